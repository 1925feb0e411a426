"""Graphs that are left to torch's inductor: nobody's inputs are written into. What it cannot compile is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.dynamo import outer_compile
from reroll.backends.inductor.whole import refused_by_inductor
from reroll.backends.runtime.executable import Executable


def alternating(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows in turn, stacked, and a chain over them from zeros: torch 2.13 wrote into the first row."""
    h = torch.zeros(3, 4, dtype=x.dtype)
    rows, states = list[Tensor](), list[Tensor]()
    for t in range(0, x.shape[0], 2):
        row = rows[-2] if len(rows) > 1 else x[t]
        h = torch.tanh(h + row)
        rows.append(row)
        states.append(h)
    return h, torch.stack(rows, 1), torch.stack(states).flip(0)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:reroll found no recurrence")
def test_the_backward_of_a_graph_that_is_left_to_torch_leaves_inputs_alone() -> None:
    x = torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True)
    before = x.detach().clone()
    model = torch.compile(alternating, backend="reroll", options={"lowering": "inductor"})
    torch.stack([each.square().mean() for each in model(x)]).sum().backward()
    assert torch.equal(x, before)
    reroll.check(model, x, strict=True, measure=False)


def fails(*_: Any, **__: Any) -> Any:
    """As inductor does at ``frexp`` of float64 on torch 2.13."""
    from torch._inductor.exc import InductorError

    raise InductorError(RuntimeError("C++ compile error\n  long text"), None)


def test_where_inductor_cannot_write_its_folder_is_named() -> None:
    """It says so itself, or the system does while kernels are built."""
    from torch._inductor.exc import InductorError

    full = OSError(28, "No space left on device")
    for error in (full, InductorError(full, None)):
        told = pytest.raises(reroll.UnsupportedError, match=r"a graph: .*No space left.*Set TORCHINDUCTOR_CACHE_DIR")
        with told, refused_by_inductor("a graph"):
            raise error


class Wide(nn.Module):
    """A loop behind a layer that makes more bytes than it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.cell = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide, h = torch.tanh(self.before(x.flip(0))), x.new_zeros(3, 4)
        for t in range(x.shape[0]):
            h = torch.tanh(self.cell(wide[t]) + h)
        return h


@pytest.mark.inductor
@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_segment_that_inductor_cannot_compile_is_refused(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    model = torch.compile(Wide(), backend="reroll") if door == "backend" else reroll.compile(Wide())
    with pytest.raises(
        reroll.UnsupportedError, match=r"cannot compile a segment of the loop at .*: RuntimeError: C\+\+ comp"
    ):
        model(torch.randn(12, 3, 4))


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:reroll found no recurrence")
def test_a_graph_without_a_loop_that_inductor_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    with pytest.raises(reroll.UnsupportedError, match="lowering='eager' runs everything"):
        torch.compile(torch.tanh, backend="reroll")(torch.randn(3))


@pytest.mark.inductor
def test_what_is_around_a_loop_runs_as_it_was_written_where_inductor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_compile, "WORTHWHILE", 1e-3)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fails)
    net = Wide().double()
    model = torch.compile(net, backend="reroll")
    with pytest.warns(reroll.RerollWarning, match="around the loop, which is run as it was written: RuntimeError"):
        model(torch.randn(12, 3, 4, dtype=torch.float64))
    reroll.check(model, torch.randn(12, 3, 4, dtype=torch.float64, requires_grad=True), strict=True, measure=False)


@pytest.mark.parametrize("half", ["run_forward", "run_backward"])
def test_a_layout_that_torch_had_not_said_is_refused(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any, **__: Any) -> Any:
        raise AssertionError("expected size 2==2, stride 1==5 at dim=0\nError in op: input")

    model = torch.compile(Wide(), backend="reroll", options={"lowering": "eager"})
    x = torch.randn(12, 3, 4)
    model(x).sum().backward()
    monkeypatch.setattr(Executable, half, stops)
    with pytest.raises(
        reroll.UnsupportedError, match=r"the loop at .* another layout than torch had said \(expected size"
    ):
        model(x).sum().backward()
