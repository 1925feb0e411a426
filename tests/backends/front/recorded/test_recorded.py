"""``reroll.compile`` records operations of models, whether or not Dynamo would read them: compared with eager."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import length_networks as networks
import reroll
from agreement import differences, real, results
from length_networks import EAGER, Flat, H, I, Net
from recorded_networks import Stateful, agree, detach, named, recordings, refused_by_dynamo, scaled, twins, unread
from reroll.backends.front.recorded import Recorded
from reroll.capture.recorder.graph import Unrecordable
from reroll.errors import RerollWarning

pytestmark = [pytest.mark.usefixtures("double_precision"), pytest.mark.filterwarnings("ignore::reroll.RerollWarning")]


BODIES = ("stacked", "rows", "over_steps", "time_numbers", "dropped")


@pytest.mark.variants(4)
@pytest.mark.parametrize("body", [*BODIES, "detached"])
def test_every_length_agrees_with_eager(body: str) -> None:
    net, twin, run = twins(Net(refused_by_dynamo(getattr(networks, body))))
    for steps in (37, 14, 21, 37):
        agree(net, twin, run, torch.randn(steps, 3, I))
    assert recordings(run) == (4 if body == "dropped" else 3)  # which has a state from its second call on


class Named(nn.Module):
    """Its parameters have names that are no names of Python's, or become one name where only letters are left."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("0", "9_weight", "self", "class", "None", "x\u00b2", "a_b", "a b", "torch", "argument_0"):
            self.register_parameter(name, nn.Parameter(torch.rand(I)))
        self.a = nn.ParameterDict({"b": torch.rand(I)})

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for x_BI in x_TBI:
            for parameter in self.parameters():
                h_BI = torch.tanh(h_BI * parameter + x_BI)
        return h_BI


def test_parameters_may_have_names_that_python_does_not_take() -> None:
    net, twin, run = twins(Named())
    for steps in (16, 21):
        agree(net, twin, run, torch.randn(steps, 3, I))


def test_state_of_modules_is_carried_from_call_to_call() -> None:
    net, twin, run = twins(Stateful(), schedule="double", chunk=6, slots=2, segment=2, remote="disk")
    for steps in (20, 33, 9, 20):
        agree(net, twin, run, torch.randn(steps, 3, I))
        assert real(net.mem - twin.mem).abs().max() < 1e-12
        detach(net, twin)
    assert recordings(run) == 4  # without a state, and of three lengths with one


def test_state_without_detaching_has_its_gradients() -> None:
    net, twin, run = twins(Stateful())
    x_TBI = torch.randn(3, 16, 2, I)
    for call in (net, run):
        torch.manual_seed(1)
        torch.stack([call(x).square().sum() for x in x_TBI]).sum().backward()
    gradients = [named(parameter.grad for parameter in model.parameters()) for model in (net, twin)]
    assert not differences(gradients[1], gradients[0])
    assert gradients[0]


def test_recording_keeps_nothing_of_the_call_before() -> None:
    _, twin, run = twins(Stateful())
    run(torch.randn(16, 2, I))
    grad_fn = weakref.ref(twin.mem.grad_fn)
    for _ in range(2):
        run(torch.randn(16, 2, I)).sum().backward()
        twin.mem = twin.mem.detach()
    gc.collect()
    assert grad_fn() is None


def switch_mode(net: Any) -> None:
    net.train(not net.training)


def double(net: Any) -> None:
    net.double() if net.fc.weight.dtype == torch.float32 else net.float()
    torch.set_default_dtype(net.fc.weight.dtype)


def other_decay(net: Any) -> None:
    net.decay = 0.3


def freeze(net: Any) -> None:
    net.fc.weight.requires_grad_(False)


def tensor_decay(net: Any) -> None:
    net.decay = torch.full((H,), 0.4)


def other_layer(net: Any) -> None:
    net.out = nn.Linear(H, 2, bias=False)
    nn.init.constant_(net.out.weight, 0.3)


