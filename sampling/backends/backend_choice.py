"""Chooses the device, the dtype and the backend for a checkpoint. Raises ValueError if what is
named is not here.
"""
import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from sampling import process
from sampling.backends.backend import Backend, EagerBackend, OwnBackend
from sampling.checkpoints.checkpoint import Checkpoint, build_gpt
from sampling.checkpoints.model_source import read_source
from sampling.inputs.prompts import MULTI_KINDS, parse_start
from sampling.model import GPT
from sampling.process import is_out_of_memory
from sampling.settings import ModelOptions, Settings
from sampling.torchrun import torchrun_number, world_size
from sampling.values import first_sentence

logger = logging.getLogger(__name__)
# What numba, its compiler, its threads and the kernels take of the addresses of a process.
NUMBA_BYTES = 512 * 2**20
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MIN_KERNEL_STEPS = 50 # loading the kernels takes as long as some steps
LOAD_SAMPLER = ("from sampling import jit; from sampling.sampler import kernels; "
                "jit.load_kernels(kernels.example_calls())")


def choose_device(name: str) -> torch.device:
    """The device of this name; 'auto' is CUDA, then MPS, then the CPU, which also stands in for a
    GPU that cannot run a kernel. If torchrun started several processes, each uses another GPU of
    its machine for 'cuda'.
    """
    process.check_fork() # first of all, because a checkpoint, too, is read with several threads
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available = ["mps", *available]
    if torch.cuda.is_available():
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        available = ["cuda", *gpus, *available]
    if name not in ["auto", *available]:
        raise ValueError(f"device={name} is not available here; found: {', '.join(available)}; use "
                         "one of these, or auto")
    device = torch.device(available[0] if name == "auto" else name)
    if device == torch.device("cuda") and world_size() > 1:
        local_rank = torchrun_number("LOCAL_RANK", 0)
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
    try:
        if device.type == "cuda":
            (torch.zeros(1, device=device) + 1).item()
        return device
    except RuntimeError as error: # torch has no code for this GPU, or its driver is too old
        if is_out_of_memory(error):
            raise
        why = first_sentence(error)
        reason = (f"the GPU cannot run torch {torch.__version__} ({why}): update its driver, or "
                  "install a build of torch that supports it (https://pytorch.org/get-started)")
    if name != "auto":
        raise ValueError(f"{reason}, or use device=cpu")
    logger.warning(f"{reason}; continuing on the CPU")
    return torch.device("cpu")


def choose_dtype(device: torch.device, name: str, runs_itself: bool = False) -> torch.dtype:
    """The dtype of this name.

    'auto' is bfloat16, or else float16, on CUDA, and float32 elsewhere. runs_itself: the user's own
    model gets what nanoGPT gives it: bfloat16 even where the GPU emulates it.
    """
    if name == "int8":
        if device.type != "cpu":
            raise ValueError(f"dtype=int8 runs only on a CPU; got device={device}: use "
                             "dtype=bfloat16, or device=cpu")
        has_numba(is_required=True)
    if device.type == "mps" and name in ("float16", "bfloat16") and torch.__version__ < (2, 11):
        raise ValueError(f"dtype={name} on MPS needs torch 2.11 or newer, because older ones "
                         f"compute wrong attention; got torch {torch.__version__}: use "
                         "dtype=float32, or install a newer torch")
    if device.type == "cuda":
        with torch.cuda.device(device): # is_bf16_supported asks about the current device
            if name == "auto": # emulation is slow
                has_bf16 = torch.cuda.is_bf16_supported(including_emulation=runs_itself)
                name = "bfloat16" if has_bf16 else "float16"
            elif name == "bfloat16" and not torch.cuda.is_bf16_supported():
                raise ValueError("bfloat16 is not available on this GPU; use dtype=float16 or "
                                 "dtype=float32")
    elif name == "auto":
        name = "float32"
    return getattr(torch, name)


def prepare_backend(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
                    options: ModelOptions, is_short: bool = False) -> Backend:
    """The fastest backend for a model. It uses the weights of the checkpoint: each needs its own.

    dtype may be torch.int8 on a CPU, without compile. is_short: see is_short_run.
    """
    if device.type == "cuda" and device.index is not None:
        # Otherwise graphs, and memory for libraries, would be on GPU 0.
        torch.cuda.set_device(device)
    # torch.compile starts Pythons, which would import modules of the working directory.
    if options.compile:
        os.environ.setdefault("PYTHONSAFEPATH", "1") # from Python 3.11 on
    limit_threads()
    config = checkpoint.config
    is_int8 = dtype == torch.int8
    is_cpu = device.type == "cpu" and not options.compile
    wants_kernels = is_cpu and (is_int8 or (dtype == torch.float32 and not is_short))
    is_edited = not checkpoint.own_model and is_model_edited(is_int8)
    # A tied head counts once.
    num_params = sum(math.prod(weight.shape) for weight in set(checkpoint.state_dict.values()))
    if checkpoint.own_model:
        backend = OwnBackend(checkpoint.own_model, config, device, dtype, options.compile)
    elif not is_edited and wants_kernels and has_numba(is_required=is_int8):
        from sampling.backends.cpu import CPUBackend
        backend = CPUBackend(config, checkpoint.state_dict, is_int8, options.draft)
    else:
        gpt = cast_linears(build_gpt(checkpoint), dtype).to(device)
        if not is_edited and device.type == "cuda":
            from sampling.backends.cuda import CUDABackend
            backend = CUDABackend(gpt, options.compile, options.cuda_graphs)
        else:
            backend = EagerBackend(gpt, options.compile)
    backend.num_params = num_params
    return backend


