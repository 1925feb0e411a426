"""What is compiled for some sizes serves others: the same results, and nothing is built again."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from pairs import Spike
from reroll.backends.inductor import half
from reroll.backends.inductor.sizes import family
from reroll.backends.inductor.sizes.fit import Fit, Form, fit
from reroll.backends.inductor.sizes.numbers import Numbered, numbered
from reroll.backends.inductor.wrapper_codegen.concrete import at_sizes
from reroll.backends.inductor.wrapper_codegen.unit import Unit
from reroll.segment.ops import PACKED_PRODUCT

pytestmark = pytest.mark.inductor


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    family.forget()
    yield
    family.forget()


def test_random_forms_are_found_again() -> None:
    """From a few graphs with other sizes: all numbers of one more graph are foretold."""
    for seed in range(500):
        draw = random.Random(seed)
        count = draw.choice([1, 1, 2])
        forms = [Form((at,), 1, 0) for at in range(count)]
        for _ in range(draw.randint(1, 12)):
            of = tuple(sorted(draw.randrange(count) for _ in range(draw.choice([0, 1, 1, 2]))))
            forms.append(Form(of, draw.randint(1, 9) if of else 0, draw.randint(0, 9) if len(of) < 2 else 0))
        sizes = [tuple(draw.sample(range(2, 400), count)) for _ in range(4)]
        samples = [tuple(form(each) for form in forms) for each in sizes]
        found = fit(samples[:-1], range(count))
        assert found is not None, seed
        assert found.holds(samples[-1]), (seed, forms, found)


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        ([(3, 7), (3, 7)], "nothing changes"),
        ([(1, 8), (4, 32)], "a size of 1"),
        ([(0, 8), (4, 32)], "a size of 0"),
        ([(8, 3), (16, 5), (24, 9)], "a number that follows no rule"),
        ([(8, 16), (16, 8)], "a number that falls"),
        ([(8, 0.3), (16, 0.7)], "a number that is not whole, nor a ratio"),
        ([(8, 2.8), (16, 4.0)], "a root"),
        ([(8, 0.5), (16, 1.5)], "a number on both sides of 1"),
    ],
)
def test_what_follows_no_rule_is_left(samples: list[tuple[int | float, ...]], why: str) -> None:
    if why in NO_SIZE:
        assert fit(samples, [0]) is None
        return
    with pytest.raises(ValueError, match="follows none of the sizes"):
        fit(samples, [0])


NO_SIZE = ("nothing changes", "a size of 1", "a size of 0")


def test_parts_of_sizes_are_found() -> None:
    def numbers(rows: int) -> tuple[int, ...]:
        return rows, rows // 2, rows - rows // 2, rows // 3, 3 * rows // 4, 2 * (rows // 2)

    found = fit([numbers(7), numbers(12), numbers(10), numbers(15)], [0])
    assert found is not None
    assert all(found.holds(numbers(rows)) for rows in range(2, 60))


def test_sizes_that_change_by_chance_as_one_are_told_apart() -> None:
    joint = fit([(8, 16), (16, 32)], [0, 1])
    assert joint is not None
    assert len(joint.bases) == 1
    assert not joint.holds((24, 40))
    apart = fit([(8, 16), (16, 32), (24, 40)], [0, 1])
    assert apart is not None
    assert len(apart.bases) == 2


def test_means_and_variances_are_ratios_of_sizes() -> None:
    def numbers(rows: int) -> tuple[int | float, ...]:
        return rows, 6 * rows, 1 / (6 * rows), 6 * rows / (6 * rows - 1), 0.9, float(rows)

    found = fit([numbers(4), numbers(7)], [0])
    assert found is not None
    assert found.holds(numbers(49))
    assert not found.holds((*numbers(49)[:2], 1 / 293, *numbers(49)[3:]))


def test_models_that_differ_in_a_constant_share_by_sizes_alone() -> None:
    """One of them is no sample for the other: a constant follows no size."""
    first, other = [(8, 16, 0.3), (16, 32, 0.3)], [(8, 16, 0.7), (16, 32, 0.7)]
    one = family.Family(samples=[first[0], other[0]])
    found = family._fitted(one, Numbered((), first[1], (0, 1)))
    assert found is not None
    assert found.holds((10, 20, 0.3))
    assert not found.holds((10, 20, 0.7))
    with pytest.raises(ValueError, match="follows none of the sizes"):
        family._fitted(one, Numbered((), (12, 24, 0.9), (0, 1)))


def test_a_size_below_two_is_not_served() -> None:
    assert Fit((0,), (Form((0,), 1, 0),)).holds((2,))
    assert not Fit((0,), (Form((0,), 1, 0),)).holds((1,))


WRAPPER = """
def call(args):
    reroll_size_0, primals_1, primals_2 = args
    args.clear()
    s56 = reroll_size_0
    assert_size_stride(primals_2, (1, s56, 32), (32*s56, 32, 1), 'input')
    buf0 = empty_strided_cpu((s56, 192), (192, 1), torch.float32)  # made
    cpp_fused_0(primals_1, reinterpret_tensor(buf0, (s56 // 2, 64), (192, 1), 64*s56 - 64), max(4, s56)); del buf0
    return (buf0, )
"""


def test_a_wrapper_with_symbols_is_one_for_given_sizes() -> None:
    assert (
        at_sizes(WRAPPER, {"reroll_size_0": 24})
        == """
def call(args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_2, (1, 24, 32), (768, 32, 1), 'input')
    buf0 = empty_strided_cpu((24, 192), (192, 1), torch.float32)
    cpp_fused_0(primals_1, reinterpret_tensor(buf0, (12, 64), (192, 1), 1472), 24); del buf0
    return (buf0, )
"""
    )
    assert at_sizes("def other():\n    pass\n", {"reroll_size_0": 24}) is None
    assert at_sizes("def call(args):\n    return (args, )\n", {"reroll_size_0": 24}) is None


def test_the_structure_of_a_graph_has_all_but_its_numbers() -> None:
    def graph(rows: int, value: Any = 2.0, dim: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        made = torch.fx.Graph()
        x = made.placeholder("x")
        x.meta["val"] = torch.empty(rows, 3, dtype=dtype)
        y = made.call_function(torch.ops.aten.mul.Tensor, (x, value))
        made.output((made.call_function(torch.ops.aten.sum.dim_IntList, (y, [dim])),))
        return numbered(made)

    first = graph(4)
    assert first.numbers == (4, 3, 3, 1, 2.0, 0)
    assert first.sizes == (0, 1)
    assert graph(5).structure == first.structure == graph(4, dim=1, value=0.5).structure
    others = [graph(4, dtype=torch.float64), *(graph(4, value=each) for each in (2, True, 0.0, -0.0, float("inf")))]
    assert first.structure not in [each.structure for each in others]
    assert len({each.structure for each in others}) == len(others)


def test_packed_weights_of_other_shapes_are_of_another_structure() -> None:
    def graph(rows: int, depth: int, columns: int) -> Any:
        made = torch.fx.Graph()
        x, panels = made.placeholder("x"), made.placeholder("panels")
        x.meta["val"], panels.meta["val"] = torch.empty(rows, depth), torch.empty(1, depth, 16)
        y = made.call_function(PACKED_PRODUCT, (x, panels, columns, 1))
        y.meta["val"] = torch.empty(rows, columns)
        made.output((y,))
        return numbered(made)

    first = graph(4, 8, 16)
    assert graph(5, 8, 16).structure == first.structure
    assert first.structure not in (graph(4, 6, 16).structure, graph(4, 8, 32).structure)


class Cell(nn.Module):
    """A GRU cell, or a spiking one, of which the loss is made around the loop."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.cell = kind, nn.GRUCell(3, 16)
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.fc, self.rec, self.norm, self.out = (
            nn.Linear(3, 16),
            nn.Linear(16, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 16)
        if self.kind == "conv":
            state = x.new_zeros(x.shape[1], 4, 5, 5)
        total = x.new_zeros(())
        for t in range(x.shape[0]):
            state = getattr(self, f"_{self.kind}")(x[t], state)
            total = total + state.square().mean()
        return total / x.shape[0] if self.kind == "conv" else self.out(state).sum(0) + total

    def _gru(self, x: Tensor, state: Tensor) -> Tensor:
        made: Tensor = self.cell(x, state)
        return made

    def _spiking(self, x: Tensor, state: Tensor) -> Tensor:
        z: Tensor = Spike.apply(state - 0.3)  # type: ignore[no-untyped-call]
        made: Tensor = 0.9 * state * (1 - z) + self.fc(x) + self.rec(z)
        return made

    def _norm(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.fc(x) + self.rec(state)))

    def _rows(self, x: Tensor, state: Tensor) -> Tensor:
        """Rows of the batch meet: attention among them, and a mean over them."""
        score = torch.softmax(state @ state.t() / state.shape[0], 1)
        return torch.tanh(self.fc(x) + score @ state - state.mean(0) + state.cumsum(0) / state.shape[0])

    def _conv(self, x: Tensor, state: Tensor) -> Tensor:
        image: Tensor = x[:, :1, None, None].expand(x.shape[0], 2, 5, 5)
        return 0.5 * state + torch.relu(self.conv(image)) * torch.sigmoid(state.flatten(1).view(-1, 4, 5, 5))


class Layers(nn.Module):
    """Two layers, of which the second reads wider rows than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(3, 16, 2, bidirectional=True)  # else the two are one loop

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)[0]
        return made


def gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    result = run(x)
    result.square().sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


LONGER = [pytest.param(kind, marks=pytest.mark.campaign) for kind in ("spiking", "rows", "conv", "norm")]
KINDS = ["gru", *LONGER]


@pytest.mark.parametrize("kind", KINDS)
def test_from_the_third_batch_size_on_nothing_is_built(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither inductor nor the C++ compiler is asked, and gradients and buffers are eager's at all sizes."""
    asked = counted(monkeypatch)
    torch.manual_seed(0)
    model, plain = Cell(kind).double(), Cell(kind).double()
    plain.load_state_dict(model.state_dict())
    fast = reroll.compile(model, segment=3)
    before = set[str]()
    for number, batch in enumerate((16, 12, 14, 10, 13)):
        asked.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", reroll.RerollWarning)
            compare(model, fast, plain, torch.randn(14, batch, 3, dtype=torch.float64))
        if number < 2:
            before |= set(asked)
            assert "inductor" in asked
        assert number < 2 or set(asked) <= before - {"inductor"}, batch
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.campaign
def test_layers_of_other_widths_are_no_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have kernels of their own, and share them with other batches."""
    asked = counted(monkeypatch)
    torch.manual_seed(0)
    model, plain = (Layers().double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    fast, first = reroll.compile(model, segment=3), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", reroll.RerollWarning)
        for number, batch in enumerate((16, 12, 14)):
            asked.clear()
            x = torch.randn(12, batch, 3, dtype=torch.float64)
            compare(model, fast, plain, x)
            first = first or asked.count("inductor")
            assert asked.count("inductor") == (0 if number == 2 else first)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_small_batches_give_eagers_gradients(kind: str) -> None:
    model, plain = Cell(kind).double(), Cell(kind).double()
    plain.load_state_dict(model.state_dict())
    fast = reroll.compile(model, segment=3)
    for batch in (6, 4, 1, 2, 3, 6):
        if kind != "norm" or batch > 1:  # eager refuses to norm one row
            compare(model, fast, plain, torch.randn(14, batch, 3, dtype=torch.float64))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that is told of each time that inductor is asked, and of all C++ that is asked for."""
    asked, compiles, source = list[str](), half.compile_half, Unit._source

    def compiled(*args: Any, **kwargs: Any) -> Any:
        asked.append("inductor")
        return compiles(*args, **kwargs)

    def text(unit: Unit) -> str:
        asked.append(source(unit))
        return asked[-1]

    monkeypatch.setattr(family, "compile_half", compiled)
    monkeypatch.setattr(Unit, "_source", text)
    return asked


def compare(model: nn.Module, fast: Any, plain: nn.Module, x: Tensor) -> None:
    for found, expected in zip(gradients(model, fast, x), gradients(plain, plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Reader(nn.Module):
    """Attention over all states of an encoder: a value of each step is as large as the sequence is long."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.query = nn.GRUCell(3, 8), nn.GRUCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, states, read = x.new_zeros(x.shape[1], 8), [], []
        for t in range(x.shape[0]):
            state = self.encoder(x[t], state)
            states.append(state)
        memory = torch.stack(states)
        for _ in range(x.shape[0]):
            weight = torch.softmax((memory * self.query(state)).sum(-1), 0)
            state = self.decoder((weight.unsqueeze(-1) * memory).sum(0), state)
            read.append(state)
        return torch.stack(read).mean(0)


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:Every step of the loop")
def test_attention_builds_nothing_from_the_third_length_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    model, plain = Reader().double(), Reader().double()
    plain.load_state_dict(model.state_dict())
    fast = reroll.compile(model, segment=2)
    for steps, batch in ((20, 4), (24, 4), (30, 4), (26, 4), (26, 6), (28, 6), (32, 5)):
        asked.clear()
        compare(model, fast, plain, torch.randn(steps, batch, 3, dtype=torch.float64))
        assert ("inductor" in asked) == ((steps, batch) in ((20, 4), (24, 4), (26, 6))), (steps, batch)


def test_an_equal_model_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(14, 4, 3, dtype=torch.float64)
    for number in range(2):
        asked = counted(monkeypatch)
        model = Cell("gru").double()
        compare(model, reroll.compile(model, segment=3), model, x)
        assert bool(asked) == (number == 0)


@pytest.mark.campaign
def test_sizes_that_cannot_be_symbols_are_compiled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and gradients are right."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no symbols today")

    monkeypatch.setattr(family, "symbolic", fails)
    monkeypatch.setattr(family, "_TOLD", iter(range(100)))
    model = Cell("gru").double()
    fast = reroll.compile(model, segment=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (4, 5, 6):
            compare(model, fast, model, torch.randn(14, batch, 3, dtype=torch.float64))
    said = [str(each.message) for each in caught if issubclass(each.category, reroll.RerollWarning)]
    assert len(said) == 1
    assert "no symbols today" in said[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dynamic_model_builds_nothing_from_the_second_batch_size_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run of a few steps at another size does to the model is undone."""
    asked = counted(monkeypatch)
    torch.manual_seed(0)
    model, plain = Cell(kind).double(), Cell(kind).double()
    plain.load_state_dict(model.state_dict())
    fast, before = reroll.compile(model, segment=3, dynamic=True), set[str]()
    for number, batch in enumerate((16, 12, 7)):
        asked.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error", reroll.RerollWarning)
            compare(model, fast, plain, torch.randn(14, batch, 3, dtype=torch.float64))
        before |= set(asked) if number == 0 else set()
        assert number == 0 or set(asked) <= before - {"inductor"}, batch
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def started(x: Tensor, h: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    """A loop of which the first state and what is wanted have the batch in a dimension of their own."""
    h = h[0]
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ weight + h)
    return (h - wanted).square().sum()


def test_a_dynamic_function_finds_the_batch_in_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch)
    weight = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    fast = reroll.compile(started, segment=3, dynamic=True)
    for number, batch in enumerate((6, 4, 7)):
        asked.clear()
        sizes = ((batch, 14, 3), (1, batch, 16), (batch, 16))
        x, h, wanted = (torch.randn(*each, dtype=torch.float64, requires_grad=True) for each in sizes)
        found, expected = (
            torch.autograd.grad(run(x, h, weight, wanted), (x, h, weight, wanted)) for run in (fast, started)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert ("inductor" in asked) == (number == 0)


class Narrow(nn.Module):
    """It runs at one batch size alone, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rec = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(8, 16)
        for t in range(x.shape[0]):
            h = torch.tanh(self.rec(h) + x[t].view(8, 16) * torch.rand_like(h))
        return h


def test_a_dynamic_model_of_one_size_is_compiled_for_it_and_says_so() -> None:
    torch.manual_seed(0)
    model = Narrow().double()
    fast, x = reroll.compile(model, segment=3, dynamic=True), torch.randn(14, 8, 16, dtype=torch.float64)
    torch.manual_seed(1)
    with pytest.warns(reroll.RerollWarning, match="dynamic=True: the model runs at no other size"):
        found = gradients(model, fast, x)
    torch.manual_seed(1)
    expected = gradients(model, reroll.compile(model, segment=3), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", reroll.RerollWarning)
        fast(x)  # it is said once
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_dynamic_model_that_fails_late_at_another_size_is_compiled_for_its_own() -> None:
    def model(x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 6)
        for t in range(x.shape[0]):
            h = torch.tanh(x[t] + 0.5 * h)
            if x.shape[1] < 4 and t > 10:
                raise ValueError("three")
        return h

    x = torch.randn(20, 4, 6)
    fast = reroll.compile(model, dynamic=True, segment=2)
    with pytest.warns(reroll.RerollWarning, match="dynamic=True"):
        torch.testing.assert_close(fast(x), model(x))
    torch.testing.assert_close(fast(x), model(x))
