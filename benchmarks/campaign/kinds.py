"""Random models that hold things, hook gradients, read sizes and tables, and are called several times in a row.

A program is a model with a loop over time, what its caller does between calls, and the calls: (steps, batch, mode). It
is text that runs alone: ``calls(compiled)`` makes all calls of a new model, compiled or not, and gives what can be seen
of them. A seed mixes idioms of several kinds (``idioms.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from idioms import IDIOMS, idioms_of
from turns import BEYOND, OUTSIDE, TURNS

HEAD = """import collections
import contextlib
import itertools
import math
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)
CONFIG = {"scale": 0.9, "log": []}
"""

FUNCTIONS = {
    "Clip": """
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.view_as(v)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.02, 0.03)
""",
    "Sign": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g.sign() * 0.1
""",
    "Norm": """
class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v * 1.0

    @staticmethod
    def backward(ctx, g):
        return g * (0.05 / g.norm().clamp(min=0.05))
""",
    "Square": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(v):
        return v.view_as(v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g * g * 5
""",
    "Gate": """
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return torch.tanh(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return (g * (1 - v.tanh() ** 2)).clamp(-0.02, 0.02)
""",
    "Rows": """
class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v * 0.9

    @staticmethod
    def backward(ctx, g):
        return F.normalize(g, dim=-1, eps=1e-3) * 0.1
""",
    "Spike": """
class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0.1).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return torch.where(g.abs() > 0.01, g, 0.0) / (1 + (3 * v) ** 2)
""",
    "Product": """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, w):
        ctx.save_for_backward(v, w)
        return v * w

    @staticmethod
    def backward(ctx, g):
        v, w = ctx.saved_tensors
        return (g * w).clamp(-0.05, 0.05), (g * v if ctx.needs_input_grad[1] else None)
""",
    "Counted": """
class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, n):
        ctx.n = n
        return v * (1 - 0.1 * n)

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.02 * ctx.n, 0.02 * ctx.n), None
""",
    "Pair": """
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v * 0.5, v.tanh()

    @staticmethod
    def backward(ctx, g, k):
        return g.clamp(-0.05, 0.05) + k * k
""",
    "Fire": """
class Fire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        z = (v > 0.3).to(v.dtype)
        ctx.save_for_backward(z)
        v.mul_(1 - z)
        ctx.mark_dirty(v)
        return v, z

    @staticmethod
    def backward(ctx, g, k):
        (z,) = ctx.saved_tensors
        return g * (1 - z) + (k * 0.3).clamp(-0.05, 0.05)
""",
    "hooked": """
def hooked(v):
    v = v * 1.0
    if v.requires_grad:
        v.register_hook(lambda g: g.clamp(-0.02, 0.03))
    return v
""",
    "normed": """
def normed(v):
    v = v + 0.0
    if v.requires_grad:
        v.register_hook(lambda g: g * (0.05 / g.norm().clamp(min=0.05)))
    return v
""",
    "squared": """
def squared(v):
    def hook(g):
        return g * g.abs() * 5

    v = 0.95 * v
    if v.requires_grad:
        v.register_hook(hook)
    return v
