"""``reroll.compile``: one compiled program for every number of steps. T steps, B batch, I inputs, H neurons."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import reroll
import reroll.backends.anylength as anylength
from agreement import differences, results
from reroll.errors import LengthError, OptionError, RerollError

I, H = 4, 6  # noqa: E741
EAGER: dict[str, Any] = {"lowering": "eager"}
DOUBLE: dict[str, Any] = {**EAGER, "schedule": "double", "chunk": 9, "slots": 3, "segment": 2, "remote": "disk"}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    """A GRU cell under a function that says what is made of its states; ``body`` may be any of the functions below."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.cell, self.out = nn.GRUCell(I, H), nn.Linear(H, 2)
        self.drop, self.scale = nn.Dropout(0.3), 1.0
        self.last: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def states(net: Net, x_TBI: Tensor) -> list[Tensor]:
    h_BH, found = x_TBI.new_zeros(x_TBI.shape[1], H), []
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH)
        found.append(h_BH)
    return found


def last(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[-1] * net.scale


def stacked(net: Net, x_TBI: Tensor) -> Any:
    return net.out(torch.stack(states(net, x_TBI)))


def rows(net: Net, x_TBI: Tensor) -> Any:
    h = states(net, x_TBI)
    return {"all": h, "some": (h[0], h[-2:]), "pairs": [(a, 2 * a) for a in h], "steps": len(h), "x": x_TBI}


def over_steps(net: Net, x_TBI: Tensor) -> Any:
    total = x_TBI.new_zeros(x_TBI.shape[1], H)
    for h in states(net, x_TBI):
        total = total + h / x_TBI.shape[0]
    return total, sum(states(net, x_TBI)) / x_TBI.shape[0] ** 0.5


def flattened(net: Net, x_TBI: Tensor) -> Any:
    steps, batch, _ = x_TBI.shape
    return torch.tanh(net.out(torch.stack(states(net, x_TBI)).view(steps * batch, H))).view(steps, batch, 2).mean(0)


def positions(net: Net, x_TBI: Tensor) -> Any:
    return stacked(net, x_TBI + torch.arange(x_TBI.shape[0])[:, None, None] / x_TBI.shape[0])


def time_numbers(net: Net, x_TBI: Tensor) -> Any:
    h_BH, loss = x_TBI.new_zeros(x_TBI.shape[1], H), x_TBI.new_zeros(())
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t] * (1 + t / x_TBI.shape[0]), h_BH)
        loss = loss + h_BH.pow(2).mean() * 0.9 ** (x_TBI.shape[0] - t)
    return loss


def dropped(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.drop(net.cell(x_TBI[t], h_BH))
    net.last = h_BH.detach()
    return h_BH, torch.rand(3)


def backwards(net: Net, x_TBI: Tensor) -> Any:
    forth, back = states(net, x_TBI), states(net, x_TBI.flip(0))[::-1]
    return torch.stack([torch.cat([a, b], -1) for a, b in zip(forth, back, strict=True)])


def every_other(net: Net, x_TBI: Tensor) -> Any:
    return torch.stack(states(net, x_TBI)[::2]), states(net, x_TBI[1::2])[-1]


def detached(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH.detach() if t % 4 == 0 else h_BH)
    return h_BH


def late(net: Net, x_TBI: Tensor) -> Any:
    return torch.stack(states(net, x_TBI)[12:])


BODIES = (last, stacked, rows, over_steps, flattened, positions, time_numbers, dropped, backwards, every_other)


def agree(net: Net, run: Any, twin: Net, x_TBI: Tensor) -> None:
    different = differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-11)
    assert not different, f"at {x_TBI.shape[0]} steps: {different}"


@pytest.mark.parametrize("body", [*BODIES, detached, late])
def test_every_length_agrees_with_eager(body: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    net = Net(body)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, **DOUBLE)
    for steps in (37, 14, 50, 38, 21):
        agree(net, run, twin, torch.randn(steps, 3, I))


