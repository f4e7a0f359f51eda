"""What the machine has, devices, their dtypes and memory, and a network made ready for it."""
import ctypes
import re
import sys
import time
from contextlib import suppress

import torch


def choose_device(name, process=None):
    """The torch.device of that name, or the best there is for 'auto'; ValueError where it is not there.

    process is this one's number on its machine where several share it: of several GPUs each takes its own.
    """
    there = ["cpu"]
    if torch.backends.mps.is_available():
        there.insert(0, "mps")
    if torch.cuda.is_available():
        there = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count())), *there]
    if name not in ["auto", *there]:
        raise ValueError(f"device={name} is not there: this machine, as its torch sees it, has {', '.join(there)}")
    found = torch.device(there[0] if name == "auto" else name)
    if found.type == "cuda" and found.index is None and process is not None:
        return torch.device("cuda", process % torch.cuda.device_count())
    return found


def choose_dtype(device, name):
    """The torch.dtype of that name, or the device's best for 'auto'; ValueError where the device has it not."""
    if device.type != "cuda":
        return torch.float32 if name == "auto" else getattr(torch, name)
    with torch.cuda.device(device):
        if name == "bfloat16" and not torch.cuda.is_bf16_supported():
            raise ValueError("dtype=bfloat16 is not there: this GPU has float16 and float32")
        if name != "auto":
            return getattr(torch, name)
        native = torch.cuda.is_bf16_supported(including_emulation=False) # elsewhere it is slow
        return torch.bfloat16 if native else torch.float16


def batch_that_fits(model, length, processes=1):
    """How many samples of so many tokens to draw at once: what half of the free memory holds, within reason.

    processes: how many share the machine's memory, where that is what counts.
    """
    place = model.lm_head.weight.device
    if place.type == "cuda":
        free, most = torch.cuda.mem_get_info(place)[0], 128 # each row's random numbers are a kernel of their own
    else:
        import psutil
        free, most = psutil.virtual_memory().available // processes, 64 # more is hardly faster
    return max(1, min(most, free // 2 // model.bytes_per_sample(length)))


def out_of_memory(error):
    """Whether that is what an exception, or the one it came of, means; torch and oneDNN have several for it."""
    words = r"MemoryError|out of memory|allocate memory|not enough memory|could not create a primitive|ALLOC_FAILED"
    return error is not None and (bool(re.search(words, f"{type(error).__name__} {error}"))
                                  or out_of_memory(error.__context__))


def peak_memory(device):
    """The most bytes that this process has held so far: of a GPU's memory where it runs on one. None: not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError: # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def hold_memory():
    """Have the C library keep what is freed, where it is glibc.

    Every step takes and frees the same megabytes. Given back to the system each time, they return page by
    page, a fault for each: a third of the time of a small network past its window.
    """
    with suppress(AttributeError, OSError, TypeError): # another system, or another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, -1) # M_TRIM_THRESHOLD, as large as can be: the heap never shrinks
        libc.mallopt(-4, 0) # M_MMAP_MAX: all of it is on the heap


def return_memory():
    """Give what hold_memory kept back to the system, which may want it for what lies elsewhere."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def get_ready(model, device, dtype, compile=False, now=False):
    """What generates on the device as the model does, in that dtype: the model, made faster, or a GraphedGPT.

    now: as packed.pack's.
    """
    model.cast_linears(dtype).to(device)
    if device.type == "cuda":
        from graphs import GraphedGPT
        torch.set_float32_matmul_precision("high") # TF32, as nanoGPT has it
        torch.backends.cuda.enable_cudnn_sdp(False) # cuDNN plans anew for every shape, and every length is one
        return GraphedGPT(model, compile)
    if device.type == "cpu" and not compile: # Inductor cannot see into packed weights
        from packed import pack
        pack(model, now)
    if device.type == "cpu":
        hold_memory() # not before: what loading frees would leave holes
    return model


def compile_for(generator, device, prompt, batch_sizes, max_new_tokens, context_shift, say):
    """Compile what generation will run after so long a prompt; ValueError where this machine cannot."""
    say("compiling ...")
    began = time.perf_counter()
    try:
        for rows in batch_sizes:
            idx = torch.zeros(rows, prompt, dtype=torch.long, device=device)
            generator.compile_generation(idx, max_new_tokens, context_shift)
    except Exception as e: # a missing compiler or driver shows in many ways
        raise ValueError(f"compile=True does not work here, leave it out ({type(e).__name__}: {e!s:.300})") from None
    say(f"compiled in {time.perf_counter() - began:.1f} s")
