"""Codecs that round: what they hold, that the forward stays exact, and that the error of gradients is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import reroll
from bits import DTYPES, same
from named_networks import EAGER, B, Captured, H, I, Lstm, Odd, Tanh
from reroll.backends.codecs.codec import CODECS, decode, encode
from reroll.backends.codecs.rounding import exactly
from reroll.backends.construct.build import build
from reroll.backends.runtime.node import RecurrenceModule
from reroll.errors import OptionError, StorageError, UnsupportedError
from reroll.planning.options import Options
from reroll.program.program import offload, save
from reroll.segment.facts import FLOATS, LOSSY

NAN, INFINITY, LARGE, TINY = float("nan"), float("inf"), 3.4028234e38, 1e-45


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_is_bounded(codec: str, dtype: torch.dtype) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 200), st.integers(0, 2**31), st.sampled_from([1.0, 1e-6, 1e4]))
    def check(numel: int, seed: int, scale: float) -> None:
        noise = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        tensor = (noise * scale).to(dtype)
        encoded = encode(tensor, codec)
        back = decode(encoded)
        assert back.dtype == dtype
        assert encoded.nbytes <= CODECS.find(codec).nbytes(numel, dtype) <= tensor.nbytes
        wide, found = tensor.double(), back.double()
        if codec == "int8":
            padded = torch.nn.functional.pad(wide.abs(), (0, -numel % 64)).view(-1, 64)
            within = (padded.amax(1, keepdim=True) / 254).expand_as(padded).reshape(-1)[:numel]
        else:
            within = wide.abs() / 256
        unit = torch.finfo(dtype)
        assert ((found - wide).abs() <= within * (1 + 1e-6) + 2 * unit.eps * wide.abs() + unit.smallest_normal).all()

    check()


@pytest.mark.parametrize(
    ("codec", "values", "found"),
    [
        ("bfloat16", [1.0, -0.0, TINY, 2.0, 1e-40, 3.0], [1.0, -0.0, 0.0, 2.0, 9.183549615799121e-41, 3.0]),
        ("int8", [9.0, -0.0, TINY, 127.0, -63.2, 1e-40], [9.0, 0.0, 0.0, 127.0, -63.0, 0.0]),
        ("int8", [TINY] * 70 + [1.0] * 5, [0.0] * 70 + [1.0] * 5),
        *((codec, [3.3, value], [3.3, value]) for codec in LOSSY for value in (NAN, INFINITY, -INFINITY, LARGE)),
    ],
)
def test_special_values(codec: str, values: list[float], found: list[float]) -> None:
    assert same(decode(encode(torch.tensor(values), codec)), torch.tensor(found))


@pytest.mark.parametrize("codec", LOSSY)
def test_what_need_not_be_rounded_is_not(codec: str) -> None:
    for dtype in [each for each in DTYPES if each not in FLOATS]:
        tensor = torch.arange(100).to(dtype)
        assert same(decode(encode(tensor, codec)), tensor)
    half = torch.randn(100, dtype=torch.float16)
    assert same(decode(encode(half, "bfloat16")), half)
    mostly_zero = torch.zeros(1000)
    mostly_zero[::200] = torch.randn(5)
    assert same(decode(encode(mostly_zero, codec)), mostly_zero)
    one = torch.randn(1, dtype=torch.float64)
    assert encode(one, codec).nbytes <= one.nbytes
    assert CODECS.find(codec).nbytes(1, one.dtype) == {"bfloat16": 2, "int8": 8}[codec]
    with exactly():
        assert same(decode(encode(one.expand(70), codec)), one.repeat(70))


def test_a_name_that_nothing_rounds_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSY, "float8", 1)
    with pytest.raises(StorageError, match="There is no codec 'float8'"):
        encode(torch.randn(100), "float8")


@pytest.mark.parametrize("codec", LOSSY)
def test_layouts_stay(codec: str) -> None:
    base = torch.randn(3, 5, 4, 7)
    for tensor in (base.permute(2, 0, 3, 1), base[:0], base[1, 2, 3, 4]):
        back = decode(encode(tensor, codec))
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        torch.testing.assert_close(back, tensor, rtol=0, atol=float(base.abs().max()) / 128)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("codec", LOSSY)
def test_gradients_are_near_and_bytes_are_those_predicted(codec: str) -> None:
    plain, _ = Captured.of(Lstm).run()
    loop, error = Captured.of(Lstm).run(codec=codec)
    assert 1e-8 < error < 1e-2
    assert loop.prediction.peak < plain.prediction.peak
    assert {line.codec for line in loop.carries} == {codec}
    carries, nbytes, kept = loop.kept
    assert kept == carries * sum(line.kept for line in loop.carries) < nbytes
    with exactly():
        assert Captured.of(Lstm).run(codec=codec)[1] < 1e-13


@pytest.mark.usefixtures("double_precision")
def test_spikes_are_kept_in_bits_and_accumulators_rounded() -> None:
    loop, _ = Captured.of(Odd).run(codec="int8")
    assert {line.codec for line in loop.carries} == {"int8"}
    loop, error = Captured.of(Late).run(codec="int8")
    assert {line.name[6:7]: line.codec for line in loop.carries} == {"v": "int8", "z": "bits"}
    assert error < 0.5


class Late(nn.Module):
    """Spikes that are carried, as the threshold comes at the end of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(I, H), nn.Linear(H, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        v_BH, z_BH = x_TBI.new_zeros(B, H), x_TBI.new_zeros(B, H)
        for x_BI in x_TBI:
            drive_BH = self.i(x_BI) + self.h(z_BH)
            z_BH = (v_BH > 0.1).to(v_BH.dtype)
            v_BH = 0.9 * v_BH + drive_BH
        return v_BH * (1 + z_BH)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "double_merged", "segment": 1, "slots": 2}, {"schedule": "double", "segment": 1, "slots": 2}],
)
def test_the_forward_is_exact(options: dict[str, Any]) -> None:
    (recurrence,) = Captured.of(Tanh).found.recurrences
    results, codecs = [], set[Any]()
    for codec in ("auto", "int8"):
        built = build(recurrence, Options(**EAGER | options | {"codec": codec}))
        kept = [node for node in built.plan.program.graph.nodes if node.target in (save, offload)]
        codecs |= {node.kwargs["codec"] for node in kept if node.kwargs}  # the first carry is there anyway
        torch.manual_seed(1)
        operands = [torch.randn(each.shape).requires_grad_(each.requires_grad) for each in recurrence.examples]
        results.append(RecurrenceModule(built.executable)(*operands))
    assert ("int8",) in codecs
    assert all(map(torch.equal, *results))


