"""What a user's pass made of loops, of a step or of a half is tried, without memory, before it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.capture.interpreter import LoopInterpreter
from reroll.errors import PassError, RerollError, is_shortage
from reroll.graph.fakes import fake_of, new_fake_mode, outside_dynamo
from reroll.graph.nested import leaves_of
from reroll.recurrence import Capture, Recurrence

PASS = "pass"
"""In ``meta`` of a node: the name of the user's pass that put it there."""


@contextmanager
def blamed_on(name: str, what: str) -> Iterator[None]:
    """Inside, whatever is raised is a PassError that names the pass, which left ``what``; but where memory ran out."""
    try:
        yield
    except RerollError:
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise PassError(f"Pass {name!r} left {what}: {_reason(error)}. Mend what it returns.") from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def guarded(graph: fx.Graph) -> fx.Graph:
    """The graph, in which what users' passes put there raises a PassError; itself where they put nothing there."""
    if not passes_in(graph):
        return graph
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    for node in made.nodes:
        if node.op == "call_function" and PASS in node.meta:
            node.target = _guarded(node.target, node.meta[PASS], node.name)
    return made


def _guarded(target: Callable[..., Any], name: str, result: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with blamed_on(name, f"an operation that cannot run, {result} = {target}"):
            return target(*args, **kwargs)

    return call


def passes_in(graph: fx.Graph) -> list[str]:
    """The users' passes that put operations into a graph, by name."""
    return sorted({node.meta[PASS] for node in graph.nodes if PASS in node.meta})


class _Trial(fx.Interpreter):
    """Runs each operation of a graph on values without memory, which are noted in ``meta`` where ``notes`` is set."""

    def __init__(self, module: fx.GraphModule, name: str, notes: bool) -> None:
        super().__init__(module)
        self.name, self.notes = name, notes

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node."""
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        with blamed_on(self.name, f"an operation that cannot run, {n.format_node()}"):
            value = super().run_node(n)
        if self.notes and _forms(value) != _forms(n.meta.get("val")):
            n.meta["val"] = value
        return value


def _forms(value: Any) -> list[Any]:
    """Shapes, dtypes and devices of a value's tensors."""
    return [isinstance(each, Tensor) and (tuple(each.shape), each.dtype, each.device) for each in leaves_of(value)]


def try_half(half: fx.GraphModule, name: str) -> None:
    """Run a half without memory, and note the values that its nodes have not. Raises PassError, with the operation."""
    with blamed_on(name, "a half of a segment that is no graph"):
        half.graph.lint()
        values = [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    if mode is not None:
        with outside_dynamo(mode), mode, torch.no_grad():
            _Trial(half, name, notes=True).run(*values)


def try_loops(before: Capture, found: Capture, module: nn.Module, name: str) -> None:
    """Run rewritten loops without memory, one step of each. Raises PassError where they cannot run, or where the graph
    around them is given or gives something else than before."""
    with blamed_on(name, "loops that cannot run"):
        found.outer.lint()
        calls = [node.target for node in found.outer.find_nodes(op="call_module")]
        if sorted(map(str, calls)) != sorted(each.name for each in found.recurrences):
            raise PassError(
                f"Pass {name!r} left a graph that calls {', '.join(map(str, calls))}, but loops "
                f"{', '.join(each.name for each in found.recurrences)}. Call each of them once, by its name."
            )
        forms = [_forms(_shapes(each, module)) for each in (before, found)]
    if _inputs(before.outer) != _inputs(found.outer) or forms[0] != forms[1]:
        raise PassError(f"Pass {name!r} changed what the graph around the loops is given or gives. Keep that.")


def _inputs(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="placeholder")]


def _shapes(found: Capture, module: nn.Module) -> Any:
    """What a graph with loops gives, without memory."""
    fake = partial(fake_of, mode := new_fake_mode())
    given = [fake(node.meta["example_value"]) for node in found.outer.find_nodes(op="placeholder")]
    with outside_dynamo(mode), mode:
        return LoopInterpreter(module, found, once=True, held_as=fake).run(*given)


def try_step(step: fx.GraphModule, recurrence: Recurrence, name: str) -> list[Any]:
    """Shapes, dtypes and devices of what a step gives. Raises PassError, with the operation that cannot run."""
    from reroll.segment.trace import step_examples, trace_mode  # Dynamo comes with it, which takes seconds to load

    mode = trace_mode()
    with outside_dynamo(mode), recurrence.modes():
        inputs: Sequence[Any] = step_examples(recurrence, mode)
        with mode, blamed_on(name, "a step that cannot run"):
            step.graph.lint()
            results = _Trial(step, name, notes=False).run(*inputs)
            return [type(results) in (tuple, list), *_forms(results)]
