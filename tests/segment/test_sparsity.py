"""What the analysis says holds for every input, NaN, infinities and -0.0 included."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.backends.codecs.codec import encode
from reroll.segment.facts import WORDS, bits, constants, integers
from reroll.segment.sparsity import Fact, infer, infer_carries

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 250.0, 1e30, 1e-40, float("nan"), float("inf"), -float("inf")]


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        v: Tensor = ctx.saved_tensors[0]
        return grad / (1 + (torch.pi * v) ** 2)


def holds(fact: Fact, value: Tensor) -> bool:
    """Whether a fact is true of a tensor, by its definition."""
    if not fact.known:
        return True
    if fact.dtype != value.dtype:
        return False
    if fact.patterns:
        words = value.contiguous().view(-1).view(WORDS[value.dtype.itemsize])
        return set(words.tolist()) <= set(fact.patterns)
    assert fact.low is not None and fact.high is not None  # noqa: PT018  # a range has both
    whole = value.double()
    return bool(((whole == whole.round()) & (whole >= fact.low) & (whole <= fact.high)).all())


class Checking(fx.Interpreter):
    """Runs a graph and compares every value with its fact."""

    def __init__(self, module: fx.GraphModule, facts: dict[fx.Node, Fact]) -> None:
        super().__init__(module)
        self.facts = facts

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, Tensor) and n.op != "output":
                fact = self.facts[n]
                assert holds(fact, value), f"{n.format_node()} is {value}, not {fact.describe()}"
        return result


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.neg, torch.abs, torch.sign, torch.relu, torch.square, torch.clone, torch.floor, torch.exp, torch.zeros_like,
    lambda a: a > 0.5, lambda a: (a > 0).to(a.dtype), lambda a: a.bfloat16(), lambda a: a.float(), lambda a: a.half(),
    lambda a: a.double(), lambda a: (a != 0).int(), lambda a: a.to(torch.int8) if not a.is_floating_point() else a,
    lambda a: 1 - a, lambda a: a * 0.9, lambda a: a + 1, lambda a: a - 1, lambda a: a * 200, lambda a: a / 2,
    lambda a: a * 1.001, lambda a: a.clamp(0, 1), lambda a: a.clamp(-0.0, 2.5), lambda a: a.clamp(max=3),
    lambda a: a.t(), lambda a: a.reshape(-1).view(3, 2).t().reshape(2, 3), lambda a: torch.cat([a, a])[:2],
    lambda a: torch.stack([a, 1 - a])[1], lambda a: a[0].expand(2, 3), lambda a: a.unbind(0)[1].expand(2, 3),
    lambda a: a.masked_fill(a > 0, 0.3), lambda a: a.masked_fill(a == 0, 1), lambda a: torch.full_like(a, 1),
    lambda a: torch.where(a > 0, 1.0, 0.0), lambda a: torch.where(a > 0, a, 0), lambda a: torch.ones_like(a) * 0.3,
    lambda a: torch.constant_pad_nd(a[:1], (0, 0, 0, 1), 2), lambda a: a.sum(0).expand(2, 3), lambda a: a.logical_not(),
    lambda a: torch.where(a > 0, torch.tensor(1.0), torch.tensor(-0.0)), lambda a: a.view(a.dtype), lambda a: ~(a > 0),
    lambda a: torch.full_like(a, -0.0), lambda a: a * -1, lambda a: a.to(torch.uint8) if a.dtype == torch.int8 else a,
    lambda a: a.float().view(torch.int32).float(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, torch.logical_and, torch.logical_xor, torch.eq,
    torch.ge, torch.lt, lambda a, b: torch.where(a > 0, a, b), lambda a, b: torch.where(b, a, 0),
    lambda a, b: a * (1 - b), lambda a, b: torch.cat([a, b])[1:3], lambda a, b: torch.heaviside(a, b.to(a.dtype)),
    lambda a, b: a * b.sum(),
    lambda a, b: torch.clamp(a, b, b + 1), lambda a, b: a.bool() & b.bool(), lambda a, b: a.int() | b.int(),
    lambda a, b: a + b * 2, lambda a, b: torch.sub(a, b, alpha=3), lambda a, b: a.max() * b, torch.rsub,
    lambda a, b: torch.select_scatter(a, b[0].to(a.dtype), 0, 1), lambda a, b: a ^ b if a.dtype == torch.bool else a,
]  # fmt: skip


def shaped(operation: Callable[..., Tensor], operands: list[Tensor]) -> Tensor:
    """An operation whose result has the shape of all others, so that it can be an operand again."""
    return operation(*operands).reshape(-1)[:6].reshape(2, 3)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """Every fact of a random graph holds for inputs that hold the given facts."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]))
    operations: list[Callable[..., Tensor]] = [*UNARY, *UNARY, *BINARY, *BINARY, *BINARY]
    plan = [
        (data.draw(st.sampled_from(operations)), data.draw(st.integers(0, 99)), number)
        for number in data.draw(st.lists(st.integers(0, 99), min_size=2, max_size=12))
    ]

    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    noise = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (2, 3), generator=seed)]
    x = noise.to(dtype) if dtype.is_floating_point else torch.randint(-300, 300, (2, 3), generator=seed).to(dtype)
    z = torch.randint(0, 2, (2, 3), generator=seed).to(dtype)
    c = torch.randint(-3, 6, (2, 3), generator=seed)
    valid: list[tuple[Callable[..., Tensor], list[int]]] = []
    pool = [x, z, c, z, z > 0]
    for operation, left, right in plan:
        operands = [left % len(pool), right % len(pool)][: 1 if operation in UNARY else 2]
        try:
            result = shaped(operation, [pool[number] for number in operands])
        except (RuntimeError, TypeError):  # what torch does not define for these dtypes
            continue
        pool.append(result)
        valid.append((operation, operands))

    def program(x: Tensor, z: Tensor, c: Tensor) -> list[Tensor]:
        pool = [x, z, c, z, z > 0]
        for operation, operands in valid:
            pool.append(shaped(operation, [pool[number] for number in operands]))
        return pool

    table = select_decomp_table() if data.draw(st.booleans()) else None
    module = make_fx(program, decomposition_table=table, tracing_mode=data.draw(st.sampled_from(["real", "fake"])))(
        x, z, c
    )
    inputs = module.graph.find_nodes(op="placeholder")
    facts = infer(module.graph, {inputs[1]: bits(dtype), inputs[2]: integers(c.dtype, -3, 5)})
    Checking(module, facts).run(x, z, c)


