"""What is refused where processes speak inside of a model: seen in one process, which is a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import reroll
from reroll.backends.processes.collectives import Agreement
from reroll.backends.runtime.run import Run
from speaking import Speaking, in_place, mean
from trained import WIDTH, GatedReader, reversals, through_backend, through_front

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")


@pytest.fixture(autouse=True)
def _group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(module: nn.Module) -> None:
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


class Behind(nn.Module):
    """A network behind another module."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.scale, self.part = nn.Parameter(torch.ones(1)), part

    def forward(self, x_TBI: Tensor) -> Any:
        return self.part(self.scale * x_TBI)


def x_TBI() -> Tensor:
    return torch.randn(9, 2, WIDTH)


def gradients(run: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    """Those of all parameters, each as a whole."""
    model.zero_grad()
    run(x).square().mean().backward()
    whole = (parameter.grad for parameter in model.parameters())
    return [getattr(grad, "full_tensor", grad.clone)() for grad in whole if grad is not None]


def rolled_as_eager(run: Any, model: nn.Module, plain: Callable[..., Any]) -> None:
    x = x_TBI()
    expected = gradients(plain, model, x)
    for _ in range(2):
        torch.testing.assert_close(gradients(run, model, x), expected)
    assert reroll.explain(run, x).loops


def test_distributed_data_parallel_inside_of_a_model() -> None:
    model = Behind(DistributedDataParallel(GatedReader()))
    rolled_as_eager(through_front(model), model, model)


def test_distributed_data_parallel_inside_of_a_function() -> None:
    model = DistributedDataParallel(GatedReader())

    def doubled(x_TBI: Tensor) -> Any:
        return 2 * model(x_TBI)

    rolled_as_eager(reroll.compile(doubled, lowering="eager"), model, doubled)


def test_collectives_inside_of_a_model() -> None:
    model = Speaking(mean)
    rolled_as_eager(through_front(model), model, model)


@pytest.mark.parametrize("called", [False, True], ids=("before a call", "after a call"))
@pytest.mark.parametrize("whole", [False, True], ids=("a part", "the whole"))
def test_sharded_after_it_was_compiled(whole: bool, called: bool) -> None:
    model = Behind(GatedReader())
    run = through_front(model)
    if called:
        run(x_TBI())
    shard(model if whole else model.part)
    with pytest.raises(
        reroll.errors.UnsupportedError, match="fully_shard first" if whole else r"around parts \(part\)"
    ):
        run(x_TBI())


def test_what_is_alone_in_a_group_is_compiled_as_ever() -> None:
    model = GatedReader()
    with reversals() as count:
        through_front(model)(x_TBI()).square().mean().backward()
        assert count() == 1
    assert all(parameter.grad is not None for parameter in model.parameters())


FREE = {"schedule": "auto", "chunk": None, "slots": None}
REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "budget": (reroll.errors.OptionError, "Give bytes, the same to all", {**FREE, "memory_budget": "auto"}),
    "times": (reroll.errors.UnsupportedError, "schedule that needs no times", {**FREE, "schedule": "hrevolve"}),
    "may move": (reroll.errors.UnsupportedError, "needs no times", {**FREE, "memory_budget": 0.5, "remote": "disk"}),
}


@pytest.mark.parametrize(("error", "text", "options"), REFUSED.values(), ids=REFUSED)
def test_plans_of_speaking_steps_that_would_differ(error: Any, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        through_backend(Speaking(), **options)(x_TBI())


def test_collectives_in_place_with_a_gradient() -> None:
    for through in (through_backend, through_front):
        with pytest.raises(reroll.errors.CaptureError, match="changes a tensor in place whose gradient is wanted"):
            through(Speaking(in_place))(x_TBI())


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_speaking_steps_are_not_played_again_where_memory_runs_out(half: str) -> None:
    run = through_backend(Speaking())
    value = run(x_TBI())
    failing = mock.patch.object(Run, half, side_effect=torch.OutOfMemoryError("no memory"))
    with failing as played, pytest.raises(reroll.errors.ShortageError, match=f"in the {half}.*End all"):
        (run(x_TBI()) if half == "forward" else value).sum().backward()
    assert played.call_count == 1


def test_speaking_steps_are_not_timed() -> None:
    report = reroll.explain(through_backend(Speaking()), x_TBI())
    assert any("No times are predicted" in note and "speak with other processes" in note for note in report.notes)


def sent(operation: Any) -> int:
    """The digest of a program whose steps send by a collective."""
    graph = fx.Graph()
    graph.output(graph.call_function(operation, (graph.placeholder("h"), "sum", "0")))
    half = fx.GraphModule(nn.Module(), graph)
    recurrence: Any = SimpleNamespace(step=half, examples=(), where="")
    program: Any = SimpleNamespace(graphs=())
    segment: Any = SimpleNamespace(forward_graph=half, backward_graph=None)
    found = Agreement.of(recurrence, program, {2: segment})
    assert found is not None
    return found.digest


def test_programs_are_told_apart_by_what_is_sent_and_not_by_where_it_lands() -> None:
    ops: Any = torch.ops._c10d_functional
    digests = [sent(each.default) for each in (ops.all_reduce, ops.all_reduce_, ops.all_gather_into_tensor)]
    assert digests[0] == digests[1] != digests[2]


class Halves(nn.Module):
    """A loop over a weight, which may lie in several processes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(9):
            h_BI = torch.tanh(x_TBI[t] + h_BI @ self.weight)
        return h_BI


def test_tensors_in_parts() -> None:
    mesh, model = init_device_mesh("cpu", (1,)), Halves()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(
        reroll.errors.UnsupportedError, match=r"works on a DTensor, whose parts lie in several processes"
    ):
        through_backend(model)(distribute_tensor(x_TBI(), mesh, [Replicate()]))
    with pytest.raises(reroll.errors.UnsupportedError, match=r"holds or is given a DTensor"):
        through_front(model)(x_TBI())
