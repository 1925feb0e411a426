"""Stacks of blocks of which one differs from the others in one or two respects: the third source of programs.

A seed picks a kind of block, how many there are, what the network gives, and what is odd about one block or two:
another number, flag, activation, shape, dtype, mask, buffer, training mode, hook, forward or parametrization, or a
weight that is frozen, tied, transposed or missing. A compiler that takes blocks to be alike which are not reuses one in
silence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

HEAD = """import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Twice(nn.Module):
    def forward(self, w):
        return w * 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.tanh() ** 2) * 0.5


class Block(nn.Module):
    def __init__(self, hidden=12, bias=True):
        super().__init__()
        self.norm = nn.{norm}
        self.up, self.down = nn.Linear(8, hidden, bias=bias), nn.Linear(hidden, 8)
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("table", torch.rand(8))
        self.register_buffer("count", torch.zeros(()))
        self.constant = torch.rand(8)
        self.act, self.p, self.scale, self.number, self.dim = F.gelu, {p}, 1.0, 0, -1
        self.flag = self.causal = self.cut = self.frozen = self.counts = self.hooked = self.again = False
        self.dtype, self.mask = torch.float64, None

    def inner(self, x):
        y = self.norm(x)
        {mix}
        y = self.act(self.up(y)).to(self.dtype).to(x.dtype)
        return F.dropout(self.down(y), self.p, self.training) * self.gain + self.table * self.constant

    def forward(self, x):
        if self.flag:
            x = x * 1.0
        if self.hooked:
            x.register_hook(lambda g: g * 0.5)
        if self.frozen:
            with torch.no_grad():
                y = self.inner(x)
        else:
            y = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        if self.cut:
            y = y.detach()
        if self.counts:
            self.count += 1
        if self.number > 2:
            y = y * self.number
        return {join}


def other(self, x):
    return x - self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        blocks = [Block() for _ in range({count})]
{odd}
        self.blocks = nn.ModuleList(blocks)
{after}

    def forward(self, x):
        x, found = {first}, []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return {result}


def inputs():
    return (torch.randn({shape}){asked},), {{}}
