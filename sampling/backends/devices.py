"""Chooses the device and the dtype."""
import torch

from sampling.messages import Log, is_out_of_memory, warn


def choose_device(name: str, local_rank: int | None = None, log: Log = warn) -> torch.device:
    """The device of this name; 'auto' is CUDA, then MPS, then the CPU. Raises ValueError if it is not available.

    A GPU whose first kernel fails cannot be used: 'auto' logs why, and goes on to the next device.
    If several processes share the machine, local_rank is the number of this process there, and selects its GPU.
    """
    available = available_devices()
    if name not in ["auto", *available]:
        raise ValueError(f"device={name} is not available here; found: {', '.join(available)}; use one of these, or "
                         "auto")
    candidates = [name]
    if name == "auto":
        candidates = [candidate for candidate in available if candidate != "cuda:0"] # "cuda" stands for it
    for candidate in candidates:
        device = torch.device(candidate)
        if device.type == "cuda" and device.index is None and local_rank is not None:
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        reason = why_unusable(device)
        if reason is None: # as always for the CPU, the last one
            return device
        if name != "auto":
            raise ValueError(reason)
        log(f"{reason}; trying the next device")


def why_unusable(device: torch.device) -> str | None:
    """Why a GPU cannot run a kernel, although torch finds it; None if it can.

    This happens if this build of torch has no code for the GPU, or if its driver is too old.
    """
    if device.type != "cuda":
        return None
    try:
        (torch.zeros(1, device=device) + 1).item()
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        try:
            major, minor = torch.cuda.get_device_capability(device)
            gpu = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        except RuntimeError: # not even this works
            gpu = str(device)
        first_line = str(error).partition("\n")[0]
        return (f"this GPU ({gpu}) cannot run torch {torch.__version__} ({first_line:.200}): update its driver, or "
                "install a build of torch that supports it (https://pytorch.org/get-started), or use device=cpu")


def available_devices() -> list[str]:
    """The names of the devices that torch finds here, the best first."""
    names = ["cpu"]
    if torch.backends.mps.is_available():
        names = ["mps", *names]
    if torch.cuda.is_available():
        names = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *names]
    return names


def choose_dtype(device: torch.device, name: str, exact: bool = False) -> torch.dtype:
    """The dtype of this name. 'auto' is bfloat16, or else float16, on CUDA, and float32 elsewhere.

    exact: choose as nanoGPT does, which takes bfloat16 even where the GPU emulates it.
    Raises ValueError if the device does not support the dtype. name must be allowed by RULES in params.py.
    """
    if name == "int8" and device.type != "cpu":
        raise ValueError(f"dtype=int8 runs only on a CPU; got device={device}: use dtype=bfloat16, or device=cpu")
    if device.type != "cuda":
        return torch.float32 if name == "auto" else getattr(torch, name)
    with torch.cuda.device(device): # is_bf16_supported asks about the current device
        if name == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ValueError("bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32")
        if name != "auto":
            return getattr(torch, name)
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=exact) # emulation is slow
        return torch.bfloat16 if has_bfloat16 else torch.float16


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context in which a model of this dtype runs. It turns autocast on for half precision, otherwise off."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype if is_half else None, enabled=is_half)