""",
}
"""What changes gradients in a way that is not linear, of which a program has what it names."""
CHANGES: tuple[str, ...] = (
    "Clip.apply",
    "Sign.apply",
    "Norm.apply",
    "Square.apply",
    "Gate.apply",
    "Rows.apply",
    "Spike.apply",
)
CHANGES += ("Clip.apply", "hooked", "normed", "squared")

PLAIN = (
    "torch.tanh({m} @ self.w)",
    "self.fc({m}).tanh()",
    "torch.sigmoid({m}) * {m}",
    "{m} * self.v",
    "{m} + 0.3 * u",
    "torch.relu({m}) * 0.9",
    "F.layer_norm({m}, (H_,)) * 0.3",
    "{m}.clamp(-0.7, 0.8)",
    "torch.where({m} > 0.1, {m}, 0.5 * {m})",
    "torch.cat([{m}[:, 1:], {m}[:, :1]], 1)",
    "{m} - 0.5 * h",
    "F.softmax({m}, -1) + 0.1 * h",
)
WEIGHTS = {"functions": 5, "containers": 3, "numbers": 3, "sizes": 3, "layouts": 3, "cond": 0.4, "random": 1}
STACKS: tuple[str, ...] = (
    "torch.stack({a})",
    "torch.stack({a})",
    "torch.stack({a}, 1)",
    "torch.stack({a}, -1)",
    "torch.cat({a})",
)
STACKS += ("torch.cat({a}, 1)", "torch.stack({a}[1:])", "torch.stack({a}).transpose(0, 1)", "torch.stack({a}[::2])")
BEHIND = (
    "F.dropout({b}, 0.5, self.training)",
    "{b} + torch.rand_like({b})",
    "{b} * torch.bernoulli(torch.full_like({b}, 0.5))",
    "{b}.reshape(-1)",
    "{b}.contiguous().view({b}.shape[0], -1)",
    "{b}.view({b}.shape)",
    "{b}",
    "{b} * 2",
    "{b}.flatten(0, 1)",
    "{b}.movedim(-1, 0).contiguous()",
    "{b} * (1.0 if {b}.is_contiguous() else 0.5)",
    "torch.empty_like({b}).copy_({b})",
    "{b}.tanh().mean(-1)",
    "F.dropout({b}.tanh(), 0.3, self.training).transpose(0, 1)",
)
"""What is made of rows that were stacked, where strides can be told."""
INITIAL = (
    "x.new_zeros(x.shape[1], H_)",
    "u",
    "u * 0.5",
    "torch.zeros(x.shape[1], H_)",
    "self.v.expand(x.shape[1], H_)",
)
HEADERS = (
    ("for t in range(T_):", "x[t]"),
    ("for t in range(T_):", "x[t]"),
    ("for t in range(T_):", "x[t]"),
    ("for t, x_t in enumerate(x):", "x_t"),
    ("for t, x_t in zip(range(T_), x.unbind(0)):", "x_t"),
    ("for t in reversed(range(T_)):", "x[t]"),
    ("for t in range(1, T_):", "x[t]"),
    ("for t in range(0, T_, 2):", "x[t]"),
)
UPDATES = (
    "torch.tanh({m} + h @ self.w)",
    "torch.tanh({m} + 0.5 * h)",
    "0.8 * h + 0.4 * {m}",
    "self.cell({m}, h)",
    "torch.lerp(h, {m}, 0.4)",
    "torch.tanh(h * self.v + {m})",
)
GATHERED = ("torch.stack(out)", "torch.stack(out)", "torch.stack(out, 1)", "torch.cat(out)", "sum(out)", "out[-1]", "h")
RETURNS: tuple[str, ...] = ("r", "(r, h)", "{'r': r, 'h': h}", "[r, h.mean()]", "(h, out)", "(h, r, out[-1])")
RETURNS += ("(r, out[2], h)", "[*out[::3], torch.stack(out)]")
USED = ("made", "made", "made", "made[:1]", "made[-1:]", "made[1::2] or made", "made[:-1] or made")
"""What a loss is of: results that it leaves out have no gradient."""
HELPERS = ("method", "method", "closure", "lambda", "nested")
PARTS = ("init", "methods", "before", "step", "after", "between")

CALLS = '''

def state(value, name, seen):
    """What is left behind: tensors, those of results as they lie, and everything else as text."""
    if isinstance(value, torch.Tensor):
        lasting = value.detach().clone(memory_format=torch.contiguous_format)
        seen[name] = value.detach() if name.startswith("result") and not WRITTEN else lasting
    elif isinstance(value, nn.Module):
        for kind in ("_buffers", "_modules"):
            state(vars(value)[kind], name, seen)
        state({key: each for key, each in vars(value).items() if key[0] != "_"}, name, seen)
    elif isinstance(value, dict):
        seen[f"type of {name}"] = f"{type(value).__name__} {list(value)}"
        for key, each in value.items():
            state(each, f"{name}.{key}", seen)
    elif isinstance(value, (list, tuple, collections.deque)):
        seen[f"type of {name}"] = f"{type(value).__name__} {len(value)} {getattr(value, 'maxlen', '')}"
        for key, each in enumerate(value):
            state(each, f"{name}[{key}]", seen)
    elif isinstance(value, torch.Generator):
        seen[name] = value.get_state().clone()
    elif isinstance(value, random.Random):
        seen[name] = str(hash(value.getstate()))
    elif isinstance(value, np.random.Generator):
        seen[name] = str(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        seen[name] = str(hash((value.get_state()[1].tobytes(), value.get_state()[2:])))
    elif isinstance(value, np.ndarray):
        seen[name] = str(value.tolist())
    elif isinstance(value, (bool, int, float, str, set, type(None), itertools.count)):
        seen[name] = f"{type(value).__name__} {value!r}"


def rounded(grad):
    """A gradient; of one that is zero in exact numbers, zeros."""
    tiny = grad is not None and grad.numel() and grad.abs().max() <= 1e-13
    return torch.zeros_like(grad) if tiny else grad


def reaches(value, leaves):
    """Whether a gradient goes on from a result: a view that is taken under no_grad says so of itself, and none does."""
    todo, seen = [value.grad_fn] if value.requires_grad else [], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        todo += [each for each, _ in node.next_functions]
    return value.requires_grad and id(value) in leaves


def calls(compiled, moves=None):
    """All that can be seen of the calls of a new model: tensors, and everything else as text, by name."""
    torch.manual_seed(SEED)
    CONFIG.update(scale=0.9, log=[])
    os.environ.pop("KINDS_SCALE", None)
    net, seen = Net(), {}
    model = compiled(net)
    for number, (steps, batch, mode) in enumerate(CALLS):
        between(net, number)
        net.train(mode != "eval")
        torch.manual_seed(number)
        x, u = torch.randn(steps, batch, H_), torch.randn(batch, H_) * 0.5
        given = {f"parameter {name}": each for name, each in net.named_parameters()} | {"x": x, "u": u}
        if moves is not None:
            with torch.no_grad():
                for each in given.values() if number == 0 else (x, u):
                    each.mul_(moves.repeat(1 + each.numel() // len(moves))[: each.numel()].view(each.shape))
        x.requires_grad_(INPUTS and mode != "frozen")
        u.requires_grad_(INPUTS and mode != "frozen")
        random.seed(number)
        np.random.seed(number)
        with torch.set_grad_enabled(mode != "no_grad"):
            made = [model(x, u), model(x * 0.5, u)] if TWICE else model(x, u)
        found = {}
        state(made, "result", found)
        flat = torch.utils._pytree.tree_leaves(made)
        leaves = {name: each for name, each in given.items() if each.requires_grad}
        made = [each for each in flat if reaches(each, [*map(id, leaves.values())])]
        found["requires_grad"] = str([any(each is some for some in made) for each in flat])
        for part, each in enumerate(made if APART else ()):
            loss = (each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sin().sum()
            grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
            for name, grad in zip(leaves, grads):
                state(rounded(grad), f"gradient of result {part} for {name}", found)
        if made:
            terms = ((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sin().sum() for each in USED)
            sum(terms).backward(retain_graph=APART)
        retained = {f"retained {k}": each for k, each in enumerate(made) if each.retains_grad and not each.is_leaf}
        for name, each in {**given, **retained}.items():
            state(rounded(each.grad), f"gradient of {name}", found)
            each.grad = each.grad if KEPT else None
        state({"x": x, "u": u}, "inputs", found)
        for each in flat if WRITTEN else ():
            with contextlib.suppress(RuntimeError), torch.no_grad():
                each.mul_(0.5)
        state(net, "model", found)
        state(CONFIG, "CONFIG", found)
        state([torch.rand(()), random.random(), np.random.rand()], "next random numbers", found)
        seen |= {f"call {number}, {name}": each for name, each in found.items()}
    return seen


def main(*doors):
    """Print what differs from eager."""
    want = calls(lambda net: net)
    for door in doors:
        torch._dynamo.reset()
        found = calls(door)
        for name in {**want, **found}:
            one, other = want.get(name), found.get(name)
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
                error = ((one.double() - other).abs().max() / one.double().abs().max().clamp(min=1e-9)).item()
                print(name, f"{error:.1e} off") if error > 1e-8 else None
                print(name, "lies in another way") if one.stride() != other.stride() else None
            elif not isinstance(one, str) or one != other:
                print(name, other, "instead of", one)
        print("done")


if __name__ == "__main__":
    import reroll

    torch.set_num_threads(1)
    main(lambda net: DOOR)
'''


@dataclass(frozen=True)
class Model:
    """The lines of a program by part, its header and result, and constants; ``calls``: steps, batch and mode of each.

    ``apart``: whether each result is differentiated by itself, too. ``twice``: whether each call is two, of one loss.
    ``written``: whether the caller updates results in place. ``random``: whether torch's numbers are drawn. ``kinds``:
    those of its idioms. ``way``: how it is compiled where it runs alone.
    """

    seed: int
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    header: str
    results: tuple[str, ...]
    calls: tuple[tuple[int, int, str], ...]
    hidden: int = 4
    used: str = "made"
    inputs: bool = True
    kept: bool = False
    apart: bool = False
    twice: bool = False
    written: bool = False
    random: bool = False
    kinds: tuple[str, ...] = ()
    way: str = "reroll.compile(net, lowering='eager')"

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """Where lines are that can be left out: (part, number); results but for the first, and calls, are such, too."""
        parts = {**dict(self.parts), "results": self.results[1:], "calls": self.calls[1:]}
        return tuple((name, number) for name, lines in parts.items() for number in range(len(lines)))

    def without(self, part: str, number: int) -> Model:
        """The program without a line, and without what is indented below it."""
        if part in ("results", "calls"):
            found = getattr(self, part)
            changed: dict[str, Any] = {part: (*found[: number + 1], *found[number + 2 :])}
            return replace(self, **changed)
        parts = dict(self.parts)
        lines = parts[part]
        behind = number + 1
        while behind < len(lines) and _indent(lines[behind]) > _indent(lines[number]):
            behind += 1
        parts[part] = (*lines[:number], *lines[behind:])
        return replace(self, parts=tuple(parts.items()))

    def source(self) -> str:
        """The text of a module with ``Net``, ``between`` and ``calls``."""
        parts = dict(self.parts)
        result = self.results[0] if len(self.results) == 1 else f"({', '.join(self.results)})"
        forward = [*parts["before"], "out = []", self.header, *_indented(parts["step"], 1), *parts["after"]]
        init = [f"self.{name} = {made}" for name, made in MADE.items()]
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *_indented((*init, *parts["init"]), 2),
            *_indented(parts["methods"], 1),
            "    def forward(self, x, u):",
            *_indented(("T_ = x.shape[0]", *forward, f"return {result}"), 2),
        ]
        net = _needed(net, "\n".join(parts["between"]))
        text = "\n".join([*net, "\n\ndef between(net, number):", *_indented((*parts["between"], "pass"), 1)])
        functions = "\n".join(made for name, made in FUNCTIONS.items() if re.search(rf"\b{name}\b", text))
        functions += CHANGED if "Changed(" in text else ""
        constants = f"SEED, H_, CALLS = {self.seed}, {self.hidden}, {list(self.calls)}\n"
        constants += f"INPUTS, KEPT, APART = {self.inputs}, {self.kept}, {self.apart}\n"
        constants += f"TWICE, WRITTEN = {self.twice}, {self.written}\n"
        tail = CALLS.replace("USED", self.used).replace("DOOR", self.way)
        return f"{HEAD}{constants}\n{functions}\n\n{text}\n{tail}"


CHANGED = """

