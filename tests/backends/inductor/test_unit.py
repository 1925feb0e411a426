"""Kernels of a graph are one translation unit, and what was found out of a machine is not found out again."""

from __future__ import annotations

import io
import shutil
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

import reroll
import reroll.backends.inductor.unit as toolchain
import reroll.backends.progress
from reroll.backends.inductor.unit import Unit
from reroll.backends.progress import hinting, progress
from reroll.errors import LengthError, RerollWarning

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


def trained() -> tuple[Tensor, Tensor, int]:
    """The gradient of the weight, eager's, and how many translation units were built for it."""
    x_TBH, w_HH = torch.randn(12, 2, 5), torch.randn(5, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(loop(x_TBH, w_HH).square().sum(), w_HH)
    fast: Any = torch.compile(loop, backend="reroll", options={"segment": 4})
    with mock.patch.object(Bindings, "load_async", wraps=Bindings.load_async) as load:
        (found,) = torch.autograd.grad(fast(x_TBH, w_HH).square().sum(), w_HH)
    return found, expected, load.call_count


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


class Isa:
    def build_arch_flags(self) -> str:
        return "march=any"


@needs_compiler
@pytest.mark.usefixtures("empty_cache")
def test_a_probe_that_succeeded_is_not_repeated() -> None:
    probe = mock.Mock(side_effect=[False, True])
    remembered = toolchain._remembered(probe)
    assert [remembered(Isa(), "code") for _ in range(3)] == [False, True, True]
    assert probe.call_count == 2
    probe.side_effect = [False]
    with mock.patch.object(toolchain, "_cpu", return_value="another"):
        assert not remembered(Isa(), "code")


def shown(seconds: float, *, terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with mock.patch.object(reroll.backends.progress, "PATIENCE", 0.01), progress("compiling", console):
        time.sleep(seconds)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_long_compilation_says_so_on_a_terminal_only() -> None:
    assert "compiling" in shown(0.3, terminal=True)
    assert not shown(0.0, terminal=True)
    assert not shown(0.3, terminal=False)


def test_a_hint_is_given_unless_it_is_called_off() -> None:
    short = mock.patch.object(reroll.backends.progress, "LONG", 0.02)
    with short, pytest.warns(RerollWarning, match="is it this"), hinting(lambda: "is it this?", wanted=True):
        time.sleep(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wanted in (True, False):
            with mock.patch.object(reroll.backends.progress, "LONG", 0.05), hinting(lambda: "no", wanted=wanted) as off:
                off()
                time.sleep(0.1)


def test_a_wrong_time_dim_is_told_while_the_model_is_read() -> None:
    class Slow(nn.Module):
        def forward(self, x_TBH: Tensor) -> Tensor:
            h_BH = x_TBH.new_zeros(x_TBH.shape[1:])
            for x_BH in x_TBH:
                h_BH = torch.tanh(x_BH + h_BH)
            return h_BH

    model = reroll.compile(Slow(), time_dim=1, lowering="eager")
    told = r"time_dim names dimension 1 of \[30, 4, 3\]"
    short = mock.patch.object(reroll.backends.progress, "LONG", 0.001)
    with short, pytest.warns(RerollWarning, match=told), pytest.raises(LengthError):
        model(torch.randn(30, 4, 3, requires_grad=True))
