"""What is refused where processes speak inside of a model: seen in one process, which is a group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reroll
from trained import WIDTH, GatedReader, reversals, through_front

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


def test_distributed_data_parallel_inside_of_a_model() -> None:
    with pytest.raises(reroll.errors.UnsupportedError, match=r"around parts \(part\).*around the whole model"):
        through_front(Behind(DistributedDataParallel(GatedReader())))


def test_distributed_data_parallel_inside_of_a_function() -> None:
    model = DistributedDataParallel(GatedReader())
    run = reroll.compile(lambda x_TBI: 2 * model(x_TBI), time_dim=0, lowering="eager")
    with pytest.raises(reroll.errors.UnsupportedError, match=r"a part of the class DistributedDataParallel"):
        run(x_TBI())


class Speaking(nn.Module):
    """A loop whose steps bring their states together."""

    def __init__(self, together: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.cell, self.together = nn.GRUCell(WIDTH, 8), together

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 8)
        for t in range(x_TBI.shape[0]):
            h_BH = self.together(self.cell(x_TBI[t], h_BH)) / 2
        return h_BH


def functional(value: Tensor) -> Tensor:
    world: Any = dist.group.WORLD
    together: Tensor = all_reduce(value, "sum", world)
    return together


def in_place(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value


@pytest.mark.parametrize("together", [functional, in_place])
def test_collectives_inside_of_a_model(together: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        reroll.errors.UnsupportedError, match=r"speaks with other processes.*all_?reduce.*torch.compile"
    ):
        through_front(Speaking(together))(x_TBI())


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
