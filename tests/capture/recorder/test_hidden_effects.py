"""A run that is only looked at holds no more than a forward without gradients, however long it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reroll.backends.front.calls.arguments import Call
from reroll.backends.front.python_state.ran import Ran
from reroll.backends.front.recorded import Recorded
from reroll.capture.recorder.graph import GraphRecorder
from reroll.capture.recorder.hidden_effects import PlainRun, Versions
from reroll.graph.private import storage_id

B, N, T = 2, 4, 3_000


def depth(value: Tensor) -> int:
    """How many operations are in the longest history that is followed by first operands."""
    found, node = 0, value.grad_fn
    while node is not None:
        found, node = found + 1, next((each for each, _ in node.next_functions if each is not None), None)
    return found


def test_the_run_before_a_record_has_a_short_history() -> None:
    """Values stay non-leaves that require gradients; what the run did not make keeps its own history."""
    weight = torch.randn(N, N, requires_grad=True)
    start = weight[:B] * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None), PlainRun():  # type: ignore[arg-type, return-value]
        h = same = start.contiguous()
        for _ in range(T):
            h = torch.tanh(h @ weight)
        shown = start.view(-1)._base
        seen = torch.stack([h, h]).unbind(0)
    assert same is start
    assert shown is start
    assert all(each.requires_grad and not each.is_leaf for each in (h, *seen))
    assert depth(h) < T // 4
    assert torch.autograd.grad(start.sum(), weight)[0].count_nonzero() == B * N


class Leaky(nn.Module):
    """An update in place in each step."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for t in range(x.shape[0]):
            h = h * 0.9 + x[t].tanh()
            h.mul_(0.5)
        return h


def test_a_record_forgets_tensors_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, finish = list[GraphRecorder](), GraphRecorder.finish

    def noted(recorder: GraphRecorder, *args: Any) -> Any:
        made.append(recorder)
        return finish(recorder, *args)

    monkeypatch.setattr(GraphRecorder, "finish", noted)
    Recorded(Leaky(), folds=True).record(Call((torch.randn(T, B, N),), {}), Ran())
    for recorder in made:
        sizes = [len(recorder.known), len(recorder.versions.known), len(recorder.versions.sharing)]
        assert all(0 < size < T for size in sizes), sizes
    assert made


def test_tensors_that_are_there_stay_known() -> None:
    versions, held = Versions(), [torch.zeros(1) for _ in range(T)]
    for each in held:
        versions.note([each])
        versions.note([torch.zeros(1)])
    assert all(id(each) in versions.known for each in held)
    assert all(versions.updated({storage_id(each)}) == [each] for each in held)
