"""What a loss does not use of a loop's outputs: eager leaves out the operations that only those need, at each step.

A program runs the backward of every step, with zeros for what is not used. That is the same where gradients are linear
in what comes in. Functions of the user's own may add something to them (an auxiliary loss): then a call whose loss does
not reach them at every step is refused.

Which operations of a step have gradients that are not torch's own, and whether zeros give what no gradient at all gives
there, is tried on values. Gradients of torch's operations are linear in what comes in; a function of the user's own may
add something to them.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx

from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.randomness import OwnNumbers, device_states, random_state, set_device_states
from reroll.capture.steps.outer import COLLECTED, ROWS, STACK
from reroll.errors import UnsupportedError, is_shortage, warn
from reroll.graph.effects import is_torchs
from reroll.graph.nested import tensors_of
from reroll.recurrence import Items, Recurrence, Slices
from reroll.segment.trace import first_step

Rows = Mapping[int, Sequence[bool]]
"""By the number of a stacked output whether the loss uses it, step for step, where that is known."""


@dataclass(slots=True, eq=False)
class RowUse:
    """Which rows of a stacked output are used by those that say so, and the gradients that come from these."""

    rows: list[bool]
    grads: list[Tensor] = field(default_factory=list)

    def is_all_of(self, grad: Tensor | None) -> bool:
        """Whether a gradient of the output comes from nobody else: who takes the stack as a whole does not say so. As
        these gradients are held here, autograd adds no other to one of them in place."""
        if grad is None or len(self.grads) < 2:
            return grad is None or (len(self.grads) == 1 and self.grads[0] is grad)
        return torch.equal(functools.reduce(torch.add, self.grads), grad)


def used_of(told: Mapping[int, RowUse], grads: Sequence[Tensor | None] | Mapping[int, Tensor | None]) -> Rows:
    """The rows that are used of outputs with these gradients, where that is known."""
    return {number: each.rows for number, each in told.items() if each.is_all_of(grads[number])}


APART = "memory of their own"
"""Where a node of ``torch.unbind`` holds which of its rows are to have that."""
Telling = tuple[int, Callable[[Tensor | None], None]]
_ROUNDING = 1e-6  # of a gradient: both are made by the same operations


def rows(
    stacked: Tensor, given: Sequence[int | slice] = (), alone: bool = True, apart: Sequence[int | slice] = ()
) -> tuple[Tensor, ...]:
    """The outputs of all steps of a loop, one by one. Its node of autograd is told which of them a loss uses.

    given: those that the caller is given. alone: nothing else is made of these outputs around the loop. apart: those
    that get memory of their own.
    """
    source = getattr(stacked.grad_fn, "__dict__", {}).pop("other", stacked)
    found: tuple[Tensor, ...] = source.unbind(0)
    own = {id(row) for part in apart for row in _rows_of(found, part)}
    results = tuple(row.clone() if id(row) in own else row for row in found)
    used, number = _row_use(source)
    if not found or found[0].grad_fn is None:
        return results
    if used is not None:

        def tell(given: Sequence[Tensor | None], came: Sequence[Tensor | None]) -> None:
            note(used, number, [grad is not None for grad in came], given[0])

        found[0].grad_fn.register_hook(tell)
    rolled = getattr(getattr(stacked.grad_fn, "node", stacked.grad_fn), "rolled", None)
    if given and rolled is not None and not (alone and number not in rolled.links.spread):
        shown = [each for part in given for each in _rows_of(results, part)]
        watch = partial(_refuse_hooks, [weakref.ref(each) for each in shown], rolled.executable.recurrence.where)
        found[0].grad_fn.register_prehook(watch)
    return results


def _rows_of(found: Sequence[Tensor], part: int | slice) -> Sequence[Tensor]:
    return found[part] if isinstance(part, slice) else (found[part],)


def _refuse_hooks(states: Sequence[weakref.ref[Tensor]], where: str, _: Sequence[Tensor | None]) -> None:
    """Raise UnsupportedError where one of these has a hook, or retains its gradient: of what is made of it, no share is
    known."""
    there = [each for each in (state() for state in states) if each is not None]
    if any(each.retains_grad or each._backward_hooks for each in there):
        raise UnsupportedError(
            f"A state of an earlier step of the loop at {where} has a hook, or retain_grad(), and other results or "
            "later steps are made of it: their share of its gradient is not known here. Add row t of a tensor of zeros "
            "that requires a gradient to the state of each step t, and read its gradient, or use the plain model."
        )


def _row_use(stacked: Tensor) -> tuple[dict[int, RowUse] | None, int]:
    """Where what made a value, a loop or ``collected``, is told which of its rows are used, and which of its results
    it is."""
    node = stacked.grad_fn
    if (gathered := _gathered(node)) is not None:
        return gathered.told, 0
    return getattr(node, "used_rows", None), getattr(node, "number", stacked.output_nr)


def _asks(operand: Tensor) -> bool:
    """Whether what made a value wants to be told."""
    return bool(getattr(operand.grad_fn, "asks", False)) or _gathered(operand.grad_fn) is not None


def note(used: dict[int, RowUse], number: int, also: Sequence[bool], grad: Tensor | None) -> None:
    """Note rows that are used of a result, by someone from whom a gradient of it comes."""
    told = used.setdefault(number, RowUse([False] * len(also)))
    told.rows = [a or b for a, b in zip(told.rows, also, strict=True)]
    if grad is not None and all(grad is not each for each in told.grads):  # one of a loop that reads it twice
        told.grads.append(grad)


def one_by_one(outer: fx.Graph, loops: Mapping[str, object]) -> None:
    """Let the outputs of loops, by the names of their modules, be taken one by one by ``rows``."""
    for node in outer.find_nodes(op="call_function", target=torch.unbind):
        if len(node.args) != 2 or node.args[1] != 0 or node.kwargs:
            continue
        source: Any = node.args[0]
        if source.op == "call_function" and source.args and getattr(source.args[0], "target", None) in loops:
            node.target, node.args = rows, (source, *_returned_rows(node, source), tuple(node.meta.get(APART, ())))


def _returned_rows(node: fx.Node, source: fx.Node) -> tuple[tuple[Any, ...], bool]:
    """Which of the rows are results of the graph, and whether nothing else is made of their stack."""
    results = node.graph.output_node().all_input_nodes
    given = tuple(user.args[1] for user in node.users if user in results)
    call: Any = source.args[0]
    picks = [user for user in call.users if user.args[1] == source.args[1]]
    return (slice(None),) if node in results else given, sum(len(pick.users) for pick in picks) == 1


@dataclass(slots=True, eq=False)
class _Gathered:
    """What a node of torch's that gathers rows is told of these, which lie in its first dimensions, of ``sizes``."""

    sizes: tuple[int, ...]
    told: dict[int, RowUse] = field(default_factory=dict)


