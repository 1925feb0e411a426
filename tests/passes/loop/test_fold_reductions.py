"""Losses, means and sums behind a loop are added up in it, and last rows come from its carries: equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reroll

T, B, N, C = 9, 3, 4, 5
WHOLE = "backend" if torch.__version__ >= "2.13" else "reroll.compile"  # Dynamo keeps torch's layers over time whole
Loss = Callable[[Tensor, Tensor], Any]


class Net(nn.Module):
    """A loop, a readout of all its states, and what a function makes of these and of targets."""

    def __init__(self, end: Loss, layer: type[nn.Module] = nn.GRU, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn, self.readout = layer(N, N, batch_first=batch_first), nn.Linear(N, C)
        self.end = end

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.end(self.readout(self.rnn(x)[0]), target)


class Loop(Net):
    """The same with a Python loop, whose first and last steps are peeled off."""

    def __init__(self, end: Loss) -> None:
        super().__init__(end)
        self.cell = nn.LSTMCell(N, N)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h = x.new_zeros(x.shape[1], N)
        c, past, states = h, 0.0, []
        for t in range(x.shape[0]):
            h, c = self.cell(x[t] + past, (h, c))
            past = 0.9 * past + h  # begins as a number, and nobody reads the last one
            states.append(h)
        return self.end(self.readout(torch.stack(states)), target)


def classes(steps: int = T, batch_first: bool = False) -> Tensor:
    found = torch.randint(C, (B, steps) if batch_first else (steps, B))
    found[0, 1] = -100
    return found


def compared(model: nn.Module, x: Tensor, target: Tensor, door: str = "reroll.compile", **options: Any) -> list[Any]:
    """The loops of a compiled model, whose results and gradients were compared with eager."""
    options = {"lowering": "eager"} | options
    fast: Any = (
        torch.compile(model, backend="reroll", options=options)
        if door == "backend"
        else reroll.compile(model, **options)
    )
    report = reroll.check(fast, x, target, measure=False, strict=True)
    assert report.equal, str(report)
    return [loop.recurrence for loop in reroll.explain(fast, x, target).loops]


pytestmark = pytest.mark.usefixtures("double_precision")
OF_CLASSES: dict[str, Loss] = {
    "cross entropy": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "its sum": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"),
    "smoothed": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.2),
    "another class ignored": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.clamp(0).flatten(), ignore_index=2),
    "classes in dimension 1": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "time in dimension 2": lambda y, t: F.cross_entropy(y.permute(1, 2, 0), t.t()),
    "probabilities": lambda y, t: F.cross_entropy(y.flatten(0, 1), y.detach().mul(2).flatten(0, 1).softmax(-1)),
    "of log_softmax": lambda y, t: F.nll_loss(y.log_softmax(-1).flatten(0, 1), t.flatten()),
    "picked by hand": lambda y, t: -y.log_softmax(-1).mean(),
    "a module": lambda y, t: nn.CrossEntropyLoss(ignore_index=1)(y.reshape(-1, C), t.clamp(0).reshape(-1)),
    "weighted": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=torch.arange(C) * 0.3 + 0.1),
    "weighted, ignored": lambda y, t: F.nll_loss(
        y.log_softmax(-1).flatten(0, 1), t.flatten(), torch.arange(C) * 0.3, ignore_index=-100
    ),
    "weighted sum": lambda y, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), weight=torch.arange(C) + 0.5, reduction="sum"
    ),
    "two of them": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + 0.1 * y.square().mean(),
    "one by one": lambda y, t: {"loss": y.exp().sum(), "each": y.mean(0), "kept": y.sum((0, 2), keepdim=True)},
}
OF_NUMBERS: dict[str, Loss] = {
    "mse": lambda y, t: F.mse_loss(y, t),
    "l1 sum": lambda y, t: F.l1_loss(y, t, reduction="sum"),
    "smooth l1": lambda y, t: F.smooth_l1_loss(y, t, beta=0.5),
    "huber": lambda y, t: F.huber_loss(y.flatten(), t.flatten()),
    "binary": lambda y, t: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    "binary of sigmoid": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t.sigmoid()),
    "weighted by hand": lambda y, t: ((y - t).square() * t.abs()).sum() / t.numel(),
    "a norm": lambda y, t: (y - t).square().sum((0, 2)).sqrt().mean(),
}
NOT: dict[str, Loss] = {
    "states are given too": lambda y, t: (F.cross_entropy(y.flatten(0, 1), t.flatten()), y),
    "weights of smoothed classes": lambda y, t: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), weight=torch.ones(C), label_smoothing=0.1
    ),
    "time is left": lambda y, t: y.sum(2),
    "a product": lambda y, t: y.prod(0),
    "the mean is taken off": lambda y, t: (y - y.mean(0)).square().sum(),
    "a row in between": lambda y, t: y[3],
    "each one": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none"),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", OF_CLASSES.values(), ids=OF_CLASSES)
def test_losses_of_classes(end: Loss) -> None:
    (loop,) = compared(Net(end), torch.randn(T, B, N, requires_grad=True), classes(), WHOLE)
    assert not loop.ys
    assert any(name.startswith("sum_") for name in loop.carries)


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_losses_of_numbers(end: Loss) -> None:
    (loop,) = compared(Net(end), torch.randn(T, B, N), torch.randn(T, B, C, requires_grad=True), WHOLE)
    assert not loop.ys


SHIFTED: dict[str, Loss] = {
    "scores": lambda y, t: F.cross_entropy(y[:-1].flatten(0, 1), t[1:].flatten()),
    "by narrow": lambda y, t: F.cross_entropy(y.narrow(0, 0, y.shape[0] - 2).flatten(0, 1), t[2:].flatten()),
    "in dimension 1": lambda y, t: F.cross_entropy(y[:-1].transpose(1, 2), t[1:]),
    "a mean beside it": lambda y, t: F.cross_entropy(y[:-1].flatten(0, 1), t[1:].flatten()) + y[:-1].square().mean(),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", SHIFTED.values(), ids=SHIFTED)
@pytest.mark.parametrize("kind", [Net, Loop])
def test_each_step_tells_the_next_entry(end: Loss, kind: type[Net]) -> None:
    (loop,) = compared(kind(end), torch.randn(T, B, N, requires_grad=True), classes())
    assert loop.steps < T
    assert not loop.ys
    assert any(name.startswith("sum_") for name in loop.carries)


BESIDE: dict[str, Loss] = {
    "the last row": lambda y, t: (F.cross_entropy(y.flatten(0, 1), t.flatten()), y[-1]),
    "the last row, shifted": lambda y, t: (F.cross_entropy(y[:-1].flatten(0, 1), t[1:].flatten()), y[-1]),
    "a mean of the last row": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + y[-1].square().mean(),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("door", [WHOLE, "reroll.compile"])
def test_a_loss_beside_the_last_row(end: Loss, door: str) -> None:
    (loop,) = compared(Net(end), torch.randn(T, B, N, requires_grad=True), classes(), door)
    assert not loop.ys
    assert any(name.startswith("sum_") for name in loop.carries)


def test_last_steps_that_are_read_besides_stay() -> None:
    def end(y: Tensor, t: Tensor) -> Any:
        return F.cross_entropy(y[:-1].flatten(0, 1), t[1:].flatten()) + y.square().mean()

    (loop,) = compared(Net(end), torch.randn(T, B, N), classes())
    assert loop.ys


@pytest.mark.variants(4)
@pytest.mark.parametrize("end", NOT.values(), ids=NOT)
def test_what_needs_all_steps_stays_behind_the_loop(end: Loss) -> None:
    (loop,) = compared(Net(end), torch.randn(T, B, N), classes(), WHOLE)
    assert loop.ys
    assert not any(name.startswith("sum_") for name in loop.carries)


@pytest.mark.parametrize(
    ("name", "door"),
    [("cross entropy", "reroll.compile"), ("one by one", "backend"), ("classes in dimension 1", "backend")],
)
def test_steps_outside_of_the_loop_are_added_too(name: str, door: str) -> None:
    (loop,) = compared(Loop(OF_CLASSES[name]), torch.randn(T, B, N), classes(), door)
    assert loop.steps < T
    assert not loop.ys


def test_every_length_divides_by_its_own() -> None:
    fast: Any = reroll.compile(Net(OF_CLASSES["cross entropy"]), lowering="eager")
    for steps in (7, 30, 12, 5):
        assert reroll.check(fast, torch.randn(steps, B, N), classes(steps), measure=False, strict=True).equal


def test_time_in_the_middle() -> None:
    model = Net(lambda y, t: F.cross_entropy(y.transpose(1, 2), t), batch_first=True)
    (loop,) = compared(model, torch.randn(B, T, N), classes(batch_first=True))
    assert not loop.ys


@pytest.mark.parametrize(
    ("schedule", "lowering"),
    [
        ("standard", "eager"),
        pytest.param("double", "inductor", marks=pytest.mark.campaign),
        ("revolve", "eager"),
        ("store_all", "eager"),
        ("hierarchical", "eager"),
    ],
)
def test_every_schedule(schedule: str, lowering: str) -> None:
    (loop,) = compared(
        Net(OF_CLASSES["two of them"]), torch.randn(40, B, N), classes(40), schedule=schedule, lowering=lowering
    )
    assert not loop.ys


def test_a_sum_of_many_steps_is_exact_in_single_precision() -> None:
    """The carry has double precision; added up in single precision a million tenths are 1 % off."""
    model = Net(lambda y, t: y.mul(0).add(0.1).mean()).float()
    fast: Any = reroll.compile(model, lowering="eager")
    x = torch.randn(4000, 1, N, dtype=torch.float32)
    result = fast(x, x)
    assert result.dtype == torch.float32
    assert float(result) == pytest.approx(0.1, abs=1e-8)


def test_ignored_everywhere_is_no_number_as_in_eager() -> None:
    model = Net(OF_CLASSES["cross entropy"])
    fast: Any = reroll.compile(model, lowering="eager")
    nothing = torch.full((T, B), -100)
    assert model(torch.randn(T, B, N), nothing).isnan()
    assert fast(torch.randn(T, B, N), nothing).isnan()


def test_numbers_of_events_are_whole() -> None:
    model = Net(lambda y, t: ((y > 0).sum(), y.square().sum()))
    fast: Any = reroll.compile(model, lowering="eager")
    x = torch.randn(T, B, N)
    expected, found = model(x, x)[0], fast(x, x)[0]
    assert found.dtype == torch.int64
    assert torch.equal(expected, found)


LAST: dict[str, Loss] = {
    "the last row": lambda y, t: y[-1],
    "by its number": lambda y, t: y[y.shape[0] - 1].tanh(),
    "after row-wise work": lambda y, t: y.relu().exp()[-1],
    "of a transposed value": lambda y, t: y.transpose(0, 1)[:, -1].sum(),
    "twice": lambda y, t: (y[-1], y.tanh()[-1]),
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("layer", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("end", LAST.values(), ids=LAST)
def test_last_rows_come_from_carries(end: Loss, layer: type[nn.Module]) -> None:
    (loop,) = compared(Net(end, layer), torch.randn(T, B, N), torch.zeros(T), WHOLE)
    assert not loop.ys


@pytest.mark.parametrize("name", ["the last row", "after row-wise work", "twice"])
def test_last_rows_at_any_length(name: str) -> None:
    assert not compared(Net(LAST[name]), torch.randn(T, B, N), torch.zeros(T))[0].ys
    assert not compared(Loop(LAST[name]), torch.randn(T, B, N), torch.zeros(T))[0].ys


@pytest.mark.parametrize(
    "end", [lambda y, t: (y[-1], y), lambda y, t: y[-2], lambda y, t: y[0], lambda y, t: (y[-1], y.sum(2))]
)
def test_more_than_the_last_row_is_held(end: Loss) -> None:
    assert compared(Net(end), torch.randn(T, B, N), torch.zeros(T), WHOLE)[0].ys


@pytest.mark.parametrize("door", ["reroll.compile", "backend"])
def test_the_last_row_lies_as_among_all_rows(door: str) -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor, turned: Tensor) -> Tensor:
            c, found = turned.t(), []
            for t in range(x.shape[0]):
                if t == x.shape[0] - 1:
                    c = c * 0.5
                c = 0.9 * c + 0.5 * x[t]
                found.append(c)
            return torch.stack(found)[-1]

    compared(Turned(), torch.randn(T, B, N), torch.randn(N, B), door)


def test_the_last_row_of_what_is_no_carry_is_held() -> None:
    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(N, N)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            v, outputs = x.new_zeros(x.shape[1], N), []
            for t in range(x.shape[0]):
                v = torch.tanh(self.fc(x[t]) + 0.9 * v)
                outputs.append(torch.sigmoid(v))
            return torch.stack(outputs)[-1]

    assert compared(Spiking(), torch.randn(T, B, N), torch.zeros(T), WHOLE)[0].ys


class Own(nn.Module):
    """A loop whose first state and next states have nothing to do with one another but for whole numbers."""

    def __init__(self, end: Loss) -> None:
        super().__init__()
        self.v, self.table, self.end = nn.Parameter(torch.randn(N)), nn.Embedding(N, N), end

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h, states = self.v.expand(B, N), []
        for t in range(x.shape[0]):
            m = x[t] + h
            h = self.table(h.argmax(1))
            states.append(h)
        return self.end(torch.stack(states), m)


@pytest.mark.parametrize("door", ["reroll.compile", "backend"])
def test_zeros_stay_zeros_where_the_last_row_depends_on_less_than_all(door: str) -> None:
    """Of a stack eager gives every row a gradient, if only zeros; a parameter that only the first row reads has one."""
    (loop,) = compared(Own(lambda y, m: (y[-1], m)), torch.randn(T, B, N), torch.zeros(T), door)
    assert loop.ys


@pytest.mark.parametrize("door", [*dict.fromkeys(["reroll.compile", WHOLE])])
def test_what_stands_before_all_rows_keeps_its_gradient_of_zeros(door: str) -> None:
    class Headed(Net):
        def __init__(self) -> None:
            super().__init__(lambda y, t: y)
            self.head = nn.Parameter(torch.randn(1, 1, N))

        def forward(self, x: Tensor, target: Tensor) -> Any:
            return torch.cat([self.head.expand(1, x.shape[1], N), self.rnn(x)[0]])[-1]

    compared(Headed(), torch.randn(T, B, N), torch.zeros(T), door)


@pytest.mark.variants(4)
@pytest.mark.parametrize(
    "end",
    [
        lambda y, t: (torch.cat([t[:1], y[1:]]) * y)[0],
        lambda y, t: (torch.cat([y[:-1], t[:1]]) + y)[-1],
        lambda y, t: (torch.cat([t[:1], y[:-1]]) * y)[-1],
        lambda y, t: (torch.cat([t[:1], y]) * torch.cat([y, t[:1]]))[0],
        lambda y, t: (torch.cat([t[:1], y]) * torch.cat([y, t[:1]]))[-1],
        lambda y, t: (torch.cat([t[:1], y[1:]]) * y).sum(),
        lambda y, t: (torch.cat([t[:1], y]) * torch.cat([y, t[:1]])).sum(0),
    ],
)
@pytest.mark.parametrize("carried", [True, False])
def test_rows_of_which_another_operand_is_of_the_loop(end: Loss, carried: bool) -> None:
    """Where one operand's row is from outside, the other's may still be one that the loop makes, and not its last."""

    class Joined(Net):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            y = self.rnn(x)[0]
            return self.end(y if carried else y.sigmoid(), target)

    compared(Joined(end), torch.randn(T, B, N), torch.randn(T, B, N), WHOLE)


class Two(nn.Module):
    """Two lists of one value, the first of which is read before the second is made."""

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h, first, second = x.new_zeros(B, N), list[Tensor](), list[Tensor]()
        for t in reversed(range(x.shape[0])):
            h = torch.tanh(0.9 * h + x[t] * 0.5**t)
            first.append(h)
            second.append(h)
        r0 = torch.stack(first)[-1]
        return r0, torch.stack(second)[-1], h


class Noisy(nn.Module):
    """Random numbers that nobody reads are drawn all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            self.drop(x[t])
            h = torch.tanh(h + self.drop(x[t]))
        return h, h * 2


