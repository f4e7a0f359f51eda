"""Train the demo: a character model of Shakespeare, saved as nanoGPT saves its checkpoints.

    python demo/train.py tinyshakespeare.txt

Writes ckpt.pt and meta.pkl beside this file.
"""
import copy
import math
import pickle
import sys
import time
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent))
from model import GPT, GPTConfig  # noqa: E402

steps = 6_000
warmup = 100
batch_size = 8
learning_rate = {"Muon": 8e-3, "AdamW": 3e-3} # of the matrices in the blocks; of everything else
shape = dict(n_layer=6, n_head=4, n_embd=192, block_size=512, bias=False, dropout=0.1)


def batch(ids):
    """Training data: ids (B, T) from random places of the text, and the next id of each."""
    starts = torch.randint(len(ids) - shape["block_size"], (batch_size, 1))
    at = starts + torch.arange(shape["block_size"])
    return ids[at], ids[at + 1]


@torch.no_grad()
def validation_loss(model, ids):
    """The loss in nats per character, in float32, over all ids in windows that do not overlap."""
    T = shape["block_size"]
    n = (len(ids) - 1) // T * T
    x = ids[:n].view(-1, T)
    y = ids[1:n + 1].view(-1, T)
    loss = 0.0
    for a, b in zip(x.split(16), y.split(16), strict=True):
        loss += model(a, b)[1].item() * len(a)
    return loss / len(x)


def schedule(step):
    """The factor of the learning rates: linear warm-up, then linear decay to 0."""
    return min((step + 1) / warmup, (steps - step) / (steps - warmup))


def half_precision(model):
    """A copy in eval mode, with its weights rounded to float16."""
    return copy.deepcopy(model).half().eval()


def encode(text):
    """Write meta.pkl. Returns the ids of the characters, and the size of the vocabulary."""
    chars = sorted(set(text))
    stoi = {char: i for i, char in enumerate(chars)}
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}
    (here / "meta.pkl").write_bytes(pickle.dumps(meta))
    return torch.tensor([stoi[char] for char in text]), len(chars)


def make_optimizers(model):
    """Muon for the matrices in the blocks, AdamW for everything else, and their schedulers."""
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=learning_rate["Muon"], weight_decay=0.1,
                            adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=learning_rate["AdamW"], weight_decay=0.0,
                              betas=(0.9, 0.99), fused=True)
    optimizers = [muon, adamw]
    return optimizers, [torch.optim.lr_scheduler.LambdaLR(each, schedule) for each in optimizers]


def save(model, step, loss):
    """Write ckpt.pt as nanoGPT's train.py does, without the optimizer's state."""
    settings = {
        "dataset": "shakespeare_char",
        "batch_size": batch_size,
        "learning_rate": learning_rate["AdamW"],
    }
    content = {
        "model": model.state_dict(),
        "model_args": dict(shape, vocab_size=model.config.vocab_size),
        "iter_num": step,
        "best_val_loss": loss,
        "config": {**shape, **settings},
    }
    torch.save(content, here / "ckpt.pt")


def main(text_file):
    """Train on nine tenths of the text. Save the weights with the lowest loss on the rest."""
    ids, vocab_size = encode(Path(text_file).read_text(encoding="utf-8"))
    train, val = ids.tensor_split([len(ids) * 9 // 10])
    torch.manual_seed(1337)
    model = GPT(GPTConfig(vocab_size=vocab_size, **shape))
    for block in model.transformer.h:
        block.attn.dropout.p = 0.0 # with dropout, attention is slow on a CPU
    # Of the weights of about 500 steps.
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimizers, schedulers = make_optimizers(model)
    began = time.time()
    best = math.inf
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(*batch(train))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        average.update_parameters(model)
        if (step + 1) % 250 == 0:
            half = half_precision(average.module)
            held_out = validation_loss(copy.deepcopy(half).float(), val)
            print(f"step {step + 1}: train {loss.item():.4f}, validation {held_out:.4f}, "
                  f"{time.time() - began:.0f} s", flush=True)
            if held_out < best:
                best = held_out
                save(half, step + 1, best)


if __name__ == "__main__":
    main(sys.argv[1])