_GATHERED = "reroll rows"


def _gathered(node: Any) -> _Gathered | None:
    found: _Gathered | None = getattr(node, "metadata", {}).get(_GATHERED)
    return found


def collected(as_rows: bool, name: str, *args: Any) -> Tensor:
    """What one of ``_GATHERS`` makes of stacks of rows, or of single values.

    Its node of autograd tells the loops which of their rows it took, and hands on nothing to what it took no row of.
    as_rows: who reads the rows says which of them are used; else all are, as they are one value of the program's.
    """
    made: Tensor = _GATHERS[name][0](*args)
    node, sources = made.grad_fn, tensors_of(args)
    if node is None or [each for each, _ in node.next_functions] != [_end(source) for source in sources]:
        return made
    sizes = [() if name == "unsqueeze" else _sizes(source) for source in sources]
    ends = [*itertools.accumulate(map(math.prod, sizes), initial=0)]
    numbers = [np.arange(*span).reshape(size) for span, size in zip(pairwise(ends), sizes, strict=True)]
    places = _GATHERS[name][1](*(numbers if isinstance(args[0], Tensor) else (numbers,)), *args[1:])
    if places.shape != made.shape[: places.ndim]:
        return made
    gathered = _Gathered(places.shape)
    if as_rows:
        metadata: Any = node.metadata  # which is a property
        metadata[_GATHERED] = gathered
    told = [_row_use(source) for source in sources]
    node.register_hook(partial(_hand_on, gathered.told, places.ravel(), ends, told))
    return made


