"""Random programs with a loop over time, as the text of a module: what people write, mixed at random.

A program is lines of Python, so that a failure can be read, kept, and made smaller by leaving lines out. What the lines
of a step may read is known by its kind: ``M`` a matrix [B, H], ``C`` a cube [B, 2, 2], ``V`` a vector [H], ``S`` a
number without dimensions, ``I`` whole numbers [B], ``K`` a mask [B, H]. Every operation says which kinds it takes and
gives.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

B, H, T = 3, 4, 9
HEAD = """from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad / (1 + (3 * u) ** 2)


@dataclass
class Result:
    state: torch.Tensor
    rows: object


class State:
    pass


"""

# (result, operands, text); {0}, {1}: operands. Values stay bounded, so that long loops do.
OPERATIONS = (
    ("M", "MM", "{0} + {1}"),
    ("M", "MM", "{0} - 0.5 * {1}"),
    ("M", "MM", "torch.tanh({0}) * torch.sigmoid({1})"),
    ("M", "MM", "torch.where({0} > 0.1, {0}, 0.5 * {1})"),
    ("M", "MM", "torch.maximum({0}, {1})"),
    ("M", "MM", "torch.lerp({0}, {1}, 0.3)"),
    ("M", "MM", "torch.addcmul({0}, {0}, {1}, value=0.1)"),
    ("M", "MM", "torch.cat([{0}[:, :2], {1}[:, 2:]], 1)"),
    ("M", "MM", "torch.stack([{0}, {1}]).mean(0)"),
    ("M", "MM", "torch.einsum('bh,bk->bh', {0}, {1}) * 0.2"),
    ("M", "MM", "torch.bmm({0}.unsqueeze(1), {1}.unsqueeze(2)).squeeze(1) * 0.1 * {0}"),
    ("M", "MM", "{0}.scatter_add(1, IDX.expand(B_, -1), {1}) * 0.5"),
    ("M", "MM", "{0}.index_add(1, IDX[0], {1}) * 0.5"),
    ("M", "M", "torch.tanh({0})"),
    ("M", "M", "torch.tanh({0} @ self.w)"),
    ("M", "M", "torch.tanh({0}.t().contiguous().t() @ self.w)"),
    ("M", "M", "self.fc({0}).tanh()"),
    ("M", "M", "torch.relu({0}) * 0.9"),
    ("M", "M", "F.gelu({0})"),
    ("M", "M", "F.softmax({0}, dim=-1)"),
    ("M", "M", "F.log_softmax({0}, 1) * 0.1"),
    ("M", "M", "F.layer_norm({0}, (H_,)) * 0.3"),
    ("M", "M", "self.ln({0}) * 0.3"),
    ("M", "M", "F.normalize({0} + 0.1, dim=1)"),
    ("M", "M", "{0}.clamp(-0.7, 0.8)"),
    ("M", "M", "{0}.cumsum(1) * 0.2"),
    ("M", "M", "(1 + 0.1 * {0}).cumprod(1) * 0.5"),
    ("M", "M", "{0}.flip(1)"),
    ("M", "M", "{0}.roll(1, 0)"),
    ("M", "M", "{0}.sort(1).values"),
    ("M", "M", "{0}.topk(2, 1).values.repeat(1, 2) * 0.5"),
    ("M", "M", "{0}.gather(1, IDX.expand(B_, -1))"),
    ("M", "M", "{0}[:, IDX[0]]"),
    ("M", "M", "{0}.reshape(-1).reshape(B_, H_)"),
    ("M", "M", "{0}.t().reshape(H_, B_).t()"),
    ("M", "M", "{0}.view(B_, 2, 2).transpose(1, 2).reshape(B_, H_)"),
    ("M", "M", "{0}.unsqueeze(0).expand(2, -1, -1).sum(0) * 0.5"),
    ("M", "M", "F.pad({0}[:, 1:], (0, 1))"),
    ("M", "M", "F.conv1d({0}.unsqueeze(1), self.kernel, padding=1).squeeze(1).tanh()"),
    ("M", "M", "F.avg_pool1d({0}.unsqueeze(1), 3, 1, 1).squeeze(1)"),
    ("M", "M", "{0}.detach()"),
    ("M", "M", "({0} - {0}.mean()) / ({0}.std() + 1)"),
    ("M", "M", "Spike.apply({0} - 0.21)"),
    ("M", "M", "{0} * ({0} > 0)"),
    ("M", "M", "{0}.masked_fill({0} > 0.6, 0.25)"),
    ("M", "M", "{0}.abs().add(0.1).sqrt() * 0.5"),
    ("M", "M", "torch.chunk({0}, 2, 1)[0].repeat(1, 2)"),
    ("M", "M", "torch.movedim({0}.view(B_, H_, 1), 0, 1).transpose(0, 1).squeeze(-1)"),
    ("M", "M", "torch.tanh({0}.float()).to({0}.dtype)"),
    ("M", "M", "torch.where(x[t][:, :1] > 0, {0}, 0.5 * {0})"),
    ("M", "M", "torch.logsumexp({0}, 1, keepdim=True) * 0.1 + 0.5 * {0}"),
    ("M", "M", "({0} + self.v).unflatten(1, (2, 2)).flatten(1)"),
    ("M", "M", "torch.sin({0})"),
    ("M", "M", "torch.linalg.norm({0}, dim=1, keepdim=True).clamp(min=0.1).reciprocal() * {0}"),
    ("M", "M", "{0}.narrow(1, 1, 3).mean(1, keepdim=True) + 0.5 * {0}"),
    ("M", "M", "torch.atan2({0}, 1 + {0}.square())"),
    ("M", "M", "F.embedding_bag(IDX, self.table, mode='mean') + 0.5 * {0}"),
    ("M", "MV", "{0} * {1}"),
    ("M", "MV", "{0} + 0.3 * {1}"),
    ("M", "MV", "torch.outer({0}.mean(1), {1})"),
    ("M", "MS", "{0} * torch.tanh({1})"),
    ("M", "I", "self.emb({0})"),
    ("M", "MI", "torch.where(({1} > 1)[:, None], {0}, 0.5 * {0})"),
    ("V", "M", "{0}.mean(0)"),
    ("V", "M", "{0}.max(0).values"),
    ("V", "M", "{0}[0]"),
    ("V", "VV", "torch.tanh({0} + {1})"),
    ("V", "V", "{0} @ self.w"),
    ("V", "V", "{0} * self.v"),
    ("S", "M", "{0}.square().mean()"),
    ("S", "M", "{0}.sum() * 0.1"),
    ("S", "M", "{0}.norm() * 0.1"),
    ("S", "V", "({0} * self.v).sum()"),
    ("S", "S", "torch.tanh({0})"),
    ("I", "M", "{0}.argmax(1)"),
    ("I", "M", "({0} > 0).long().sum(1)"),
    ("S", "S", "{0} / (1 + t)"),
    ("I", "I", "({0} + 1) % H_"),
    ("I", "II", "torch.maximum({0}, {1})"),
    ("K", "M", "{0} > 0.1"),
    ("K", "KK", "{0} & ~{1}"),
    ("K", "K", "{0}.roll(1, 1)"),
    ("M", "MK", "torch.where({1}, {0}, 0.5 * {0})"),
    ("M", "MK", "{0}.masked_fill({1}, 0.2)"),
    ("M", "MK", "{0} * {1}"),
    ("C", "M", "{0}.view(B_, 2, 2)"),
    ("C", "M", "{0}.unflatten(1, (2, 2)).mT"),
    ("C", "MM", "torch.stack([{0}, {1}], 2)[:, 1:3]"),
    ("C", "CC", "torch.tanh({0} @ {1})"),
    ("C", "CC", "torch.einsum('bij,bkj->bki', {0}, {1}) * 0.3"),
    ("C", "C", "{0}.transpose(1, 2) * 0.9"),
    ("C", "C", "F.softmax({0}, -1)"),
    ("C", "C", "F.conv2d({0}.unsqueeze(1), self.kernel.unsqueeze(2), padding=(0, 1)).squeeze(1).tanh()"),
    ("M", "C", "{0}.flatten(1)"),
    ("M", "C", "{0}.permute(0, 2, 1).reshape(B_, H_)"),
    ("M", "C", "F.interpolate({0}, size=H_, mode='linear').mean(1)"),
)
RANDOM = (
    ("M", "M", "F.dropout({0}, 0.3, self.training)"),
    ("M", "M", "self.drop({0})"),
    ("M", "M", "{0} + 0.1 * torch.randn_like({0})"),
    ("M", "M", "{0} * torch.bernoulli(torch.full_like({0}, 0.7))"),
    ("M", "M", "{0} + 0.1 * torch.rand(B_, H_, dtype={0}.dtype)"),
)
STATEFUL = (("M", "M", "self.bn({0}) * 0.3"),)
WRITES = (
    "{0} = {0}.clone(); {0}[:, :2] = {0}[:, 2:] * 0.5",
    "{0} = {0} * 1.0; {0}.mul_(0.9).add_(0.01)",
    "{0} = {0} + 0; {0}[0] += 0.1",
    "{0} = {0}.clone(); {0}[{0} > 0.5] = 0.2",
    "{0} = {0} * 1.0; {0}.t()[1].zero_()",
    "z = {0}.detach(); z *= 0.5; {0} = {0} + z",
    "z = {0}.detach().clone(); z[:, 0] = {0}[:, 1]; {0} = {0} * 0.5 + z",
    "z = torch.zeros_like({0}); z[:, 1:] += {0}[:, 1:] * 0.5; {0} = z",
    "z = {0}.detach(); z += 0.1 * {0}; {0} = 0.5 * z + 0.1",
)
BUFFERS = ("self.count += 1", "self.mean.mul_(0.9).add_({0}.detach().mean(0), alpha=0.1)", "self.last = {0}.detach()")
INITIAL = {
    "M": (
        "x.new_zeros(B_, H_)",
        "torch.zeros(B_, H_, dtype=x.dtype)",
        "h0",
        "h0 * 0.5",
        "turned.t()",
        "self.v.expand(B_, H_)",
        "self.start",
        "torch.ones_like(h0)",
        "h0[:, torch.arange(H_)]",
    ),
    "V": ("x.new_zeros(H_)", "self.v", "self.v * 2", "h0[0]"),
    "S": ("x.new_zeros(())", "0", "0.0", "self.v.sum()"),
    "I": ("torch.zeros(B_, dtype=torch.long)", "labels"),
    "K": ("torch.zeros(B_, H_, dtype=torch.bool)", "h0 > 0"),
    "C": (
        "x.new_zeros(B_, 2, 2)",
        "h0.view(B_, 2, 2)",
        "h0.view(B_, 2, 2).transpose(1, 2)",
        "torch.eye(2).expand(B_, 2, 2)",
    ),
}
UPDATES = {
    "M": ("{1}", "0.9 * {0} + 0.5 * {1}", "torch.tanh({0} + {1})", "torch.tanh({0} @ self.w + {1})"),
    "C": ("0.6 * {0} + 0.3 * {1}", "torch.tanh({0} @ {1})", "torch.tanh({0}.transpose(1, 2) + {1})"),
    "V": ("0.5 * {0} + 0.5 * {1}",),
    "S": ("{0} + 0.1 * {1}",),
    "I": ("({0} + {1}) % H_",),
    "K": ("{0} ^ {1}", "{0} | {1}"),
}
BOXES = ("s['{0}']", "s.{0}")
HEADERS = (
    "for t in range(x.shape[0]):",
    "for t in range(x.shape[0]):",
    "for t in range(x.shape[0]):",
    "for t in reversed(range(x.shape[0])):",
    "for t in range(x.shape[0] - 1, -1, -1):",
    "for t in range(1, x.shape[0]):",
    "for t in range(0, x.shape[0], 2):",
    "for t, x_t in enumerate(x):",
    "for t, (x_t, u_t) in enumerate(zip(x.unbind(0), u.unbind(0))):",
)
BEFORE = (
    "y = x * 2",
    "y = self.fc(x)",
    "y = torch.sin(x) * self.v",
    "y = x.flip(0)",
    "y = F.dropout(x, 0.2, self.training)",
    "y = x.cumsum(0) * 0.1",
    "y = self.blocks(x)",
)
READS = (
    "y[t]",
    "u[t]",
    "x[t - 1] if t else x[t] * 0",
    "y[t - 1] if t else y[t]",
    "self.table[t].expand(B_, -1)",
    "x[0]",
    "bf[:, t]",
)
WHOLES = (
    "(x + {0}).sum(0) * 0.05",
    "x.mean(0) * {0} + 0.5 * x[t]",
    "(torch.einsum('tbh,bh->tb', x, {0}).softmax(0)[:, :, None] * x).sum(0) + 0.3 * x[t]",
    "(torch.einsum('tbh,bh->tb', u, {0} * x[t]).softmax(0)[:, :, None] * u).sum(0) - 0.3 * u[t]",
    "(bf * {0}[:, None]).mean(1) + 0.5 * bf[:, t]",
    "(bf @ self.w).amax(1) * bf[:, t]",
    "(x.flatten(1)[:, t].tanh()[:, None, None] * x).mean(0) + 0.2 * {0}",
    "torch.tanh(u[t] @ u[t].mT @ {0}) * u.std(0)",
    "torch.cat([x, {0}[None]]).mean(0) * x[t]",
    "x.flip(0)[t] * 0.5 + u.cumsum(0)[t] * 0.1 * {0}",
    "{0} * x.square().mean().sqrt() + x[t]",
)
"""What reads all of a sequence at each step, most often beside its row."""
COUNTED = ("{0} = {0} / n", "{0} = {0} * 0.5 if n % 4 == 1 else {0}", "{0} = {0} * (0.9 ** n)")
DELAYED = ("{0}[-1] if {0} else x[t] * 0", "{0}[-2] if len({0}) > 1 else x[t]", "{0}[-1] if t % 2 and {0} else x[t]")
CONDITIONS = ("if t % 3 == 0:", "if t == 0:", "if t == x.shape[0] - 1:", "if t < 4:", "if t > 2:")
SECOND_LOOPS = (
    ("d0 = h0 * 0.3", "for t in range(u.shape[0]):", "    d0 = torch.tanh(u[t] + d0 @ self.w)"),
    ("d0 = h0.new_zeros(B_, H_)", "for t in reversed(range(x.shape[0])):", "    d0 = 0.5 * d0 + self.fc(x[t]).tanh()"),
    ("d0 = c0", "for x_t, u_t in zip(x, u):", "    d0 = torch.sigmoid(x_t * d0 + u_t)"),
    ("d0 = c0", "for block in self.blocks:", "    d0 = d0 + 0.5 * block(d0)"),
    (
        "d0 = c0",
        "for block in self.blocks[1:]:",
        "    d0 = F.dropout(torch.tanh(block[0](d0) + c0), 0.2, self.training)",
    ),
)
OVER_LISTS = (
    ("d0 = h0", "for each in out0:", "    d0 = torch.tanh(each + d0 @ self.w)"),
    ("d0 = h0", "for each in reversed(out0):", "    d0 = 0.7 * d0 + 0.1 * each"),
)
LOSSES = (
    "F.mse_loss(torch.stack({0}), x.detach())",
    "F.mse_loss(x, torch.stack({0}), reduction='sum')",
    "F.cross_entropy(torch.stack({0}).flatten(0, 1), x.detach().argmax(-1).flatten())",
    "F.cross_entropy(torch.stack({0}).flatten(0, 1), x.detach().argmax(-1).flatten(), ignore_index=1)",
    "F.cross_entropy(torch.stack({0}).transpose(1, 2), x.detach().argmax(-1), reduction='sum')",
    "F.cross_entropy(torch.stack({0}, 1).transpose(1, 2), bf.argmax(-1), label_smoothing=0.1)",
    "F.nll_loss((torch.stack({0}) @ self.w).log_softmax(-1).flatten(0, 1), x.detach().argmax(-1).flatten())",
    "F.huber_loss(torch.stack({0})[1:], x.detach()[:-1])",
    "F.l1_loss(torch.stack({0})[1:] * 2, torch.stack({0})[:-1])",
    "F.binary_cross_entropy_with_logits(torch.stack({0}), x.detach().sigmoid())",
    "(torch.stack({0}, 1) * x.transpose(0, 1)).mean()",
    "(torch.stack({0}) * turned.t()).square().sum((0, 2))",
    "torch.stack({0}).square().mean((0, 1), keepdim=True)",
    "torch.tanh(torch.stack({0}) @ self.w).mean(0)",
    "(torch.stack({0}) > 0).sum() + torch.stack({0}).exp().mean(-1).sum(0)",
    "torch.stack({0})[-1]",
    "torch.stack({0}, 1)[:, -1].tanh() * 2",
    "torch.sigmoid(torch.stack({0}) @ self.w)[-1].sum()",
    "torch.stack({0})[-1] + torch.stack({0}).mean(0)",
    "sum(F.mse_loss(each, h0.detach()) for each in {0})",
)
"""What training scripts make of the outputs of all steps: in place of what is gathered, with ``losses=True``."""
GATHERED = (
    "torch.stack({0})",
    "torch.stack({0}, 1)",
    "torch.cat({0}, 0)",
    "{0}",
    "tuple({0})",
    "{0}[-1]",
    "{0}[2] * {0}[-2]",
    "sum({0})",
    "torch.stack({0}).mean(0)",
    "torch.stack({0}[2:])",
    "torch.stack({0}[::2])",
    "torch.stack({0}).flip(0)",
    "torch.stack([torch.tanh(each) for each in {0}])",
)


@dataclass(frozen=True)
class Program:
    """The lines of ``forward`` before the loop, of its step, and behind it; how the loop is written, what it gives.

    ``frozen``: whether a parameter is. ``random``: whether it draws numbers. ``keywords``: how many inputs, counted
    from the last, are given by name.
    """

    seed: int
    before: tuple[str, ...]
    header: str
    step: tuple[str, ...]
    after: tuple[str, ...]
    result: str
    frozen: bool = False
    random: bool = False
    keywords: int = 0

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """Where lines are that can be left out: (part, number)."""
        parts = (("before", self.before), ("step", self.step), ("after", self.after))
        return tuple((name, number) for name, lines in parts for number in range(len(lines)))

    def without(self, part: str, number: int) -> Program:
        """The program without a line, and without what is indented below it."""
        lines = getattr(self, part)
        behind = number + 1
        while behind < len(lines) and _indent(lines[behind]) > _indent(lines[number]):
            behind += 1
        changed: dict[str, Any] = {part: (*lines[:number], *lines[behind:])}
        return replace(self, **changed)

    def source(self, batch: int = B) -> str:
        """The text of a module with ``Net`` and ``inputs()``."""
        forward = [*self.before, self.header, *(f"    {line}" for line in self.step or ("pass",)), *self.after]
        freeze = "        self.w.requires_grad_(False)\n" if self.frozen else ""
        body = "\n".join(f"        {line}" for line in (*forward, f"return {self.result}"))
        sizes = f"B_, H_ = {batch}, {H}\nIDX = torch.tensor([[1, 0, 3, 1]])\n"
        split = len(NAMES) - self.keywords
        named = ", ".join(f'"{name}": {name}' for name in NAMES[split:])
        given = f"    return [{', '.join(NAMES[:split])}], {{{named}}}\n"
        return f"{HEAD}{sizes}\n\n{_net(batch)}{freeze}\n{FORWARD}{body}\n\n\n{_inputs(batch)}{given}"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


NAMES = ("x", "u", "h0", "turned", "bf", "labels")


def _net(batch: int) -> str:
    return f"""class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn({H}, {H}) * 0.4)
        self.v = nn.Parameter(torch.randn({H}) * 0.4)
        self.start = nn.Parameter(torch.randn({batch}, {H}) * 0.4)
        self.table = nn.Parameter(torch.randn({T}, {H}) * 0.4)
        self.kernel = nn.Parameter(torch.randn(1, 1, 3) * 0.4)
        self.fc, self.ln, self.bn = nn.Linear({H}, {H}), nn.LayerNorm({H}), nn.BatchNorm1d({H})
        self.emb, self.drop = nn.Embedding({H}, {H}), nn.Dropout(0.2)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear({H}, {H}), nn.Tanh()) for _ in range(5)))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros({H}))
        self.register_buffer("held", torch.zeros({batch}, {H}))
        self.last = None
