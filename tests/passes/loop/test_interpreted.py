"""Passes on loops, one by one and in any order: values and gradients in float64, by the interpreter of loops.

Shape letters: T steps, B batch, H neurons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

import reroll
from layers import B, H, Layer, Leaky, Net, Spiking, batch_first, between, chain, convolved, flat, gathered, skipped
from reroll.capture.capture import capture
from reroll.capture.interpreter import LoopInterpreter
from reroll.errors import PassError
from reroll.graph.effects import example
from reroll.passes import DEFAULT_PASSES
from reroll.program.registry import find, loops_by_pass, run_on_loops
from reroll.recurrence import Capture

PASSES = tuple(name for name in DEFAULT_PASSES if find(name).on == "loops")
ORDERS = {**{name: (name,) for name in PASSES}, "all": PASSES, "from last to first": PASSES[::-1], "twice": PASSES * 2}
NETS: dict[str, Callable[[], Net]] = {
    "three layers": lambda: Net(chain, Layer(), Layer(False), Leaky()),
    "spikes": lambda: Net(between, Spiking(), nn.Linear(H, H), Layer()),
    "layer norm, time and batch in one": lambda: Net(flat, Layer(), nn.LayerNorm(H), Leaky()),
    "convolution": lambda: Net(convolved, Layer(), nn.Conv2d(1, 1, 3, padding=1), Layer(False)),
    "batch first": lambda: Net(batch_first, Layer(), nn.Linear(H, H), Layer()),
    "two producers": lambda: Net(gathered, Layer(), Leaky(), Layer()),
    "skip connection": lambda: Net(skipped, Layer(), Layer(False), Leaky()),
    "one step late": lambda: Net(lambda x, a, b: b(a(x)[:-1]), Leaky(), Layer()),
    "readout": lambda: Net(lambda x, a, fc: fc(a(x)), Layer(), nn.Linear(H, 2)),
    "readout and states": lambda: Net(lambda x, a, fc: (fc(y := a(x)), y[-1]), Layer(), nn.Linear(H, 2)),
    "last row": lambda: Net(lambda x, a, fc: fc(a(x))[-1], Layer(), nn.Linear(H, 2)),
    "last row of two": lambda: Net(lambda x, a, b: b(a(x))[-1] + a(x)[-1], Leaky(), Leaky()),
    "mean": lambda: Net(lambda x, a, fc: fc(a(x)).mean(0), Layer(), nn.Linear(H, 2)),
    "loss": lambda: Net(
        lambda x, a, fc: F.mse_loss(fc(a(x)).flatten(0, 1), x[..., :2].flatten(0, 1)), Layer(), nn.Linear(H, 2)
    ),
    "classes": lambda: Net(
        lambda x, a, fc: F.cross_entropy(fc(a(x)).flatten(0, 1), x.argmax(-1).flatten()), Layer(), nn.Linear(H, H)
    ),
    "loss of next": lambda: Net(lambda x, a: F.mse_loss(a(x)[:-1], x[1:]), Layer()),
    "input layer": lambda: Net(lambda x, fc, a: a(fc(x)), nn.Linear(H, H), Layer()),
    "input layer, read again": lambda: Net(lambda x, fc, a: (a(y := fc(x)), y[0]), nn.Linear(H, H), Layer()),
    "every third row": lambda: Net(lambda x, a, fc: fc(a(x))[::3], Layer(), nn.Linear(H, 2)),
    "late rows": lambda: Net(lambda x, a: (y := a(x).relu()[4:], y.sum()), Layer()),
    "two readings": lambda: Net(lambda x, a: (a(x)[1::2], a(x)[2:].sum(0)), Layer()),
}


@cache
def captured(name: str, steps: int) -> tuple[fx.GraphModule, list[Tensor], Capture]:
    """A net's graph, what it is given, and its loops as they were captured."""
    torch.manual_seed(0)
    found: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        found.append(
            (gm, [each.detach().requires_grad_(each.requires_grad) for each in inputs], capture(gm, maps=True))
        )
        return gm.forward

    torch._dynamo.reset()
    torch.compile(NETS[name]().double(), backend=backend)(
        torch.randn(steps, B, H, dtype=torch.float64).requires_grad_()
    )
    ((gm, leaves, loops),) = found
    return gm, leaves, loops