def outputs_of(function: Callable[..., Any], *inputs: Tensor, **given_facts: Fact) -> list[str]:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    names = {node.name.removesuffix("_1"): node for node in module.graph.find_nodes(op="placeholder")}
    facts = infer(module.graph, {names[name]: fact for name, fact in given_facts.items()})
    results: Any = module.graph.output_node().args[0]
    return [facts[node].describe() for node in (results if isinstance(results, (list, tuple)) else [results])]


def test_comparisons_masks_and_products() -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z, w = (x > 1).float(), torch.where(y > 0, 1.0, 0.0)
        return (
            z,
            z * w,
            1 - z,
            z * 0.9,
            z + w,
            x * z,
            torch.maximum(z, w),
            z.masked_fill(y > 2, 0),
            z - z,
            -z,
            z * y * 0,
        )

    found = outputs_of(step, torch.rand(3), torch.rand(3))
    assert found == [
        *("{0, 1}", "{0, 1}", "{0, 1}", "{0, 0.9}", "integers in [0, 2]", "unknown"),
        *("{0, 1}", "{0, 1}", "{0}", "{-0, -1}", "unknown"),
    ]


def test_rounding_is_the_dtypes() -> None:
    def step(x: Tensor) -> tuple[Tensor, ...]:
        z = (x > 1).to(x.dtype)
        return z * 0.9, z * 1.001, torch.where(x > 0, 0.3, 0.0).to(x.dtype), z + 1000.0

    module = make_fx(step)(torch.rand(3, dtype=torch.bfloat16))
    facts = infer(module.graph, {})
    results: Any = module.graph.output_node().args[0]
    scaled, rounded, _, large = (facts[node] for node in results)
    assert scaled.values == (0.0, torch.tensor(0.9, dtype=torch.bfloat16).item())
    assert scaled.codec == "two"
    assert not rounded.known  # 1 after rounding, 1.001 where inductor keeps it in float32
    assert holds(large, step(torch.rand(3, dtype=torch.bfloat16))[3])


