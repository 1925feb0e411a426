"""What plain PyTorch holds in a training step, found by running and reversing the user's own graph on fake tensors.

Autograd itself says there what it saves, so no list of that is kept here. The peak of a model over time is a line in
the number of its steps, which two short graphs give.

Private torch API, tried on 2.11 and 2.13: ``FakeTensorMode`` (no memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from reroll.backends.construct.plan import Built
from reroll.backends.construct.replan import fit
from reroll.backends.inductor.workspaces import workspace_of
from reroll.backends.tiers.available import total_bytes
from reroll.backends.tiers.device import home_of
from reroll.capture.folded import unfolded
from reroll.errors import warn
from reroll.graph.fakes import apart_from_dynamo, fake_of
from reroll.graph.nested import tensors_of
from reroll.graph.private import Watching, storage_id
from reroll.words.units import nbytes_text

_MATTERS = 1 << 20  # bytes: of plans that hold less nothing is said, and nothing is run
_PART = 64  # of a device's memory: of plans that hold less only ``explain`` says it, as it takes time to find out
_MORE = 1.02  # times plain PyTorch's
_NODES = 2_000  # of a graph that is run as it is
_UNSEEN = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")  # fake ones do not say what they keep


class _Event(NamedTuple):
    """A block of memory that is made, or freed: its number, its bytes, and whether it is a sum of two."""

    block: int
    nbytes: int
    summed: bool = False


class _Ledger(Watching):
    """Notes each block of memory that is made while it is entered, and when that is freed; not that of ``inputs``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = set(map(storage_id, inputs))
        self.alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.events: list[_Event] = []
        self.blocks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(name in str(func) for name in _UNSEEN):
            raise NotImplementedError(f"{func} keeps what is not seen")
        for each in tensors_of(result):
            key, storage = storage_id(each), each.untyped_storage()
            if key not in self.alive and key not in self.inputs:
                block, nbytes = self._made(storage.nbytes(), func is torch.ops.aten.add.Tensor)
                self.alive[key] = block, weakref.ref(storage, partial(self._freed, key, block, nbytes))
        if working := workspace_of(func, args):
            block, nbytes = self._made(working)
            self.events.append(_Event(block, -nbytes))
        return result

    def _made(self, nbytes: int, summed: bool = False) -> tuple[int, int]:
        self.blocks += 1
        self.events.append(_Event(self.blocks, nbytes, summed))
        return self.blocks, nbytes

    def _freed(self, key: int, block: int, nbytes: int, _: object) -> None:
        if self.alive.get(key, (0,))[0] == block:
            del self.alive[key]
        self.events.append(_Event(block, -nbytes))

    def block_of(self, tensor: Tensor) -> int:
        """The number of a tensor's memory; 0 for that of an input."""
        return self.alive.get(storage_id(tensor), (0,))[0]

    def peak(self, left_out: set[int]) -> int:
        """The most bytes that were held, without some blocks.

        A sum of two gradients counts once what it was made of is freed: autograd adds to one of them in place, but not
        while somebody watches.
        """
        held = peak = 0
        for event, later in zip(self.events, (*self.events[1:], _Event(0, 0)), strict=True):
            held += 0 if event.block in left_out else event.nbytes
            if not (event.summed and later.nbytes < 0):
                peak = max(peak, held)
        return peak


class PlainPeak:
    """What plain PyTorch holds in a training step of a graph, which is found once, when somebody asks; None of none."""

    def __init__(self, module: fx.GraphModule | None = None) -> None:
        self._module = module
        self._found: int | None = None

    def __call__(self) -> int | None:
        """The bytes, where they are known."""
        if self._module is not None:
            self._found = plain_peak(unfolded(self._module))
            self.forget()
        return self._found

    def forget(self) -> None:
        """Hold the graph no longer. Who has not asked is not told any more."""
        self._module = None


def plain_peak(module: fx.GraphModule) -> int | None:
    """The local peak of a training step of a graph as it is, in bytes, as ``reroll.measure`` gives it. None where
    nothing needs a gradient, or it does not run on fake tensors."""
    nodes = module.graph.find_nodes(op="placeholder")
    if len(module.graph.nodes) > _NODES:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress(Exception), apart_from_dynamo(mode), mode, torch.enable_grad():  # torch raises what it likes
        return _watched(module, [fake_of(mode, node.meta["example_value"]) for node in nodes])
    return None


def _watched(module: fx.GraphModule, operands: Sequence[Any]) -> int | None:
    inputs = [each for each in operands if isinstance(each, Tensor)]
    with _Ledger(inputs) as ledger:
        found = fx.Interpreter(module).run(*operands)
        wanted = [each for each in tensors_of(found) if each.requires_grad]
        del found
        if not wanted:
            return None
        torch.autograd.backward(wanted, [torch.empty_like(each) for each in wanted])
        peak: int = ledger.peak({ledger.block_of(grad) for grad in _gradients(inputs)})
        return peak


def _gradients(inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    yield from (each.grad for each in inputs if each.is_leaf and each.grad is not None)


def more_than_plain(placed: Sequence[Built], plain: Callable[[], int | None], *, unasked: bool) -> str:
    """What is said of the plans of a graph where they are predicted to hold more than ``plain`` PyTorch would, which is
    only found out where they hold much; else nothing. ``unasked``: nobody has asked for a report."""
    needed = max(each.needed for each in placed)
    least = plain() if needed >= matters(placed, unasked=unasked) else None
    if least is None or needed < _MORE * least:
        return ""
    remedy = (
        f"With memory_budget={least} it would hold no more than that, and run some steps again."
        if fit(placed, least)
        else "No plan of these segments holds as little."
    )
    return (
        f"More memory than plain PyTorch: a training step is predicted to hold {nbytes_text(needed)} at its peak, and "
        f"{nbytes_text(least)} in plain PyTorch. {remedy}"
    )


def matters(built: Sequence[Built], *, unasked: bool) -> int:
    """Bytes from which on something is said of plans."""
    memory = total_bytes(home_of(built[0].executable.recurrence.examples)) if unasked else 0
    return max(_MATTERS, (memory or 0) // _PART)


def say_more(text: str) -> None:
    """Warn, if ``more_than_plain`` says something."""
    if text:
        warn(text)
