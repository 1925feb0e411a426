"""keep= and recompute=: the tape holds what they say, the gradients are autograd's, and what cannot be is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

import reroll
from agreement import differences, results
from named_networks import EAGER, ROW, SEGMENT, B, Captured, H, I, Lif, Lstm, Net, Odd, Peak, Tanh, Twins, sequence
from recorded_networks import refused_by_dynamo
from reroll.backends.construct.build import build
from reroll.errors import OptionError
from reroll.planning.options import Options
from reroll.report.report import Loop
from reroll.segment.cut.policy import StepValue

pytestmark = pytest.mark.usefixtures("double_precision")
CARRY = {"carry": 1}


def taped(loop: Loop) -> dict[str, int]:
    return dict(Counter(value.name or value.op for value in loop.taped))


def made(value: StepValue) -> bool:
    """Whether a value of ``Odd`` may be recomputed."""
    return value.name != "noise"


def real(value: StepValue) -> bool:
    return value.dtype.is_floating_point


def unnamed(value: StepValue) -> bool:
    return not value.name


NORM, KEPT = "aten.native_layer_norm", {"noise": 2, "aten.tanh": 2, "carry": 2}
HELD: tuple[tuple[Callable[[], nn.Module], dict[str, Any], dict[str, int], int], ...] = (
    (Tanh, {}, CARRY | {"aten.tanh": 2}, 2 * ROW),
    (Tanh, {"keep": "aten.addmm", "recompute": "tanh"}, CARRY | {"aten.addmm": 4}, 5 * ROW),
    (Tanh, {"recompute": "hidden"}, CARRY | {"pre": 2}, 3 * ROW),
    (Tanh, {"recompute": ("hidden", "pre", "addmm")}, CARRY, ROW),
    (Tanh, {"recompute": lambda value: value.nbytes >= ROW}, CARRY, ROW),
    (Tanh, {"keep": lambda value: True}, CARRY | {"hidden": 2}, 2 * ROW),
    (Lstm, {"keep": ["gates", "cell"]}, {"carry": 2, "gates": 2, "cell": 2}, 11 * ROW),
    (Lstm, {"recompute": lambda value: True}, {"carry": 2}, 2 * ROW),
    (Lstm, {"recompute": unnamed, "keep": "cell"}, {"carry": 2, "cell": 2}, 3 * ROW),
    (Lif, {"keep": "z"}, CARRY | {"v": 1, "z": 2}, 4 * ROW),
    (Lif, {"recompute": ("v", "addmm")}, CARRY | {"aten.gt": 2}, ROW + 2 * ROW // 8),
    (Lif, {"keep": "v", "replay": True}, CARRY | {"v": 1, "aten.gt": 2}, 2 * ROW + 2 * ROW // 8),
    (Peak, {"recompute": real}, CARRY | {"aten.max": 2}, ROW + 2 * B * 8),
    (Odd, {"keep": "sum"}, KEPT | {NORM: 4, "sum": 2, "k": 2}, 10 * ROW + 4 * B * 8),
    (Odd, {"keep": ("drive", "weight", "input")}, KEPT | {NORM: 4, "aten.add": 2, "k": 2, "drive": 2}, 0),
    (Odd, {"recompute": "also k"}, KEPT | {NORM: 6, "aten.add": 2}, 0),
    (Odd, {"recompute": NORM}, KEPT | {"aten.add": 2, "k": 2}, 10 * ROW),
    (Odd, {"recompute": made}, {"noise": 2, "carry": 2}, 4 * ROW),
)


@pytest.mark.variants(4)
@pytest.mark.parametrize(("make", "asked", "held", "nbytes"), HELD)
def test_the_tape_holds_what_was_asked(
    make: Callable[[], nn.Module], asked: dict[str, Any], held: dict[str, int], nbytes: int
) -> None:
    loop, error = Captured.of(make).run(**asked)
    assert taped(loop) == held
    assert not nbytes or loop.saved == nbytes
    assert error < 1e-13


REFUSED: tuple[tuple[Callable[[], nn.Module], dict[str, Any], str], ...] = (
    (Lif, {"recompute": lambda value: True}, r"recompute=<lambda> holds, in the loop at .*\(aten.gt\).* is a decision"),
    (
        Lif,
        {"recompute": ("v", "gt")},
        r"recompute=\('v', 'gt'\) holds.* is a decision \(a comparison, rounding or index\)",
    ),
    (Peak, {"recompute": "max"}, r"shape \[3, 1\] \(aten.max\), and that cannot be recomputed: it is a decision"),
    (Odd, {"recompute": "noise"}, r"shape \[3, 7\] \('noise', aten.rand_like\), .* is made of random numbers"),
    (
        Odd,
        {"recompute": "input"},
        r"\('input', aten.select\), and that cannot be recomputed: it is an input of the step",
    ),
    (Odd, {"recompute": "weight"}, r"\('weight', input\), and .* is an input of the step.* Leave it out"),
    (
        Tanh,
        {"keep": "tanh", "recompute": "hidden"},
        r"keep='tanh' and recompute='hidden' both hold of .*'hidden', aten",
    ),
)


@pytest.mark.variants(4)
@pytest.mark.parametrize(("make", "asked", "sentence"), REFUSED)
def test_what_cannot_be_is_refused(make: Callable[[], nn.Module], asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        Captured.of(make).run(**asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"keep": "hiden"},
            r"keep='hiden' names no value .* Did you mean 'hidden'\? Names given there: 'hidden', 'pre'",
        ),
        (
            {"recompute": "mm"},
            "recompute='mm' names no value .* Operations: aten.add, aten.addmm, aten.tanh",
        ),
    ],
)
def test_a_name_that_nothing_has_is_refused(asked: dict[str, Any], sentence: str) -> None:
    run = torch.compile(Tanh(), backend="reroll", options=EAGER | asked)
    with pytest.raises(OptionError, match=sentence):
        run(sequence())


def test_wrong_options() -> None:
    for wrong in (3, "", ["a", 3], {"a": 1}):
        with pytest.raises(OptionError, match=r"keep=.* is not valid\. Give a name"):
            Options.of({"keep": wrong})
    with pytest.raises(OptionError, match="Contradictory options: keep and recompute both have 'a'"):
        Options.of({"keep": ("a", "b"), "recompute": "a"})
    assert Options(keep=["a"]) == Options(keep="a")
    assert len({Options(keep=["a", made]), Options(keep=("a", made)), Options(recompute=made)}) == 2


def test_naming_is_the_identity() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert reroll.name(leaf, "leaf") is leaf
    assert torch.vmap(lambda row: 2 * reroll.name(row, "row"), in_dims=1)(torch.ones(2, 3)).shape == (3, 2)
    assert torch.equal(torch.func.grad(lambda v: (reroll.name(v, "v") ** 2).sum())(leaf), 2 * leaf)
    doubled = torch.compile(lambda v: reroll.name(2 * v, "v").sin_(), backend="aot_eager", fullgraph=True)(leaf)
    torch.testing.assert_close(doubled, (2 * leaf).sin())
    nothing: Any = [leaf]
    with pytest.raises(reroll.RerollError, match=r"was given list, no tensor\. Name tensors one by one"):
        reroll.name(nothing, "leaf")
    with pytest.raises(reroll.RerollError, match="was given '' as a name"):
        reroll.name(leaf, "")


def test_names_change_nothing_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> list[str]:
        Captured.of.cache_clear()
        recurrence = Captured.of(Odd).found.recurrences[0]
        segment = build(recurrence, Options(**EAGER)).executable.compiled.segments[SEGMENT]
        halves = (recurrence.step, segment.forward_graph, segment.backward_graph)
        return [str(n.target) for half in halves if half is not None for n in half.graph.nodes if n.op != "placeholder"]

    named = calls()
    monkeypatch.setattr(reroll, "name", lambda value, text: value)
    assert named == calls()
    Captured.of.cache_clear()


def test_what_is_saved_does_not_depend_on_the_order_of_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networkx keeps sets of nodes, in the order of addresses in memory. With costs that round, one process in some ten
    saved ``tanh`` where others saved the ``detach`` of it."""
    costs, cut = list[Any](), nx.minimum_cut

    def noted(network: Any, *ends: Any) -> Any:
        costs.extend(cost for *_, cost in network.edges.data("capacity") if cost is not None)
        return cut(network, *ends)

    monkeypatch.setattr(nx, "minimum_cut", noted)
    build(Captured.of(Odd).found.recurrences[0], Options(**EAGER))
    assert {*map(type, costs)} == {int}


