"""What a model does, operation by operation, while Python really runs it at its full length.

Dynamo is only shown short inputs, and no short trace tells what a loop does later on (``if t % 8 == 7: detach``). So a
model is also run as it is, without a tape, under a ``TorchFunctionMode`` that turns every operation into an *event*: a
colour (the operation, the structure of its operands, which inputs and parameters they are) and its numbers (how many
events ago each operand was made, its sizes, and all integers and floats). Nothing of an event is kept but that.

A run that is only looked at never goes backward, but needs gradients on, as models ask for them. Its graph of nodes
would grow with the run, and small nodes that stay among tensors that go break the heap into pieces: over 8,192 steps of
network D2r (``benchmarks/network_d.py``) the process grew by 1.4 GB, in 2.5 times the time. So autograd's history of
what a run makes is kept short.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reroll.capture.recorder.identity import Same, fingerprint
from reroll.capture.recorder.ragged import LONGEST, PACK, steps_of, whole
from reroll.capture.recorder.valueless import Valueless
from reroll.capture.steps.runs import Item, longest, slopes
from reroll.errors import UnsupportedError
from reroll.graph.names import LABEL
from reroll.graph.private import any_autocast, applied_functions, autocast_dtypes, base_of

Numbers = tuple[int | float, ...]
Sink = Callable[[tuple[Any, ...], Numbers], None]
LITERALS = ("int", "float")
"""Markers in a colour where it has a number of the user's; ``made`` and ``count`` mark numbers of the recording."""
SIZE = "size"
"""Marks a size of an operand: ``(SIZE, n)`` in a colour stands for all ``n`` of one."""
_PLAIN = (int, float, bool, str, complex, type(None), np.generic, torch.Size, torch.dtype, torch.device, torch.layout)
_GETTERS = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout")
    }
    | {getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point", "is_contiguous")}
    | {LABEL}  # gives the tensor itself
)
SCAN = torch.ops.higher_order.scan
_LIST = 4


_EVERY = 128


