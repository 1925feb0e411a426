"""Last states that a caller is given: what their hooks, ``retain_grad()`` and ``torch.autograd.grad`` get is eager's.

In eager the gradient of a last state has what reaches it through all that is made of it: a row of the stacked states,
a readout, the hidden state that is made of the cell state. A program reverses the last step as a whole, and tells
nobody. So each result that is shown, or that the last step makes of a state that is, is a node of autograd of its own
(``_Joined``) behind these states, which hands them their shares; without a gradient its hooks are not called. The
program adds such a share itself; so it is taken off what the state got before the program is given that. Shares are
made only where somebody looks: where a state has hooks, retains its gradient, or gradients of some values alone are
asked for. A share that is no row of a gradient is made by torch, which runs the last step once more, after compiled
segments have run to it. What earlier states get is not known: one that is given, and is looked at, is refused.

Private torch API, tried on 2.11 and 2.13: ``_will_engine_execute_node`` (whether this backward goes to all leaves).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.inductor.lower import Interpreted
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.randomness import OwnNumbers, device_states, set_device_states
from reroll.backends.runtime.reach import Parts, backward_running, goes_to
from reroll.backends.runtime.run import Start, as_traced, border
from reroll.backends.runtime.undefined_grads import note, rows, used_of
from reroll.errors import UnsupportedError, is_shortage, warn
from reroll.graph.fakes import outside_dynamo
from reroll.recurrence import Recurrence
from reroll.segment.trace import step_examples, step_of, trace_mode

_ROUNDING = 1e-3  # of a state that runs again: by torch, where it was compiled


def shown_results(outer: fx.Graph, name: str) -> dict[int, bool]:
    """The results of a recurrence, by their numbers, that the graph around it gives; whether as they are, or laid out
    anew, which most are already."""
    given, found = outer.output_node().all_input_nodes, dict[int, bool]()
    for node in given:
        pick: Any = node.args[0] if (node.op, node.target) == ("call_method", "contiguous") else node
        if pick.op == "call_function" and pick.args and _is_call(pick.args[0], name):
            found[pick.args[1]] = found.get(pick.args[1], False) or pick is node
    return found


def unbound_results(outer: fx.Graph, name: str) -> frozenset[int]:
    """The results of a recurrence of which ``rows`` takes the rows."""
    picks = [node.args[0] for node in outer.find_nodes(op="call_function", target=rows)]
    return frozenset(pick.args[1] for pick in picks if _is_call(pick.args[0], name))


def _is_call(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_module" and node.target == name


@dataclass(frozen=True, slots=True)
class Links:
    """What a last step makes of which states, by the numbers of its results.

    ``through``: for each result the states of which it is made, of those that are shown; of none, for one that is shown
    itself beside others. Results are in an order in which each comes behind its states, and so are states. ``same``:
    results that are a state itself, and which. ``spread``: results of which others are made, in this step or the next.
    """

    through: Mapping[int, tuple[int, ...]]
    same: Mapping[int, int]
    spread: frozenset[int]

    @classmethod
    def of(cls, recurrence: Recurrence, needing: Sequence[bool], shown: Mapping[int, bool]) -> Links:
        """Those of a step, as autograd walks it; ``needing``: which of its inputs have a gradient."""
        mode = trace_mode()
        with outside_dynamo(mode), recurrence.modes(), mode:
            values = _leaves(step_examples(recurrence, mode), needing)
            results = recurrence.step(*values)
            edges = {n: _edge(value) for n, value in enumerate(results) if value.requires_grad}
            reached = {n: _reached(edge) for n, edge in edges.items()}
        states = [n for n in sorted(edges) if shown.get(n) and n < len(recurrence.carries)]
        states.sort(key=lambda n: sum(edge in reached[n] for edge in edges.values()))
        places = {n: at for at, n in enumerate(states)}
        last = recurrence.steps - 1
        through = dict[int, tuple[int, ...]]()
        for n in [*states, *(n for n in edges if n not in places)]:
            before = states[: places.get(n, len(states))]
            found = tuple(v for v in before if edges[v] in reached[n])
            found = found if _row(recurrence, n, last) is not None else ()
            if found or (n in shown and len(edges) > 1):
                through[n] = found
        same = {n: v for n, found in through.items() for v in found if results[n] is results[v]}
        spread = (n for n, edge in edges.items() if any(edge in reached[m] for m in edges if m != n))
        return cls(through, same, frozenset(spread))


def _row(recurrence: Recurrence, number: int, step: int) -> int | None:
    """Which row of a result is a step's: none where that is not kept. A last carry has one."""
    if number < len(recurrence.carries):
        return 0
    rows, _ = recurrence.rows_of(number).among(step, 1)
    return int(rows.start) if rows.stop > rows.start else None


