"""Models that several processes train together: what speaks with the others stays outside of what is compiled.

``DistributedDataParallel`` sends buffers in its forward, ``fully_shard`` gathers parameters in hooks around a module's.
A front door runs a model a few times more than it is called, and not on all processes at the same calls, as each may
meet a new length at another one. So it compiles the forward inside, and the module around it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from reroll.errors import CaptureError, UnsupportedError


def spoken_around(module: nn.Module) -> nn.Module | None:
    """The module around whose forward processes speak with each other as ``module`` is called; None if none does.

    Raises UnsupportedError if they also speak inside of that forward.
    """
    if not torch.distributed.is_available():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return spoken_around(module.module) or module.module
    parts = [name for name, part in module.named_modules() if isinstance(part, FSDPModule) and name]
    if parts:
        raise UnsupportedError(
            f"Parts of {type(module).__name__} are sharded by themselves ({', '.join(parts)}), so processes speak with "
            "each other inside of it. Compile each of these parts by reroll.compile, and leave what is around them."
        )
    return module if isinstance(module, FSDPModule) else None


@contextmanager
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module's forward be this one; its hooks run around it."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def refuse_pieces(gm: fx.GraphModule) -> None:
    """Raise CaptureError if Dynamo has cut the model's graph into pieces for ``DistributedDataParallel``.

    It counts a parameter at every use, so it cuts a loop in the middle.
    """
    ended: Any = getattr(gm, "compile_subgraph_reason", None)
    if ended is not None and "DDPOptimizer" in str(ended.reason):
        raise CaptureError(
            "Dynamo has cut the model's graph into pieces for DistributedDataParallel, and a loop with it. Use "
            "reroll.compile(model, time_dim=...), or set torch._dynamo.config.optimize_ddp = False before."
        )
