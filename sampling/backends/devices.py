"""Chooses the device and the dtype."""
import torch

from sampling.backends.cpu.int8_matmul import onednn_limits
from sampling.backends.process import avoid_amx


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this name; 'auto' is CUDA, then MPS, then the CPU. Raises ValueError if it is not available.

    If several processes share the machine, local_rank is the number of this process there, and selects its GPU.
    """
    available = available_devices()
    if name not in ["auto", *available]:
        raise ValueError(f"device={name} is not available here; found: {', '.join(available)}; use one of these, or "
                         "auto")
    device = torch.device(available[0] if name == "auto" else name)
    if device.type == "cuda" and device.index is None and local_rank is not None:
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return device


def available_devices() -> list[str]:
    """The names of the devices that torch can use here, the best first."""
    names = ["cpu"]
    if torch.backends.mps.is_available():
        names = ["mps", *names]
    if torch.cuda.is_available():
        names = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *names]
    return names


def choose_dtype(device: torch.device, name: str) -> torch.dtype:
    """The dtype of this name. 'auto' is bfloat16, or else float16, on CUDA, and float32 elsewhere.

    For int8, it also turns AMX off for this process. Raises ValueError if the device does not support the dtype.
    check_dtype must have allowed the name.
    """
    if name == "int8":
        prepare_for_int8(device)
    if device.type != "cuda":
        return torch.float32 if name == "auto" else getattr(torch, name)
    with torch.cuda.device(device): # is_bf16_supported asks about the current device
        if name == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ValueError("bfloat16 is not available on this GPU; use dtype=float16 or dtype=float32")
        if name != "auto":
            return getattr(torch, name)
        is_native = torch.cuda.is_bf16_supported(including_emulation=False) # emulation is slow
        return torch.bfloat16 if is_native else torch.float16


def prepare_for_int8(device: torch.device) -> None:
    """Turn AMX off for this process: see avoid_amx. Raises ValueError if int8 does not work here."""
    if device.type != "cpu":
        raise ValueError(f"dtype=int8 runs only on a CPU; got device={device}: use dtype=bfloat16, or device=cpu")
    avoid_amx()
    onednn_limits() # raises ValueError


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """The context in which a model of this dtype runs. It turns autocast on for half precision, otherwise off."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(device.type, dtype if is_half else None, enabled=is_half)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the setting dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")
