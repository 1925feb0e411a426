"""One of the processes that train the same models together: ``torchrun`` runs it for ``test_distributed.py``.

Every case compares with eager training in the same processes, or with one process that has the joint batch. What
differs is written as JSON, by the name of the case.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import reroll
from networks import RecurrentLIF
from speaking import Speaking, gathered, mean, normalised, without_gradient
from trained import reversals

DOUBLE: dict[str, Any] = {"lowering": "eager", "segment": 2, "schedule": "double", "chunk": 4, "slots": 2}
WIDTH = 6
Model = Any


class Normed(nn.Module):
    """A loop whose batch norm updates running statistics at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(WIDTH, 5), nn.BatchNorm1d(5)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for t in range(x_TBI.shape[0]):
            h_BH = self.norm(self.cell(x_TBI[t], h_BH))
        return h_BH


class Stacked(nn.Module):
    """Two recurrent layers, each sharded by itself, and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RecurrentLIF(WIDTH, 8, 7, mean=False), RecurrentLIF(7, 8, 3)
        self.readout = nn.Linear(3, 2)

    def forward(self, x_TBI: Tensor) -> Tensor:
        out: Tensor = self.readout(self.second(self.first(x_TBI) * 9))
        return out


class Feed(nn.Module):
    """A block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_TBI: Tensor) -> Tensor:
        y_TBI: Tensor = self.down(torch.tanh(self.up(self.norm(x_TBI))))
        return x_TBI + y_TBI


class Encoder(nn.TransformerEncoderLayer):
    """A layer of torch's whose parameters are read in many ways."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2, 3 * width, dropout=0.0)


class Deep(nn.Module):
    """A layer that embeds, and blocks."""

    def __init__(self, width: int, block: Callable[[int], nn.Module] = Feed) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, width), nn.ModuleList(block(width) for _ in range(6))

    def forward(self, x_TBI: Tensor) -> Tensor:
        x_TBI = self.first(x_TBI)
        for block in self.blocks:
            x_TBI = block(x_TBI)
        return x_TBI


def plain() -> nn.Module:
    """A recurrent spiking network."""
    return RecurrentLIF(WIDTH, 8, 3)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The same model at every call."""
    torch.manual_seed(1)
    return make()


def batch(steps: int, rank: int, seed: int = 0) -> Tensor:
    """A batch of one process."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.rand(steps, 4, WIDTH, generator=generator, dtype=torch.float64) < 0.4).double() * 2


def joint(steps: int) -> Tensor:
    """The batches of all processes together."""
    return torch.cat([batch(steps, rank) for rank in range(dist.get_world_size())], 1)


def loss(model: Model, x_TBI: Tensor) -> Tensor:
    """The mean over a batch."""
    out: Tensor = model(x_TBI)
    return out.square().mean()


def whole(value: Tensor) -> Tensor:
    """A tensor that is held in pieces by all processes, or by each."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def differences(found: nn.Module, expected: nn.Module) -> list[str]:
    """Gradients and buffers that differ; prefixes of names are those of wrappers."""
    texts = []
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        if one.grad is None or other.grad is None:
            texts += [] if one.grad is other.grad else [f"{name}: one gradient is missing"]
        elif (gap := float((whole(one.grad) - whole(other.grad)).abs().max())) > 1e-12:
            texts.append(f"{name}: {gap:.1e}")
    for (name, buffer), (_, same) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        if not torch.allclose(buffer, same, rtol=1e-12, atol=1e-12):
            texts.append(f"{name} differs")
    if all(parameter.grad is None for parameter in found.parameters()):
        texts.append("no gradient at all")
    return texts


def against_joint(
    around: Callable[[nn.Module], Model], lengths: Iterable[int] = (9, 14), make: Callable[[], nn.Module] = plain
) -> list[str]:
    """What differs between a model that ``around`` distributes and compiles, and one process with the joint batch."""
    texts = []
    model, alone = made(make), made(make)
    run = around(model)
    for steps in lengths:
        model.zero_grad()
        alone.zero_grad()
        loss(run, batch(steps, dist.get_rank())).backward()
        loss(alone, joint(steps)).backward()
        texts += [f"T={steps}: {text}" for text in differences(model, alone)]
    return texts


