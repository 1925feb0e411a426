"""measure: what is counted; and that explain predicts it."""

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from networks import RecurrentLIF, spikes
from reroll.backends.construct.build import build
from reroll.backends.construct.replan import Plans
from reroll.backends.dynamo.entry import Graph, assemble
from reroll.backends.inductor.wrapper_codegen.wrapper import wrapper_peak
from reroll.backends.measure.explain import plan
from reroll.backends.runtime.node import RecurrenceModule
from reroll.capture.capture import capture
from reroll.graph.memory import graph_peak
from reroll.planning.options import Options
from reroll.recurrence import Capture

SCHEMES: tuple[dict[str, Any], ...] = (
    {"schedule": "store_all"},
    {"schedule": "standard"},
    {"schedule": "remote"},
    {"schedule": "hierarchical"},
    {"schedule": "double"},
    {"schedule": "double", "remote": "local"},
)


def block(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_the_peak_is_what_lives_at_once() -> None:
    def call() -> Tensor:
        first = block(1 << 20)
        del first
        kept = block(3 << 20)
        block(1 << 20)
        return kept

    found = reroll.measure(call)
    assert found.local_peak == 4 << 20
    assert found.result.nbytes == 3 << 20
    assert found.wall_seconds > 0
    assert found.seconds >= 0


def test_what_lived_before_does_not_count() -> None:
    held = [block(1 << 20), block(1 << 20)]

    def call() -> None:
        if held:
            held.pop()
        block(1 << 20)

    assert reroll.measure(call).local_peak == 1 << 20


def test_gradients_that_the_call_makes_can_be_left_out() -> None:
    layer = nn.Linear(512, 512, bias=False)
    x = torch.ones(1, 512)

    def call() -> None:
        layer.weight.grad = None
        layer(x).sum().backward()

    whole, without = reroll.measure(call), reroll.measure(call, exclude=[layer])
    assert whole.local_peak - without.local_peak == layer.weight.nbytes


@pytest.fixture(scope="module")
def captured() -> tuple[RecurrentLIF, fx.GraphModule, Capture]:
    """Network D2r, captured from eight steps: its graph is that of any length, but for the slices' number."""
    torch._dynamo.reset()
    found: list[tuple[fx.GraphModule, Capture]] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        found.append((gm, capture(gm)))
        return gm.forward

    model = RecurrentLIF()
    torch.compile(model, backend=keep)(spikes(8))
    return (model, *found[0])


def ratio(captured: tuple[RecurrentLIF, fx.GraphModule, Capture], steps: int, options: dict[str, Any]) -> float:
    """Predicted local peak over the measured one, at ``steps`` steps."""
    model, gm, found = captured
    x = spikes(steps)
    (recurrence,) = found.recurrences
    examples = tuple(torch.empty_like(x) if like.dim() == 3 else like for like in recurrence.examples)
    recurrence = replace(recurrence, steps=recurrence.steps + steps - 8, examples=examples)
    built = build(recurrence, Options(**options))
    module = assemble(gm, found.outer, {recurrence.name: RecurrenceModule(built.executable)})
    weights = {name: layer.weight for name, layer in model.named_children()}
    names = [str(node.target) for node in found.outer.find_nodes(op="placeholder")]
    operands = [next((w for name, w in weights.items() if f"_{name}_" in each), x) for each in names]

    def call() -> None:
        model.zero_grad()
        module(*operands)[0].square().mean().backward()

    call()
    return (
        plan(Graph(module, module, Plans((built,)))).predicted_peak / reroll.measure(call, exclude=[model]).local_peak
    )


@pytest.mark.variants(4)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "-".join(map(str, scheme.values())))
def test_the_predicted_peak_is_the_measured_one(captured: Any, scheme: dict[str, Any]) -> None:
    assert ratio(captured, 200, {"lowering": "eager", **scheme}) == pytest.approx(1, abs=0.15)


@pytest.mark.inductor
def test_the_predicted_peak_of_kernels_is_the_measured_one(captured: Any) -> None:
    options = {"lowering": "inductor", "schedule": "double", "segment": 2}
    assert ratio(captured, 65, options) == pytest.approx(1, abs=0.15)