def hook(net: Any) -> None:
    net.fc.register_forward_hook(_doubled)


def _doubled(module: Any, args: Any, out: Any) -> Any:
    return 2 * out


@pytest.mark.variants(4)
@pytest.mark.parametrize("change", [switch_mode, other_decay, freeze, tensor_decay, other_layer, hook])
def test_what_changes_in_the_model_is_recorded_anew(change: Callable[..., Any]) -> None:
    net, twin, run = twins(Stateful())
    for _ in range(2):
        agree(net, twin, run, torch.randn(17, 3, I))
        detach(net, twin)
    before = recordings(run)
    change(net), change(twin)
    agree(net, twin, run, torch.randn(17, 3, I))
    assert recordings(run) == before + 1


def test_other_dtypes_batches_and_modes_of_torch_are_recorded_anew() -> None:
    net, twin, run = twins(Net(refused_by_dynamo(networks.stacked)))
    agree(net, twin, run, torch.randn(17, 3, I))
    agree(net, twin, run, torch.randn(17, 2, I))
    with torch.no_grad():
        agree(net, twin, run, torch.randn(17, 2, I))
    net.float(), twin.float()
    x_TBI = torch.randn(17, 2, I, dtype=torch.float32)
    assert not differences(results(run, twin, (x_TBI,)), results(net, net, (x_TBI,)), 1e-5)
    assert recordings(run) == 4


def test_new_parameters_are_read_where_the_old_ones_were() -> None:
    net, twin, run = twins(Net(refused_by_dynamo(networks.stacked)))
    agree(net, twin, run, torch.randn(17, 3, I))
    weight = torch.randn(2, H)
    net.out.weight, twin.out.weight = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    agree(net, twin, run, torch.randn(17, 3, I))
    assert recordings(run) == 1