def through_backend(model: nn.Module) -> Model:
    """``torch.compile`` with Dynamo's cuts for DDP off."""
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(model, backend="reroll", options=DOUBLE)


def compiled(model: nn.Module, **options: Any) -> Model:
    """``reroll.compile``."""
    return reroll.compile(model, **{**DOUBLE, **options})


def sharded(model: nn.Module, parts: Iterable[nn.Module] = (), **options: Any) -> nn.Module:
    """A model with ``fully_shard`` around parts and around it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*parts, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def compiled_around_layers(model: nn.Module) -> Model:
    """Layers that are sharded by themselves, inside of a model that is compiled."""
    assert isinstance(model, Stacked)
    return compiled(sharded(model, (model.first, model.second)))


def sharded_in_layers(model: nn.Module) -> Model:
    """Layers that give their parameters back after the forward and gather them again in the backward."""
    assert isinstance(model, Stacked)
    sharded(model, (model.first, model.second), reshard_after_forward=True)
    for name in ("first", "second"):
        setattr(model, name, compiled(getattr(model, name)))
    return model


def as_in_eager(
    make: Callable[[], nn.Module], lengths: Callable[[int], Iterable[int]], accumulate: int = 1
) -> list[str]:
    """What differs from eager DDP, with several backwards before gradients are sent, and lengths of each process."""
    texts = []
    runs = [DistributedDataParallel(made(make)) for _ in range(2)]
    fast = compiled(runs[1])
    for number, steps in enumerate(lengths(dist.get_rank())):
        for run, model in ((runs[0], runs[0]), (fast, runs[1])):
            model.zero_grad()
            for part in range(accumulate - 1):
                with model.no_sync():
                    loss(run, batch(steps, dist.get_rank(), 10 + part)).backward()
            loss(run, batch(steps, dist.get_rank(), number)).backward()
        texts += [f"call {number}: {text}" for text in differences(runs[1], runs[0])]
    return texts


def cut_by_dynamo() -> list[str]:
    """A graph that Dynamo cuts for DDP is refused."""
    model = DistributedDataParallel(RecurrentLIF(WIDTH, 256, 3), bucket_cap_mb=1)
    run = torch.compile(model, backend="reroll", options=DOUBLE)
    try:
        run(batch(9, dist.get_rank()))
    except reroll.RerollError as error:
        return [] if "optimize_ddp = False" in str(error) else [str(error)]
    return ["it was not refused"]


def uncut_by_dynamo() -> list[str]:
    """A graph that Dynamo would cut, but that fits in a bucket, is compiled as it is."""

    def around(model: nn.Module) -> Model:
        return torch.compile(DistributedDataParallel(model), backend="reroll", options=DOUBLE)

    return against_joint(around)


def budgets() -> list[str]:
    """Processes with other budgets play other plans, and gradients are the same."""
    budget = 1.0 if dist.get_rank() else 0.5
    return against_joint(lambda model: DistributedDataParallel(compiled(model, **FREE, memory_budget=budget)), (40,))


def speaking(
    together: Callable[[Tensor], Tensor], around: Callable[[nn.Module], Model], front: bool = False, **options: Any
) -> list[str]:
    """What differs from eager where the steps speak, in a few calls of two lengths."""
    texts = []
    model, twin = (made(lambda: Speaking(together)) for _ in range(2))
    by_backend: Any = torch.compile(model, backend="reroll", fullgraph=True, options={**DOUBLE, **options})
    run, eager = around(compiled(model, **options) if front else by_backend), around(twin)
    with reversals() as count:
        for number, steps in enumerate((9, 14, 9)):
            for each, call in ((model, run), (twin, eager)):
                each.zero_grad()
                loss(call, batch(steps, dist.get_rank(), number)).backward()
            texts += [f"call {number}: {text}" for text in differences(model, twin)]
        return texts if count() == 3 else [*texts, f"{count()} loops were rolled in 3 calls"]


def apart(steps: int, size: int, front: bool = False) -> list[str]:
    """Steps that speak are refused where processes have other lengths or batches."""
    model = made(lambda: Speaking(normalised))
    run = compiled(model) if front else torch.compile(model, backend="reroll", options=DOUBLE)
    try:
        run(batch(steps, dist.get_rank())[:, :size])
    except reroll.RerollError as error:
        return [] if "do not all play the same program" in str(error) else [str(error)]
    return ["it was not refused"]


def over_depth(model: nn.Module, **options: Any) -> Model:
    """``reroll.compile`` of blocks over depth."""
    return reroll.compile(model, lowering="eager", schedule="standard", **options)


def deep(width: int = WIDTH) -> nn.Module:
    """Six blocks."""
    return Deep(width)


def tied() -> nn.Module:
    """Six blocks whose norms are frozen; the second layer has the bias of the norm for its own."""
    model = Deep(WIDTH)
    for block in model.blocks:
        assert isinstance(block, Feed)
        block.norm.requires_grad_(False)
        block.down.bias = block.norm.bias
    return model


def blocks_against_joint(around: Callable[[nn.Module], Model], make: Callable[[], nn.Module] = deep) -> list[str]:
    """As ``against_joint``; it is wrong, too, if no blocks were rolled."""
    with reversals() as count:
        texts = against_joint(around, make=make)
        return texts if count() == 2 else [*texts, f"{count()} loops were rolled in 2 calls"]


def in_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """A model with ``fully_shard`` around each block and around it."""
    return sharded(model, model.get_submodule("blocks").children(), **options)


def sharded_blocks(make: Callable[[], nn.Module] = deep, **options: Any) -> list[str]:
    """Blocks that are sharded by themselves are rolled, and no tape keeps what they gather.

    Afterwards the model is what ``fully_shard`` made of it.
    """
    models: list[Any] = []

    def around(model: nn.Module) -> Model:
        models.append(model)
        models.append(reroll.compile(in_blocks(model), **{"lowering": "eager", "schedule": "standard", **options}))
        return models[-1]

    texts = blocks_against_joint(around, make)
    before = type(models[0]), [list(vars(part)) for part in models[0].modules()]
    twin = in_blocks(made(make))
    loss(twin, batch(9, dist.get_rank()))
    texts += [] if before[0] is type(twin) else [f"the model is a {before[0]} afterwards"]
    texts += [] if "_reroll" not in str(before[1]) else ["shards are left in the model"]
    loss(models[0], batch(9, dist.get_rank())).backward()  # by its own hooks, which are there again
    report = str(reroll.explain(models[1], batch(9, dist.get_rank())))
    return texts if "wait_tensor" not in report and "blocks" in report else [*texts, report]


def mixed_blocks(**policy: Any) -> list[str]:
    """What differs from eager ``fully_shard`` in mixed precision, gradients in float64."""
    texts = []
    halves = MixedPrecisionPolicy(param_dtype=torch.float32, **policy)
    model, twin = (in_blocks(made(deep), mp_policy=halves) for _ in range(2))
    run = over_depth(model)
    for number in range(2):
        for part in range(2):
            for each in (run, twin):
                loss(each, batch(9, dist.get_rank(), 10 * number + part)).backward()
        texts += [f"call {number}: {text}" for text in differences(model, twin)]
    return texts


def refused_blocks() -> list[str]:
    """What is sharded in a way that is not followed is refused, and the model left as it was."""
    texts = []
    away = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    columns = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}
    for options, why in ((away, "offload_policy"), (columns, "rows (Shard(0))")):
        model = made(lambda: Deep(8))
        try:
            over_depth(in_blocks(model, **options))
            texts.append(f"{why} was not refused")
        except reroll.UnsupportedError as error:
            texts += [] if why in str(error) else [str(error)]
        texts += [] if type(model).__name__ == "FSDPDeep" else ["the model was left open"]
    return texts


def told_of_blocks() -> list[str]:
    """The backend alone runs such blocks as torch does, and says what rolls them."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        texts = against_joint(lambda model: torch.compile(in_blocks(model), backend="reroll"), make=deep)
    told = [str(each.message) for each in said if issubclass(each.category, reroll.RerollWarning)]
    return texts if any("reroll.compile(model)" in text for text in told) else [*texts, *told, "nothing was said"]


