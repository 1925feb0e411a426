"""Several threads call one compiled model."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from networks import Spike
from reroll.backends.front.calls.compile_lock import turn

pytestmark = pytest.mark.usefixtures("double_precision")
LENGTHS = (33, 21, 26, 35, 40, 47)


class Spiking(nn.Module):
    """Neurons whose spikes are made by a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)

    def forward(self, x_TBI: Tensor) -> Tensor:
        z_BH = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            z_BH = Spike.apply(1 + self.taken(x_TBI[t]) + self.back(z_BH) + 0.5 * z_BH)  # type: ignore[no-untyped-call]
        return z_BH


def test_first_calls_at_many_lengths_at_once() -> None:
    model = Spiking()
    compiled = reroll.compile(model, lowering="eager")

    def gradients(call: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        return list(torch.autograd.grad(call(x).sum(), [x, *model.parameters()]))

    xs = [torch.randn(steps, 2, 3) for steps in LENGTHS]
    expected = [gradients(model, x) for x in xs]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(xs)) as threads:
            found = list(threads.map(lambda x: gradients(compiled, x), [*xs, *xs]))
    finally:
        sys.setswitchinterval(before)
    for ones, others in zip(found, expected * 2, strict=True):
        for one, other in zip(ones, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


DEADLOCK = 60  # seconds: only a deadlock takes so long
meeting: list[threading.Barrier] = []


@torch.library.custom_op("reroll_test::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    """Waits for the other thread's call, where there is to be one."""
    for barrier in meeting:
        barrier.wait(DEADLOCK)
    return x.clone()


@meet.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Meeting(Spiking):
    """Results go through an operator that waits for another thread."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        met: Tensor = meet(super().forward(x_TBI))
        return met


@pytest.mark.usefixtures("unproved")  # a run that looks at a model waits for nobody
def test_a_forward_that_waits_for_another_threads_forward_goes_on() -> None:
    models = [Meeting(), Meeting()]
    compiled = [reroll.compile(model, lowering="eager") for model in models]
    x, limit = torch.randn(33, 2, 3), torch._dynamo.config.recompile_limit

    def called(model: Any) -> Tensor:
        with torch.no_grad():  # each thread has a mode of its own
            result: Tensor = model(x)
            return result

    expected = [called(model) for model in [*models, *compiled]][:2]
    meeting.append(threading.Barrier(2))
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(called, compiled))
    finally:
        meeting.clear()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch._dynamo.config.recompile_limit == limit


def test_a_call_waits_while_dynamo_is_off_for_another_threads_turn() -> None:
    """The plain model would run otherwise, which holds all of a tape and reads what that turn has changed."""
    model, x = Spiking(), torch.randn(20, 2, 3)
    compiled = reroll.compile(model, lowering="eager", proof="never")
    compiled(x)
    inside, over = threading.Event(), threading.Event()

    def looks() -> None:
        with turn(), torch.compiler.set_stance("force_eager"):
            inside.set()
            over.wait(DEADLOCK)

    with ThreadPoolExecutor(2) as threads:
        looking = threads.submit(looks)
        assert inside.wait(DEADLOCK)
        called = threads.submit(compiled, x)
        with pytest.raises(TimeoutError):
            called.result(0.2)
        over.set()
        looking.result()
        torch.testing.assert_close(called.result(), compiled(x))