@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_surrogate_spike_is_proved(decompose: bool, dtype: torch.dtype) -> None:
    def step(v: Tensor, z: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.9 * v * (1 - z) + x + z @ w
        return v, Spike.apply(v - 1)  # type: ignore[no-untyped-call]

    inputs = [torch.rand(*shape, dtype=dtype) for shape in ((2, 3), (2, 3), (2, 3), (3, 3))]
    table = select_decomp_table() if decompose else None
    graph = make_fx(step, decomposition_table=table, tracing_mode="fake")(*inputs).graph
    results: Any = graph.output_node().args[0]
    facts = infer(graph, {})
    assert [facts[node].codec for node in results] == ["sparse", "bits"]
    assert facts[results[1]].binary
    carries = infer_carries(graph, graph.find_nodes(op="placeholder")[:2], results)
    assert [fact.codec for fact in carries] == ["sparse", "bits"]
    replay = infer(graph, dict(zip(graph.find_nodes(op="placeholder"), carries, strict=False)))
    reset = next(node for node in graph.nodes if "sub" in node.name)
    assert replay[reset].binary


def test_carries_are_inductive() -> None:
    """What holds of an initial carry that satisfies the facts holds after every step."""

    def step(ever: Tensor, count: Tensor, total: Tensor, trace: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        z = (x > 0).float()
        count = torch.clamp(count - 1 + 5 * z, 0, 5)
        return torch.maximum(ever, z), count, total + 1, 0.9 * trace + z

    state: tuple[Tensor, ...] = (torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64), torch.zeros(4))
    module = make_fx(step)(*state, torch.rand(4))
    results: Any = module.graph.output_node().args[0]
    carries = infer_carries(module.graph, module.graph.find_nodes(op="placeholder")[:4], results)
    assert [fact.describe() for fact in carries] == ["{0, 1}", "integers in [0, 5]", "unknown", "unknown"]
    assert [fact.codec for fact in carries] == ["bits", "small", "sparse", "sparse"]
    for _ in range(30):
        state = module(*state, torch.randn(4))
        assert all(map(holds, carries, state))
        assert encode(state[0], carries[0].codec).codec == "bits"


def test_in_place_writes_end_the_analysis() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        z = (x > 0).float()
        view = z[0]
        view.add_(x[1])
        return z, x > 0

    assert outputs_of(step, torch.rand(2, 3)) == ["unknown", "boolean"]


def test_parameters_are_no_constants() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    graph = make_fx(lambda x: module.weight.detach() * 1)(torch.rand(1)).graph
    assert not infer(graph, {})[graph.output_node().args[0]].known  # type: ignore[index]


def test_facts_join() -> None:
    one, half = constants(torch.float32, [0, 1]), constants(torch.float32, [0.5])
    assert one.join(constants(torch.float32, [1])) == one
    assert not one.join(half).known
    assert one.join(integers(torch.float32, -2, 0)) == integers(torch.float32, -2, 1)
    assert not one.join(constants(torch.float64, [1])).known
    assert constants(torch.float32, [0.0]) != constants(torch.float32, [-0.0])
    assert not constants(torch.float32, [float("nan")]).known
    assert not integers(torch.bfloat16, 0, 300).known
    assert integers(torch.int64, 0, 1).binary
    assert not integers(torch.int64, 0, 1 << 15).known
    assert not integers(torch.uint8, -1, 5).known
    for left, right in itertools.combinations([one, half, Fact(torch.float32), integers(torch.float32, 0, 9)], 2):
        assert left.join(right) == right.join(left)


def test_no_fake_tensor_gets_in() -> None:
    """A compiler calls the analysis under its fake mode."""
    graph = make_fx(lambda x: (x > 0).float() * 0.5)(torch.rand(3)).graph
    with FakeTensorMode():
        facts = infer(graph, {})
        assert facts[graph.output_node().args[0]].values == (0.0, 0.5)  # type: ignore[index]
        assert constants(torch.float32, [1]).join(bits(torch.float32)).describe() == "{0, 1}"


def test_tuples_of_other_operations_are_unknown() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        z = (x > 0).float()
        return z.max(0)[0], z.chunk(2)[0]

    assert outputs_of(step, torch.rand(2, 3)) == ["unknown", "{0, 1}"]