class Recorder(TorchFunctionMode):
    """Tells ``sink(colour, numbers)`` of every operation that makes or changes a tensor.

    inputs: names of the tensors that are passed to the model. Other tensors from outside are known by their identity.
    short: whether the run is on the first steps of sequences alone. ``sizes`` are those of what each event made first.
    valueless: what gives results without their values. packs: whether the run has packed sequences, after which sizes
    are no numbers of events: they are as large as lengths say, which is not what short runs are shown.
    """

    def __init__(
        self,
        sink: Sink,
        inputs: Mapping[int, str],
        short: bool = False,
        valueless: Valueless | None = None,
    ) -> None:
        super().__init__()
        self.sink, self.inputs, self.short, self.valueless = sink, inputs, short, valueless
        self.sizes, self.packs = list[Any](), False
        self.made: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self.history = History()
        self.count, self.muted = 0, False

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.muted or func in _GETTERS:
            return func(*args, **kwargs)
        if func is SCAN:
            with self:
                return step_by_step(*args)
        colour, numbers = self._operands(func, args, kwargs)
        if getattr(func, "__name__", "") == PACK:
            args, self.packs = self._packed(*args), True
        if _updates(func) or "out" in kwargs:  # told of before it happens, so that a departure comes before any harm
            self._tell(colour, numbers)
            return self._made(self._value(func, args, kwargs, colour))
        result = self._value(func, args, kwargs, colour)
        if isinstance(result, Tensor) or not _is_plain(result) or result is None:
            self._tell(colour, numbers)
            self._made(result)
        elif func is Tensor.__bool__:
            self._tell([*colour, result], numbers)
        return result

    def _packed(self, value: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Any, ...]:
        """The operands with which sequences are packed. Raises UnsupportedError if all end before the input does."""
        if self.short:
            return value, whole(value, lengths, batch_first), batch_first
        if lengths.numel() and int(lengths.max()) < steps_of(value, batch_first):
            raise UnsupportedError(f"The model {LONGEST}.")
        return value, lengths, batch_first

    def _value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], colour: list[Any]) -> Any:
        """What an operation gives, with its values or without."""
        if self.valueless is None:
            return self._muted(func, args, kwargs)
        return self._muted(self.valueless, (func, args, kwargs, colour[1]), {})

    def _muted(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operation gives; those inside of it are no events."""
        self.muted = True
        try:
            return function(*args, **kwargs)
        finally:
            self.muted = False

    def apply(self, function: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An ``autograd.Function`` is an event, as are the operations of its forward, and what it notes at the end."""
        if self.muted:
            return inner(*args, **kwargs)
        self._tell(*self._operands(fingerprint(function), args, kwargs))
        result = inner(*args, **kwargs)
        noted = self._muted(noted_for_backward, (result,), {})
        self._tell(*self._operands("noted for backward", (noted,), {}))
        return self._muted(self._made, (result,), {})

    def give(self, name: str, value: Any) -> None:
        """The event that the model gives a value, or leaves it in an attribute."""
        self._tell(*self._operands(f"gives {name}", (value,), {}))

    def event_of(self, value: Tensor) -> int | None:
        """The number of the event that made a tensor."""
        entry = self.made.get(id(value))
        return entry[1] if entry is not None and entry[0]() is value else None

    def _tell(self, colour: list[Any], numbers: list[int | float]) -> None:
        self.sink(tuple(colour), tuple(numbers))
        self.count += 1
        if self.short:
            self.sizes.append(None)

    def _made(self, result: Any) -> Any:
        """Note which event made the tensors of a result."""
        for index, item in enumerate((result,) if type(result) is Tensor else _tensors(result)):
            known = weakref.ref(item)
            if index == 0 and self.short and self.sizes:
                self.sizes[-1] = item.shape
            self.made[id(item)] = (known, self.count - 1, index)
            self.history.made(item, known)
        return result

    def _operands(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[int | float]]:
        """Colour and numbers of an event."""
        colour: list[Any] = [function, autocast_dtypes() if any_autocast() else None]
        numbers: list[int | float] = []
        for value in args:
            self._flatten(value, colour, numbers)
        if kwargs:
            self._flatten(kwargs, colour, numbers)
        return colour, numbers

    def _flatten(self, value: Any, colour: list[Any], numbers: list[int | float]) -> None:
        if isinstance(value, Tensor):
            self._tensor(value, colour, numbers)
        elif type(value) is int or (type(value) is float and value == value and str(value) != "-0.0"):
            colour.append("int" if type(value) is int else "float")
            numbers.append(value)
        elif isinstance(value, list | tuple):
            self._list(value, colour, numbers)
        elif isinstance(value, Mapping):
            colour.append(("keys", *value))
            for item in value.values():
                self._flatten(item, colour, numbers)
        elif isinstance(value, slice):
            colour.append("slice")
            for item in (value.start, value.stop, value.step):
                self._flatten(item, colour, numbers)
        elif isinstance(value, _PLAIN):
            colour.append((type(value), str(value)))
        else:
            self._object(value, colour, numbers)

    def _object(self, value: Any, colour: list[Any], numbers: list[int | float]) -> None:
        colour.append(type(value))
        if hasattr(type(value), "__dataclass_fields__"):
            self._flatten(vars(value), colour, numbers)
        elif isinstance(value, range):
            self._flatten((value.start, value.stop, value.step), colour, numbers)
        elif isinstance(value, types.FunctionType):
            colour.append(fingerprint(value))
        elif value.__hash__ is not None:
            colour.append(Same(value))
        else:
            colour.append(repr(value))

    def _tensor(self, value: Tensor, colour: list[Any], numbers: list[int | float]) -> None:
        entry = self.made.get(id(value))
        if entry is not None and entry[0]() is value:
            colour.append("made")
            numbers += (self.count - entry[1], entry[2])
            if not self.packs:
                colour.append((SIZE, value.dim()))
                numbers += value.shape
        else:
            self.history.keep(value)
            colour.append(("from outside", self.inputs.get(id(value), id(value))))

    def _list(self, values: Sequence[Any], colour: list[Any], numbers: list[int | float]) -> None:
        """The items of a list; three and more, or blocks of them, that differ evenly in their numbers are one run."""
        colour.append("(")
        if len(values) < _LIST:
            for value in values:
                self._flatten(value, colour, numbers)
        else:
            self._runs(values, colour, numbers)
        colour.append(")")

    def _runs(self, values: Sequence[Any], colour: list[Any], numbers: list[int | float]) -> None:
        items: list[Item] = []
        for value in values:
            own: tuple[list[Any], list[int | float]] = ([], [])
            self._flatten(value, *own)
            items.append((tuple(own[0]), tuple(own[1])))
        at = 0
        while at < len(items):
            period, count = longest(items, at)
            block = items[at : at + period]
            numbers += [n for _, first in block for n in first]
            if count > 1:
                colour.append(("run", *(key for key, _ in block)))
                numbers += [n for slope in slopes(items, at, period) for n in slope]
                numbers.append(count)
            else:
                colour += block[0][0]
            at += count * period


def markers(colour: tuple[Any, ...]) -> list[str]:
    """What each number of an event of this colour is: ``int``, ``float``, or of the recording."""
    found: list[str] = []
    for item in colour:
        if item in LITERALS:
            found.append(item)
        elif item == "made":
            found += ["made", "made"]
        elif isinstance(item, tuple) and item and item[0] == SIZE:
            found += [SIZE] * item[1]
        elif isinstance(item, tuple) and item and item[0] == "run":
            inner = [marker for key in item[1:] for marker in markers(key)]
            found += ["count"] * (2 * len(inner) + 1)
    return found


def noted_for_backward(result: Any) -> dict[str, Any]:
    """What an ``autograd.Function`` has noted for its backward."""
    return next((vars(t.grad_fn) for t in _tensors(result) if hasattr(t.grad_fn, "__dict__")), {})


def _tensors(result: Any) -> list[Tensor]:
    items = result if isinstance(result, tuple | list) else (result,)
    return [item for item in items if isinstance(item, Tensor)]


@functools.cache
def _updates(function: Any) -> bool:
    """Whether an operation is known by its name to update an operand in place."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return not isinstance(value, torch.Size) and all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what runs inside: with gradients if they are on, as models ask for that, but without a tape.

    Whether they are on is afterwards as before: a block of ``no_grad`` in which a run ends may never have begun.
    """
    eager = torch.compiler.set_stance("force_eager")  # torch.scan compiles itself
    no_tape = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    before = torch.is_grad_enabled()
    try:
        with applied_functions(recorder.apply), eager, no_tape, recorder:
            yield
    finally:
        torch.set_grad_enabled(before)


def _no_backward(_: None) -> Tensor:
    raise UnsupportedError(
        "reroll.compile: the model takes a gradient in its forward (backward, torch.autograd.grad), which a compiled "
        "loop cannot do. Write that gradient as operations, by its formula, or use the plain model."
    )


def step_by_step(
    combine: Callable[..., Any], initial: Sequence[Tensor], xs: Sequence[Tensor], constants: Sequence[Tensor]
) -> list[Tensor]:
    """What ``torch.scan`` does, as the operations of its steps."""
    carry, rows = list(initial), []
    for t in range(xs[0].shape[0]):
        results = combine(*carry, *(x[t] for x in xs), *constants)
        carry = list(results[: len(initial)])
        rows.append(results[len(initial) :])
    return [*carry, *(torch.stack(column) for column in zip(*rows, strict=True))]


class History:
    """Cuts tensors that were made a while ago off their history; they stay non-leaves that require gradients.

    Only tensors that the run made itself are cut, and none of which there are views: those look at its history.
    ``changed`` is told of those that were.
    """

    def __init__(self, changed: Callable[[list[Tensor]], None] = lambda _: None) -> None:
        self.changed = changed
        self.recent: list[weakref.ref[Tensor]] = []
        self.views: dict[int, list[weakref.ref[Tensor]]] = {}
        self.foreign: set[int] = set()
        self.leaf = torch.zeros(0, requires_grad=True)

    def keep(self, value: Tensor) -> None:
        """A tensor that the run did not make."""
        self.foreign.add(id(value))

    def made(self, value: Tensor, known: weakref.ref[Tensor]) -> None:
        """A tensor that an operation gave."""
        base = base_of(value)
        if base is not None:
            if id(base) not in self.foreign:
                self.views.setdefault(id(base), []).append(known)
        elif value.requires_grad:
            self.recent.append(known)
            if len(self.recent) >= _EVERY:
                self._cut()

    def _cut(self) -> None:
        alive = [value for known in self.recent if (value := known()) is not None]
        self.recent.clear()
        views = {base: [known for known in found if known() is not None] for base, found in self.views.items()}
        self.views = {base: found for base, found in views.items() if found}
        kept = self.views.keys() | self.foreign
        cut = [value for value in alive if id(value) not in kept and _has_history(value)]
        with torch.enable_grad():
            for value in cut:
                value.detach_()
                value.as_strided((0,), (1,)).copy_(self.leaf)  # a new history: that of nothing
        self.changed(cut)


def _has_history(value: Tensor) -> bool:
    return type(value) is Tensor and base_of(value) is None and not value.is_leaf and value.layout == torch.strided
