"""``reroll.compile``: what is recorded, and what Dynamo reads."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.full.caller import Caller
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.recorded import Recorded
from reroll.capture.recorder import graph
from reroll.capture.recorder.graph import GraphRecorder
from reroll.errors import OptionError, RerollWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("double_precision")
EAGER: dict[str, Any] = {"lowering": "eager"}
B, N, H = 2, 3, 4
Change = Callable[["Net", int, Tensor, Tensor], Tensor]


def stays(_net: Net, _t: int, h: Tensor, _x: Tensor) -> Tensor:
    return h


class Net(nn.Module):
    """A cell over time, whose readouts a body makes into a result."""

    def __init__(self, change: Change = stays) -> None:
        super().__init__()
        self.cell, self.out, self.change = nn.GRUCell(N, H), nn.Linear(H, 2), change
        self.slope: float = 1.0
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Readouts of every step."""
        h, found = x.new_zeros(x.shape[1], H), []
        for t in range(x.shape[0]):
            h = self.change(self, t, self.cell(x[t], h), x[t])
            found.append(self.out(h) * self.slope)
        return torch.stack(found)


def every_third(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
    return h * 0.5 if t % 3 == 1 else h


def prints(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
    if t == 0:
        print("a call")
    return h


def asks(_net: Net, t: int, h: Tensor, x_t: Tensor) -> Tensor:
    return h * 0.5 if t and bool((x_t.abs() > 50).all()) else h


def in_a_checkpoint(net: Net, _t: int, h: Tensor, _x: Tensor) -> Tensor:
    return torch.as_tensor(checkpoint(net.out, h, use_reentrant=True)).sum(-1, keepdim=True) + h


def steps_of(run: Any, x: Tensor) -> list[int]:
    """How many steps each loop of a call has."""
    report = reroll.explain(run, x)
    return [loop.recurrence.steps for each in (report, *report.others) for loop in each.loops]


def trained_alike(run: Any, plain: Net, x: Tensor) -> None:
    """Whether a call gives what the plain model gives, and gradients."""
    found = []
    for each in (run, plain):
        given = x.clone().requires_grad_()
        y = each(given)
        y.square().sum().backward()
        found.append([y.detach(), given.grad, *(value.grad for value in each.parameters())])
        each.zero_grad()
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("change", [every_third, lambda _net, t, h, _: h.detach() if t == 7 else h, in_a_checkpoint])
def test_loops_over_time_are_found_at_each_length_without_dynamo(change: Any) -> None:
    torch.manual_seed(0)
    net = Net(change)
    run, plain = reroll.compile(net, **EAGER), copy.deepcopy(net)
    torch._dynamo.utils.counters.clear()
    for length in (20, 13, 1, 33, 20):
        trained_alike(run, plain, torch.randn(length, B, N))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1  # of one step, which is no loop
    assert sum(steps_of(run, torch.randn(33, B, N))) >= 10


def test_what_a_record_does_not_tell_is_read_by_dynamo() -> None:
    torch.manual_seed(0)
    net = Net(prints)
    run = reroll.compile(net, **EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        for _ in range(2):
            trained_alike(run, copy.deepcopy(net), torch.randn(12, B, N))
    assert run.reroll_caller.is_read


@pytest.mark.parametrize("at", range(1, 6))
def test_another_answer_to_what_a_model_asks_is_given_by_dynamo(at: int) -> None:
    torch.manual_seed(0)
    net = Net(asks)
    run, plain, told = reroll.compile(net, **EAGER), copy.deepcopy(net), list[str]()
    for call in range(8):
        x = torch.randn(12, B, N) + (99.0 if call == at else 0.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trained_alike(run, plain, x)
        told += [str(each.message) for each in said if each.category is RerollWarning]
        assert run.reroll_caller.is_read is (call >= at)
    assert "asks whether values are true, at File" in told[0]
    others = [text for text in told if text.startswith("Another answer")]
    assert len(others) == 1
    assert "File" in others[0]


def dropping(net: Net, t: int, h: Tensor, x_t: Tensor) -> Tensor:
    return asks(net, t, torch.dropout(h, 0.5, train=True), x_t)


def test_random_numbers_are_drawn_once_where_another_answer_is_given() -> None:
    torch.manual_seed(0)
    net = Net(dropping)
    run, plain = reroll.compile(net, **EAGER), copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            drawn, x = [], torch.randn(12, B, N) + (99.0 if call == 1 else 0.0)
            for each in (run, plain):
                torch.manual_seed(call)
                drawn.append((each(x), torch.rand(3)))
            torch.testing.assert_close(*drawn)


def counted(net: Net, t: int, h: Tensor, x_t: Tensor) -> Tensor:
    net.seen += h.detach().mean()
    return asks(net, t, h, x_t)


def test_a_model_that_asks_and_updates_in_place_is_read_by_dynamo() -> None:
    torch.manual_seed(0)
    net = Net(counted)
    net.register_buffer("seen", torch.zeros(()))
    run, plain, x = reroll.compile(net, **EAGER), copy.deepcopy(net), torch.randn(12, B, N)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained_alike(run, plain, x)
    assert run.reroll_caller.is_read
    torch.testing.assert_close(net.seen, plain.seen)


def test_a_model_without_a_loop_is_recorded_once_for_a_shape() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    run = reroll.compile(net, **EAGER)
    x = torch.randn(5, 3)
    with pytest.warns(RerollWarning, match="no recurrence"):
        run(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        torch.testing.assert_close(run(x), net(x))
    assert len(run.reroll_caller.at_length.recorded.recordings) == 1
    assert not run.reroll_caller.is_read


def test_a_number_that_changes_at_every_call_is_left_to_dynamo() -> None:
    torch.manual_seed(0)
    net = Net()
    run, x = reroll.compile(net, **EAGER), torch.randn(12, B, N)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call in range(6):
            net.slope = 1.0 + call
            trained_alike(run, copy.deepcopy(net), x)
    assert any("3 calls in a row" in str(each.message) for each in said)
    assert run.reroll_caller.is_read


def test_too_many_operations_are_refused_and_the_remedy_helps() -> None:
    class InParts(Net):
        def forward(self, x: Tensor, h: Any = None) -> Any:
            h, rows = x.new_zeros(x.shape[1], H) if h is None else h, []
            for x_t in x:
                h = self.cell(x_t, h)
                rows.append(self.out(h) * self.slope)
            return torch.stack(rows), h

    net, x, parts = InParts(), torch.randn(60, B, N), list[Tensor]()
    plain, run, h = copy.deepcopy(net), reroll.compile(net, **EAGER), None
    with mock.patch.object(graph, "_MOST", 100):
        with pytest.raises(UnsupportedError, match=r"more than 100 operations.* Give it the sequence in parts"):
            run(x)
        for part in x.split(15):
            y, h = run(part, h)
            parts.append(y)
    found, whole = torch.cat(parts), plain(x)[0]
    torch.testing.assert_close(found, whole)
    for result in (found, whole):
        result.square().sum().backward()
    torch.testing.assert_close([each.grad for each in net.parameters()], [each.grad for each in plain.parameters()])


def test_it_can_be_pickled_copied_and_put_around_a_function() -> None:
    net = Net()
    run, x = reroll.compile(net, schedule="standard", **EAGER), torch.randn(12, B, N)
    for each in (pickle.loads(pickle.dumps(reroll.compile(Net(), **EAGER))), copy.deepcopy(run)):
        assert isinstance(each.reroll_caller, Caller)
        trained_alike(each, each._orig_mod, x)
    assert run.reroll_caller.options.schedule == "standard"

    @reroll.compile(**EAGER)  # type: ignore[untyped-decorator]
    def last(x: Tensor, scale: float = 2.0) -> Any:
        return net(x)[-1] * scale

    assert last.__name__ == "last"
    torch.testing.assert_close(last(x, scale=3.0), net(x)[-1] * 3.0)
    assert steps_of(last, x) == [12]
    with pytest.raises(OptionError, match="compiled already"):
        reroll.compile(run)
    with pytest.raises(OptionError, match="the class Net"):
        reroll.compile(Net)


def test_without_gradients_and_in_another_mode_of_training() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, _t, h, _: torch.dropout(h, 0.0 if net.training else 0.5, train=False) if net.training else -h)
    run, x = reroll.compile(net, **EAGER), torch.randn(12, B, N)
    trained_alike(run, copy.deepcopy(net), x)
    run.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(x), net(x))
    trained_alike(run, copy.deepcopy(net), x)
    run.train()
    trained_alike(run, copy.deepcopy(net), x)


@pytest.mark.inductor
def test_another_length_takes_the_segments_of_the_first() -> None:
    run: Any = reroll.compile(Net(), start="compiled")
    built = list[set[int]]()
    for length in (40, 23, 31):
        run(torch.randn(length, B, N)).sum().backward()
        (program,) = [each.run for each in run.reroll_caller.at_length.recorded.recordings.values()][-1:]
        built.append({k for loop in program.graph.built for k in loop.executable.compiled.segments})
    assert all(max(each) == max(built[0]) for each in built)
    assert built[1] | built[2] <= built[0] | {1, 8}


def counts_and_raises(net: Net, t: int, h: Tensor, x_t: Tensor) -> Tensor:
    net.seen += 1
    if x_t.shape[0] == 1 and t == 2:
        raise ValueError("one sequence is too few")
    return h


@pytest.mark.parametrize("first", [True, False])
def test_what_a_model_raises_is_raised_as_it_is_and_later_calls_are_recorded(first: bool) -> None:
    torch.manual_seed(0)
    net = Net(counts_and_raises)
    net.register_buffer("seen", torch.zeros(()))
    run, plain = reroll.compile(net, **EAGER), copy.deepcopy(net)
    if not first:
        trained_alike(run, plain, torch.randn(12, B, N))
    for wrong in (torch.randn(12, 1, N), torch.randn(12, B, N + 1)):
        found = []
        for each in (run, plain):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                each(wrong)
            found.append((type(raised.value), str(raised.value)))
        assert found[0] == found[1]
        torch.testing.assert_close(net.seen, plain.seen)  # as far as it came
        trained_alike(run, plain, torch.randn(12, B, N))
    assert not run.reroll_caller.is_read
    assert steps_of(run, torch.randn(12, B, N)) == [12]


RESULTS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a row": lambda rows: (torch.stack(rows), rows[3], rows[3].view(-1)),
    "the last row": lambda rows: (torch.stack(rows), rows[-1]),
    "all rows": lambda rows: (torch.stack(rows), *rows),
    "two stacks": lambda rows: (torch.stack(rows), torch.stack(rows)),
    "along another dimension": lambda rows: (torch.cat(rows), torch.stack(rows)),
    "views of one stack": lambda rows: (lambda all_: (all_, all_[2], all_.transpose(0, 1), rows[2]))(torch.stack(rows)),
}


def changed_by(results: Any, at: int) -> list[int]:
    """Which of some results change with one of them."""
    before = [each.detach().clone() for each in results]
    with torch.no_grad():
        results[at].detach().add_(1.0)
    return [number for number, each in enumerate(results) if not torch.equal(each, before[number])]


@pytest.mark.parametrize("pick", RESULTS)
def test_results_share_memory_where_those_of_the_model_do(pick: str) -> None:
    torch.manual_seed(0)

    class Several(Net):
        def forward(self, x: Tensor) -> Any:
            h, found = x.new_zeros(x.shape[1], H), []
            for x_t in x:
                h = self.cell(x_t, h)
                found.append(self.out(h))
            return RESULTS[pick](found)

    net = Several()
    run, x = reroll.compile(net, **EAGER), torch.randn(9, B, N)
    for at in range(len(net(x))):
        assert changed_by(run(x), at) == changed_by(net(x), at)
    grads = [
        torch.autograd.grad(
            sum((number + 1) * each.square().sum() for number, each in enumerate(of(x))), list(net.parameters())
        )
        for of in (run, net)
    ]
    torch.testing.assert_close(*grads)


def writes(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
    if t == 0:
        print("a call", file=sys.stderr)
    return h


LINES = io.StringIO()


def writes_to_its_own(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
    if t == 0:
        LINES.write("a call")
    return h


@pytest.mark.parametrize("change", [writes, writes_to_its_own])
def test_what_a_model_writes_is_written_once_a_call(change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    net = Net(change)
    run = reroll.compile(net, **EAGER)
    LINES.truncate(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        for _ in range(5):
            run(torch.randn(12, B, N))
    assert (capsys.readouterr().err + LINES.getvalue()).count("a call") == 5
    assert run.reroll_caller.is_read


def warns(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
    if t == 0:
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
    return h


def test_a_model_that_warns_is_recorded() -> None:
    net = Net(warns)
    run = reroll.compile(net, **EAGER)
    with pytest.warns(DeprecationWarning, match="an old name"):
        run(torch.randn(12, B, N))
    assert not run.reroll_caller.is_read


class Packs(nn.Module):
    """Packs sequences of these lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(N, H)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """The last states."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return torch.as_tensor(self.layer(packed)[1])


@pytest.mark.parametrize("at", range(5))
def test_sequences_that_all_end_before_the_input_are_dynamos(at: int) -> None:
    net = Packs()
    run = reroll.compile(net, **EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        for call in range(6):
            x, lengths = torch.randn(7, B, N), torch.tensor([4, 4] if call == at else [3, 7])
            torch.testing.assert_close(run(x, lengths), net(x, lengths))
    assert run.reroll_caller.is_read


@pytest.mark.filterwarnings("ignore::reroll.RerollWarning")
@pytest.mark.parametrize("as_function", [False, True])
def test_numpy_draws_numpys_random_numbers_where_dynamo_reads(as_function: bool) -> None:
    """Dynamo would have torch draw others in their place."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[1:])
            for row in x:
                h = torch.tanh(row + h) + torch.from_numpy(np.random.randn(B, N))  # noqa: NPY002
            return h

    net = Noisy()
    model: Any = net.forward if as_function else net
    run, x = reroll.compile(model, **EAGER), torch.randn(9, B, N)
    found = []
    for each in (model, run):
        np.random.seed(7)  # noqa: NPY002
        found.append([each(x), each(x), torch.tensor(np.random.rand())])  # noqa: NPY002
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_that_a_model_sets_holds_whatever_was_set_before(seed: int) -> None:
    """Where it was set to the same before, nothing but the numbers that were drawn meanwhile tells that it is set."""

    def seeds(_net: Net, t: int, h: Tensor, _x: Tensor) -> Tensor:
        if t == 0:
            torch.manual_seed(3)
        return h * torch.rand_like(h)

    net = Net(seeds)
    run, x = reroll.compile(net, **EAGER), torch.randn(9, B, N)
    for before in (seed, 5, 3):
        found = []
        for each in (net, run):
            torch.manual_seed(before)
            found.append([each(x), torch.rand(2)])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("named", [{"time_dim": 0}, {"time_dim": {"x": 1}}, {"steps": 40}])
def test_where_time_is_has_no_effect(named: dict[str, Any]) -> None:
    model, x = Net(stays), torch.randn(9, B, N)
    with pytest.warns(DeprecationWarning, match="time_dim and steps have no effect") as said:
        run = reroll.compile(model, lowering="eager", **named)
    assert [each.filename for each in said] == [__file__]
    torch.testing.assert_close(run(x), model(x))
    assert reroll.explain(run, x).loops


def recorded_apart() -> None:
    with GraphRecorder([], {}).recording():
        raise AssertionError("nothing is recorded")


@pytest.mark.parametrize("alone", [True, False])
def test_an_interrupt_leaves_the_stance_of_torch_as_it_was(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets a stance where it is made, not where it is entered."""
    monkeypatch.setattr("reroll.backends.front.recorded.isolated_run", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("reroll.capture.recorder.graph.applied_functions", mock.Mock(side_effect=KeyboardInterrupt))
    call, recorded = Call((torch.randn(9, B, N),), {}), Recorded(Net(stays))
    with pytest.raises(KeyboardInterrupt):
        recorded._run_alone(call, Ran()) if alone else recorded_apart()
    assert torch._dynamo.eval_frame._stance.stance == "default"


class Apart(nn.Module):
    """Two states, of which the second reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.GRUCell(N, N), nn.GRUCell(N, N)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = g = x.new_zeros(x.shape[1:])
        for row in x:
            h = self.a(row, h)
            g = self.b(h, g)
        return h, g


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_sequences_without_a_loop_have_the_gradients_of_the_model(
    lowering: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """By inductor they were zeros where the model's are None. That they run as plain PyTorch is said once."""
    model = Apart()
    run: Any = reroll.compile(model, lowering=lowering)
    run.reroll_caller._read = mock.Mock(side_effect=AssertionError("Dynamo is asked"))
    for steps in (9, 2, 1, 9):
        x, found = torch.randn(steps, B, N), []
        for each in (run, model):
            model.zero_grad()
            each(x)[0].sum().backward()
            found.append([parameter.grad for parameter in model.parameters()])
        assert [each is None for each in found[0]] == [each is None for each in found[1]]
        torch.testing.assert_close(*([each for each in grads if each is not None] for grads in found))
    assert capsys.readouterr().err.count("its call runs as plain PyTorch") == 1


@pytest.mark.parametrize("flips", ["gradients", "training"])
def test_what_goes_to_and_fro_at_new_lengths_is_no_reason_to_ask_dynamo(flips: str) -> None:
    model = Net(stays)
    run: Any = reroll.compile(model, **EAGER)
    run.reroll_caller._read = mock.Mock(side_effect=AssertionError("Dynamo is asked"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        for steps in range(9, 14):
            x = torch.randn(steps, B, N)
            torch.testing.assert_close(run(x), model(x))
            if flips == "training":
                run.eval()
            with torch.set_grad_enabled(flips == "training"):
                torch.testing.assert_close(run(x), model(x))
            run.train()


class LazyCell(nn.Module):
    """A cell whose weights have no sizes before the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.read_in, self.norm = nn.LazyLinear(H), nn.LazyBatchNorm1d()

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BH = x_TBN.new_zeros(x_TBN.shape[1], H)
        for x_BN in x_TBN:
            h_BH = torch.tanh(self.norm(self.read_in(x_BN)) + h_BH)
        return h_BH


def test_a_model_without_sizes_runs_plainly_once(capsys: pytest.CaptureFixture[str]) -> None:
    plain, model = LazyCell(), LazyCell()
    compiled, x = reroll.compile(model, **EAGER), torch.randn(7, B, N)
    for call in range(3):
        found = []
        for each in (plain, compiled):
            torch.manual_seed(call)
            y = each(x)
            y.sum().backward()
            found.append(y)
        torch.testing.assert_close(*found)
        assert ("Reversible" in type(found[1].grad_fn).__name__) is bool(call)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert "read_in.weight has no size yet, so this call runs as plain PyTorch" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match=r"Call the plain model once before.*torch.no_grad"):
        reroll.check(LazyCell(), x)


class Counting(nn.Module):
    """Keeps copies of its states, and updates a tensor of their size in place behind the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(N, H)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(B, H))

    def forward(self, x_TBN: Tensor, update: Callable[[Tensor, Tensor], Any]) -> tuple[Tensor, Tensor]:
        h_BH, rows = x_TBN.new_zeros(B, H), []
        for x_BN in x_TBN:
            h_BH = self.cell(x_BN, h_BH)
            rows.append(h_BH.clone())
        update(self.seen, h_BH.detach())
        return torch.stack(rows), h_BH


@pytest.mark.parametrize("update", [Tensor.copy_, Tensor.add_, lambda seen, _: seen.mul_(2)])
def test_a_tensor_that_is_updated_begins_no_loop(update: Any) -> None:
    """A copy of it before the update was taken for one of a state."""
    plain = Counting()
    compiled, x = copy.deepcopy(plain), torch.randn(7, B, N)
    for run in (plain, reroll.compile(compiled, **EAGER)):
        for _ in range(2):
            rows, last = run(x, update)
            (rows[2].sum() + last.square().sum()).backward()
    torch.testing.assert_close(compiled.seen, plain.seen)
    for one, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Listed(nn.Module):
    """Updates tensors in place that a list or tuple holds."""

    def __init__(self, update: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.cell, self.update = nn.GRUCell(N, H), update
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(B, H))

    def forward(self, x_TBN: Tensor) -> Tensor:
        h_BH = x_TBN.new_zeros(B, H)
        for x_BN in x_TBN:
            h_BH = self.cell(x_BN, h_BH)
            self.update(self.seen, h_BH.detach())
        return h_BH + self.seen


def added(seen: Tensor, h: Tensor) -> None:
    torch._foreach_add_([seen], [h])


def multiplied(seen: Tensor, h: Tensor) -> None:
    torch._foreach_mul_([seen], h[0, 0])


def largest(seen: Tensor, h: Tensor) -> None:
    values = torch.zeros(B)
    torch.max(h, 1, out=(values, torch.zeros(B, dtype=torch.int64)))
    seen[:, 0] = values


@pytest.mark.parametrize("door", ["compile", "backend"])
@pytest.mark.parametrize("update", [added, multiplied, largest])
def test_tensors_of_a_list_that_are_updated_are_left_to_torch(update: Any, door: str) -> None:
    """These were no updates for whoever reads a graph."""
    torch._dynamo.reset()
    plain, x = Listed(update), torch.randn(7, B, N)
    model = copy.deepcopy(plain)
    options = {**EAGER, "proof": "never"}
    run: Any = (
        reroll.compile(model, **options)
        if door == "compile"
        else torch.compile(model, backend="reroll", options=options)
    )
    with pytest.warns(RerollWarning, match="updates the tensors of a list in place|no recurrence"):
        found = run(x)
    torch.testing.assert_close(found, plain(x))
    torch.testing.assert_close(model.seen, plain.seen)
