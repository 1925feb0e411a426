"""Models that several processes train together: what speaks with the others stays outside of what is compiled.

``DistributedDataParallel`` sends buffers in its forward, ``fully_shard`` gathers parameters in hooks around a module's.
A front door runs a model a few times more than it is called, and not on all processes at the same calls, as each may
meet a new length at another one. So it compiles the forward inside, and the module around it runs as it is. A look ends
before what speaks inside of that forward: it would wait for processes that do not run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from reroll.errors import CaptureError, UnsupportedError
from reroll.graph.private import Watching

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CollectiveError(UnsupportedError):
    """A run that is looked at would speak with other processes."""


def alone() -> bool:
    """Whether there are no other processes that this one could speak with."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def in_parts(value: Tensor) -> bool:
    """Whether a tensor lies in parts in several processes."""
    if alone():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def collective_wrapper(module: nn.Module) -> nn.Module | None:
    """The module around whose forward processes speak with each other as ``module`` is called; None if none does.

    Raises UnsupportedError if they also speak inside of that forward.
    """
    if alone():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel):
        return collective_wrapper(module.module) or module.module
    root = isinstance(module, FSDPModule)
    parts = [name for name, part in module.named_modules() if _speaks(part) and (name or not root)]
    if parts:
        raise UnsupportedError(
            f"Processes speak with each other inside of {type(module).__name__}, where DistributedDataParallel or "
            f"fully_shard is around parts ({', '.join(parts) or 'FullyShardedDataParallel around it'}). Compile each "
            "of these parts by reroll.compile, and leave what is around them; or put DistributedDataParallel or "
            "fully_shard around the whole model alone."
        )
    return module if root else None


def speaks_inside(module: nn.Module) -> bool:
    """Whether processes speak with each other inside of a module's forward, by a part that is sharded by itself."""
    try:
        collective_wrapper(module)
    except UnsupportedError:
        return True
    return False


def _speaks(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(module, DistributedDataParallel | FSDPModule | FullyShardedDataParallel)


@contextmanager
def in_silence() -> Iterator[None]:
    """Raise UnsupportedError where a run inside would speak with other processes, before it does."""
    if alone():
        yield
        return
    thread = threading.get_ident()

    def look(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread and _speaks(module):
            raise _collective_error(f"a part of the class {type(module).__name__}")

    hook = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        with _Silence():  # type: ignore[no-untyped-call]
            yield
    finally:
        hook.remove()


class _Silence(Watching):
    """Collectives are refused; compiled functions run as ever."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _NAMESPACES:
            raise _collective_error(str(func))
        return func(*args, **(kwargs or {}))


def _collective_error(what: str) -> CollectiveError:
    return CollectiveError(
        f"The model speaks with other processes in its forward ({what}). reroll.compile runs a model a few times more "
        "than it is called, which the others would have to do at the same moment. Speak before the model or after it, "
        "compile only a part that does not, or use torch.compile(backend='reroll')."
    )


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
            "reroll.compile(model), or set torch._dynamo.config.optimize_ddp = False before."
        )
