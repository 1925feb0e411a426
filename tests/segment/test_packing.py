"""Packing changes the bytes of a tape and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.segment.packing import pack_saved
from reroll.segment.sparsity import infer

SHAPE = (5, 7)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        z = v > 0.5
        ctx.save_for_backward(z)
        return z.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return torch.where(z, grad * 0.5, grad)


def halves(steps: int, dtype: torch.dtype = torch.float32) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a few steps, by hand: ``s`` and ``b`` are saved as numbers and as booleans."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        bits, saved = [], []
        v = x
        for _ in range(steps):
            b = v > 0.5
            z = b.to(dtype)
            v = v * 0.9 + x - z
            bits.append(b)
            saved.append(z)
        return (v, *saved, v * 2, *bits)

    def backward(*args: Tensor) -> tuple[Tensor, ...]:
        *saved, grad = args
        for value in reversed(saved):
            grad = grad * 0.9 + grad * value
        return (grad,)

    x = torch.randn(SHAPE, dtype=dtype)
    first = make_fx(forward, tracing_mode="fake")(x)
    values: Any = first.graph.output_node().args[0]
    fakes = [torch.empty(SHAPE, dtype=node.meta["val"].dtype) for node in values[1:]]
    second = make_fx(backward, tracing_mode="fake")(*fakes, x)
    for number, (reader, node) in enumerate(zip(second.graph.find_nodes(op="placeholder"), values[1:], strict=False)):
        reader._rename(f"saved_{number}")
        node._rename(f"saved_{number}")
    second.recompile()
    return first, second


def pack(first: fx.GraphModule, second: fx.GraphModule, fixed: int = 1) -> tuple[fx.GraphModule, fx.GraphModule]:
    facts = {node.name: fact for node, fact in infer(first.graph, {}).items()}
    return pack_saved(first, second, fixed, facts)


def tape_bytes(module: fx.GraphModule, fixed: int = 1) -> int:
    return sum(node.meta["val"].nbytes for node in results(module)[fixed:])


def results(module: fx.GraphModule) -> Any:
    return module.graph.output_node().args[0]


@pytest.mark.variants(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 16, 17, 31, 33])
def test_the_same_results(steps: int, dtype: torch.dtype) -> None:
    first, second = halves(steps, dtype)
    packed_first, packed_second = pack(first, second)
    x = 2 * torch.randn(SHAPE, dtype=dtype)
    plain, packed = first(x), packed_first(x)
    assert torch.equal(plain[0], packed[0])
    assert torch.equal(second(*plain[1:], x)[0], packed_second(*packed[1:], x)[0])
    assert sum(tensor.nbytes for tensor in packed[1:]) == tape_bytes(packed_first)
    words = -(-2 * steps // 8)
    assert tape_bytes(packed_first) <= words * x.numel() + x.nbytes
    assert tape_bytes(packed_first) < tape_bytes(first)


def test_the_order_of_what_is_saved_is_kept() -> None:
    first, second = pack(*halves(9))
    saved = [node.name for node in results(first)[1:]]
    readers = [node.name for node in second.graph.find_nodes(op="placeholder")]
    assert saved == readers[:-1]
    assert saved[0].startswith("packed")


def test_every_new_node_has_its_value() -> None:
    for module, example in zip(pack(*halves(33)), halves(33), strict=True):
        for node in module.graph.nodes:
            if node.op != "output":
                assert isinstance(node.meta["val"], FakeTensor), node
        mode = example.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
        assert isinstance(mode, FakeTensorMode)
    first, _ = pack(*halves(33))
    x = torch.randn(SHAPE)
    for result, node in zip(first(x), results(first), strict=True):
        value = node.meta["val"]
        assert (result.shape, result.dtype, result.stride()) == (value.shape, value.dtype, value.stride())


def test_words_waste_less_than_a_byte() -> None:
    sizes = {}
    for steps in (1, 4, 8, 13, 16):
        first, _ = pack(*halves(steps))
        sizes[2 * steps] = (tape_bytes(first) - 4 * 35) / 35
    assert sizes == {2: 1, 8: 1, 16: 2, 26: 4, 32: 4}


def test_the_originals_are_not_touched() -> None:
    first, second = halves(9)
    before = str(first.graph), str(second.graph)
    pack(first, second)
    assert before == (str(first.graph), str(second.graph))


def test_what_is_not_proved_stays() -> None:
    first, second = halves(9)
    packed_first, packed_second = pack_saved(first, second, 1, {})
    assert str(packed_first.graph) == str(first.graph)
    assert str(packed_second.graph) == str(second.graph)


def test_no_truth_values_are_written_as_such_on_a_cpu() -> None:
    """Inductor takes fifty times as long for them as for bytes (``reroll.segment.packing``)."""

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y = x.relu()
        return y, y <= 0

    def backward(mask: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(mask, 0, grad),)

    x = torch.randn(SHAPE)
    first = make_fx(forward, tracing_mode="fake")(x)
    second = make_fx(backward, tracing_mode="fake")(x > 0, x)
    results(first)[1]._rename("mask_1")
    packed, unpacked = pack(first, second)
    assert [node.meta["val"].dtype for node in results(packed)] == [torch.float32, torch.uint8]
    grad = torch.randn(SHAPE)
    assert torch.equal(unpacked(packed(x)[1], grad)[0], torch.where(x > 0, grad, 0))


def test_unlike_tensors_are_not_mixed() -> None:
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x > 0, y > 0, (x > 1).t(), y > 1, (x > 2).t().clone(), x[0] > 0, (x > 3).expand(2, 5, 7)

    def backward(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return (a.float(), b.float(), c.t(), d, e, f, g)

    x, y = torch.randn(5, 7), torch.randn(3)
    first = make_fx(forward, tracing_mode="fake")(x, y)
    plain = first(x, y)
    second = make_fx(backward, tracing_mode="fake")(*plain[1:])
    nodes: Any = first.graph.output_node().args[0]
    for reader, node in zip(second.graph.find_nodes(op="placeholder"), nodes[1:], strict=True):
        reader._rename("reads_" + node.name)
        node._rename(reader.name)
    packed_first, packed_second = pack(first, second)
    packed = packed_first(x, y)
    assert len(packed) < len(plain)
    for left, right in zip(second(*plain[1:]), packed_second(*packed[1:]), strict=True):
        assert torch.equal(left, right)
        assert left.dtype == right.dtype


def test_a_joint_graph_of_torch() -> None:
    from torch._functorch.aot_autograd import aot_export_joint_simple

    def steps(v: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        out = v * 0
        for t in range(12):
            z = Spike.apply(v)  # type: ignore[no-untyped-call]
            v = 0.9 * v * (1 - z) + x[t]
            out = out + z
        return v, out

    v, x = torch.randn(4, 6, requires_grad=True), torch.randn(12, 4, 6, requires_grad=True)
    joint: Any = aot_export_joint_simple(steps, (v, x), trace_joint=True)
    first, second = default_partition(joint, (), num_fwd_outputs=2)
    packed_first, packed_second = pack(first, second, 2)
    plain, packed = first(v.detach(), x.detach()), packed_first(v.detach(), x.detach())
    assert sum(t.nbytes for t in packed[2:]) < sum(t.nbytes for t in plain[2:])
    grads = torch.randn(4, 6), torch.randn(4, 6)
    for left, right in zip(second(*plain[2:], *grads), packed_second(*packed[2:], *grads), strict=True):
        assert torch.equal(left, right)
    expected = torch.autograd.grad(steps(v, x), (v, x), grads)
    for left, right in zip(packed_second(*packed[2:], *grads), expected, strict=True):
        assert torch.allclose(left, right, atol=1e-5)