def seen(run: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """What a run gives, and gradients of what it is given, for numbers of each result's own."""
    torch.manual_seed(1)
    results = [each for each in tree_leaves(run(*inputs)) if isinstance(each, Tensor)]
    weighed = sum((each * torch.randn_like(each)).sum() for each in results if each.requires_grad)
    leaves = [each for each in inputs if each.requires_grad]
    return [*results, *torch.autograd.grad(weighed, leaves, allow_unused=True)]  # type: ignore[arg-type]


def differ(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> list[int]:
    """Where two runs differ; no gradient is one of zeros."""
    pairs = [[torch.zeros(()) if each is None else each for each in pair] for pair in zip(found, expected, strict=True)]
    return [at for at, (a, b) in enumerate(pairs) if not torch.allclose(a.broadcast_to(b.shape), b, 1e-11, 1e-12)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [3, 4, 7])
@pytest.mark.parametrize("name", NETS)
def test_loops_give_what_the_graph_gives(name: str, steps: int, order: str) -> None:
    gm, inputs, found = captured(name, steps)
    before = str(found)
    made = run_on_loops(ORDERS[order], found, gm)
    assert str(found) == before
    assert not differ(seen(LoopInterpreter(gm, made).run, inputs), seen(gm, inputs))


def test_each_pass_changes_some_of_these() -> None:
    stages = [loops_by_pass(PASSES, found, gm) for gm, _, found in (captured(name, 7) for name in NETS)]
    assert {name for each in stages for name in each} == {"captured", *PASSES}


def of_one_step_less(loops: Capture) -> Capture:
    first, *others = loops.recurrences
    return replace(loops, recurrences=(replace(first, steps=first.steps - 1), *others))


def of_no_loop(loops: Capture) -> Capture:
    return replace(loops, recurrences=())


def that_raises(loops: Capture) -> Capture:
    raise KeyError("states")


def that_is_no_graph(loops: Capture) -> Capture:
    graph = fx.Graph()
    graph.output(graph.graph_copy(loops.outer, {}))
    call = next(node for node in graph.nodes if node.op == "call_module")
    call.args = call.args[:-1]
    return replace(loops, outer=graph)


WRONG: dict[str, tuple[Callable[[Capture], Any], str]] = {
    "rows-less": (of_one_step_less, "changed what the graph around the loops is given or gives"),
    "no-loop": (of_no_loop, "left a graph that calls recurrence_0, but loops"),
    "raises": (that_raises, "raised KeyError"),
    "operand-less": (that_is_no_graph, "left loops that cannot run"),
    "graph": (lambda loops: loops.outer, "must return a Capture, but it returned a Graph"),
}


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pass_on_loops_is_named(name: str) -> None:
    made, said = WRONG[name]
    reroll.register_pass(f"wrong-{name}", on="loops")(made)
    gm, _, found = captured("readout", 7)
    with pytest.raises(PassError, match=f"Pass 'wrong-{name}' {said}"):
        run_on_loops((f"wrong-{name}",), found, gm)


@pytest.mark.usefixtures("fresh_registry")
def test_a_pass_of_ones_own_is_shown_and_proved() -> None:
    """It doubles what a loop gives, which shapes do not tell."""

    @reroll.register_pass("doubling", on="loops")
    def doubling(loops: Capture, /) -> Capture:
        graph = fx.Graph()
        graph.output(graph.graph_copy(loops.outer, {}))
        (made,) = graph.output_node().all_input_nodes
        with graph.inserting_after(made):
            twice = graph.call_function(torch.mul, (made, 2))
        twice.meta["example_value"] = example(made)
        graph.output_node().replace_input_with(made, twice)
        return replace(loops, outer=graph)

    x = torch.randn(7, B, H)
    run: Any = reroll.compile(NETS["readout"](), lowering="eager", passes=(*DEFAULT_PASSES, "doubling"))
    stages = reroll.explain(run, x).stages
    assert [*stages] == ["captured", "fold-readouts", "doubling"]
    assert "call_function[target=torch.mul]" in str(stages["doubling"])
    assert re.search(r"Loops behind fold-readouts: 6 steps of \d+ operations", str(reroll.explain(run, x)))
    with pytest.raises(reroll.ProofError):
        run(x)


def test_a_pass_that_is_left_out_leaves_loops_apart() -> None:
    x = torch.randn(7, B, H)
    model = NETS["three layers"]()
    for passes, loops in ((DEFAULT_PASSES, 1), ([name for name in DEFAULT_PASSES if name != "fuse-loops"], 3)):
        run: Any = reroll.compile(model, lowering="eager", passes=passes)
        assert len(reroll.explain(run, x).loops) == loops
        torch.testing.assert_close(run(x), model(x))
