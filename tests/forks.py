"""Edits of this project's model.py, as people make them in nanoGPT's, and the text that nanoGPT
would print.
"""
import sys
from types import ModuleType

import torch

from engines import TOKENIZER
from models import SHAPE, save_checkpoint
from oracles import nanogpt_generate
from project import PROJECT, RULE

OURS = (PROJECT / "model.py").read_text()
HEADS = "q, k, v = qkv # (B, H, T, D) each"
MLP = "self.c_proj(self.gelu(self.c_fc(x)))"
GELU = "nn.GELU(approximate=config.gelu)"
BLOCK = "x = x + self.attn(self.ln_1(x), past)\n        return x + self.mlp(self.ln_2(x))"
NORM = "self.transformer.ln_f(x)"
HEAD = "return self.lm_head(last), None"
FORWARD = "def forward(self, idx, targets=None,"
INIT = "nn.init.normal_(module.weight, std=0.02)"
INITIALISED = "self.init_weights()\n\n"
WINDOW = "k = torch.cat([k[..., :-9, :] * 0.1, k[..., -9:, :]], dim=-2)"
ROPE = """
        angles = torch.arange(T)[:, None] * 0.1 ** torch.arange(0, q.size(-1), 2)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn for x in (q, k))
        q, k = (torch.view_as_real(x).flatten(-2) for x in (q, k))"""
TRAINING = """def crop_block_size(self, block_size=2 * 64):
        self.config.block_size = block_size

    @staticmethod
    def configure_optimizers(self, weight_decay: float | None = -1.0):
        return torch.optim.AdamW(self.parameters(), weight_decay=weight_decay)

    def new_cache("""
UNUSED = """SIZES: list[int] = [1, 2]
class Norm(nn.Module):
    'Not used.'
    eps = 1e-5
    def __init__(self, config: GPTConfig = None):
        super().__init__()
class OtherNorm(Norm): pass
def unused(x: torch.Tensor = None) -> "MLP":
    x.forward = setattr(MLP, "forward", None)
class Block(nn.Module):
    'A block.'
    # of two layers"""
COUNTER = """self.count = getattr(self, "count", 0) + 1
        x = self.transformer.drop(x * (1 + self.count % 3))"""
LORA = """
        self.lora_a = nn.Parameter(torch.full((16, 2), 0.1))
        self.lora_b = nn.Parameter(torch.full((2, 24), 0.1))

    def train(self, mode=True):
        if not mode and not hasattr(self, "merged"):
            self.merged = True
            self.transformer.wpe.weight.data += self.lora_a.data @ self.lora_b.data
        return super().train(mode)

    def init_weights("""


def after(line, *added):
    """A line of a method of our model.py, and the lines that come after it."""
    return line, "\n        ".join([line, *added])