class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, w):
        return self.change(w)
"""
MADE = {
    "w": "nn.Parameter(torch.randn(H_, H_) * 0.4)",
    "v": "nn.Parameter(torch.rand(H_) + 0.3)",
    "table": "nn.Parameter(torch.randn(32, H_) * 0.4)",
    "fc": "nn.Linear(H_, H_)",
    "cell": "nn.GRUCell(H_, H_)",
    "emb": "nn.Embedding(32, H_)",
    "conv": "nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)",
    "eye": "torch.diag(torch.arange(1.0, H_ + 1))",
}
"""Attributes of which a model has those that it names."""


def _needed(net: list[str], between: str) -> list[str]:
    """The class without the attributes that neither it nor its caller reads."""
    made = {f"        self.{name} = {text}": rf"\b(?:self|net)\.{name}\b" for name, text in MADE.items()}
    return [line for line in net if line not in made or len(re.findall(made[line], "\n".join((*net, between)))) > 1]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indented(lines: tuple[str, ...] | list[str], depth: int) -> Iterator[str]:
    return ("    " * depth + line for line in lines)


@dataclass
class _Writer:
    """Writes the parts of a program; ``rows``: names of rows [B, H] that the step knows; ``draws``: it may draw random
    numbers."""

    draw: random.Random
    parts: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in PARTS})
    rows: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    fresh: int = 0
    draws: bool = True

    def name(self, letter: str) -> str:
        """A name that is new."""
        self.fresh += 1
        return f"{letter}{self.fresh}"

    @property
    def behind(self) -> list[str]:
        """What may be made of rows that were stacked."""
        return [each for each in BEHIND if self.draws or not DRAWS.search(each)]

    def write(self, idiom: str) -> None:
        """Add the lines of an idiom; a row that it makes is known from then on."""
        draw, made = self.draw, self.name("m")
        a, b = self.name("a"), self.name("b")
        stacked, behind = draw.choice(STACKS).format(a=a), draw.choice(self.behind).format(b=b)
        named = {
            "m": draw.choice((self.rows[-1], *self.rows[-3:])),
            "n": made,
            "a": a,
            "b": b,
            "q": self.name("q"),
            "S": stacked,
            "D": behind,
        }
        named |= {name: str(draw.randint(*ends)) for name, ends in (("k", (2, 14)), ("p", (1, 4)), ("c", (1, 2)))}
        named["F"] = draw.choice(CHANGES)
        for line in idiom.format(**named).split("\n"):
            part, _, text = line.partition(": ")
            if part == "result":
                self.results.append(text)
            elif part == "step" and text.startswith(f"{made} = ") and draw.random() < 0.3:
                self.parts["step"].append(f"{made} = {self.helped(text.partition(' = ')[2])}")
            else:
                self.parts[part].append(text)
        if "{n}" in idiom:
            self.rows.append(made)

    def helped(self, text: str) -> str:
        """A call of a new function that gives what the text gives."""
        name, form = self.name("f"), self.draw.choice(HELPERS)
        given = sorted(set(re.findall(r"\b(?:[mab]\d+|x_t|x|u|h|t|T_|out)\b", text)))
        names = ", ".join(given)
        if form == "lambda":
            self.parts["before"].append(f"{name} = lambda {names}: {text}")
            return f"{name}({names})"
        if form == "closure":
            self.parts["before"] += [f"def {name}({names}):", f"    return {text}"]
            return f"{name}({names})"
        body = [f"    return {text}"]
        if form == "nested":
            body = [f"    def inner({names}):", f"        return {text}", f"    return inner({names})"]
        self.parts["methods"] += [f"def {name}(self, {names}):", *body]
        return f"self.{name}({names})"


def model(seed: int, door: str = "compile", *, draws: bool = True, turns: bool = False, states: bool = True) -> Model:
    """The program of a seed, and calls for a door. draws: torch's random numbers may be drawn. turns: most idioms are
    of ``turns.py``. states: a model may write to its attributes."""
    draw = random.Random(f"{'turns' if turns else 'kinds'} {seed}")
    writer = _Writer(draw, draws=draws)
    header = _begun(draw, writer)
    kinds = _turned(draw) if turns else _picked(draw)
    drawn = (idiom for kind in kinds for idiom in _drawn(draw, {**IDIOMS, **TURNS}[kind], draws))
    idioms = [each for each in drawn if states or not STATES.search(each)]
    idioms += _from_outside(seed, states) if turns else []
    idioms += [f"step: {{n}} = {draw.choice(PLAIN)}" for _ in range(draw.choice((0, 0, 1, 1, 2)))]
    draw.shuffle(idioms)
    gathered = draw.choice(GATHERED)
    late = [idiom for idiom in idioms if idiom.startswith("after: ")]
    for idiom in idioms:
        if idiom not in late:
            writer.write(idiom)
    row = writer.rows[-1]
    given, returned = draw.choice((("h", RETURNS), ("h", RETURNS), (row, RETURNS[1:])))  # so that the carry matters
    writer.parts["step"] += [f"h = {draw.choice(UPDATES).format(m=row)}", f"out.append({given})"]
    writer.parts["after"].insert(0, f"r = {gathered}")
    for idiom in late:
        writer.write(idiom)
    parts = tuple((name, tuple(lines)) for name, lines in writer.parts.items())
    text = "\n".join(line for _, lines in parts for line in lines) + "\n".join(writer.results)
    return Model(
        seed,
        parts,
        header,
        (draw.choice(returned), *writer.results),
        _lengths(draw) if turns else _calls(draw, door, dear="torch.cond" in text),
        hidden=draw.choice((4, 4, 6)),
        used=draw.choice(USED),
        inputs=draw.random() < 0.8,
        kept=draw.random() < 0.2,
        apart=turns and draw.random() < 0.7,
        random=bool(DRAWS.search(text)),
        kinds=tuple(kinds),
        twice=turns and draw.random() < 0.1,
        written=turns and draw.random() < 0.15,
    )


def _begun(draw: random.Random, writer: _Writer) -> str:
    """The header of a loop, whose first state and row are written."""
    header, row = draw.choice(HEADERS)
    writer.parts["before"].append(f"h = {draw.choice(INITIAL)}")
    writer.parts["step"].append(f"m0 = {row}")
    writer.rows.append("m0")
    return header


_LATER = {1: (480, "outside", OUTSIDE), 3: (4000, "beyond", BEYOND)}
"""For a seed's place among four fours: the first seed of turns that has one more idiom, and of which kind."""
DRAWS = re.compile(r"drop|torch\.rand|bernoulli|rand_like|randn|gumbel|rrelu|normal_|uniform_")