FREE: dict[str, Any] = {"schedule": "auto", "chunk": None, "slots": None}
DDP = DistributedDataParallel
CASES: dict[str, Callable[[], list[str]]] = {
    "compiled inside of DDP": lambda: against_joint(lambda model: DDP(compiled(model))),
    "compiled around DDP": lambda: against_joint(lambda model: compiled(DDP(model))),
    "backend around DDP": lambda: against_joint(lambda model: through_backend(DDP(model))),
    "backend inside of DDP": lambda: against_joint(lambda model: DDP(through_backend(model))),
    "in one bucket of DDP's": uncut_by_dynamo,
    "cut by Dynamo": cut_by_dynamo,
    "lengths of each process": lambda: as_in_eager(plain, lambda rank: (9 + 3 * rank, 14, 10 + rank)),
    "buffers, and lengths of each process": lambda: as_in_eager(Normed, lambda rank: (9, 13 - rank, 14)),
    "accumulated without sending": lambda: as_in_eager(plain, lambda rank: (9, 9), accumulate=3),
    "compiled around fully_shard": lambda: against_joint(lambda model: compiled(sharded(model))),
    "compiled inside of fully_shard": lambda: against_joint(lambda model: sharded(compiled(model))),
    "backend around fully_shard": lambda: against_joint(lambda model: through_backend(sharded(model))),
    "sharded in layers": lambda: against_joint(sharded_in_layers, make=Stacked),
    "compiled around sharded layers": lambda: against_joint(compiled_around_layers, make=Stacked),
    "budgets of each process": budgets,
    "blocks inside of DDP": lambda: blocks_against_joint(lambda model: DDP(over_depth(model))),
    "blocks around DDP": lambda: blocks_against_joint(lambda model: over_depth(DDP(model))),
    "blocks of more than a bucket of DDP's": lambda: blocks_against_joint(
        lambda model: DDP(over_depth(model), bucket_cap_mb=1), lambda: deep(96)
    ),
    "blocks around fully_shard": lambda: blocks_against_joint(lambda model: over_depth(sharded(model))),
    "blocks that are sharded": sharded_blocks,
    "sharded blocks of odd widths, by inductor": lambda: sharded_blocks(lambda: Deep(7), lowering="inductor"),
    "sharded blocks in a budget": lambda: sharded_blocks(lambda: Deep(48), schedule="auto", memory_budget=0.5),
    "sharded blocks with tied and frozen weights": lambda: sharded_blocks(tied),
    "sharded blocks with layers of torch's": lambda: sharded_blocks(lambda: Deep(WIDTH, Encoder)),
    "sharded blocks, mixed precision": mixed_blocks,
    "sharded blocks, added up in float64": lambda: mixed_blocks(reduce_dtype=torch.float64),
    "sharded blocks, inputs in float32": lambda: mixed_blocks(output_dtype=torch.float32),
    "sharded blocks that are refused": refused_blocks,
    "sharded blocks through the backend": told_of_blocks,
    "speaking steps": lambda: speaking(mean, lambda model: model, verify=True),
    "gathering steps": lambda: speaking(gathered, lambda model: model, schedule="standard", slots=None),
    "steps that normalise, by inductor": lambda: speaking(normalised, lambda model: model, lowering="inductor"),
    "speaking steps without gradient": lambda: speaking(without_gradient, lambda model: model),
    "speaking steps in DDP": lambda: speaking(normalised, DDP, **FREE, memory_budget=0.5),
    "speaking steps, other lengths": lambda: apart(9 + 3 * dist.get_rank(), 4),
    "speaking steps, other batches": lambda: apart(9, 4 - dist.get_rank()),
    "speaking steps, other batches, in reroll.compile": lambda: apart(9, 4 - dist.get_rank(), front=True),
    "speaking steps in reroll.compile": lambda: speaking(normalised, lambda model: model, front=True),
}


def main() -> None:
    """Run all cases, and write what differs to the file that is named by the first argument and the rank."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    chosen = sys.argv[2:] or list(CASES)
    for name in chosen:
        try:
            with torch._dynamo.config.patch(optimize_ddp=True):  # the default, whatever a case sets
                found[name] = CASES[name]()
        except Exception:  # noqa: BLE001  # whatever a case raises is what it found
            found[name] = [traceback.format_exc()]
        torch.compiler.reset()
        Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