def is_model_edited(is_int8: bool) -> bool:
    """Whether this project's model.py was edited, which a warning then says: only EagerBackend runs
    it. Raises ValueError for int8.
    """
    path = inspect.getfile(GPT)
    edits = read_source(Path(path)).differences
    if edits and is_int8:
        raise ValueError(f"dtype=int8 does not follow the edits of {path}: leave out dtype, or "
                         "undo them")
    if edits:
        logger.warning(f"{path} was edited ({', '.join(edits):.300}), so it runs itself, more "
                       "slowly, without the kernels and CUDA graphs; the random numbers are those "
                       "of nanoGPT's own initialisation")
    return bool(edits)


def warm_up(backend: Backend) -> None:
    """Load or compile the kernels of a backend, and those of the sampler, which it uses then."""
    if not backend.has_kernels:
        return
    from sampling import jit
    from sampling.backends.cpu import example_calls
    from sampling.sampler import kernels
    calls = example_calls(backend.dtype_name)
    sampler_calls = kernels.example_calls()
    has_two_cores = process.owns_process and torch.get_num_threads() > 1
    if has_two_cores and not jit.why_unsaved(sampler_calls):
        jit.load_kernels(calls, meanwhile=LOAD_SAMPLER)
        calls = {}
    jit.load_kernels(calls | sampler_calls)


def is_short_run(settings: Settings) -> bool:
    """Whether a run of sample.py is over before the kernels would be loaded. It depends on nothing
    else, so that all of torchrun's processes choose the same backend.
    """
    batch_size = settings["batch_size"] or Backend.max_rows
    num_steps = math.ceil(settings["num_samples"] / batch_size) * settings["max_new_tokens"]
    has_one_prompt = parse_start(settings["start"])[0] not in MULTI_KINDS
    is_few = num_steps < MIN_KERNEL_STEPS and has_one_prompt and not settings["interactive"]
    return is_few or settings["score"]


def cast_linears(model: GPT, dtype: torch.dtype) -> GPT:
    """Cast the Linears once: autocast would do it at every step.

    The embeddings keep their dtype. Returns model.
    """
    for module in model.modules():
        # A new Parameter would untie a float32 head.
        if isinstance(module, nn.Linear) and module.weight.dtype != dtype:
            for name, value in module.named_parameters():
                setattr(module, name, nn.Parameter(value.to(dtype), requires_grad=False))
    return model


# ---- what the machine has

def limit_threads() -> None:
    """Let torch, and so the kernels, use no more threads than a container has the time of, unless
    the user chose.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        # torch has counted the cores.
        torch.set_num_threads(min([torch.get_num_threads(), *cpu_limits()]))


def cpu_limits() -> Iterator[int]:
    """The cores of which each control group (version 2), such as a container, has the time."""
    with suppress(OSError): # not Linux
        own = OWN_CGROUPS.read_text().partition("0::")[2] # such as "0::/docker/1f"
        group = CGROUPS / own.strip("/\n")
        for folder in group, *group.parents:
            with suppress(OSError): # inside a container, only the folder of its root may be there
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    yield math.ceil(int(quota) / int(period))


def has_numba(is_required: bool) -> bool:
    """Whether numba works here. If not, a warning says so, or an error if it is required."""
    remedy = "pip install --force-reinstall numba, or unset NUMBA_* variables"
    # numba reads this file when it is imported and when it compiles. It may come with a stranger's
    # model, and can name a folder of pickles that numba then loads.
    if os.path.isfile(".numba_config.yaml"):
        reason = "which would apply the .numba_config.yaml of this folder"
        remedy = "remove that file, or start in another folder"
    elif "numba" not in sys.modules and free_addresses() < NUMBA_BYTES:
        # It could fail half-way, and keep the memory.
        reason = f"which takes {NUMBA_BYTES >> 20} MB, and less is left below the limit of memory"
        remedy = "raise the limit, which ulimit -v shows in KiB"
    else:
        reason = numba_failure()
    if not reason:
        return True
    message = f"the compiled kernels for CPUs, and dtype=int8, need numba ({reason}): {remedy}"
    if is_required:
        raise ValueError(message)
    logger.warning(f"{message}; continuing without the kernels, which is slower")
    return False


def free_addresses() -> float:
    """How many bytes this process may still map, below a limit such as that of ulimit -v."""
    with suppress(ImportError, OSError): # not Linux
        import resource
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        if limit != resource.RLIM_INFINITY:
            return limit - num_pages * resource.getpagesize()
    return math.inf


def numba_failure() -> str:
    """Why numba does not work; empty if it does."""
    num_threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            # numba's warning about a variable has a traceback of its own.
            warnings.simplefilter("error", RuntimeWarning)
            import numba
        # Starts its threads, which fails without the layer that NUMBA_THREADING_LAYER names.
        numba.get_num_threads()
        torch.set_num_threads(num_threads) # where both share an OpenMP, numba has changed it
        return "NUMBA_DISABLE_JIT is set" if numba.config.DISABLE_JIT else ""
    except Exception as error: # it, or what it needs, is missing or broken, or a variable is wrong
        return f"{type(error).__name__}: {first_sentence(error)}"
