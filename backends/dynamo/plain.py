"""What plain PyTorch holds in a training step, found by running and reversing the user's own graph on fake tensors.

Autograd itself says there what it saves, so no list of that is kept here. Of a folded graph (``capture.folded``) the
runs that are written down are run: what the first one behind a mark leaves behind, in the forward as in the backward,
each of those that are missing leaves behind, too.

Private torch API, tried on 2.11 and 2.13: ``FakeTensorMode`` (no memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
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
from reroll.capture.folded import SIDE, is_row, row_of_run, run_ended, skipped_runs
from reroll.errors import warn
from reroll.graph.effects import example
from reroll.graph.fakes import fake_of, outside_dynamo
from reroll.graph.nested import leaves_of, tensors_of
from reroll.graph.private import Watching, storage_id
from reroll.planning.options import Options, PartOfPlain
from reroll.recurrence import Recurrence
from reroll.words.units import nbytes_text

_MATTERS = 1 << 20  # bytes: of plans that hold less nothing is said, and nothing is run
_PART = 64  # of a device's memory: of plans that hold less only ``explain`` says it, as it takes time to find out
_MORE = 1.02  # times plain PyTorch's
_NODES = 2_000  # of a graph that is run as it is
_NODES_FOR_A_BUDGET = 20_000
_SOON = 6  # runs, behind which a block that is still held counts for each missing run
_UNSEEN = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")  # fake ones do not say what they keep


class _Event(NamedTuple):
    """A block of memory that is made, or freed: its number, its bytes, and whether it is a sum of two."""

    block: int
    nbytes: int
    summed: bool = False


@dataclass(slots=True)
class _Missing:
    """``runs`` that are missing, and the run behind them: the numbers of the events at which its forward and its
    backward began and ended."""

    runs: int
    forward: list[int]
    backward: list[int] = field(default_factory=list)


class _Ledger(Watching):
    """Notes each block of memory that is made while it is entered, and when that is freed; not that of ``inputs``."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = set(map(storage_id, inputs))
        self.alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self.events: list[_Event] = []
        self.missing: list[_Missing] = []
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

    def _times(self) -> dict[int, int]:
        """How often blocks count that missing runs have made, too, where those hold them for longer than a few runs."""
        made = {event.block: (at, event.summed) for at, event in enumerate(self.events) if event.nbytes > 0}
        freed = {event.block: at for at, event in enumerate(self.events) if event.nbytes < 0}
        found = dict[int, int]()
        for each in self.missing:
            for run, sums in ((each.forward, True), (each.backward, False)):  # a gradient is added up in one block
                begin, end = (run[0], run[-1]) if run else (0, 0)
                inside = (block for block, (at, summed) in made.items() if begin <= at < end and (sums or not summed))
                soon = end + _SOON * (end - begin)
                left = (block for block in inside if freed.get(block, soon + 1) > soon)
                found |= dict.fromkeys(left, each.runs + 1)
        return found

    def peak(self, left_out: set[int]) -> int:
        """The most bytes that were held, without some blocks, and with those of missing runs.

        A sum of two gradients counts once what it was made of is freed: autograd adds to one of them in place, but not
        while somebody watches.
        """
        held, peak, times = 0, 0, self._times()
        for event, later in zip(self.events, (*self.events[1:], _Event(0, 0)), strict=True):
            held += 0 if event.block in left_out else event.nbytes * times.get(event.block, 1)
            if not (event.summed and later.nbytes < 0):
                peak = max(peak, held)
        return peak