"""


FORWARD = """    def forward(self, x, u, h0, turned, bf, labels):
"""


def _inputs(batch: int) -> str:
    return f"""def inputs():
    x, u, h0 = torch.randn({T}, {batch}, {H}), torch.randn({T}, {batch}, {H}), torch.randn({batch}, {H})
    turned, bf = torch.randn({H}, {batch}), torch.randn({batch}, {T}, {H})
    x, u, h0, turned, bf = (each.mul(0.7).requires_grad_() for each in (x, u, h0, turned, bf))
    labels = torch.randint(0, {H}, ({batch},))
"""


@dataclass
class _Writer:
    """Writes the lines of a step, and those that they need before the loop; ``known``: names by kind."""

    draw: random.Random
    known: dict[str, list[str]]
    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    fresh: int = 0

    def pick(self, kind: str) -> str:
        """A value of a kind, rather a recent one; one is made of a matrix where there is none."""
        names = self.known.setdefault(kind, [])
        if not names:
            made = {
                "V": "{0}.mean(0)",
                "S": "{0}.mean()",
                "I": "{0}.argmax(1)",
                "K": "{0} > 0",
                "C": "{0}.view(B_, 2, 2)",
            }[kind]
            self.assign(kind, made.format(self.pick("M")))
        return self.draw.choice(names[-4:])

    def assign(self, kind: str, text: str) -> str:
        """A line that gives a value a new name."""
        self.fresh += 1
        name = f"{kind.lower()}{self.fresh}"
        self.lines.append(f"{name} = {text}")
        self.known.setdefault(kind, []).append(name)
        return name

    def derived(self, name: str, source: str) -> bool:
        """Whether a value was made from another in this step."""
        names = {source}
        for line in self.lines:
            made, _, text = line.strip().partition(" = ")
            if not names.isdisjoint(re.findall(r"\w+", text)):
                names.add(made)
        return name in names

    def operation(self, operations: tuple[tuple[str, str, str], ...]) -> str:
        """One operation of those that are given."""
        kind, operands, text = self.draw.choice(operations)
        return self.assign(kind, text.format(*(self.pick(each) for each in operands)))


def generate(seed: int, *, losses: bool = False, wholes: bool = False) -> Program:
    """The program of a seed. losses: with a loss, a sum or a last row of what all steps give, and little else. wholes:
    with steps that read all of a sequence."""
    draw = random.Random(seed)
    before = [draw.choice(BEFORE)]
    kinds = ["M", *draw.choices("MVSIKC", (5, 2, 2, 1, 1, 2), k=draw.choice((0, 0, 1, 1, 2)))]
    carries = [(f"c{number}", kind) for number, kind in enumerate(kinds)]
    before += [f"{name} = {draw.choice(INITIAL[kind])}" for name, kind in carries]
    lists = [f"out{number}" for number in range(draw.choice((0, 1, 1, 1, 2)))]
    before += [f"{name} = []" for name in lists]
    header = draw.choice(HEADERS)
    noisy, stateful = draw.random() < 0.15, draw.random() < 0.1
    writer = _Writer(draw, {"M": []})
    for name, kind in carries:
        writer.known.setdefault(kind, []).append(name)
    if "x_t" in header:
        writer.known["M"].append("x_t")
    else:
        writer.assign("M", "x[t]")
    if draw.random() < 0.5:
        writer.assign("M", draw.choice((*READS, *(each.format(name) for name in lists for each in DELAYED))))
    for _ in range(draw.choice((1, 1, 2)) if wholes else 0):
        writer.assign("M", draw.choice(WHOLES).format(writer.pick("M")))
    operations = OPERATIONS + (RANDOM * 3 if noisy else ()) + (STATEFUL * 8 if stateful else ())
    for _ in range(draw.randint(1, 6)):
        writer.operation(operations)
    _spice(draw, writer)
    for name, kind in carries:
        new = writer.pick(kind)
        carried = name != "c0" or writer.derived(new, name)
        writer.lines.append(f"{name} = {_update(draw, kind, name, new, carried)}")
    matrices = [name for name, kind in carries if kind == "M"]
    writer.lines += [f"{name}.append({draw.choice([*matrices, writer.pick('M')])})" for name in lists]
    numbers = any(word in " ".join([*before, *writer.lines]) for word in ("drop", "rand", "bernoulli"))
    parts = (*before, *writer.before), header, tuple(writer.lines)
    after, result, frozen, keywords = _ending(draw, carries, lists, losses=losses)
    numbers |= any("dropout" in line for line in after)
    program = Program(seed, *parts, after, result, frozen, numbers, keywords)
    return _boxed(program, draw.choice(BOXES)) if draw.random() < 0.15 else program


UPDATED = (
    *("{0}.mul_(0.9)", "{0} += 0.1 * h0.detach()", "{0}.clamp_(-0.8, 0.8)", "{0}.tanh_()", "{0}[0].mul_(0.5)"),
    "torch._foreach_mul_([{0}], 0.9)",
)
SCANNED = ("c0 = c0.detach()", "c0 += 0.3 * {0}")

HELD = ("self.held.add_(1)", "self.held.copy_(c0.detach())", "self.held.lerp_(c0.detach(), 0.5)")


def updated(program: Program) -> Program:
    """The program with updates in place of values of its step, behind what reads them: torch refuses to go backward
    where what reads them saves them. And of a buffer as large as a state, where copies of states are kept."""
    draw = random.Random(f"updated {program.seed}")
    lines = list(program.step)
    for _ in range(draw.choice((1, 1, 2))):
        made = [number for number, line in enumerate(lines) if re.match(r"m\d+ = (?!\w+\[)", line)]  # no row
        if made:
            first = draw.choice(made)
            places = [number for number in range(first + 1, len(lines) + 1) if not _indent("".join(lines[number:][:1]))]
            lines.insert(draw.choice(places), draw.choice(UPDATED).format(lines[first].split()[0]))
    matrices = [line.split()[0] for line in lines if re.match(r"m\d+ = ", line)]
    if matrices and draw.random() < 0.4:
        lines += [line.format(draw.choice(matrices)) for line in SCANNED]
    before, after = list(program.before), list(program.after)
    if draw.random() < 0.5:
        lines.append("copies.append(c0.clone())")
        before.append("copies = []")
        after = [draw.choice(HELD), *after, "d0 = torch.stack(copies)"]
        return replace(program, before=tuple(before), step=tuple(lines), after=tuple(after), result="(d0, c0)")
    return replace(program, step=tuple(lines))


def _boxed(program: Program, form: str) -> Program:
    """The program with its carries as entries of a dict, or attributes of an object."""

    def boxed(line: str) -> str:
        return re.sub(r"\b(c\d)\b", lambda found: form.format(found[1]), line)

    made = "s = {}" if "[" in form else "s = State()"
    before, step, after = (tuple(map(boxed, part)) for part in (program.before, program.step, program.after))
    return replace(program, before=(made, *before), step=step, after=after, result=boxed(_names_kept(program.result)))


def _names_kept(result: str) -> str:
    """A result that is a dict keeps its keys, which look like carries."""
    return re.sub(r'"c(\d)":', r'"carry\1":', result)


def _ending(
    draw: random.Random, carries: list[tuple[str, str]], lists: list[str], *, losses: bool
) -> tuple[tuple[str, ...], str, bool, int]:
    """The lines behind the loop, the result, whether a parameter is frozen, and how many inputs are given by name."""
    if losses and lists:
        made = tuple(f"r{number} = {draw.choice(LOSSES).format(name)}" for number, name in enumerate(lists))
        names = [f"r{number}" for number in range(len(lists))] + (["c0"] if draw.random() < 0.2 else [])
        return made, _result(draw, names), False, draw.choice((0, 0, 1, 3))
    after = [f"r{number} = {draw.choice(GATHERED).format(name)}" for number, name in enumerate(lists)]
    results = [name for name, _ in carries if draw.random() < 0.8 or name == "c0"]
    results += [f"r{number}" for number in range(len(lists))]
    if draw.random() < 0.15:
        after.append("c0 = torch.tanh(c0 @ self.w)")
    if draw.random() < 0.2:
        after += draw.choice(SECOND_LOOPS + (OVER_LISTS if lists else ()))
        results.append("d0")
    result, frozen = _result(draw, results), draw.random() < 0.1
    return tuple(after), result, frozen, draw.choice((0, 0, 1, 3, 6))


def _spice(draw: random.Random, writer: _Writer) -> None:
    """What is not an operation: branches on the step, writes in place, buffers, an inner loop."""
    if draw.random() < 0.2:
        name = writer.pick("M")
        writer.lines += [draw.choice(CONDITIONS), f"    {name} = {name} * 0.5 + 0.1"]
    if draw.random() < 0.2:
        name = writer.assign("M", writer.pick("M") + " * 1.0")
        writer.lines.append(draw.choice(WRITES).format(name))
    if draw.random() < 0.15:
        writer.lines.append(draw.choice(BUFFERS).format(writer.pick("M")))
    if draw.random() < 0.1:
        name = writer.assign("M", writer.pick("M") + " * 1.0")
        inner = draw.choice(("torch.tanh({0} @ self.w)", "torch.tanh({0} + u[k])", "{0} + x[t][:, k:k + 1] * {0}"))
        writer.lines += [f"for k in range({draw.choice((2, 3))}):", f"    {name} = {inner.format(name)}"]
    if draw.random() < 0.08:
        writer.before.append("n = 0")
        writer.lines += ["n += 1", draw.choice(COUNTED).format(writer.pick("M"))]


def _update(draw: random.Random, kind: str, name: str, new: str, carried: bool) -> str:
    """The next value of a carry. ``carried``: whether the new value may take its place, as it was made from it."""
    forms = UPDATES[kind] if carried or kind != "M" else UPDATES[kind][1:]
    return draw.choice(forms).format(name, new)


def _result(draw: random.Random, names: list[str]) -> str:
    form = draw.choice(("tuple", "tuple", "dict", "first", "class"))
    if form == "dict":
        return "{" + ", ".join(f'"{name}": {name}' for name in names) + "}"
    if form == "class" and len(names) > 1:
        return f"Result({names[0]}, ({', '.join(names[1:])},))"
    return f"({', '.join(names)},)" if form != "first" else names[0]