_GATHERS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "narrow": (torch.narrow, lambda rows, _, start, count: rows[start : start + count]),
    "getitem": (operator.getitem, operator.getitem),
    "select": (torch.select, lambda rows, _, at: np.asarray(rows[at])),
    "flip": (torch.flip, lambda rows, _: rows[::-1]),
    "unsqueeze": (torch.unsqueeze, np.expand_dims),
    "flatten": (torch.flatten, lambda rows, *_: rows.reshape(-1)),
    "stack": (torch.stack, np.stack),
    "cat": (torch.cat, np.concatenate),
}
"""By their names, and the same of the numbers of rows."""


def _end(source: Tensor) -> Any:
    """The node that a gradient of a value goes to."""
    return torch.autograd.graph.get_gradient_edge(source).node if source.requires_grad else None


def _sizes(source: Tensor) -> tuple[int, ...]:
    """The sizes of the dimensions in which the rows of a value lie."""
    gathered = _gathered(source.grad_fn)
    return (source.shape[0],) if gathered is None else gathered.sizes


def _hand_on(
    told: dict[int, RowUse],
    places: npt.NDArray[np.int64],
    ends: Sequence[int],
    sources: Sequence[tuple[dict[int, RowUse] | None, int]],
    given: Sequence[Tensor | None],
    came: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Tell what was gathered which of its rows are used, and give the gradients of what has such rows."""
    rows = used_of(told, came).get(0)
    told.clear()
    used, results = np.zeros(ends[-1], bool), list[Tensor | None]()
    used[places if rows is None else places[rows]] = True
    for span, (whose, number), grad in zip(pairwise(ends), sources, given, strict=True):
        also = used[slice(*span)]
        if grad is not None and whose is not None and also.any():
            note(whose, number, also.tolist(), grad)
        results.append(grad if also.any() else None)
    return tuple(results)


def value_of_its_own(stack: Tensor) -> Tensor:
    """What the program has as one value: a loop that reads some of its rows reads it, not the rows of other loops."""
    return stack.view_as(stack)


def as_collected(outer: fx.Graph, loops: Mapping[str, object]) -> None:
    """Let what was gathered of rows tell which of them are used, around loops of which that decides what is reached."""
    if not any(getattr(each, "tells_rows", False) for each in loops.values()):
        return
    for node in [*outer.nodes]:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        kind = node.meta.get(COLLECTED)
        if kind is not None and name in _GATHERS and node.target is _GATHERS[name][0] and _of_first(name, node.args):
            node.target, node.args = collected, (kind == ROWS, name, *node.args)
        if node.target is torch.unbind and node.args[0].meta.get(COLLECTED) == ROWS and node.args[1:] == (0,):
            node.target, node.args = rows, (node.args[0],)
        if node.op == "call_module" and node.target in loops:
            node.args = tuple(_own(node, each) for each in node.args)


def _of_first(name: str, args: Sequence[Any]) -> bool:
    """Whether rows are gathered in the first dimension."""
    return name in ("narrow", "getitem", "flip") or args[1] == (1 if name == "stack" else 0)


def _own(call: fx.Node, operand: Any) -> Any:
    """An operand of a loop; of a value of the program's that may be the stack of another loop, one of its own."""
    if not isinstance(operand, fx.Node) or operand.meta.get(COLLECTED) != STACK:
        return operand
    with call.graph.inserting_before(call):
        made = call.graph.call_function(value_of_its_own, (operand,))
    made.meta = {key: value for key, value in operand.meta.items() if key != COLLECTED}
    return made


def tells_rows(recurrence: Recurrence) -> bool:
    """Whether a row of an output may reach less than what the output reaches over all steps: what a step reads of its
    own, or what comes by carries alone."""
    if any(isinstance(x, Items) for x in recurrence.xs) or own_functions(recurrence.step):
        return True
    inputs = recurrence.step.graph.find_nodes(op="placeholder")
    results: Any = recurrence.step.graph.output_node().args[0]
    reached = [_reached_in(each, inputs) for each in results]
    carried = len(recurrence.carries)
    for here in reached[carried:]:
        found, todo = set(here), [*here]
        while todo:
            at = todo.pop()
            fresh = reached[at] - found if at < carried else set()
            found |= fresh
            todo += fresh
        if found != here:
            return True
    return False


def _reached_in(result: Any, inputs: Sequence[fx.Node]) -> set[int]:
    """The inputs of a step that a result of it is made of, with a gradient."""
    seen, todo = set[fx.Node](), [result] if isinstance(result, fx.Node) else []
    while todo:
        node = todo.pop()
        value = node.meta.get("example_value")
        if node not in seen and not (isinstance(value, Tensor) and not value.requires_grad):
            seen.add(node)
            todo += node.all_input_nodes
    return {number for number, each in enumerate(inputs) if each in seen}


def have_own_functions(executables: Sequence[Executable]) -> bool:
    """Whether a step of one of these has functions of the user's own."""
    return any(own_functions(each.recurrence.step) for each in executables)


@dataclass(slots=True)
class Unused:
    """What is known of a loop, by the outputs of a step that matter. It matters where loops of the graph have functions
    of the user's ``own``, where steps read ``items`` of their own (the weights of a block), and where a loss uses some
    rows: what only unused outputs need has no gradient in eager, not zeros. ``uneven``: a row may reach less than all.
    """

    own: bool
    items: bool
    uneven: bool = False
    known: dict[frozenset[int], Trial] = field(default_factory=dict)

    @property
    def asked(self) -> bool:
        """Whether loops that read its outputs tell it which rows are used there."""
        return self.own or self.items or self.uneven

    def check(
        self,
        executable: Executable,
        given: Sequence[Tensor],
        plain: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        partly: Rows,
    ) -> tuple[frozenset[int], list[Telling]]:
        """Raise UnsupportedError where gradients would not be eager's.

        ``given`` operands, ``plain`` as they are computed with; ``grads`` came in for the outputs, of which ``partly``
        are used at some steps alone. Gives the operands that no used step needs, and what is to be told to
        loops whose outputs this one reads, by number of the operand, once its gradient is there. Steps that speak with
        other processes are not looked at.
        """
        recurrence, partly = executable.recurrence, _of_all_steps(executable.recurrence, partly)
        asked = any(_asks(given[x.operand]) for x in recurrence.xs if isinstance(x, Slices))
        uneven = not all(all(used) for used in partly.values())
        matters = self.own or asked or uneven or (self.items and _is_unused(executable, grads, partly))
        if executable.together or not matters:
            return frozenset(), []
        reached = self._reached(executable, plain, grads, partly)
        if reached is None:
            return frozenset(), []
        telling = list[Telling]()
        for (at,), x in recurrence.slots(1).xs:
            if isinstance(x, Slices):
                telling += _telling(given[x.operand], x, at, reached)
        return frozenset(range(len(plain))) - _alive(recurrence, reached), telling

    def _reached(
        self, executable: Executable, plain: Sequence[Tensor], grads: Sequence[Tensor | None], partly: Rows
    ) -> list[frozenset[int]] | None:
        """The inputs that autograd reaches at each step; None if memory does not suffice to look."""
        recurrence, carried = executable.recurrence, len(executable.recurrence.carries)
        came = [number for number, grad in enumerate(grads) if grad is not None]
        whole = frozenset(number for number in came if number >= carried and number not in partly)
        live = frozenset(number for number in came if number < carried)
        found = list[frozenset[int]]()
        if self.own and recurrence.dropped:
            self._trial(executable, plain, frozenset())
        for step in reversed(range(recurrence.steps)):
            live = live | whole | {number for number, used in partly.items() if used[step]}
            seen = self._trial(executable, plain, live)
            if seen is None:
                return None
            found.append(seen.reached)
            before = frozenset(number for number in seen.reached if number < carried)
            if not partly and before | whole == live:  # so it stays
                found += [seen.reached] * step
                break
            live = before
        return found[::-1]

    def _trial(self, executable: Executable, plain: Sequence[Tensor], live: frozenset[int]) -> Trial | None:
        """What is seen of a step of which these results matter; None if memory does not suffice to look."""
        seen = self.known.get(live) or _look(executable, plain, live)
        if seen is not None:
            self.known[live] = seen
            if seen.differ:
                raise UnsupportedError(_refusal(executable.recurrence))
        return seen


def _alive(recurrence: Recurrence, reached: Sequence[frozenset[int]]) -> set[int]:
    """The operands that gradients reach at some step, whatever reads them there."""
    slots, ever = recurrence.slots(1), frozenset[int]().union(*reached)
    found = {carry for carry in slots.carries if carry in reached[0]}
    found |= {operand for at in slots.constants if at in ever for operand in slots.operands[at]}
    for (at,), x in slots.xs:
        if isinstance(x, Items):
            found |= {operand for operand, each in zip(x.operands, reached, strict=True) if at in each}
        elif at in ever:
            found.update(slots.operands[at])
    return found


def _of_all_steps(recurrence: Recurrence, partly: Rows) -> Rows:
    """What is known of outputs that have a row of every step. Others are slices of these in eager, which give all rows
    a gradient, if only zeros, whichever of theirs is used. Rows of a last carry, which others read, are no steps."""
    width, kept = len(recurrence.carries), recurrence.kept_rows
    return {number: used for number, used in partly.items() if number >= width and kept[number - width].whole}


def _is_unused(executable: Executable, grads: Sequence[Tensor | None], partly: Rows) -> bool:
    """Whether the loss leaves out an output, or some of its rows."""
    carried = len(executable.recurrence.carries)
    carries = [number for number in differentiable_inputs(executable) if number < carried]
    outputs = [*carries, *range(carried, len(grads))]
    return any(grads[number] is None for number in outputs) or not all(all(used) for used in partly.values())


def differentiable_inputs(executable: Executable) -> Sequence[int]:
    """Which inputs of a segment are differentiated."""
    return next(iter(executable.compiled.segments.values())).inputs


def _telling(operand: Tensor, x: Slices, number: int, reached: Sequence[frozenset[int]]) -> Iterator[Telling]:
    """What tells the loop that made an operand, input ``number`` of a step, which of its rows are used here."""
    used, result = _row_use(operand)
    if used is None or x.dim != 0 or not _asks(operand):
        return
    also = [False] * operand.shape[0]
    for step, inputs in enumerate(reached):
        also[x.start + x.stride * step] = number in inputs
    yield x.operand, partial(note, used, result, also)


def _look(executable: Executable, plain: Sequence[Tensor], live: frozenset[int]) -> Trial | None:
    """As ``look``; None if memory runs out. A step that torch cannot run by itself is taken for linear, and said."""
    recurrence = executable.recurrence
    try:
        return look(recurrence, differentiable_inputs(executable), plain, live)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        if is_shortage(error):
            return None
        everything = Trial(False, frozenset(range(recurrence.slots(1).constants.stop)))
        if not own_functions(recurrence.step):
            return everything
        text = (
            f"A step of the loop at {recurrence.where} cannot be run by itself ({str(error).splitlines()[0]}), so it "
            "is not known whether functions of your own in it give gradients where none come in (an auxiliary loss, "
            "say). If they do, let the loss use all outputs of the loop."
        )
        warn(text)
        return everything


def _refusal(recurrence: Recurrence) -> str:
    return (
        f"The loss does not use all that the loop at {recurrence.where} gives at every step, and a function of your "
        "own in it gives a gradient where none comes in (an auxiliary loss, say). Plain autograd leaves it out at "
        "steps that the loss does not use; here all steps are reversed, so gradients would differ. Let the loss use "
        "all outputs (adding 0 * output.sum() of each is enough), or use the plain model."
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of a step of whose outputs some matter: whether gradients ``differ`` if the others got zeros, and
    the inputs (carries, what is read at each step, constants) that autograd ``reached``, by number. ``blurred``: zeros
    gave no numbers where none gave some (0 * inf)."""

    differ: bool
    reached: frozenset[int]
    blurred: bool = False


def own_functions(step: fx.GraphModule) -> list[fx.Node]:
    """The operations of a step whose gradients may be another's than torch's."""
    return [node for node in step.graph.nodes if not is_torchs(node, step)]


def look(
    recurrence: Recurrence, differentiable: Sequence[int], operands: Sequence[Tensor], live: frozenset[int]
) -> Trial:
    """Run a step by torch, on what the first one of a call reads and on normal numbers, and reverse it with and without
    zeros for the outputs that are not ``live``. ``differentiable``: which carries are, by number."""
    slots, devices = recurrence.slots(1), device_states(operands)
    changing = {n for n in range(slots.constants.start) if slots.operands[n]}  # numbers of the user's stay
    own = OwnNumbers(random_state(operands))
    try:
        with torch.enable_grad(), recurrence.modes(), own.drawing():
            real = first_step(recurrence, operands)
            made = [
                torch.randn_like(value) if n in changing and _is_real(value) else value for n, value in enumerate(real)
            ]
            wanted = needing(recurrence, differentiable)
            first, second = (_checked_function(recurrence, values, wanted, live, own) for values in (real, made))
    finally:
        set_device_states(devices)
    return Trial(first.differ or first.blurred or second.differ, first.reached)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def needing(recurrence: Recurrence, differentiable: Sequence[int]) -> list[bool]:
    """For each input of a step whether a gradient is wanted."""
    slots = recurrence.slots(1)
    read = [[recurrence.examples[i].requires_grad for i in operands] for operands in slots.operands]
    return [n in differentiable for n in slots.carries] + [any(each) for each in read[slots.carries.stop :]]


class _Watching(fx.Interpreter):
    """Runs a step; ``given`` are the tensors that functions of the user's own were given."""

    def __init__(self, step: fx.GraphModule) -> None:
        super().__init__(step)
        self.own, self.given = set(own_functions(step)), list[Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        if n in self.own:
            given = tensors_of(self.fetch_args_kwargs_from_env(n))
            self.given += [value for value in given if value.requires_grad]
        return super().run_node(n)


def _checked_function(
    recurrence: Recurrence, values: Sequence[Any], needing: Sequence[bool], live: frozenset[int], own: OwnNumbers
) -> Trial:
    """A function that adds something adds it to the gradients of what it is given."""
    inputs = [value.detach().requires_grad_(need) for value, need in zip(values, needing, strict=True)]
    watching = _Watching(recurrence.step)
    outputs = watching.run(*inputs)
    leaves = {n: each for n, each in enumerate(inputs) if needing[n]}
    wanted = [*watching.given, *leaves.values()]
    ends = {number: value for number, value in enumerate(outputs) if value.requires_grad}
    some = {number: value for number, value in ends.items() if number in live}
    state = own.state(values)
    alone = _gradients(some, wanted, live)
    own.start(state)
    padded = _gradients(ends, wanted, live) if len(some) < len(ends) else alone
    count = len(watching.given)
    reached = (n for n, grad in zip(leaves, alone[count:], strict=True) if grad is not None)
    pairs = list(zip(alone[:count], padded[:count], strict=True))
    blurred = any(_lost(value) and not _lost(other) for other, value in pairs)
    return Trial(any(_differ(*pair) for pair in pairs), frozenset(reached), blurred)


def _gradients(ends: Mapping[int, Tensor], wanted: Sequence[Tensor], live: frozenset[int]) -> list[Tensor | None]:
    """Gradients with ones for what is live, zeros for what else ends hold."""
    if not ends or not wanted:
        return [None] * len(wanted)
    tangents = [torch.full_like(value, 1.0 if number in live else 0.0) for number, value in ends.items()]
    return list(torch.autograd.grad(list(ends.values()), wanted, tangents, retain_graph=True, allow_unused=True))


def _lost(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.isnan().any())


def _differ(alone: Tensor | None, padded: Tensor | None) -> bool:
    """Whether two gradients are not the same, but for rounding, where they are numbers."""
    if padded is None:
        return False
    alone = torch.zeros_like(padded) if alone is None else alone
    difference, size = (float(value.abs().nan_to_num().sum(dtype=torch.float64)) for value in (padded - alone, alone))
    return difference > _ROUNDING * size
