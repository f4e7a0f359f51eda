"""Train the demo: a character model of Shakespeare, saved as nanoGPT saves its checkpoints.

    python out-shakespeare-char/train.py tinyshakespeare.txt

Writes ckpt.pt and meta.pkl beside this file. Takes about twenty minutes on two CPU cores.
"""
import math
import pickle
import sys
import time
from pathlib import Path

import torch

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent))
from model import GPT, GPTConfig  # noqa: E402

steps, warmup, batch_size, learning_rate = 6_000, 200, 8, 3e-3
shape = dict(n_layer=4, n_head=5, n_embd=160, block_size=512, bias=False, dropout=0.0)


def batch(ids):
    """A batch of training data: ids (B, T) from random places of the text, and the next id of each."""
    starts = torch.randint(len(ids) - shape["block_size"], (batch_size, 1))
    at = starts + torch.arange(shape["block_size"])
    return ids[at], ids[at + 1]


@torch.no_grad()
def validation_loss(model, ids):
    """The loss in nats per character, in float32, over all ids in windows that do not overlap."""
    model.eval()
    T = shape["block_size"]
    n = (len(ids) - 1) // T * T
    x, y = ids[:n].view(-1, T), ids[1:n + 1].view(-1, T)
    losses = [model(a, b)[1].item() * len(a) for a, b in zip(x.split(16), y.split(16), strict=True)]
    model.train()
    return sum(losses) / len(x)


def learning_rate_at(step):
    """Linear warm-up, then cosine decay to a fiftieth of learning_rate."""
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return learning_rate * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))


def main(text_file):
    """Train on the first nine tenths of the text, and validate on the last tenth."""
    text = Path(text_file).read_text(encoding="utf-8")
    chars = sorted(set(text))
    stoi = {char: i for i, char in enumerate(chars)}
    ids = torch.tensor([stoi[char] for char in text])
    train, val = ids[:len(ids) * 9 // 10], ids[len(ids) * 9 // 10:]

    torch.manual_seed(1337)
    model = GPT(GPTConfig(vocab_size=len(chars), **shape))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)

    began = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step)
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(*batch(train))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 500 == 0 or step + 1 == steps:
            held_out = validation_loss(model, val)
            print(f"step {step + 1}: train {loss.item():.4f}, validation {held_out:.4f}, {time.time() - began:.0f} s",
                  flush=True)

    torch.save({
        "model": model.state_dict(), "model_args": dict(shape, vocab_size=len(chars)), "iter_num": steps,
        "best_val_loss": held_out,
        "config": dict(shape, dataset="shakespeare_char", batch_size=batch_size, learning_rate=learning_rate),
    }, here / "ckpt.pt")
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}
    (here / "meta.pkl").write_bytes(pickle.dumps(meta))


if __name__ == "__main__":
    main(sys.argv[1])