@pytest.mark.parametrize("door", ["reroll.compile", "backend"])
@pytest.mark.parametrize("model", [Two(), Noisy()])
def test_rows_of_nobody_and_of_lists_that_are_made_later(model: nn.Module, door: str) -> None:
    compared(model, torch.randn(T, B, N, requires_grad=True), torch.zeros(T), door)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("end", [lambda y, t: (y + 100).mean(), lambda y, t: F.mse_loss(y * 9, t * 0)])
def test_rows_in_half_precision_do_not_overflow(end: Loss, dtype: torch.dtype) -> None:
    class Half(Net):
        def forward(self, x: Tensor, target: Tensor) -> Any:
            return self.end(self.readout(self.rnn(x)[0]).to(dtype), target.to(dtype))

    model, x, target = Half(end), torch.randn(T, 1000, N), torch.randn(T, 1000, C)
    fast: Any = reroll.compile(model, lowering="eager")
    expected, found = model(x, target), fast(x, target)
    assert found.dtype == dtype
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)


def test_a_table_is_read_in_the_step_and_a_large_one_before_it() -> None:
    class Words(nn.Module):
        def __init__(self, words: int) -> None:
            super().__init__()
            self.table, self.rnn = nn.Embedding(words, N, padding_idx=0), nn.GRU(N, N)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.rnn(self.table(x))[0].square().mean()  # type: ignore[no-any-return]

    x = torch.randint(6, (T, B))
    for words, inside in ((6, True), (6000, False)):
        (loop,) = compared(Words(words), x, x)
        targets = {getattr(node.target, "__name__", "") for node in loop.step.graph.nodes}
        assert ("embedding" in targets) == inside