"""
# kind: (norm, what mixes positions, shape of the input)
KINDS = {
    "mlp": ("LayerNorm(8)", "", "5, 8"),
    "batch norm": ("BatchNorm1d(8)", "", "6, 8"),
    "attention": (
        "LayerNorm(8)",
        "heads = y.unflatten(-1, (2, 4)).transpose(1, 2)\n"
        "        y = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=self.mask, is_causal=self.causal)\n"
        "        y = y.transpose(1, 2).flatten(2)",
        "2, 4, 8",
    ),
    "softmax": ("RMSNorm(8)", "y = torch.softmax(y, self.dim) @ y.mT @ y", "2, 4, 8"),
    "convolution": ("Conv1d(4, 4, 3, padding=1)", "", "2, 4, 8"),
}
JOINS = ("x + self.scale * y", "torch.tanh(x + y * self.scale)", "x.addcmul(y, self.gain * self.scale)")
RESULTS = (
    "self.last(x)",
    "(self.last(x), found)",
    "(x, found[1])",
    "self.last(x) + found[0].mean()",
    "torch.stack(found)",
)
FIRST = ("self.first(x)", "self.first(x).tanh()", "x", "x * 2")
# What is odd about block {k}; {j} is another one.
ODD = (
    "blocks[{k}].p = 0.4",
    "blocks[{k}].scale = 2.0",
    "blocks[{k}].scale = 0.0",
    "blocks[{k}].scale = 1",
    "blocks[{k}].number = 1",
    "blocks[{k}].number = 4",
    "blocks[{k}].flag = True",
    "blocks[{k}].cut = True",
    "blocks[{k}].frozen = True",
    "blocks[{k}].hooked = True",
    "blocks[{k}].counts = True",
    "blocks[{k}].again = True",
    "blocks[{k}].act = torch.tanh",
    "blocks[{k}].act = Double.apply",
    "blocks[{k}].act = nn.Softplus(beta=2.0)",
    "blocks[{k}].act = lambda x: F.gelu(x, approximate='tanh')",
    "blocks[{k}].act = lambda x: F.leaky_relu(x, 0.3)",
    "blocks[{k}].dtype = torch.float32",
    "blocks[{k}].constant = torch.rand(1)",
    "blocks[{k}].constant = blocks[{j}].constant",
    "blocks[{k}].constant = 0.5",
    "blocks[{k}].table = torch.rand(1)",
    "blocks[{k}].table = blocks[{j}].table",
    "blocks[{k}].table = torch.rand(8, dtype=torch.float32)",
    "blocks[{k}].gain = blocks[{j}].gain",
    "blocks[{k}].gain = nn.Parameter(torch.rand(1))",
    "blocks[{k}].gain.requires_grad_(False)",
    "blocks[{k}].up.weight = blocks[{j}].up.weight",
    "blocks[{k}].up.weight = nn.Parameter(torch.randn(8, 12).t())",
    "blocks[{k}].up = blocks[{j}].up",
    "blocks[{k}].up.weight.requires_grad_(False)",
    "blocks[{k}].requires_grad_(False)",
    "blocks[{k}] = blocks[{j}]",
    "blocks[{k}] = Block(hidden=7)",
    "blocks[{k}] = Block(bias=False)",
    "blocks[{k}] = nn.Identity()",
    "blocks[{k}] = nn.Sequential(Block(), Block())",
    "blocks[{k}].norm = nn.Identity()",
    "blocks[{k}].norm.eps = 0.1",
    "blocks[{k}].norm.momentum = 0.5",
    "blocks[{k}].norm.momentum = None",
    "blocks[{k}].norm.track_running_stats = False",
    "blocks[{k}].eval()",
    "blocks[{k}].norm.eval()",
    "blocks[{k}].norm.padding_mode = 'circular'; blocks[{k}].norm._reversed_padding_repeated_twice = [1, 1]",
    "blocks[{k}].norm.weight.requires_grad_(False)",
    "blocks[{k}].causal = True",
    "blocks[{k}].mask = torch.tensor([[True, False, True, True]] * 4)",
    "blocks[{k}].mask = torch.rand(4, 4)",
    "blocks[{k}].dim = -2",
    "blocks[{k}].dim = 2",
    "blocks[{k}].forward = types.MethodType(other, blocks[{k}])",
    "blocks[{k}].inner = lambda x: x.sin()",
    "blocks[{k}].register_forward_hook(lambda module, given, made: made * 0.5)",
    "blocks[{k}].register_forward_hook(lambda module, given, made: None)",
    "blocks[{k}].register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))",
    "blocks[{k}].up.register_forward_hook(lambda module, given, made: made.detach())",
    "parametrize.register_parametrization(blocks[{k}].up, 'weight', Twice())",
    "parametrizations.weight_norm(blocks[{k}].up)",
    "parametrizations.spectral_norm(blocks[{k}].up)",
    "for n, b in enumerate(blocks): b.scale = 1 / (n + 1)",
    "for n, b in enumerate(blocks): b.scale = 1.0 if n % 2 else 0.5",
    "for n, b in enumerate(blocks): b.p = 0.05 * n",
    "for n, b in enumerate(blocks): b.number = n",
    "for n, b in enumerate(blocks): b.counts = n % 2 == 1",
    "for n, b in enumerate(blocks): b.requires_grad_(n % 2 == 0)",
    "for n, b in enumerate(blocks): b.requires_grad_(n > {k})",
    "for n, b in enumerate(blocks): b.requires_grad_(n < {k})",
    "for n, b in enumerate(blocks): b.table = blocks[n // 2].table",
    "for n, b in enumerate(blocks): b.up = blocks[n // 3 * 3].up",
    "blocks = blocks[:3] * 2 + blocks[3:]",
    "blocks = blocks + blocks[::-1]",
    "blocks = blocks[:{k}] + [nn.Linear(8, 8)] + blocks[{k}:]",
)
AFTER = ("", "", "", "self.eval()", "self.first.requires_grad_(False)", "self.blocks.requires_grad_(False)")


@dataclass(frozen=True)
class Stack:
    """A network of blocks: its text, and whether it draws random numbers."""

    seed: int
    text: str
    random: bool

    def source(self) -> str:
        """The text."""
        return self.text


def stack(seed: int) -> Stack:
    """The stack of a seed."""
    draw = random.Random(f"stack {seed}")
    norm, mix, shape = KINDS[draw.choice(list(KINDS))]
    count, p = draw.randint(5, 9), draw.choice(("0.0", "0.0", "0.1"))
    odd = [_odd(draw, count) for _ in range(draw.choice((1, 1, 1, 2)))]
    text = HEAD.format(
        norm=norm,
        mix=mix,
        shape=shape,
        asked=draw.choice(("", ".requires_grad_()")),
        p=p,
        count=count,
        join=draw.choice(JOINS),
        first=draw.choice(FIRST),
        result=draw.choice(RESULTS),
        odd="\n".join(f"        {each}" for each in odd),
        after=f"        {draw.choice(AFTER)}",
    )
    return Stack(seed, text, p != "0.0" or any(".p =" in each for each in odd))


def _odd(draw: random.Random, count: int) -> str:
    k = draw.randrange(count)
    j = draw.choice([each for each in range(count) if each != k])
    return draw.choice(ODD).format(k=k, j=j)