def test_a_budget_is_met(captured: Any) -> None:
    _, _, found = captured
    (recurrence,) = found.recurrences
    recurrence = replace(recurrence, steps=200)
    plain = build(recurrence, Options(lowering="eager", schedule="store_all")).plan.prediction.peak
    built = build(recurrence, Options(lowering="eager", memory_budget=plain // 2))
    assert built.choice.schedule == "revolve"
    assert built.plan.prediction.peak <= plain // 2
    with pytest.raises(reroll.RerollError, match="below the least"):
        build(recurrence, Options(lowering="eager", memory_budget=built.plan.prediction.most.scratch // 2))


WRAPPER = """
def call(self, args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (4, 8), (8, 1), 'input')
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        # a comment
        extern_kernels.mm(primals_1, reinterpret_tensor(primals_2, (8, 8), (1, 8), 0), out=buf0)
        del primals_1
        buf1 = reinterpret_tensor(buf0, (8, 4), (1, 8), 0); del buf0  # reuse
        buf2 = empty_strided_cpu((4, 8), (8, 1), torch.float64)
        buf3 = buf2; del buf2  # reuse
        buf4 = empty_strided_cpu((0, 8), (8, 1), torch.float64)
    return (buf1, buf3, )
"""


def test_the_plan_of_a_wrapper_is_read() -> None:
    assert wrapper_peak(WRAPPER, [], {}) == 128 + 256
    assert wrapper_peak(WRAPPER, [(128, ("primals_1",))], {}) == 128 + 256
    assert wrapper_peak(WRAPPER, [(512, ("primals_1",))], {}) == 512 + 128
    assert wrapper_peak(WRAPPER, [(128, ("primals_2",))], {}) == 128 + 256 + 128
    assert wrapper_peak(WRAPPER.replace("buf4 = empty_strided_cpu(", "buf4 = unheard_of("), [], {}) is None
    assert wrapper_peak("nothing", [], {}) is None


KERNELS = """
    def call(self, args):
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        buf1 = torch.ops.aten.fft.default(buf0, (1, 2))
        del buf0
        buf2 = buf1
        assert_size_stride(buf2, (4, 16), (16, 1), 'torch.ops.aten.fft.default')
        # buffer buf2 (op: torch.ops.aten.fft.default) is assumed to be not aligned
        del buf1
        buf3 = torch.ops.aten.two.default(buf2)
        buf4 = buf3[0]
        assert_size_stride(buf4, (64, ), (1, ), 'torch.ops.aten.two.default')
        del buf3
        return (buf2, buf4, )
"""


class Adding(nn.Module):
    """A step whose backward has no operations: the gradient of the state passes through."""

    def forward(self, x_TI: Tensor, h_I: Tensor) -> Tensor:
        for x_I in x_TI:
            h_I = h_I + x_I
        return h_I


@pytest.mark.inductor
@pytest.mark.filterwarnings("error::reroll.RerollWarning")
def test_a_half_without_operations_has_no_wrapper() -> None:
    compiled, state = reroll.compile(Adding()), torch.zeros(3, requires_grad=True)
    compiled(torch.randn(40, 3), state).sum().backward()
    assert state.grad is not None
    assert torch.equal(state.grad, torch.ones(3))


def test_results_of_kernels_that_are_not_inductors_count() -> None:
    sizes = {"aten.fft.default": 8, "aten.two.default": 4}
    assert wrapper_peak(KERNELS, [], sizes) == 4 * 16 * 8 + 64 * 4
    assert wrapper_peak(KERNELS, [], {"aten.fft.default": 8}) is None


def test_the_walk_of_a_graph_counts_views_once() -> None:
    graph = fx.Graph()
    aten = torch.ops.aten
    x = graph.placeholder("x")
    made = graph.call_function(aten.exp.default, (x,))
    view = graph.call_function(aten.view.default, (made, [32]))
    other = graph.call_function(aten.exp.default, (view,))
    graph.output((graph.call_function(aten.neg.default, (other,)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(32, device="meta")
    assert graph_peak(graph, []) == 2 * 128
    assert graph_peak(graph, [(128, ("x",))]) == 2 * 128


def test_the_walk_of_a_graph_counts_memory_once_and_each_result_by_itself() -> None:
    graph = fx.Graph()
    aten = torch.ops.aten
    q, k = graph.placeholder("q"), graph.placeholder("k")  # views of one saved tensor
    both = graph.call_function(aten.aminmax.default, (q,))
    low, high = (graph.call_function(operator.getitem, (both, index)) for index in range(2))
    first = graph.call_function(aten.exp.default, (low,))  # the last use of the first result
    second = graph.call_function(aten.add.Tensor, (first, k))
    graph.output((graph.call_function(aten.add.Tensor, (second, high)),))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(32, device="meta")
    both.meta["val"] = (torch.empty(32, device="meta"),) * 2
    assert graph_peak(graph, [(256, ("q", "k"))]) == 256 + 3 * 128  # else 2 * 256 + 3 * 128, or 256 + 4 * 128
    assert graph_peak(graph, []) == 3 * 128