def test_the_error_of_gradients_is_measured_and_reported() -> None:
    model, x_TBI = Restless(), torch.randn(24, B, I)
    fast = reroll.compile(model, **EAGER, codec="int8")
    assert "so gradients are approximate: reroll.gradient_error says" in text_of(fast, x_TBI)
    before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    found = reroll.gradient_error(fast, x_TBI, loss=lambda result: result.sum())
    assert 1e-6 < found.total < 0.1
    assert set(found.tensors) == {name for name, _ in model.named_parameters()}
    assert f"off by {found.total:.2g} of their norm, measured" in text_of(fast, x_TBI)
    assert str(found).splitlines()[0] == f"{found.total:.2e}  all gradients"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[1])


def text_of(fast: Any, x_TBI: Tensor) -> str:
    return " ".join(str(reroll.explain(fast, x_TBI)).replace("│", " ").split())


class Restless(Tanh):
    """A hidden state in a buffer, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_TBI: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x_TBI + 0.1 * torch.randn_like(x_TBI)) @ self.o.weight.t() + self.o.bias


def test_no_error_without_rounding_and_no_gradient_without_leaves() -> None:
    weight, x_TBI = torch.randn(H, H, requires_grad=True), torch.randn(12, B, H)

    def loop(x_TBI: Tensor) -> Tensor:
        h_BH = torch.zeros_like(x_TBI[0])
        for x_BH in x_TBI:
            h_BH = torch.tanh(h_BH @ weight + x_BH)
        return h_BH

    fast = torch.compile(loop, backend="reroll", options=EAGER)
    found = reroll.gradient_error(fast, x_TBI)
    assert (found.total, list(found.tensors.values())) == (0, [0])
    weight.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="found no parameter and no input that needs a gradient"):
        reroll.gradient_error(fast, x_TBI)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"codec": "int8", "verify": True}, "codec='int8' rounds kept carries, and verify=True asks"),
        ({"codec": "bfloat16", "schedule": "store_all"}, "codec='bfloat16' has no effect with schedule='store_all'"),
    ],
)
def test_contradictions(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=f"Contradictory options: {sentence}"):
        Options.of(options)
