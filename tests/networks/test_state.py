"""State in modules is advanced once a forward however often it is recomputed, and stays right after errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import case_snntorch
import case_spikingjelly
from agreement import Results, differences
from training import SCHEDULES, precision, state, through_backend

functional, neuron = case_spikingjelly.functional, case_spikingjelly.neuron


class Kept(nn.Module):
    """A recurrent state in an attribute, a step counter in a buffer, running statistics; nothing is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))
        self.h = torch.zeros(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = self.h, []
        for t in range(x.shape[0]):
            h = torch.tanh(self.norm(self.cell(torch.cat([x[t], h], 1))))
            self.count += 1
            ys.append(h)
        self.h = h.detach()
        return torch.stack(ys)


Make = Callable[[], nn.Module]
STATEFUL: dict[str, tuple[Make, torch.dtype, float]] = {
    "plain": (Kept, torch.float64, 1e-12),
    "spikingjelly": (case_spikingjelly.CASES["carried_over"].make, torch.float32, 3e-5),
}
TWICE = SCHEDULES[3]


def inputs(make: Make, batch: int = 2) -> Tensor:
    return torch.randn(6, batch, 3 if make is Kept else 4) * 2


def detach(model: nn.Module) -> None:
    """Cut the state off from the graph of the batch before, as users do."""
    functional.detach_net(model)


Story = Callable[[Callable[..., Any], nn.Module, Make], list[Tensor]]


def two_forwards(run: Callable[..., Any], model: nn.Module, make: Make) -> list[Tensor]:
    """A second forward before the backward of the first."""
    first = run(inputs(make))
    second = run(inputs(make))
    (first.square().sum() + second.sum()).backward()
    return [first, second]


def in_eval(run: Callable[..., Any], model: nn.Module, make: Make) -> list[Tensor]:
    """Evaluation between two training batches: the state moves, the running statistics do not."""
    made = [run(inputs(make))]
    made[0].sum().backward()
    detach(model)
    model.eval()
    with torch.no_grad():
        made += [run(inputs(make)), run(inputs(make))]
    model.train()
    made.append(run(inputs(make)))
    made[-1].square().sum().backward()
    return made


def after_a_wrong_shape(run: Callable[..., Any], model: nn.Module, make: Make) -> list[Tensor]:
    """A batch that raises inside of the loop, between two good ones."""
    made = [run(inputs(make))]
    made[0].sum().backward()
    detach(model)
    with pytest.raises(Exception, match=r"."):
        run(inputs(make)[..., :-1])
    made.append(run(inputs(make)))
    made[-1].square().sum().backward()
    return made


def backward_twice(run: Callable[..., Any], model: nn.Module, make: Make) -> list[Tensor]:
    """Two backwards of one forward recompute twice as often."""
    made = run(inputs(make))
    made.square().sum().backward(retain_graph=True)
    made.sum().backward()
    return [made]


def told(story: Story, run: Callable[..., Any], model: nn.Module, make: Make) -> Results:
    torch.manual_seed(6)
    made = {f"output {i}": value.detach() for i, value in enumerate(story(run, model, make))}
    return made | state(model) | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.variants(4)
@pytest.mark.parametrize("story", [two_forwards, in_eval, after_a_wrong_shape, backward_twice])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_is_as_in_eager(name: str, story: Story) -> None:
    make, dtype, tolerance = STATEFUL[name]
    with precision(dtype):
        torch.manual_seed(4)
        model = make()
        twin = copy.deepcopy(model)
        expected = told(story, model, model, make)
        found = told(story, through_backend(twin, TWICE), twin, make)
    assert any(key.startswith("state") for key in expected)
    assert not differences(found, expected, tolerance)


def test_an_exception_in_the_loop_leaves_the_state_as_it_was() -> None:
    with precision(torch.float64):
        model = Kept()
        run = through_backend(model, TWICE)
        run(inputs(Kept)).sum().backward()
        before = state(model)
        with pytest.raises(Exception, match=r"shape|size|dimension"):
            run(inputs(Kept, batch=3))
        assert not differences(state(model), before, 0.0)
        run(inputs(Kept)).sum().backward()
        assert model.count == 12


@pytest.mark.variants(4)
@pytest.mark.parametrize("options", SCHEDULES)
def test_a_step_is_counted_once_under_every_schedule(options: Mapping[str, Any]) -> None:
    with precision(torch.float64):
        model = Kept()
        run = through_backend(model, options)
        for calls in (1, 2):
            run(inputs(Kept)).sum().backward()
            assert model.count == 6 * calls
            assert model.norm.num_batches_tracked == 6 * calls


def test_hidden_states_of_snntorch_are_reset_between_batches() -> None:
    case = case_snntorch.CASES["leaky_hidden"]
    torch.manual_seed(4)
    model: Any = case.make()
    run = through_backend(model, TWICE)
    batch = case.lengthwise(6)[0]
    first = run(*batch)
    moved = run(*batch)
    case.reset(model)
    again = run(*batch)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], moved[1])


class Checkpointed(case_spikingjelly.Steps):
    """The same network under plain checkpoints over chunks of the loop: the replay finds a state that moved on."""

    def forward(self, x: Tensor) -> Tensor:
        def chunk(part: Tensor) -> Tensor:
            return super(Checkpointed, self).forward(part)

        return torch.cat([checkpoint(chunk, part, use_reentrant=False) for part in x.split(4)])


def test_plain_checkpoints_give_wrong_gradients_where_reroll_is_exact() -> None:
    def gradients(model: nn.Module, run: Callable[..., Any]) -> Results:
        torch.manual_seed(6)
        run(torch.randn(16, 2, 4) * 2).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    with precision(torch.float64):
        torch.manual_seed(4)
        model = case_spikingjelly.Steps(case_spikingjelly.dense(neuron.LIFNode))
        naive = Checkpointed(copy.deepcopy(model.net))
        twin = copy.deepcopy(model)
        expected = gradients(model, model)
        wrong = gradients(naive, naive)
        found = gradients(twin, through_backend(twin, TWICE))
    assert not differences(found, expected)
    largest = max(float(value.abs().max()) for value in expected.values())
    error = max(float((wrong[name] - value).abs().max()) for name, value in expected.items())
    assert error > 0.05 * largest