def _leaves(values: Sequence[Any], needing: Sequence[bool]) -> list[Any]:
    return [value.detach().requires_grad_(need) for value, need in zip(values, needing, strict=True)]


def _edge(value: Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(value)
    return edge.node, edge.output_nr


def _reached(edge: tuple[Any, int]) -> set[tuple[Any, int]]:
    """All that autograd reaches from a value, with itself."""
    seen, todo = {edge}, [edge]
    while todo:
        fresh = {each for each in todo.pop()[0].next_functions if each[0] is not None} - seen
        seen |= fresh
        todo += fresh
    return seen


@dataclass(slots=True, eq=False)
class Shares:
    """What results of one call hand to its states, by the backward that does: their sums, and the last step as torch
    ran it."""

    executable: Executable
    needing: Sequence[bool]
    links: Links
    parts: Parts | None = None
    handed: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    runs: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    saved: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def of(self, number: int, grad: Tensor, asked: Sequence[int], node: Any, sure: bool) -> dict[int, Tensor]:
        """What a result with a gradient hands to the states that are ``asked`` for, by their numbers; it is noted.

        ``sure``: these states' gradients are wanted, and not only those of others that ``torch.autograd.grad`` names.
        """
        recurrence = self.executable.recurrence
        if number >= len(recurrence.carries):
            grad = grad[_row(recurrence, number, recurrence.steps - 1)]
        itself = self.links.same.get(number)
        made = {itself: grad} if itself in asked and itself is not None else self._made(number, grad, asked, node, sure)
        handed = self.handed.setdefault(backward_running(), {})
        for state, share in made.items():
            handed[state] = handed[state] + share if state in handed else share
        return made

    def _made(self, number: int, grad: Tensor, asked: Sequence[int], node: Any, sure: bool) -> dict[int, Tensor]:
        """The same by torch. What goes through a later state is that one's to hand on."""
        recurrence = self.executable.recurrence
        if recurrence.random and not _draws_by_torch(self.executable):
            reason = "which only lowering='eager' draws random numbers for as torch does: use that"
            return self._left_out(reason, sure)
        if self.executable.together:
            return self._left_out("which speaks with other processes: use the plain model", sure)
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"Double backward (create_graph=True) through the compiled recurrence at {recurrence.where} is not "
                "supported. Use the plain model for it, outside of torch.compile."
            )
        self.operands(node)  # raises if one was changed in place since, or is freed
        try:
            results = self._run(node)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            if is_shortage(error):
                raise
            return self._left_out(f"which torch cannot run by itself ({str(error).splitlines()[0]})", sure)
        ends, grads, found = [results[number]], [grad], dict[int, Tensor]()
        for state in reversed(asked):
            (share,) = torch.autograd.grad(ends, [results[state]], grads, retain_graph=True, allow_unused=True)
            if share is not None:
                found[state] = share
                ends.append(results[state])
                grads.append(-share)
        return found

    def _left_out(self, reason: str, sure: bool) -> dict[int, Tensor]:
        """No share can be made. Raises UnsupportedError where one is wanted for ``sure``."""
        where = self.executable.recurrence.where
        share = f"and other results are made of that state. Their share needs the last step once more, {reason}."
        if sure:
            raise UnsupportedError(
                f"The gradient of a last state of the loop at {where} is asked for (by a hook, retain_grad() or "
                f"torch.autograd.grad), {share}"
            )
        text = (
            f"torch.autograd.grad runs, perhaps for the gradient of a last state of the loop at {where}, {share} If it "
            "is not that state's gradient that it was asked for, all is right."
        )
        warn(text)
        return {}

    def operands(self, node: Any) -> Sequence[Tensor]:
        """What the call has saved, unpacked once for a backward: ``torch.utils.checkpoint`` refuses a second time."""
        task = backward_running()
        if task not in self.saved:
            self.saved[task] = node.saved_tensors
        return self.saved[task]

    def _run(self, node: Any) -> Sequence[Tensor]:
        """What the last step gives, by torch, once for a backward."""
        task = backward_running()
        if task not in self.runs:
            self.runs[task] = last_step(self.executable, node.start, self.needing)
        return self.runs[task]

    def take_off(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the results without what was handed to states in this backward, which ends here."""
        handed = self.handed.get(backward_running(), {})
        self.handed.clear()
        self.runs.clear()
        self.saved.clear()
        pairs = enumerate(grads)
        return [each - handed[n] if each is not None and n in handed else each for n, each in pairs]


def last_step(executable: Executable, start: Start, needing: Sequence[bool]) -> Sequence[Tensor]:
    """What the last step of a call gives, run by torch with gradients, from a border between compiled segments on."""
    recurrence, devices = executable.recurrence, device_states(start.operands)
    own = OwnNumbers(start.random) if start.random is not None else None
    try:
        with ExitStack() as stack:
            stack.enter_context(as_traced(start.operands))
            before, at = border(executable, start, own)
            carries: Sequence[Tensor] = before
            stack.enter_context(recurrence.modes())
            if own:
                stack.enter_context(own.drawing())
            for step in range(at, recurrence.steps):
                values = step_of(recurrence, carries, start.operands, executable.numbers, step)
                wanted = needing if step == recurrence.steps - 1 else [False] * len(values)
                results: Sequence[Tensor] = recurrence.step(*_leaves(values, wanted))
                carries = results[: len(carries)]
    finally:
        if own:
            set_device_states(devices)
    return results


def joined(
    executable: Executable,
    needing: Sequence[bool],
    links: Links,
    results: Sequence[Tensor],
    twice: frozenset[int],
    parts: Parts | None,
) -> tuple[Tensor, ...]:
    """The results of a call, each behind the states of which it is made; ``twice``: those of which ``rows`` has one of
    its own, as its rows are not made of what is shown. ``parts``: of operands that not all results reach."""
    shares, given = Shares(executable, needing, links, parts), [*results]
    tickets: Mapping[int, Sequence[Tensor]] = parts.tickets if parts else {}
    numbers = [number for number in dict.fromkeys((*links.through, *tickets)) if results[number].requires_grad]
    if not numbers:
        return tuple(results)
    node: Any = results[numbers[0]].grad_fn
    node.shares = shares
    for number in numbers:
        states = (given[state] for state in links.through.get(number, ()))
        operands = shares, node, number, given[number], *states, *tickets.get(number, ())
        given[number] = _Joined.apply(*operands)  # type: ignore[no-untyped-call]
        if number in twice:
            made: Any = given[number].grad_fn
            made.other = _Joined.apply(*operands)  # type: ignore[no-untyped-call]
    return tuple(given)


class _Joined(torch.autograd.Function):
    """A result that is made of states: the same value, whose gradient the states have their shares of. It holds these
    tensors, as nothing else tells of hooks on one that is no longer held by the caller. Behind the states come tickets
    of operands that it reaches (``reach``)."""

    @staticmethod
    def forward(ctx: Any, shares: Shares, node: Any, number: int, value: Tensor, *behind: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.shares, ctx.node, ctx.number, ctx.used_rows, ctx.asks = shares, node, number, {}, node.asks
        ctx.behind = len(behind)
        ctx.states = dict(zip(shares.links.through.get(number, ()), behind, strict=False))
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        found, rows = dict[int, Tensor](), used_of(ctx.used_rows, {ctx.number: grad}).get(ctx.number)
        ctx.used_rows.clear()
        if rows is not None:
            note(ctx.node.used_rows, ctx.number, rows, grad)
        if grad is not None and ctx.states and (rows is None or rows[-1]):
            watched = [n for n, each in ctx.states.items() if each.retains_grad or each._backward_hooks]
            asked = watched if _goes_to_all(ctx.node) else list(ctx.states)
            tickets = ctx.next_functions[1 + len(ctx.states) :]
            sure = bool(watched) or not _goes_on((*ctx.node.next_functions, *tickets))
            found = ctx.shares.of(ctx.number, grad, asked, ctx.node, sure) if asked else {}
        if ctx.shares.parts is not None:
            ctx.shares.parts.come_in(ctx.node, ctx.number, grad)
        shares = [found.get(state) for state in ctx.states]
        return (None, None, None, grad, *shares, *[None] * (ctx.behind - len(shares)))


def _draws_by_torch(executable: Executable) -> bool:
    """Whether segments draw random numbers as torch does."""
    return all(isinstance(each.backward, Interpreted) for each in executable.compiled.segments.values())


def _goes_on(sources: Sequence[tuple[Any, int]]) -> bool:
    """Whether the backward that runs goes to any of these nodes."""
    return any(goes_to(source) for source, _ in sources if source is not None)


def _goes_to_all(node: Any) -> bool:
    """Whether the backward that runs goes to all leaves, and not to some values that were asked for."""
    while sources := [source for source, _ in node.next_functions if source is not None]:
        node = next((source for source in sources if not source.next_functions), sources[0])
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that torch.autograd.grad names
        return False