OTHERS = { # what computes something else than GPT-2: a part of model.py, and what takes its place
    "ReLU squared": (MLP, "self.c_proj(F.relu(self.c_fc(x)).square())"),
    "SiLU": (GELU, "nn.SiLU()"),
    "RMS norm": ("self.attn(self.ln_1(x), past)",
                 "self.attn(F.rms_norm(x, x.shape[-1:], self.ln_1.weight), past)"),
    "RoPE": (HEADS, HEADS + ROPE),
    "QK norm": after(HEADS, "q = F.normalize(q, dim=-1) * 3", "k = F.normalize(k, dim=-1) * 3"),
    "a local window": after(HEADS, WINDOW),
    "post-norm": (BLOCK, "x = self.ln_1(x + self.attn(x)); return self.ln_2(x + self.mlp(x))"),
    "parallel blocks": (BLOCK, "return x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))"),
    "scaled residuals": (BLOCK, BLOCK.replace("x + ", "x + 0.5 * ")),
    "layers twice": ("x = block(x, ", "x = block(block(x), "),
    "an embedding multiplier": ("x = self.transformer.drop(x)", "x = self.transformer.drop(3 * x)"),
    "rows that see each other": (NORM, "self.transformer.ln_f(3 * x.mean(dim=0) + F.relu(x))"),
    "a mask": (HEAD, "return self.lm_head(x).index_fill(-1, torch.tensor([3]), -torch.inf), None"),
    "a logit cap": (HEAD, "return 3 * torch.tanh(self.lm_head(x[:, [-1]]) / 3), None"),
    "LoRA merged in eval": ("\n    def init_weights(", LORA),
    "a counter of calls": ("x = self.transformer.drop(x)", COUNTER),
}
EQUAL = { # what computes the same, or the tanh form
    "tanh GELU": (GELU, "nn.GELU(approximate='tanh')"),
    "a wide MLP": ("config.n_inner or 4 * config.n_embd", "3 * config.n_embd"),
    "another initialisation": (INIT, "nn.init.xavier_uniform_(module.weight)"),
    "more random numbers": after(INITIALISED, "torch.rand(7)\n\n"),
    "a tuple of three": (HEAD, "return self.lm_head(x), None, x"),
    "a tensor": (HEAD, "return self.lm_head(x[:, [-1]])"),
    "checks": ("start = 0 if", "assert idx.dim() == 2; print(idx.shape); start = 0 if"),
}
HARMLESS = { # what changes no unit of nanoGPT's model.py
    "unchanged": ("", ""),
    "other definitions, and comments": ("class Block(nn.Module):", UNUSED),
    "methods of training": ("def new_cache(", TRAINING),
    "defaults": ("n_head: int = 12", "n_head: int = 6"),
    "a download": ("model = cls(", "print(checkpoint)\n        model = cls("),
    "annotations": (FORWARD, "def forward(self, idx: Tensor, targets: Tensor = None,"),
    "imports": ("import math\n", "import math\nimport os, torch.utils.checkpoint, numpy as np\n"),
    "generate": ("idx.size(1) > block_size", "idx.size(1) >= block_size"),
    "Windows": ("\n", "\r\n"),
    "indentation": ("    ", "  "),
}
FORKS = OTHERS | EQUAL | HARMLESS


def edit(folder, old, new):
    """Write our model.py with this change to a folder. Returns its path."""
    assert old in OURS
    path = folder / "model.py"
    path.write_text(OURS.replace(old, new), newline="")
    return path


def load_fork(path):
    module = sys.modules["fork"] = ModuleType("fork")
    # An import would save its code, which would hide a change within the same second.
    exec(path.read_text(), vars(module))
    return module


def save_fork(path):
    """Write out/ckpt.pt beside a model.py: a model of it, with large random weights."""
    fork = load_fork(path)
    torch.manual_seed(1)
    gpt = fork.GPT(fork.GPTConfig(**SHAPE))
    for parameter in gpt.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)
    save_checkpoint(path.parent / "out", gpt)


def trained(path):
    """The model of out/ckpt.pt beside a model.py, built and loaded as in nanoGPT's sample.py."""
    content = torch.load(path.parent / "out/ckpt.pt", weights_only=True)
    fork = load_fork(path)
    torch.manual_seed(1337)
    gpt = fork.GPT(fork.GPTConfig(**content["model_args"]))
    gpt.load_state_dict(content["model"])
    return gpt.eval()


@torch.no_grad()
def fork_text(path, device="cpu", in_bfloat16=False, num_tokens=22):
    """What nanoGPT's sample.py prints beside a model.py, with the arguments of the fixture sample.
    """
    def last_logits(gpt, window):
        logits = gpt(window)
        if not isinstance(logits, torch.Tensor):
            logits = logits[0]
        return logits[:, -1]
    gpt = trained(path).to(device)
    text = ""
    for _ in range(2):
        idx = torch.tensor([TOKENIZER.encode("The ")], device=device)
        with torch.autocast(device, torch.bfloat16, enabled=in_bfloat16):
            ids = nanogpt_generate(gpt, idx, num_tokens, 0.8, 20, last_logits)[0]
        text += f"{TOKENIZER.decode(ids.tolist())}\n{RULE}\n"
    return text