def test_loops_that_differ_in_names_only_do_not_share_kernels() -> None:
    model = Twins()
    run = torch.compile(model, backend="reroll", fullgraph=True, options=EAGER | {"keep": "first"})
    loops = reroll.explain(run, sequence()).loops
    assert [taped(loop) for loop in loops] == [CARRY | {"first": 2}, CARRY | {"aten.tanh": 2}]


class Way(Net):
    """A tanh RNN, with its loop written in one way or another."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x_TBI: Tensor) -> Tensor:
        return self.body(self, x_TBI)

    def step(self, h_BH: Tensor, x_BI: Tensor) -> Tensor:
        return torch.tanh(reroll.name(self.i(x_BI) + self.h(h_BH), "pre"))


def looped(net: Way, x_TBI: Tensor) -> Tensor:
    h_BH = x_TBI.new_zeros(B, H)
    for x_BI in x_TBI:
        h_BH = net.step(h_BH, x_BI)
    return h_BH


def scanned(net: Way, x_TBI: Tensor) -> Tensor:
    def step(h_BH: Tensor, x_BI: Tensor) -> tuple[Tensor, Tensor]:
        h_BH = net.step(h_BH, x_BI)
        return h_BH, h_BH.clone()

    return scan(step, x_TBI.new_zeros(B, H), x_TBI)[0] if torch.compiler.is_compiling() else looped(net, x_TBI)


def layered(net: Way, x_TBI: Tensor) -> Tensor:
    rows, h_BH = [], x_TBI.new_zeros(B, H)
    for x_BI in x_TBI:
        h_BH = net.step(h_BH, x_BI)
        rows.append(h_BH)
    h_BH = x_TBI.new_zeros(B, H)
    for row_BH in rows:
        h_BH = torch.tanh(reroll.name(net.h(h_BH) + reroll.name(row_BH, "row"), "second"))
    return h_BH


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize(
    ("body", "held"),
    [
        (scanned, CARRY | {"pre": 2}),
        (refused_by_dynamo(looped), CARRY | {"pre": 2}),
        (layered, {"carry": 2, "row": 2, "second": 2}),
    ],
    ids=["scan", "recorded", "layers"],
)
def test_names_come_through_every_way_in(body: Callable[..., Tensor], held: dict[str, int]) -> None:
    model, x_TBI = Way(body), torch.randn(17, B, I)
    run = reroll.compile(model, **EAGER, keep=lambda value: bool(value.name))
    assert taped(reroll.explain(run, x_TBI).loops[0]) == held
    assert not differences(results(run, model, (x_TBI,)), results(model, model, (x_TBI,)))


@pytest.mark.inductor
def test_kernels_pack_what_is_kept() -> None:
    loop, error = Captured.of(Lif).run(lowering="inductor", keep=("z", "v"))
    assert taped(loop) == CARRY | {"v": 1, "z": 2}
    assert loop.saved == 2 * ROW + B * H  # the two z of a segment are two bits of one byte
    assert error < 1e-12