class _Runs(fx.Interpreter):
    """Runs a graph, of which runs may be missing: a value of such a one is that of the run before these."""

    def __init__(self, module: fx.GraphModule, ledger: _Ledger) -> None:
        super().__init__(module)
        self.ledger, self.mark = ledger, 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A call; where runs are missing, and where the one behind them ends, that is noted, in both directions."""
        ledger = self.ledger
        if target is row_of_run:
            return args[0]
        if target is skipped_runs:
            ledger.missing.append(_Missing(args[0], [len(ledger.events)]))
            self.mark = args[1]
            self._when_reversed([node for node in self.env if _is_read_after(node, self.mark)])
        elif target is run_ended:
            ledger.missing[-1].forward.append(len(ledger.events))
            self._when_reversed([node for node in self.env if node.meta.get(SIDE) == (self.mark, True)])
        else:
            return super().call_function(target, args, kwargs)
        return None

    def _when_reversed(self, nodes: Sequence[fx.Node]) -> None:
        """Note when the backward has come to these values."""
        ledger, missing = self.ledger, self.ledger.missing[-1]
        for value in (each for node in nodes for each in tensors_of(self.env[node]) if each.requires_grad):
            value.register_hook(lambda _: missing.backward.append(len(ledger.events)))


def _is_read_after(node: fx.Node, mark: int) -> bool:
    """Whether a value of the last runs before a mark is read behind it."""
    return node.meta.get(SIDE) == (mark, False) and any(user.meta.get(SIDE) == (mark, True) for user in node.users)


class PlainPeak:
    """What plain PyTorch holds in a training step of a graph, which is found once, when somebody asks; None of none."""

    def __init__(self, module: fx.GraphModule | None = None) -> None:
        self._module = module
        self._found: int | None = None

    def __call__(self, nodes: int = _NODES) -> int | None:
        """The bytes, where they are known; not of a graph of more than so many ``nodes``, which takes seconds."""
        if self._module is not None:
            self._found = plain_peak(self._module, nodes)
            self.forget()
        return self._found

    def forget(self) -> None:
        """Hold the graph no longer. Who has not asked is not told any more."""
        self._module = None


def plain_peak(module: fx.GraphModule, most: int = _NODES) -> int | None:
    """The local peak of a training step of a graph as it is, in bytes, as ``reroll.measure`` gives it. None where
    nothing needs a gradient, it does not run on fake tensors, or it has more than so many nodes."""
    nodes = module.graph.find_nodes(op="placeholder")
    if sum(not is_row(node) for node in module.graph.nodes) > most:
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress(Exception), outside_dynamo(mode), mode, torch.enable_grad():  # torch raises what it likes
        return _watched(module, [fake_of(mode, node.meta["example_value"]) for node in nodes])
    return None


def _watched(module: fx.GraphModule, operands: Sequence[Any]) -> int | None:
    inputs = [each for each in operands if isinstance(each, Tensor)]
    with _Ledger(inputs) as ledger:
        found = _Runs(module, ledger).run(*operands)
        wanted = [each for each in tensors_of(found) if each.requires_grad]
        del found
        if not wanted:
            return None
        torch.autograd.backward(wanted, [torch.empty_like(each) for each in wanted])
        peak: int = ledger.peak({ledger.block_of(grad) for grad in _gradients(inputs)})
        return peak


def _gradients(inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    yield from (each.grad for each in inputs if each.is_leaf and each.grad is not None)


class _Needing(torch.autograd.Function):
    """A value that needs a gradient, of which zeros reach some others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *reached: Tensor) -> Tensor:
        ctx.save_for_backward(*reached)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def needing_as(plain: fx.GraphModule, *, cut: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets results of what runs a graph need a gradient where those of the ``plain`` graph do; not where gradients are
    ``cut``.

    Of what is written over, torch follows the gradient of a whole tensor, though none of it reaches anything. Rewrites
    leave that out, and what it reaches has zeros here, as in torch.
    """
    values = () if cut else enumerate(map(example, leaves_of(plain.graph.output_node().args)))
    needing, known = [at for at, value in values if value is not None and value.requires_grad], dict[int, list[int]]()
    module = weakref.ref(plain)  # a record is forgotten, in the end: the first call is soon

    def ran(run: Callable[..., Any], *args: Any) -> Any:
        made = run(*args)
        bare = [at for at in needing if not made[at].requires_grad] if torch.is_grad_enabled() else ()
        if not bare:
            return made
        known.update(() if known.keys() >= {*bare} else _sources(module(), bare, len(args)))
        reached = {at: [args[number] for number in known[at]] for at in bare}
        found = [*made]
        for at in bare:
            trained = (each for each in reached[at] if isinstance(each, Tensor) and each.requires_grad)
            found[at] = _Needing.apply(found[at], *trained)  # type: ignore[no-untyped-call]
        return tuple(found)

    return lambda run: partial(ran, run)


def _sources(module: fx.GraphModule | None, results: Sequence[int], inputs: int) -> dict[int, list[int]]:
    """To which inputs of a graph the gradients of some results flow; to all, where that is not known any more."""
    found = {at: [*range(inputs)] for at in results}
    if module is None:
        return found
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with suppress(Exception), outside_dynamo(mode), mode, torch.enable_grad():
        operands = [fake_of(mode, node.meta["example_value"]) for node in module.graph.find_nodes(op="placeholder")]
        leaves = {at: x for at, x in enumerate(operands) if isinstance(x, Tensor) and x.requires_grad}
        made = [*leaves_of(_Runs(module, _Ledger(())).run(*operands))]
        for at in results:
            grads = torch.autograd.grad(
                made[at], [*leaves.values()], torch.empty_like(made[at]), retain_graph=True, allow_unused=True
            )
            found[at] = [number for number, grad in zip(leaves, grads, strict=True) if grad is not None]
    return found


def with_part_of_plain(options: Options, plain: PlainPeak, recurrences: Sequence[Recurrence]) -> Options:
    """The options with a budget that is a fraction as one of what plain PyTorch holds; as they are without gradients.

    Where that is not known it is a fraction of what keeping everything would hold, and a RerollWarning says so."""
    part = options.memory_budget
    trained = torch.is_grad_enabled() and any(x.requires_grad for each in recurrences for x in each.examples)
    if not isinstance(part, float) or not trained:
        return options
    whole = plain(_NODES_FOR_A_BUDGET)
    if whole is None:
        warn(
            f"memory_budget={part!r} is a fraction of what reroll would hold without a budget, as what plain PyTorch "
            "holds is not known for this graph. Give bytes to have so much and no more."
        )
        return options
    found = copy(options)  # which checks nothing again: a folder that has gone since is the disk's to tell
    object.__setattr__(found, "memory_budget", PartOfPlain(part, whole))
    return found


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
