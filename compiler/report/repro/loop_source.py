"""One loop as a module of its own: its step as a function, a ``forward`` over time or depth, and how it is compiled.

What steps read by an index, and the first carries, are arguments; all else are parameters. Arguments have the sizes of
the call that was explained; what steps of ``reroll.compile`` read by an index is as long as these reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, fx

from reroll.recurrence import Items, Numbers, PerStep, Recurrence, Slices
from reroll.report.listing import source_line
from reroll.report.repro.functions import with_operations
from reroll.report.repro.source import Source, value_of

_INDEXED = ("embedding", "one_hot", "nll_loss", "cross_entropy")


@dataclass(frozen=True)
class LoopSource:
    """The text of a class ``name``: a loop as ``nn.Module``. ``share``: its bytes of a budget of several."""

    recurrence: Recurrence
    name: str
    source: Source
    share: int | None = None
    arguments: list[str] = field(init=False)

    def __post_init__(self) -> None:
        step = f"step_{self.name.lower()}"
        about = "One step: carries, what it reads at each step, what stays the same -> next carries, rows of outputs."
        object.__setattr__(self, "arguments", self.source.function(with_operations(self.recurrence.step), step, about))

    @property
    def text(self) -> str:
        """The class."""
        loop, where = self.recurrence, source_line(self.recurrence.where)
        lines = [f"class {self.name}(nn.Module):", f'    """{loop.size}{f", at {where}" * bool(where)}."""', ""]
        lines += [
            f"    random, short, share = {loop.random}, {loop.short}, {self.share}",
            "",
            "    def __init__(self):",
            "        super().__init__()",
        ]
        lines += [f"        self.steps = {loop.steps}", *(f"        {each}" for each in self._parameters())]
        lines += ["", f"    def forward(self, {', '.join(self.inputs.values())}):"]
        lines += [f"        {each}" for each in self._forward()]
        lines += ["", "    @staticmethod", "    def inputs():", "        return ("]
        lines += [f"            {self._value(number, given=True)},  # {name}" for number, name in self.inputs.items()]
        lines += ["        )", "", "    def compiled(self, options):", f"        return {self._door()}"]
        return "\n".join(lines)

    @cached_property
    def inputs(self) -> dict[int, str]:
        """The operands that are arguments of ``forward``, with their names; -1 - i is what ``xs[i]`` has as numbers."""
        found = dict(enumerate(self.arguments[: len(self.recurrence.carries)]))
        for place, (name, x) in enumerate(zip(self._read, self.recurrence.xs, strict=True)):
            if isinstance(x, Slices):
                found.setdefault(x.operand, name)
            elif isinstance(x, Numbers):
                found[-1 - place] = name
        return found

    @property
    def _slices(self) -> list[Slices]:
        return [x for x in self.recurrence.xs if isinstance(x, Slices)]

    @property
    def _read(self) -> list[str]:
        """The arguments of the step that are other ones at each step."""
        first = len(self.recurrence.carries)
        return self.arguments[first : first + len(self.recurrence.xs)]

    @property
    def _fixed(self) -> list[tuple[str, int]]:
        """The arguments of the step that are the same at all steps, and their operands."""
        constants = self.recurrence.constants
        return list(zip(self.arguments[len(self.arguments) - len(constants) :], constants, strict=True))

    def _parameters(self) -> Iterator[str]:
        for name, x in zip(self._read, self.recurrence.xs, strict=True):
            if isinstance(x, Items):
                values = dict.fromkeys(x.operands)
                yield f"self.{name} = nn.ParameterList([{', '.join(map(self._parameter, values))}])"
        for name, number in self._fixed:
            if number not in self.inputs:
                yield f"self.{name} = {self._parameter(number)}"

    def _parameter(self, number: int) -> str:
        grad = "" if self.recurrence.examples[number].requires_grad else ", requires_grad=False"
        return f"nn.Parameter({self._value(number)}{grad})"

    @cached_property
    def timed(self) -> bool:
        """Whether the number of steps is that of the rows that are given: all that they read moves by one."""
        loop = self.recurrence
        if not loop.any_length or not loop.xs or any(isinstance(x, Items) for x in loop.xs):
            return False
        one_way = len({(x.operand, x.dim) for x in self._slices}) == len({x.operand for x in self._slices})
        return one_way and all(abs(x.stride) == 1 for x in self._slices)

    @property
    def _beyond(self) -> int:
        """By how many more rows than steps all that has time is longer."""
        steps = self.recurrence.steps
        return max((_last(x, steps) + 1 - steps for x in self._slices), default=0)

    def _length(self) -> str:
        """How many steps there are, as code."""
        if not self.timed:
            return "self.steps"
        x = self.recurrence.xs[0]
        name, dim = (self.inputs[x.operand], x.dim) if isinstance(x, Slices) else (self.inputs[-1], 0)
        return f"{name}.shape[{dim}]{f' - {self._beyond}' * bool(self._beyond)}"

    def _forward(self) -> Iterator[str]:
        loop, carries = self.recurrence, self.arguments[: len(self.recurrence.carries)]
        kept = [number for number, whole in enumerate(_rows(loop)) if whole]
        yield f"steps = {self._length()}"
        yield from (f"rows_{number} = []" for number in kept)
        indent = ""
        for mode in modes(loop):
            yield f"{indent}with {mode}:"
            indent += "    "
        yield f"{indent}for t in range(steps):"
        given = [*carries, *map(self._at_step, self._read, loop.xs), *(self._operand(*each) for each in self._fixed)]
        results = [*carries, *(f"row_{number}" for number in range(len(loop.ys)))]
        yield f"{indent}    ({', '.join(results)},) = step_{self.name.lower()}({', '.join(given)})"
        yield from (f"{indent}    rows_{number}.append(row_{number})" for number in kept)
        stacked = [f"torch.stack(rows_{number}){self._kept(number)}" for number in kept]
        yield f"return ({', '.join([*carries, *stacked])},)"

    def _kept(self, number: int) -> str:
        kept = self.recurrence.kept_rows[number]
        return "" if kept.whole else f"[{kept.first}::{kept.every}]"

    def _operand(self, name: str, number: int) -> str:
        return self.inputs.get(number, f"self.{name}")

    def _at_step(self, name: str, x: PerStep) -> str:
        """What the step reads at step t, as code."""
        if isinstance(x, Numbers):
            return f"{name}[t]"
        if isinstance(x, Items):
            order = {each: place for place, each in enumerate(dict.fromkeys(x.operands))}
            places = [order[each] for each in x.operands]
            return f"self.{name}[t]" if places == list(range(len(places))) else f"self.{name}[{places}[t]]"
        if x.stride == -1 and self.timed:
            return f"{self.inputs[x.operand]}.select({x.dim}, steps + {x.start - self.recurrence.steps} - t)"
        index = f"{x.start} + t" if x.stride == 1 else f"{x.start} + {x.stride} * t"
        return f"{self.inputs[x.operand]}.select({x.dim}, {index.removeprefix('0 + ')})"

    def _door(self) -> str:
        """How the loop is compiled, as code."""
        if self.recurrence.any_length:
            return "reroll.compile(self, **options)"
        return 'torch.compile(self, backend="reroll", options={**options, "on_no_recurrence": "error"})'

    def _value(self, number: int, *, given: bool = False) -> str:
        """What makes the values of an operand, as code; ``given``: as an argument."""
        if number < 0:
            numbers = self.recurrence.xs[-1 - number]
            assert isinstance(numbers, Numbers)
            return f"torch.tensor({list(numbers.values)}, dtype={numbers.dtype})"
        example = self.recurrence.examples[number]
        shape, sliced = self._shape(number)
        kind = "input" if sliced else "weight" if example.requires_grad and example.dim() > 1 and not given else "state"
        text = value_text(example, kind, shape, highest(self._node(number)))
        return f"{text}.requires_grad_()" if given and example.requires_grad else text

    def _shape(self, number: int) -> tuple[tuple[int, ...], bool]:
        """The shape that an operand has for all steps, and whether it is read by an index."""
        shape, steps = list(self.recurrence.examples[number].shape), self.recurrence.steps
        read = [x for x in self._slices if x.operand == number]
        if read and self.recurrence.any_length:
            size = steps + self._beyond if self.timed else max(_last(x, steps) for x in read) + 1
            shape[read[0].dim] = size
        return tuple(shape), bool(read)

    def _node(self, number: int) -> fx.Node:
        """The input of the step by which it reads an operand first."""
        slots = self.recurrence.slots(1)
        inputs: list[fx.Node] = list(self.recurrence.step.graph.find_nodes(op="placeholder"))
        return next(node for node, read in zip(inputs, slots.operands, strict=True) if number in read)


def modes(loop: Recurrence) -> list[str]:
    """The modes in which the steps of a loop run, as code."""
    found = [] if loop.grad_enabled else ["torch.no_grad()"]
    return [*found, *(f"torch.autocast({', '.join(map(repr, each))})" for each in loop.autocast)]


def _last(x: Slices, steps: int) -> int:
    """The last row that steps read."""
    return max(x.start, x.start + x.stride * (steps - 1))


def _rows(loop: Recurrence) -> list[bool]:
    """Of the outputs of a step, which are stacked: not those that only draw a random number that nobody reads."""
    results = loop.step.graph.output_node().args[0]
    assert isinstance(results, tuple | list)
    values = [value_of(node) for node in results[len(loop.carries) :] if isinstance(node, fx.Node)]
    return [not (isinstance(value, Tensor) and value.numel() == 0 and not value.requires_grad) for value in values]


def highest(node: fx.Node) -> int:
    """Below what whole numbers have to be, so that all that reads them finds an entry; 2 where nothing says it."""
    seen, todo, found = {node}, [node], list[int]()
    while todo:
        for user in todo.pop().users:
            limit = _limit(user)
            if limit is not None:
                found.append(limit)
            elif user not in seen and _whole(value_of(user)):
                seen.add(user)
                todo.append(user)
    return min(found, default=2)


def _whole(value: object) -> bool:
    return isinstance(value, Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _limit(user: fx.Node) -> int | None:
    """What an operation that looks up by its operand leaves of numbers."""
    name = str(getattr(user.target, "__name__", user.target))
    if name not in _INDEXED or len(user.args) < 2:
        return None
    if name == "one_hot":
        return user.args[1] if isinstance(user.args[1], int) and user.args[1] > 0 else None
    table = user.args[1] if name == "embedding" else user.args[0]
    value = value_of(table) if isinstance(table, fx.Node) else None
    if not isinstance(value, Tensor):
        return None
    return value.shape[0] if name == "embedding" or value.dim() == 1 else value.shape[1]


def value_text(example: Tensor, kind: str, shape: tuple[int, ...], high: int = 2) -> str:
    """A call of ``made`` for values like an example's, of another shape if one is given."""
    strides = strides_of(example, shape)
    floating = example.dtype.is_floating_point or example.dtype.is_complex
    given = [str(shape), str(example.dtype)]
    given += [f'"{kind}"'] if kind != "state" and floating else []
    given += [f"high={high}"] if not floating and high != 2 else []
    given += [f"strides={strides}"] if strides else []
    given += [f'device="{example.device}"'] if example.device.type != "cpu" else []
    return f"made({', '.join(given)})"


def strides_of(example: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor that lies as the example does, if it is not contiguous; else nothing."""
    if example.is_contiguous():
        return ()
    if tuple(example.shape) == shape:
        return tuple(example.stride())
    found, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (example.stride(dim), -dim)):
        if example.stride(dim):
            found[dim], size = size, size * shape[dim]
    return tuple(found)