STATES = re.compile(r"self\.\{q\}|Net\.|CONFIG|random|environ|net\.|globals|_seed|_rng_state|import ")
"""Of idioms that keep something between calls, or may."""


def _from_outside(seed: int, states: bool) -> list[str]:
    """An idiom of ``OUTSIDE`` or ``BEYOND`` for some seeds, that leaves all else of theirs as it is."""
    place = seed // 4 % 4
    if place not in _LATER or seed < _LATER[place][0]:
        return []
    _, name, text = _LATER[place]
    drawn = random.Random(f"{name} {seed}").choice(idioms_of(text))
    return [drawn] if states or not STATES.search(drawn) else []


def _picked(draw: random.Random) -> list[str]:
    """Some kinds, each once."""
    names = list(IDIOMS)
    found = draw.choices(names, [WEIGHTS.get(name, 2) for name in names], k=draw.choice((1, 2, 2, 3, 3)))
    return list(dict.fromkeys(found))


ROOM = 32
"""Steps for which lists and tables of states have room."""
TURNED: dict[str, float] = {"times": 4, "modes": 3, "maps": 3, "draws": 1, "views": 1, "states": 2, "in place": 2}
BESIDE = ("functions", "containers", "numbers", "sizes", "layouts", "norms", "delays", "tensors")
"""Kinds of ``idioms.py`` that come beside those of ``turns.py``."""