def operators(net: Any, x_TBI: Tensor) -> Any:
    """Ways to write an operation: reflected, in place, properties, into rows, under no_grad."""
    h_BH, out_TBH = x_TBI.new_zeros(x_TBI.shape[1], H), x_TBI.new_zeros(*x_TBI.shape[:2], H)
    mask = None
    for t, x_BI in enumerate(x_TBI):
        assert (mask == None) is (t == 0)  # noqa: E711  # as snnTorch asks
        with torch.no_grad():
            mask = 1 - (h_BH > 0.3) / 2
        h_BH = 2 ** (-h_BH.abs()) * (1 - torch.tanh(x_BI @ net.cell.weight_ih[:H].T)) * mask
        h_BH += h_BH.data * 0.1
        h_BH[:, 0] *= 0.5
        clamped = h_BH.clamp(min=0.1, max=2.0)
        out_TBH[t] = clamped
        first, second = clamped.split(H // 2, dim=1)
        h_BH = torch.cat([second, 1 / (1 + first.square())], dim=-1)
    return out_TBH, h_BH.max(dim=1).values


def normed(net: Any, x_TBI: Tensor) -> Any:
    h_BH = x_TBI.new_zeros(x_TBI.shape[1], H)
    for x_BI in x_TBI:
        h_BH = torch.tanh(net.norm(F.linear(x_BI, net.fc.weight)) + 0.5 * h_BH)
    return h_BH


class Layers(nn.Module):
    """Whole layers over time, which torch has as one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = unread
        self.lstm = nn.LSTM(I, H, num_layers=2)

    def forward(self, x_TBI: Tensor) -> Any:
        return self.lstm(unread(x_TBI))


def test_operations_are_written_as_dynamo_writes_them() -> None:
    for model in (Net(refused_by_dynamo(operators)), Layers()):
        net, twin, run = twins(model)
        for steps in (17, 26):
            agree(net, twin, run, torch.randn(steps, 3, I))


def test_running_statistics_are_updated_once() -> None:
    model = Stateful()
    model.forward = refused_by_dynamo(normed).__get__(model)  # type: ignore[method-assign]
    twin = copy.deepcopy(model)
    twin.forward = refused_by_dynamo(normed).__get__(twin)  # type: ignore[method-assign]
    run = reroll.compile(twin, **EAGER)
    for steps in (17, 26):
        agree(model, twin, run, torch.randn(steps, 3, I))
    assert model.norm.num_batches_tracked == twin.norm.num_batches_tracked == 43


def test_what_a_model_asks_of_values_is_said_once() -> None:
    def asks(net: Any, x_TBI: Tensor) -> Tensor:
        y: Tensor = networks.last(net, x_TBI)
        return y if y.isfinite().all() else y.nan_to_num()

    _, _, run = twins(Net(asks))
    with pytest.warns(RerollWarning, match=r"asks whether values are true, at .*test_recorded\.py.*isfinite"):
        run(torch.randn(16, 2, I))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(torch.randn(16, 3, I))


def test_past_states_in_a_deque() -> None:
    def remember(net: Any) -> None:
        net.mem = net.mem + 0.1 * net.past[0].mean()
        net.past.append(net.mem)

    net, twin, run = twins(Stateful(remember))
    for steps in (17, 26):
        agree(net, twin, run, torch.randn(steps, 3, I))
        for model in (net, twin):
            model.past = deque([value.detach() for value in model.past], maxlen=2)
        detach(net, twin)
        assert not differences(named(twin.past), named(net.past))


def test_functions_and_nested_arguments() -> None:
    weight = nn.Parameter(torch.randn(I, I) / 2)

    def forward(batch: dict[str, Tensor], scale: float) -> dict[str, Any]:
        h_BI = unread(batch["start"])
        for x_BI in batch["x"]:
            h_BI = torch.tanh(x_BI + h_BI @ weight) * scale
        return {"h": h_BI, "scale": scale, "empty": []}

    run = reroll.compile(forward, **EAGER)
    for steps, scale in ((17, 1.0), (26, 1.0), (17, 0.5)):
        batch = {"x": torch.randn(steps, 2, I), "start": torch.randn(2, I)}
        made: list[dict[str, Any]] = []
        for call in (run, forward):
            weight.grad = None
            result = call(batch, scale)
            result["h"].square().sum().backward()
            assert result["scale"] == scale
            assert not result["empty"]
            result["empty"].append(1)  # the user's own list at every call
            made.append({"h": result["h"].detach(), "weight": weight.grad})
        assert not differences(made[0], made[1])


def test_a_model_that_shows_python_a_value_is_dynamos_from_then_on() -> None:
    net, twin, run = twins(Stateful(scaled))
    for update, steps in ((None, 16), (scaled, 16), (scaled, 9), (None, 16)):
        net.update = twin.update = update
        agree(net, twin, run, torch.randn(steps, 2, I), recorded=not run.reroll_caller.is_read and update is None)
        assert real(net.mem - twin.mem).abs().max() < 1e-12
        detach(net, twin)
    assert run.reroll_caller.is_read


def test_dynamo_reads_nothing_that_is_recorded() -> None:
    _, _, run = twins(Net(networks.last))
    torch._dynamo.utils.counters.clear()
    run(torch.randn(16, 2, I)).sum().backward()
    assert not torch._dynamo.utils.counters["stats"]


@pytest.mark.variants(3)
@pytest.mark.parametrize("body", BODIES)
def test_dynamo_reads_what_cannot_be_recorded(body: str) -> None:
    net, twin, run = twins(Net(getattr(networks, body)))
    with mock.patch.object(Recorded, "record", side_effect=Unrecordable("not today")) as recorded:
        for steps in (37, 14, 21, 37):
            agree(net, twin, run, torch.randn(steps, 3, I), recorded=False)
    assert recorded.call_count == 1


def test_dynamo_reads_what_cannot_be_recorded_at_another_length() -> None:
    net, twin, run = twins(Net(networks.last))
    record, tried = Recorded.record, list[int]()

    def at_one_length(self: Recorded, call: Any, ran: Any) -> Any:
        tried.append(call.args[0].shape[0])
        if tried[-1] == 14:
            raise Unrecordable("not of fourteen steps")
        return record(self, call, ran)

    with mock.patch.object(Recorded, "record", at_one_length):
        for steps in (37, 14, 21, 37):
            agree(net, twin, run, torch.randn(steps, 3, I), recorded=len(tried) == 0)
    assert tried == [37, 14]


class Steep(Flat):
    """It names itself, and its slope is set from outside."""

    slope = 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Steep.slope * grad


def test_a_slope_that_is_set_between_calls_is_seen() -> None:
    net, twin, run = twins(Stateful(lambda net: setattr(net, "mem", Steep.apply(net.mem))))  # type: ignore[no-untyped-call]
    for slope in (1.0, 3.0, 1.0):
        Steep.slope = slope
        agree(net, twin, run, torch.randn(12, 2, I))
        detach(net, twin)


class Parallel(nn.Module):
    """A loop in eager, and another way for compilers, with a transform, as Mamba in transformers has them."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.fc, self.always = nn.Linear(I, I), always

    def forward(self, x_TBI: Tensor) -> Tensor:
        transformed = torch.compiler.is_compiling() or self.always
        x_TBI = torch.func.vmap(torch.sin)(x_TBI) if transformed else torch.sin(x_TBI)
        h_BI, rows = torch.zeros_like(x_TBI[0]), []
        for x_BI in x_TBI:
            h_BI = torch.tanh(self.fc(x_BI) + h_BI)
            rows.append(h_BI)
        return torch.stack(rows)


def test_a_model_that_is_another_one_for_compilers_is_recorded_as_it_is() -> None:
    run = reroll.compile(Parallel(), **EAGER)
    for steps in (16, 25):
        reroll.check(run, torch.randn(steps, 2, I), strict=True, measure=False)
    assert [loop.recurrence.steps for loop in reroll.explain(run, torch.randn(16, 2, I)).loops] == [16]


def test_a_transform_that_eager_does_too_is_read_by_dynamo() -> None:
    net, twin, run = twins(Parallel(always=True))
    with pytest.warns(RerollWarning, match=r"no recurrence: it contains a torch\.func transform"):
        agree(net, twin, run, torch.randn(16, 2, I), recorded=False)
    for steps in (25, 16):
        agree(net, twin, run, torch.randn(steps, 2, I), recorded=False)


fires, parity, counted_calls = False, "", 0


class Flagged(nn.Module):
    """Says in globals what it has seen, as snnTorch's ``utils.reset`` does."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        global fires, parity  # noqa: PLW0603
        h_BI, fires = x_TBI.new_zeros(x_TBI.shape[1:]), False
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(x_TBI[t] + h_BI * (0.5 if fires else 1.0))
            fires = True
        parity = "even" if x_TBI.shape[0] % 2 == 0 else "odd"
        return h_BI


def test_truth_values_and_texts_that_globals_are_set_to_are_set_at_every_call() -> None:
    global fires, parity
    net, _, run = twins(Flagged())
    for steps in (20, 21, 20, 33, 20):
        fires, parity = None, ""  # type: ignore[assignment]
        x = torch.randn(steps, 2, I)
        torch.testing.assert_close(run(x), net(x))
        fires, parity = None, ""  # type: ignore[assignment]
        run(x)
        assert (fires, parity) == (True, "odd" if steps % 2 else "even")
    assert not run.reroll_caller.is_read


def test_numbers_that_globals_are_set_to_are_read_by_dynamo() -> None:
    class Counting(nn.Module):
        def forward(self, x_TBI: Tensor) -> Tensor:
            global counted_calls  # noqa: PLW0603
            counted_calls += 1
            return networks.last(self.net, x_TBI)  # type: ignore[no-any-return]

        def __init__(self) -> None:
            super().__init__()
            self.net = Net(networks.last)

    net, _, run = twins(Counting())
    x, before = torch.randn(12, 2, I), counted_calls
    torch.testing.assert_close(run(x), net(x))
    assert counted_calls == before + 2
    assert run.reroll_caller.is_read