def test_thirty_lengths_are_traced_and_compiled_once() -> None:
    net = Net(stacked)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, **EAGER)
    kernels = mock.Mock(wraps=anylength.compile_kernels)
    graphs = mock.Mock(wraps=anylength.Entry)
    with mock.patch.object(anylength, "compile_kernels", kernels), mock.patch.object(anylength, "Entry", graphs):
        for steps in (40, *range(1, 15), *range(21, 300, 20), 64):
            agree(net, run, twin, torch.randn(steps, 2, I))
    assert graphs.call_count == 1
    assert kernels.call_count <= 2  # the loop, and the row-wise readout where it is a loop of its own


def test_lengths_are_independent_of_their_order() -> None:
    net = Net(rows)
    for order in ((1, 9, 30), (30, 9, 1), (8, 11, 9)):
        twin = copy.deepcopy(net)
        run = reroll.compile(twin, time_dim=0, **EAGER)
        for steps in order:
            agree(net, run, twin, torch.randn(steps, 2, I))


def test_lists_and_numbers_come_at_the_full_length() -> None:
    net = Net(rows)
    x_TBI = torch.randn(33, 2, I)
    found = reroll.compile(net, time_dim=0, **EAGER)(x_TBI)
    assert len(found["all"]) == len(found["pairs"]) == found["steps"] == 33
    assert found["x"] is x_TBI
    assert isinstance(found["some"], tuple)
    assert len(found["some"][1]) == 2


@pytest.mark.parametrize("change", ["batch", "dtype", "mode", "attribute", "requires_grad", "no_grad"])
def test_all_but_the_length_is_guarded(change: str) -> None:
    net = Net(lambda net, x: net.drop(last(net, x)))
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, **EAGER)
    agree(net, run, twin, torch.randn(20, 2, I))
    batch = 5 if change == "batch" else 2
    if change == "dtype":
        net, twin = net.float(), twin.float()
    if change == "mode":
        net.eval()
        run.eval()
        assert not twin.training
    if change == "attribute":
        net.scale = twin.scale = 3.0
    if change == "requires_grad":
        for each in (net, twin):
            each.cell.weight_hh.requires_grad_(False)
    x_TBI = torch.randn(25, batch, I, dtype=torch.float32 if change == "dtype" else None)
    if change == "no_grad":
        with torch.no_grad():
            torch.manual_seed(1)
            expected = net(x_TBI)
            torch.manual_seed(1)
            assert torch.allclose(run(x_TBI), expected)
        return
    different = differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-5 if change == "dtype" else 1e-11)
    assert not different


def masked(net: Net, batch: dict[str, Any], h_BH: Tensor, *, gain: float = 1.0) -> Any:
    x_BTI, (mask_TB, labels_B) = batch["x"], batch["rest"]
    for t in range(x_BTI.shape[1]):
        h_BH = net.cell(x_BTI[:, t], h_BH * gain) * mask_TB[t, :, None]
    return h_BH, labels_B + 1


def test_time_in_nested_arguments_by_name() -> None:
    net = Net(masked)
    spec = {"batch": {"x": 1, "rest": (0, None)}}
    run = reroll.compile(net.forward, time_dim=spec, **EAGER)
    for steps in (H, 31, 3, 12):
        batch = {"x": torch.randn(H, steps, I), "rest": (torch.rand(steps, H), torch.arange(H))}
        expected = net(batch, torch.ones(H, H), gain=0.5)
        found = run(batch, torch.ones(H, H), gain=0.5)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, atol=1e-12)


def test_batch_first_sequences_that_are_views() -> None:
    net = Net(lambda net, x_BTI: states(net, x_BTI.transpose(0, 1))[-1])
    run = reroll.compile(net, time_dim=1, **DOUBLE)
    for x_BTI in (torch.randn(3, 30, I), torch.randn(30, 3, I).transpose(0, 1), torch.randn(3, 60, 2 * I)[:, ::2, :I]):
        assert torch.allclose(run(x_BTI), net(x_BTI), atol=1e-12)


