"""Runs that repeat are not written down: what is written says the same as a record of all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import reroll
from networks_zoo import Net as ZooNet
from networks_zoo import load
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.python_state.state_cache import Reach
from reroll.backends.front.recorded import Recorded
from reroll.capture.capture import capture
from reroll.capture.folded import UNFOLD, Gapped, is_row, unfolded
from reroll.capture.normal import row_writes
from reroll.capture.normal.normal import normalise
from reroll.capture.recorder import repeats
from reroll.capture.recorder.graph import Unrecordable
from reroll.capture.steps.node_hash import Sequence
from reroll.capture.steps.operands import Region, gaps_in
from reroll.graph.editing import flatten
from reroll.graph.private import storage_id
from reroll.passes import DEFAULT_PASSES
from reroll.program.registry import run_on_loops
from reroll.recurrence import Capture
from rnns import Bodied

pytestmark = pytest.mark.usefixtures("double_precision")
B, N, H = 2, 3, 4
T = 97
ZOO = load()


class Net(Bodied):
    """That, and a second cell."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(body)
        self.other = nn.RNNCell(H, H)


def of_the_middle(net: Net, x: Tensor) -> Any:
    hs = net.states(x)
    return hs[T // 3] * hs[T // 3 - 1], hs[3], hs[-2], hs[T // 2 :: 7]


def reversed_rows(net: Net, x: Tensor) -> Any:
    hs, g = net.states(x), x.new_zeros(B, H)
    for h in reversed(hs):
        g = net.other(h, g)
    return g


def every_other_row(net: Net, x: Tensor) -> Any:
    hs, g = net.states(x), x.new_zeros(B, H)
    for t in range(1, T, 2):
        g = net.other(hs[t], g)
    return g, torch.stack(hs[::3])


def updated_in_its_run(net: Net, x: Tensor) -> Any:
    def change(_: int, h: Tensor) -> Tensor:
        v = h * 0.9
        v += 0.1
        return v.mul_(0.95)

    return torch.stack(net.states(x, change))


def updated_by_the_next_run(net: Net, x: Tensor) -> Any:
    h, found, last = x.new_zeros(B, H), [], x.new_zeros(B, H)
    for t in range(T):
        h = net.cell(x[t], h)
        last.mul_(0.5)
        last = h * 2
        found.append(last)
    return found[5], found[T // 3], torch.stack(found)


def updated_afterwards(net: Net, x: Tensor) -> Any:
    made = [h * 1.5 for h in net.states(x)]
    made[T // 2].add_(1.0)
    return torch.stack(made), made[T // 2] * 2


def parts_updated_afterwards(net: Net, x: Tensor) -> Any:
    made = [(row, row[0]) for row in (h * 1.5 for h in net.states(x))]
    made[T // 2][1].mul_(3.0)
    return made[T // 2][0].sum(), torch.stack([row for _, row in made])


def in_place_functions(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda _, h: F.hardtanh(F.relu_(h + 0.2) * 1.1, inplace=True)))


def rows_of_tensors(net: Net, x: Tensor) -> Any:
    rows, columns, h = x.new_zeros(T, B, H), x.new_zeros(B, T), x.new_zeros(B, H)
    for t in range(T):
        h = net.cell(x[t], h)
        rows[t] = h
        columns[:, t] = h.sum(-1)
    return rows, columns


def read_back(net: Net, x: Tensor) -> Any:
    rows = x.new_zeros(T + 1, B, H)
    for t in range(T):
        rows[t + 1] = net.cell(x[t], rows[t].clone())
    return rows


def a_buffer_of_states(net: Net, x: Tensor) -> Any:
    held, h = x.new_zeros(3, B, H), x.new_zeros(B, H)
    for t in range(T):
        h = net.cell(x[t], h + held[t % 3])
        held[t % 3] = h
    return held


def in_turn(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda t, h: h * 0.5 if t % 3 == 1 else h))


def once(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda t, h: h.detach() if t == T // 3 else h))


def a_loop_in_each_step(net: Net, x: Tensor) -> Any:
    def change(_: int, h: Tensor) -> Tensor:
        for _ in range(31):
            h = h * 0.99 + 0.001
        return h

    return net.states(x[:12], change)[-1]


def nobody_reads_it(net: Net, x: Tensor) -> Any:
    net.states(x)
    return net.states(x * 2)[-1]


def numbers(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda t, h: h * t + torch.full((B, H), t) + torch.tensor(t)))


def fading(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda t, h: h * 0.9**t))


def of_long_ago(net: Net, x: Tensor) -> Any:
    hs = [x.new_zeros(B, H)] * 6
    for t in range(T):
        hs.append(net.cell(x[t], hs[-1] + 0.3 * hs[-6]))
    return torch.stack(hs)


def queues(net: Net, x: Tensor) -> Any:
    h, found = x.new_zeros(B, H), []
    first, second = ([x.new_zeros(B, N), x[0] * 0.5, x[1]] for _ in range(2))
    for t in reversed(range(T)):
        first = [*first[1:], 0.8 * x[t] + 0.3 * first[0]]
        second = [*second[1:], 0.8 * first[-1] + 0.3 * second[0]]
        h = net.cell(second[-1], h + h.detach().mean(0))
        found.append(h)
    return torch.stack(found), first[1], second[1]


def drawn(net: Net, x: Tensor) -> Any:
    return torch.stack(net.states(x, lambda _, h: F.dropout(h, 0.3) + torch.rand(B, H)))


def given_as_they_are(net: Net, x: Tensor) -> Any:
    return net.states(x), [row * 2 for row in x]


def windows(net: Net, x: Tensor) -> Any:
    h = x.new_zeros(B, H)
    for t in range(T - 2):
        h = net.cell(x[t : t + 3].mean(0), h)
    return h


def without_gradients(net: Net, x: Tensor) -> Any:
    with torch.no_grad():
        hs = net.states(x)
    return torch.stack([h + x[0].mean() for h in hs])


FOLDED = (
    of_the_middle,
    reversed_rows,
    every_other_row,
    updated_in_its_run,
    updated_by_the_next_run,
    in_place_functions,
    rows_of_tensors,
    in_turn,
    once,
    numbers,
    of_long_ago,
    queues,
    drawn,
    windows,
    nobody_reads_it,
)
"""Rolled without all runs."""
WRITTEN = (
    updated_afterwards,
    parts_updated_afterwards,
    read_back,
    a_buffer_of_states,
    a_loop_in_each_step,
    fading,
    given_as_they_are,
    without_gradients,
)
"""All runs are written out for some or all loops."""


def recorded(model: nn.Module, args: tuple[Any, ...], *, folds: bool) -> fx.GraphModule:
    torch.manual_seed(0)
    call = Call(args, {})
    module, _ = Recorded(model, folds=folds).record(call, Reach().ran)
    return module


def operands(node: fx.Node, places: dict[fx.Node, int]) -> list[Any]:
    return [places[x] if isinstance(x, fx.Node) else x for x in flatten(node)]


def look(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return None
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad


def differs(one: fx.GraphModule, other: fx.GraphModule) -> str:
    """The first node of two graphs that differ; a function that applies another is known by it."""
    places: dict[fx.Node, int] = {}
    if len(one.graph.nodes) != len(other.graph.nodes):
        return f"{len(one.graph.nodes)} nodes, not {len(other.graph.nodes)}"
    for at, (a, b) in enumerate(zip(one.graph.nodes, other.graph.nodes, strict=True)):
        places[a] = places[b] = at
        targets = [getattr(x.target, "reroll_application", x.target) for x in (a, b)]
        looks = [look(x.meta.get("example_value")) for x in (a, b)]
        if a.op != b.op or targets[0] != targets[1] or repr(operands(a, places)) != repr(operands(b, places)):
            return f"{a.format_node()} {b.format_node()}"
        if looks[0] != looks[1]:
            return f"{a.format_node()} {looks}"
    return ""


def said(found: Capture) -> Any:
    """What a capture says, without names."""
    places = {node: at for at, node in enumerate(found.outer.nodes)}
    outer = [
        ("" if x.op == "placeholder" else str(x.target), repr(operands(x, places)), look(x.meta.get("example_value")))
        for x in found.outer.nodes
    ]
    loops = []
    for each in found.recurrences:
        own = {node: at for at, node in enumerate(each.step.graph.nodes)}
        step = [(x.op, x.op == "placeholder" or str(x.target).split(" at ")[0], repr(operands(x, own))) for x in own]
        loops.append((each.steps, each.xs, each.constants, len(each.ys), list(map(look, each.examples)), step))
    return loops, [(target.split(" at ")[0], *rest) for target, *rest in outer]


def loops_of(module: fx.GraphModule) -> Capture:
    """The loops of a record, behind all passes on loops."""
    return run_on_loops(DEFAULT_PASSES, capture(module, depth=True), module)


def compare(model: nn.Module, args: tuple[Any, ...]) -> str:
    """Compare what records with and without all runs say; what became of the folded one."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    plain = recorded(model, args, folds=False)
    model.load_state_dict(state)
    folded = recorded(model, args, folds=True)
    became = "written"
    if UNFOLD in folded.meta:
        assert said(loops_of(folded)) == said(loops_of(plain))
        became = "folded" if UNFOLD in folded.meta else "unfolded"
    assert not differs(unfolded(folded), plain)
    assert UNFOLD not in folded.meta
    return became


@pytest.mark.parametrize("body", [*FOLDED, *WRITTEN])
def test_a_record_says_what_one_of_all_runs_does(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    became = compare(Net(body), (torch.randn(T, B, N, requires_grad=True),))
    assert became == "folded" if body in FOLDED else became in ("unfolded", "written")


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", [*ZOO])
def test_all_networks(name: str) -> None:
    torch.manual_seed(0)
    net = ZooNet(ZOO[name])
    leaf = ZOO[name].leaf
    args = tree_map_only(Tensor, lambda v: v.requires_grad_(leaf) if v.is_floating_point() else v, ZOO[name].inputs(40))
    try:
        compare(net, tuple(args))
    except Unrecordable:
        pytest.skip("a record does not tell what it does")


@pytest.mark.parametrize("body", [*FOLDED, *WRITTEN])
def test_values_and_gradients_are_those_of_the_plain_model(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    net, x = Net(body), torch.randn(T, B, N, requires_grad=True)
    compiled = reroll.compile(net, lowering="eager")
    results = []
    for run in (net, compiled):
        torch.manual_seed(1)
        made = tree_leaves(run(x))
        loss = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sin().sum() for each in made[::2])
        grads = torch.autograd.grad(loss, [x, *net.parameters()], allow_unused=True)
        results.append([*made, *grads])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("body", [*FOLDED, *WRITTEN])
def test_few_missing_runs_are_told_apart_from_those_that_are_there(
    body: Callable[..., Any], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that reads what was made longer ago than runs are missing, or are there behind these."""
    monkeypatch.setattr(repeats, "KEPT", kept)
    monkeypatch.setattr(repeats, "WHOLE", 2)
    monkeypatch.setattr(sys.modules[__name__], "T", 15)
    torch.manual_seed(0)
    folded = recorded(Net(body), (x := torch.randn(15, B, N),), folds=True)
    plain = recorded(Net(body), (x,), folds=False)
    assert said(loops_of(folded)) == said(loops_of(plain))


def test_a_step_is_whole_on_each_side_of_missing_runs() -> None:
    """Else some of its values would be of another step than others."""
    module = recorded(Net(queues), (torch.randn(T, B, N),), folds=True)
    sequence = Sequence(module, normalise(module, module.graph))
    (gap,) = sequence.gaps
    first = gap.at - 4 * gap.period
    assert [missing for _, missing in gaps_in(sequence, Region(first, gap.period, 8))] == [gap.runs]
    for start, steps in ((first + 1, 4), (gap.at - gap.period - 1, 4), (gap.at - gap.period + 1, 3)):
        with pytest.raises(Gapped):
            list(gaps_in(sequence, Region(start, gap.period, steps)))


def test_rows_that_are_written_one_by_one_are_collected_once() -> None:
    """Each write of a chain was collected by itself, with those before it, and nobody read that."""
    with mock.patch.object(row_writes, "_shaped", wraps=row_writes._shaped) as shaped:
        capture(recorded(Net(rows_of_tensors), (torch.randn(T, B, N),), folds=True))
    assert shaped.call_count == 2 * T


def test_a_record_is_as_large_for_any_number_of_runs() -> None:
    net = Net(lambda net, x: net.states(x)[-1])
    sizes = {len(recorded(net, (torch.randn(steps, B, N),), folds=True).graph.nodes) for steps in (100, 1_000, 4_000)}
    assert max(sizes) - min(sizes) <= 12 * 2
    assert max(sizes) < 100


def test_rows_share_memory_with_their_tensors_alone() -> None:
    module = recorded(Net(of_the_middle), (torch.randn(T, B, N),), folds=True)
    rows = [node for node in module.graph.nodes if is_row(node)]
    assert len({storage_id(node.meta["example_value"]) for node in rows}) == len(rows) > 2


def test_a_folded_graph_is_not_run() -> None:
    module = recorded(Net(of_the_middle), (x := torch.randn(T, B, N),), folds=True)
    read = [{"argument_0": x}.get(node.name) for node in module.graph.find_nodes(op="placeholder")]
    with pytest.raises(AssertionError, match="not run"):
        module(
            *(
                torch.zeros(node.meta["example_value"].shape) if r is None else r
                for r, node in zip(read, module.graph.find_nodes(op="placeholder"), strict=True)
            )
        )


def test_runs_that_are_in_no_step_are_refused_by_the_search() -> None:
    module = recorded(Net(lambda net, x: [row * 2 for row in x]), (torch.randn(T, B, N),), folds=True)
    assert UNFOLD in module.meta
    assert not capture(module).recurrences
    assert UNFOLD not in module.meta
    assert issubclass(Gapped, Exception)
