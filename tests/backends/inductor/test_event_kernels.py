"""The kernels of event products give what torch's dense products give, on any operand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

import reroll
from reroll.backends.inductor import event_counts as events
from reroll.segment import ops as event_ops

pytestmark = pytest.mark.inductor
SIZES = [(1, 1, 1), (3, 5, 7), (2, 16, 33), (4, 17, 64), (5, 40, 300), (32, 64, 256), (7, 3, 1)]
ops = torch.ops.reroll


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    assert events.built()


def spikes(rows: int, columns: int, density: float, dtype: torch.dtype) -> Tensor:
    return (torch.rand(rows, columns) < density).to(dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-4}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_right_for_odd_sizes(sizes: tuple[int, int, int], density: float, dtype: torch.dtype) -> None:
    m, k, n = sizes
    z, w, g, bias = spikes(m, k, density, dtype), *(torch.randn(s, dtype=dtype) for s in ((k, n), (m, n), (n,)))
    for crossover in (1.0, 0.5, 0.0):
        close(ops.event_product(None, z, w, crossover, 0), z @ w)
        close(ops.event_product(bias, z, w, crossover, 0), z @ w + bias)
        close(ops.event_outer(z, g, crossover, 0), z.T @ g)
        before = torch.randn(k, n, dtype=dtype)
        total = before.clone()
        added = ops.event_outer_add(total, z, g, crossover, 0)
        assert added == (z.count_nonzero() <= crossover * z.numel())
        close(total, before + z.T @ g if added else before)


def test_they_take_any_values_and_layouts() -> None:
    z = torch.randn(6, 20, dtype=torch.float64) * spikes(6, 20, 0.2, torch.float64)
    w, g = torch.randn(9, 20, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    wide = torch.zeros(6, 40, dtype=torch.float64)
    wide[:, ::2] = z
    for operand in (z, z.T.contiguous().T, wide[:, ::2]):
        close(ops.event_product(None, operand, w.T, 1.0, 0), z @ w.T)
        close(ops.event_outer(operand, g.T, 1.0, 0), z.T @ g.T)
    assert torch.equal(ops.event_rows(w.T), w.T)
    assert ops.event_rows(w.T).is_contiguous()


def test_what_is_no_number_is_no_zero() -> None:
    z, w = torch.zeros(2, 40), torch.randn(40, 50)
    z[0, 3], z[1, 39] = float("nan"), float("inf")
    product, outer = ops.event_product(None, z, w, 1.0, 0), ops.event_outer(z, torch.ones(2, 3), 1.0, 0)
    assert product[0].isnan().all()
    assert torch.equal(product[1], float("inf") * w[39])
    assert outer[3].isnan().all()
    assert outer[39].isinf().all()


def test_a_sum_is_the_same_beside_other_rows_and_on_several_threads() -> None:
    z, w = spikes(64, 300, 0.2, torch.float32), torch.randn(300, 270)
    threads, whole = torch.get_num_threads(), ops.event_product(None, z, w, 1.0, 0)
    outer = ops.event_outer(z, z, 1.0, 0)
    for row in range(3):
        assert torch.equal(ops.event_product(None, z[row : row + 1], w, 1.0, 0)[0], whole[row])
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.event_product(None, z, w, 1.0, 0), whole)
        assert torch.equal(ops.event_outer(z, z, 1.0, 0), outer)
    finally:
        torch.set_num_threads(threads)


def test_dense_operands_are_multiplied_by_torch() -> None:
    z, w, bias = torch.randn(32, 100), torch.randn(100, 90), torch.randn(90)
    assert torch.equal(ops.event_product(bias, z, w, 0.3, 0), torch.addmm(bias, z, w))
    assert torch.equal(ops.event_product(None, z, w, 0.3, 0), z @ w)
    assert torch.equal(ops.event_outer(z, z, 0.3, 0), z.T @ z)


def test_counts_are_of_this_thread_and_of_one_table() -> None:
    counts = torch.zeros(2, 4, dtype=torch.int64)
    z = torch.zeros(4, 10)
    z[0, :5] = 1
    ops.event_product(None, z, torch.ones(10, 3), 0.5, 1)
    ops.event_count(counts)
    ops.event_product(None, z, torch.ones(10, 3), 0.5, 1)
    ops.event_outer(z, torch.ones(4, 3), 0.01, 0)
    ops.event_count(counts[:0])
    ops.event_outer(z, torch.ones(4, 3), 0.01, 0)
    assert counts.tolist() == [[1, 0, 40, 5], [1, 1, 40, 5]]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(RuntimeError, match="float32 and float64"):
        ops.event_product(None, torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16), 1.0, 0)


def test_operands_that_do_not_fit_are_refused() -> None:
    z, w = torch.ones(4, 6), torch.ones(6, 5)
    for bias, left, right in ((torch.ones(1), z, w), (None, z, w.T), (None, z[0], w), (None, z, w.double())):
        with pytest.raises(RuntimeError, match="operands of an event product"):
            ops.event_product(bias, left, right, 1.0, 0)
    for other in (torch.ones(5, 3), torch.ones(4), torch.ones(4, 3).double()):
        with pytest.raises(RuntimeError, match="operands of an event product"):
            ops.event_outer(z, other, 1.0, 0)
    for total in (torch.ones(3, 6).T, torch.ones(6, 4), torch.ones(6, 3).double()):
        with pytest.raises(RuntimeError, match="operands of an event product"):
            ops.event_outer_add(total, z, torch.ones(4, 3), 1.0, 0)


def test_operations_are_what_their_schemas_and_fakes_say() -> None:
    z, w = spikes(4, 6, 0.3, torch.float32), torch.randn(6, 5)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.event_product, (torch.randn(5), z, w, 0.3, 0)),
        (ops.event_product, (None, z, w.T.contiguous().T, 0.3, 0)),
        (ops.event_outer, (z, torch.randn(4, 3), 0.3, 0)),
        (ops.event_rows, (w.T,)),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_torch_alone_gives_the_same() -> None:
    z, w, bias = spikes(4, 6, 0.3, torch.float64), torch.randn(6, 5, dtype=torch.float64), torch.randn(5).double()
    close(event_ops._product(bias, z, w, 0.3, 0), ops.event_product(bias, z, w, 1.0, 0))
    close(event_ops._product(None, z, w, 0.3, 0), ops.event_product(None, z, w, 1.0, 0))
    close(event_ops._outer(z, z, 0.3, 0), ops.event_outer(z, z, 1.0, 0))
    assert torch.equal(event_ops._rows(w.T), w.T)


def test_kernels_that_cannot_be_built_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = mock.Mock(side_effect=CppCompileError(["g++"], "no such instruction"))
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", failing)
    _forget()
    try:
        with pytest.warns(reroll.RerollWarning, match="(?s)dense products.*no such instruction"):
            assert not events.built()
        assert not events.built()
        assert failing.call_count == 1  # the second time nothing is tried
    finally:
        _forget()


def _forget() -> None:
    events.built.cache_clear()
    events.building.cache_clear()