def test_a_module_stays_a_module() -> None:
    net = Net(last)
    fast = reroll.compile(net, time_dim=0, **EAGER)
    x_TBI, seen = torch.randn(20, 2, I), []
    assert isinstance(fast, nn.Module)
    assert [id(p) for p in fast.parameters()] == [id(p) for p in net.parameters()]
    assert fast.cell is net.cell
    fast.scale = 2.0
    assert net.scale == 2.0
    fast.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    assert torch.equal(fast(x_TBI), net(x_TBI))
    assert seen == [(2, H)]
    fast.load_state_dict({name: value * 0 for name, value in fast.state_dict().items()})
    assert not any(parameter.any() for parameter in net.parameters())
    assert fast.eval().training is net.training is False


def test_copies_and_pickles_have_parameters_of_their_own() -> None:
    net = Net(last)
    fast = reroll.compile(net, time_dim=0, **EAGER)
    x_TBI = torch.randn(20, 2, I)
    expected = fast(x_TBI)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(twin(x_TBI), expected)
        with torch.no_grad():
            twin.cell.weight_ih.zero_()
        assert not torch.equal(twin(x_TBI), expected)
        assert torch.equal(fast(x_TBI), expected)


def test_decorators_of_functions_and_methods() -> None:
    @reroll.compile(time_dim=0, **EAGER)
    def total(x_TB: Tensor) -> Tensor:
        """A leaky sum."""
        v_B = x_TB.new_zeros(x_TB.shape[1])
        for t in range(x_TB.shape[0]):
            v_B = torch.tanh(0.9 * v_B + x_TB[t])
        return v_B

    class Method(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        @reroll.compile(time_dim={"x_TB": 0}, **EAGER)
        def forward(self, x_TB: Tensor) -> Tensor:
            v_B = x_TB.new_zeros(x_TB.shape[1])
            for t in range(x_TB.shape[0]):
                v_B = torch.tanh(0.9 * v_B + self.gain * x_TB[t])
            return v_B

    x_TB = torch.randn(40, 3)
    assert total.__name__ == "total"
    assert total.__doc__ == "A leaky sum."
    assert torch.allclose(Method()(x_TB), total(x_TB), atol=1e-14)


def test_the_model_is_as_if_it_had_run_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.calls, self.log = nn.BatchNorm1d(I), 0, {"h": torch.zeros(2, I)}

        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BI = self.log["h"]
            for t in range(x_TBI.shape[0]):
                h_BI = torch.tanh(nn.functional.dropout(self.norm(x_TBI[t] + h_BI), 0.2))
            self.log["h"] = h_BI.detach()
            return h_BI

    net = Counting()
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, **EAGER)
    for steps in (20, 31):
        agree(net, run, twin, torch.randn(steps, 2, I))  # type: ignore[arg-type]
        assert torch.allclose(net.log["h"], twin.log["h"], atol=1e-12)
        assert torch.allclose(net.norm.running_var, twin.norm.running_var, atol=1e-12)  # type: ignore[arg-type]
        assert net.norm.num_batches_tracked == twin.norm.num_batches_tracked


def detach_late(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[t], h_BH.detach() if t % 40 == 39 else h_BH)
    return h_BH


