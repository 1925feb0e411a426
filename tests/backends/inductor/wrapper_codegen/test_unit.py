"""Kernels of a graph are one translation unit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

from reroll.backends.inductor.sizes.family import forget
from reroll.backends.inductor.wrapper_codegen.unit import Unit
from reroll.errors import RerollWarning

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def loop(x_TBH: Tensor, w_HH: Tensor) -> Tensor:
    """Its segments have several kernels: products are between them."""
    v_BH = torch.zeros_like(x_TBH[0])
    for t in range(x_TBH.shape[0]):
        v_BH = torch.tanh(v_BH @ w_HH + x_TBH[t])
    return v_BH


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    Bindings.cache_clear()
    forget()


def trained() -> tuple[Tensor, Tensor, int]:
    """The gradient of the weight, eager's, and how many translation units were built for it."""
    x_TBH, w_HH = torch.randn(12, 2, 5), torch.randn(5, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(loop(x_TBH, w_HH).square().sum(), w_HH)
    fast: Any = torch.compile(loop, backend="reroll", options={"segment": 4})
    with mock.patch.object(Bindings, "load_async", wraps=Bindings.load_async) as load:
        (found,) = torch.autograd.grad(fast(x_TBH, w_HH).square().sum(), w_HH)
    return found, expected, len({call.args[0] for call in load.call_args_list})


@needs_compiler
@pytest.mark.inductor
@pytest.mark.usefixtures("empty_cache")
def test_the_kernels_of_a_graph_are_one_translation_unit() -> None:
    kernels: list[int] = []
    built = Unit.built

    def counted(unit: Unit) -> list[Any]:
        kernels.append(len(unit.kernels))
        return built(unit)

    with mock.patch.object(Unit, "built", counted):
        found, expected, units = trained()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert units == 2, "forward and backward of a segment"
    assert max(kernels) > 1


@needs_compiler
@pytest.mark.inductor
@pytest.mark.usefixtures("empty_cache")
def test_kernels_that_do_not_compile_together_are_compiled_one_by_one() -> None:
    with (
        mock.patch.object(Unit, "_source", lambda unit: f"this is no C++ {len(unit.kernels)}"),
        pytest.warns(RerollWarning, match="could not be compiled together"),
    ):
        found, expected, units = trained()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert units > 4


def test_equal_kernels_are_one() -> None:
    unit = Unit()
    first, again = (unit.add(("const float*",), 'extern "C" void kernel(const float* a) {}') for _ in range(2))
    other = unit.add(("float*",), 'extern "C" void kernel(float* a) {}')
    assert (first, first.number, other.number) == (again, 0, 1)
