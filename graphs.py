"""GPT's generation on a GPU: nearly every step after the prompt is one CUDA graph.

A step of a small network is a hundred kernels of a few microseconds each, and sending them one by one takes
longer than running them. A CUDA graph sends them at once; choosing the token is part of it, so that nothing
waits for the CPU, which only has the random numbers drawn. Only tests run these steps on other devices, without graphs.
"""
import torch
from torch.nn import functional as F

from model import KVCache
from sampler import next_token, require_finite

BUCKET = 128 # a step attends to so many cached positions or a multiple of it; each multiple has its graph


class GraphedGPT:
    """Generates what the GPT it is given would; with compile, torch.compile fuses what the graphs hold.

    Under autocast, its Linears are to be cast already (GPT.cast_linears): graphs keep no copies of weights.
    """

    def __init__(self, model, compile=False):
        self.model, self.compiled, self.steps, self.sum = model, compile, None, None
        # A row costs a GPU little, and new graphs much; compiled ones most of all.
        self.shrink_at = 0 if compile else 0.5
        if compile:
            torch._dynamo.config.recompile_limit = 64 # a graph for each bucket and batch size
        self.step = torch.compile(block_step, dynamic=False) if compile else block_step # layers share what it makes
        self.forward = torch.compile(model.forward, dynamic=False) if compile else model.forward

    def next_token(self, logits, temperature=1.0, *rest, **how):
        """sampler.next_token without its looks at the logits, which would have to wait for the GPU."""
        if 0 < temperature < 1e-30: # so cold that float32 overflows: the limit
            temperature = 0
        return next_token(logits, temperature, *rest, **how, checked=False)

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, context_shift=False, **how):
        """As GPT.generate."""
        def choose(logits, ids):
            """As stream wants it."""
            return self.next_token(logits, temperature, top_k, ids=ids, **how)
        if hasattr(how.get("draw"), "ahead"):
            choose.ahead = how["draw"].ahead
        return torch.cat([idx, *self.stream(idx, max_new_tokens, choose, context_shift)], dim=1)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, choose, context_shift=False):
        """As GPT.stream, but ValueError where logits were NaN or infinite comes in check and at the end.

        Where choose has a function ahead, it is called before each step, outside of its graph.
        """
        if max_new_tokens == 0 or idx.size(1) == 0:
            yield from self.model.stream(idx, max_new_tokens, choose, context_shift)
            return
        size = self.model.config.block_size
        steps = self.take_steps(len(idx), idx.size(1) + max_new_tokens, choose)
        read, filled = idx[:, -size:], 0 # positions of the cache
        ahead = getattr(choose, "ahead", lambda: None)
        for _ in range(max_new_tokens):
            ahead()
            if filled == size and context_shift:
                read, filled = torch.cat([steps.window, steps.token], dim=1)[:, size // 2 - size:], 0
            if filled == 0:
                steps.read(read)
                filled = read.size(1)
            elif filled < size:
                filled += 1
                length = steps.bucket(filled)
                steps.run(length, steps.read_token, length)
            else: # positions are learned: in a window that has moved, every key and value is new
                steps.run("window", steps.move_window)
            rows = yield steps.token.clone()
            if rows == []:
                break
            if rows is not None:
                steps.keep(rows)
        require_finite(steps.sum)
        self.steps = steps # for the next call: what ended otherwise may have left anything behind

    def check(self):
        """Raise ValueError where logits of the last stream were NaN or infinite, which waits for the GPU."""
        require_finite(self.sum)

    def take_steps(self, batch_size, length, choose):
        """The Steps for such a call: those of the last one where they fit, since making graphs takes a while."""
        size = self.model.config.block_size
        most = -(-size // 8) * 8 # attention with a mask wants multiples of 8
        capacity = most if self.compiled else min(-(-length // BUCKET) * BUCKET, most) # another is compiled anew
        steps, self.steps = self.steps, None # nobody else's meanwhile
        if not (steps and len(steps.token) == batch_size and steps.choose is choose and steps.capacity >= capacity):
            steps = None # gives its memory back first
            steps = Steps(self, batch_size, capacity, choose)
        self.sum = steps.sum
        return steps

    def decode(self, layers, token, position, length):
        """GPT.forward for one token (B, 1) at a position that is a tensor (1,), attending to length cached ones.

        layers are KVCache's, to which the token's keys and values are added. Returns logits (B, 1, V).
        """
        transformer = self.model.transformer
        x = transformer.wte(token) + transformer.wpe(position)
        future = torch.arange(length, device=token.device) > position
        mask = torch.zeros(1, length, device=token.device, dtype=layers[0].dtype).masked_fill(future, -torch.inf)
        for block, layer in zip(transformer.h, layers, strict=True):
            x = self.step(block, x, layer, position, mask, length)
        return self.model.lm_head(transformer.ln_f(x))

    @torch.no_grad()
    def compile_generation(self, idx, max_new_tokens, context_shift=False):
        """As GPT.compile_generation."""
        length = idx.size(1) + max_new_tokens
        steps = self.take_steps(len(idx), length, None)
        for filled in range(1, min(length, steps.capacity) + 1, BUCKET):
            steps.position.fill_(filled - 1)
            self.decode(steps.cache.layers, steps.token, steps.position, steps.bucket(filled))
        if length > self.model.config.block_size and not context_shift:
            self.forward(steps.window)


class Steps:
    """What the steps of one batch read and write in place, as graphs must, and their graphs."""

    def __init__(self, gpt, batch_size, capacity, choose):
        self.gpt, self.choose, self.capacity = gpt, choose, capacity
        self.graphs, self.pool = {}, None
        config, self.device = gpt.model.config, gpt.model.lm_head.weight.device
        self.cache = KVCache(config, batch_size, capacity, self.device, gpt.model.compute_dtype())
        for layer in self.cache.layers:
            layer.zero_() # what is masked must be a number all the same
        self.token = torch.zeros(batch_size, 1, dtype=torch.long, device=self.device) # the latest
        self.position = torch.zeros(1, dtype=torch.long, device=self.device) # of the last token in the cache
        # What the network sees; where that does not fill it yet, the first token again.
        self.window = torch.zeros(batch_size, config.block_size, dtype=torch.long, device=self.device)
        self.sum = torch.zeros((), device=self.device) # of all logits: NaN or infinite once one of them is

    def keep(self, rows):
        """Forget all but these rows. Graphs are made anew for them."""
        self.graphs, self.pool = {}, None
        self.cache.keep(rows)
        self.token, self.window = self.token[rows], self.window[rows]

    def bucket(self, filled):
        """How many positions of the cache a step looks at that has filled so many."""
        return min(-(-filled // BUCKET) * BUCKET, self.capacity)

    def read(self, idx):
        """Read (B, T) ids into the empty cache and choose the next token."""
        shared = idx[:1] if (idx == idx[:1]).all() else idx
        self.cache.size = 0
        self.window.copy_(idx[:, :1].expand_as(self.window))
        self.window[:, :idx.size(1)] = idx
        self.choose_from(self.gpt.model(shared, cache=self.cache)[0])
        self.position.fill_(idx.size(1) - 1)

    def read_token(self, length):
        """Read the latest token, which attends to length positions, and choose the next."""
        self.position.add_(1)
        self.window.index_copy_(1, self.position, self.token)
        self.choose_from(self.gpt.decode(self.cache.layers, self.token, self.position, length))

    def move_window(self):
        """Move the window on by the latest token, read all of it and choose the next."""
        self.window.copy_(torch.cat([self.window[:, 1:], self.token], dim=1))
        self.choose_from(self.gpt.forward(self.window)[0])

    def choose_from(self, logits):
        """Make the choice from (B or 1, 1, V) logits the latest token."""
        logits = logits[:, -1].float().expand(len(self.token), -1)
        self.sum.add_(logits.sum())
        self.token.copy_(self.choose(logits, self.window))

    def run(self, name, step, *arguments):
        """Run a step: the first of its name as it is, which readies all it needs; the second is captured."""
        if self.device.type != "cuda" or name not in self.graphs:
            self.graphs[name] = None
            step(*arguments)
            return
        with torch.cuda.device(self.device):
            if self.graphs[name] is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    step(*arguments)
                self.graphs[name], self.pool = graph, graph.pool()
            self.graphs[name].replay()


def block_step(block, x, layer, position, mask, length):
    """A model.Block for one more token: (B, 1, E) -> (B, 1, E), its keys and values added to the layer of the cache."""
    qkv = block.attn.heads(block.ln_1(x)) # (3, B, H, 1, D)
    layer.index_copy_(3, position, qkv[1:])
    keys, values = layer[..., :length, :] # (B, H, length, D)
    y = F.scaled_dot_product_attention(qkv[0], keys, values, attn_mask=mask)
    x = x + block.attn.c_proj(block.attn.merge(y))
    return x + block.mlp(block.ln_2(x))