def stuck_index(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = net.cell(x_TBI[min(t, 45)], h_BH)
    return h_BH


def other_surrogate(net: Net, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for t in range(x_TBI.shape[0]):
        h_BH = (Steep if t > 45 else Flat).apply(net.cell(x_TBI[t], h_BH))  # type: ignore[no-untyped-call]
    return h_BH


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad


class Steep(Flat):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def late_rows(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[60:]


def turned(net: Net, x_TBI: Tensor) -> Any:
    found = states(net, x_TBI)
    return torch.stack(found[::-1] if len(found) > 45 else found)


def later_scale(net: Net, x_TBI: Tensor) -> Any:
    return states(net, x_TBI)[-1] * (1 + x_TBI.shape[0] // 50)


def growing_attribute(net: Net, x_TBI: Tensor) -> Any:
    net.history = states(net, x_TBI)
    return net.history[-1]


def counted(net: Net, x_TBI: Tensor) -> Any:
    net.scale = net.scale + x_TBI.shape[0]
    return last(net, x_TBI)


def kept_input(net: Net, x_TBI: Tensor) -> Any:
    net.last = x_TBI
    return last(net, x_TBI)


DEPARTURES = (detach_late, stuck_index, other_surrogate, late_rows, turned, later_scale)


@pytest.mark.parametrize("body", DEPARTURES)
def test_what_short_traces_do_not_show_is_refused(body: Callable[..., Any]) -> None:
    net = Net(body)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, **EAGER)
    agree(net, run, twin, torch.randn(38, 2, I))
    with pytest.raises(LengthError, match=r"test_compile.py|short trace|steps"):
        run(torch.randn(100, 2, I))
    agree(net, run, twin, torch.randn(25, 2, I))


@pytest.mark.parametrize("body", [growing_attribute, counted, kept_input])
def test_attributes_that_depend_on_the_length_are_refused(body: Callable[..., Any]) -> None:
    run = reroll.compile(Net(body), time_dim=0, **EAGER)
    with pytest.raises(LengthError, match="leaves in"):
        run(torch.randn(30, 2, I))


def test_decisions_on_values_are_refused_with_their_line() -> None:
    def branch(net: Net, x_TBI: Tensor) -> Any:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
        for t in range(x_TBI.shape[0]):
            h_BH = net.cell(x_TBI[t], h_BH)
            if h_BH.sum() > 1:
                h_BH = h_BH * 0.5
        return h_BH

    with pytest.raises(torch._dynamo.exc.Unsupported, match="h_BH.sum"):
        reroll.compile(Net(branch), time_dim=0, **EAGER)(torch.randn(30, 2, I))


@pytest.mark.parametrize(
    ("time_dim", "args", "match"),
    [
        (7, (torch.zeros(30, 2, I),), "no argument has the time dimension"),
        ({"y": 0}, (torch.zeros(30, 2, I),), "'y', which is no parameter"),
        ({"x_TBI": "first"}, (torch.zeros(30, 2, I),), "is 'first'"),
        ({"x_TBI": (0, 1)}, (torch.zeros(30, 2, I),), "a tensor of shape"),
        (1, (torch.zeros(2, 30, I),), "first 8 steps"),
    ],
)
def test_a_wrong_time_dimension_is_refused(time_dim: Any, args: Any, match: str) -> None:
    net = Net(last)

    def call(x_TBI: Tensor) -> Any:
        return net(x_TBI.view(30, 2, I) if x_TBI.shape[0] == 2 else x_TBI)

    with pytest.raises(RerollError, match=match):
        reroll.compile(call, time_dim=time_dim, **EAGER)(*args)


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(OptionError, match="must be a dimension"):
        reroll.compile(Net(last), time_dim="first")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cannot be called"):
        reroll.compile(3, time_dim=0)
    with pytest.raises(OptionError, match="Did you mean 'schedule'"):
        reroll.compile(Net(last), time_dim=0, shedule="double")


def test_explain_shows_the_plan_of_the_length() -> None:
    run = reroll.compile(Net(stacked), time_dim=0, **DOUBLE)
    for steps in (400, 30):
        assert reroll.explain(run, torch.randn(steps, 2, I)).loops[0].recurrence.steps in (steps, steps - 1)


def test_a_budget_is_met_at_every_length() -> None:
    net = Net(last)
    run = reroll.compile(net, time_dim=0, **EAGER, memory_budget="64KiB", remote="disk")
    for steps in (60, 500):
        x_TBI = torch.randn(steps, 2, I)
        report = reroll.explain(run, x_TBI)
        assert report.loops[0].prediction.peak <= 64 * 2**10
        assert torch.allclose(run(x_TBI), net(x_TBI), atol=1e-12)


@pytest.mark.inductor
@pytest.mark.slow
def test_inductor_serves_every_length() -> None:
    net = Net(stacked)
    twin = copy.deepcopy(net)
    run = reroll.compile(twin, time_dim=0, verify=True)
    for steps in (60, 7, 33, 129):
        x_TBI = torch.randn(steps, 2, I)
        assert not differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-9)


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", reroll.RerollWarning)
        found = reroll.compile(Net(rows), time_dim=0, **EAGER)(torch.randn(30, 2, I))
    assert all(isinstance(leaf, Tensor | int) for leaf in tree_leaves(found))