def _turned(draw: random.Random) -> list[str]:
    """Some kinds of turns, each once, and at times another one."""
    found = draw.choices(list(TURNED), list(TURNED.values()), k=draw.choice((1, 2, 2, 3, 3)))
    beside = draw.choices(BESIDE, k=draw.choice((0, 0, 0, 1)))
    return list(dict.fromkeys((*found, *beside)))


def _drawn(draw: random.Random, idioms: tuple[str, ...], draws: bool) -> list[str]:
    """One or two idioms of a kind."""
    allowed = [each for each in idioms if draws or not DRAWS.search(each)] or ["step: {n} = {m} * 0.9"]
    return [draw.choice(allowed) for _ in range(draw.choice((1, 1, 2)))]


def _calls(draw: random.Random, door: str, *, dear: bool) -> tuple[tuple[int, int, str], ...]:
    """Two to four calls of at most two numbers of steps; some with another batch, or in another mode.

    dear: two short ones, as plain torch compiles every ``torch.cond``. Through ``reroll.compile`` lengths change more
    often, and come again.
    """
    if dear:
        return (12, 3, "train"), (draw.choice((5, 12)), 3, "train")
    steps = (draw.choice((12, 13, 14)), draw.choice((5, 6, 7, 9, 12)))
    order: tuple[int, ...] = draw.choice(((0, 0), (0, 0), (0, 0, 0), (0, 1)))
    if door == "compile":
        steps = (draw.randint(12, 18), draw.choice((5, 7, 9, 13, 22, 30)))
        order = draw.choice(((0, 0, 1), (0, 1, 0), (0, 1), (1, 0, 0), (0, 0, 0, 1)))
    batch = draw.choice((3, 4))
    batches = [batch if draw.random() < 0.92 else batch + 1 for _ in order]
    modes = [draw.choice(("train",) * 18 + ("eval", "no_grad")) for _ in order]
    return tuple((steps[which], size, mode) for which, size, mode in zip(order, batches, modes, strict=True))


def at_length(made: Model) -> Model:
    """The model with calls of as many steps as its states have room for, of which a record leaves some out
    (``recorder/repeats.py``)."""
    return replace(made, calls=tuple((ROOM - steps % 3, batch, mode) for steps, batch, mode in made.calls))


def _lengths(draw: random.Random) -> tuple[tuple[int, int, str], ...]:
    """Calls of some lengths of which some come again, as a rule in one mode."""
    chosen = draw.choice(
        ((13, 5, 21, 13), (13, 5, 21), (12, 18, 12), (6, 14, 6), (20, 9), (14, 14), (22,), (18, 19, 20))
    )
    modes = [draw.choice(("train",) * 18 + ("eval", "no_grad", "frozen")) for _ in chosen]
    return tuple((steps, 3, mode) for steps, mode in zip(chosen, modes, strict=True))
