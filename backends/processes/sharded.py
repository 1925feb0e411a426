"""Blocks that ``fully_shard`` has sharded one by one: their parameters are gathered in the step that reads them.

The hooks of ``fully_shard`` cut every graph of Dynamo's. So while such a model is called they are off, and each of its
sharded parameters is a property of its module that gathers it, by functional collectives, which Dynamo reads. A block
then gathers what it needs when it runs, again when it is reversed, and its gradient is reduced there; in between every
process holds its own shards alone. The model's parameters stay what they are, DTensors, and so do their gradients.

Source: Zhao et al. (2023), PyTorch FSDP, arXiv 2304.11277; collectives that a compiler sees: Zhang et al. (2024),
SimpleFSDP, arXiv 2411.00284.

Private torch API, tried on 2.11 and 2.13: ``torch.ops._c10d_functional`` and ``_c10d_functional_autograd``, into which
functional collectives turn; ``tree_map_only``, for the values that ``fully_shard`` casts; and of ``fully_shard``
``_get_fsdp_state`` with the policies and hooks that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from reroll.backends.processes.wrappers import alone, in_parts
from reroll.errors import UnsupportedError
from reroll.graph.effects import SHARD

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@dataclass(frozen=True, slots=True)
class _Form:
    """How a parameter is gathered: ``rows`` from the ``size`` processes of a ``group``, sent as ``dtype``;
    gradients are added up as ``reduced``."""

    rows: int
    size: int
    group: str
    dtype: torch.dtype
    reduced: torch.dtype


def sharded_inside(module: Any) -> bool:
    """Whether ``fully_shard`` has sharded parts of a module by themselves."""
    if alone() or not isinstance(module, nn.Module):
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(part, FSDPModule) for part in module.modules() if part is not module)


@contextmanager
def gathering(module: nn.Module) -> Iterator[None]:
    """Have a model's blocks gather their sharded parameters by themselves inside, and not by hooks.

    Raises UnsupportedError for what is sharded in a way that is not followed.
    """
    shards: dict[Tensor, tuple[Tensor, _Form]] = {}
    put_back: list[Callable[[], None]] = []
    try:
        for part, policy in _parts(module, None):
            put_back.append(partial(_restore, part, type(part), dict(vars(part))))
            _open(part, policy, shards)
        yield
    finally:
        for restore in reversed(put_back):
            restore()


def _parts(module: nn.Module, policy: Any) -> Iterator[tuple[nn.Module, Any]]:
    """Each part of a module once, with the policy of mixed precision of what shards it."""
    todo, seen = [(module, policy)], set()
    while todo:
        part, policy = todo.pop()
        if part in seen:
            continue
        seen.add(part)
        state = _state(part)
        policy = policy if state is None else state._mp_policy
        yield part, policy
        todo += [(child, policy) for child in part.children()]


def _state(part: nn.Module) -> Any:
    """What ``fully_shard`` knows of a module; None if it has not sharded it."""
    from torch.distributed.fsdp import FSDPModule

    return part._get_fsdp_state() if isinstance(part, FSDPModule) else None


def _restore(part: nn.Module, kind: type, before: dict[str, Any]) -> None:
    part.__class__ = kind
    for name in [name for name in vars(part) if name.startswith(SHARD)]:
        del part.__dict__[name]
    part.__dict__.update({name: before[name] for name in _HOOKS})


def _open(part: Any, policy: Any, shards: dict[Tensor, tuple[Tensor, _Form]]) -> None:
    """Make a part one that gathers its own parameters."""
    from torch.distributed.fsdp import FSDPModule

    kind: Any = type(part)
    state = _state(part)
    if isinstance(part, FSDPModule):
        _check(part, state)
        part.reshard()  # what an earlier call left gathered
        kind = next(base for base in kind.__mro__ if issubclass(base, nn.Module) and not issubclass(base, FSDPModule))
        _without_hooks(part, state)
    forms = {}
    for name, parameter in part._parameters.items():
        if parameter is not None and in_parts(parameter):
            if parameter not in shards:
                form = _form(parameter, policy, f"{kind.__name__}.{name}")
                shards[parameter] = _shard(parameter, form), form
            part.__dict__[SHARD + name], forms[name] = shards[parameter]
    if forms or state is not None:
        part.__class__ = _gathering_class(kind, tuple(forms.items()))


def _check(part: object, state: Any) -> None:
    """Raise UnsupportedError for settings of ``fully_shard`` that gathering in steps does not follow."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in (each for each in groups if each is not None):
        settings = {
            "an offload_policy": hasattr(group.offload_policy, "pin_memory"),
            "set_gradient_divide_factor": getattr(group, "gradient_divide_factor", None) is not None,
            "set_all_reduce_hook": getattr(group, "_all_reduce_hook", None) is not None,
        }
        for what in (name for name, given in settings.items() if given):
            raise UnsupportedError(
                f"fully_shard of {type(part).__name__} has {what}, which reroll.compile does not follow where blocks "
                "are sharded by themselves. Leave it out, or use fully_shard(model) alone."
            )


def _without_hooks(part: Any, state: Any) -> None:
    """Take the hooks of ``fully_shard`` off, but for the casts that they do."""
    policy = state._mp_policy
    inside = policy.param_dtype if policy.cast_forward_inputs else None
    casts = (
        inside and partial(_cast_inputs, inside),
        policy.output_dtype and partial(_cast_output, policy.output_dtype),
    )
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    for name, cast, handle in zip(_HOOKS, casts, handles, strict=True):
        own, before = {each.id for each in getattr(handle, "handles", (handle,))}, vars(part)[name]
        hooks = [(number, cast if number in own else hook) for number, hook in before.items()]
        part.__dict__[name] = type(before)((number, hook) for number, hook in hooks if hook is not None)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return _cast(output, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, values)


def _form(parameter: Any, policy: Any, name: str) -> _Form:
    """How a parameter is gathered. Raises UnsupportedError if it does not lie in rows over one line of processes."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or not placements[0].is_shard(0):
        raise UnsupportedError(
            f"The parameter {name} is sharded as {placements} over a mesh of {mesh.ndim} dimensions. Where blocks are "
            "sharded by themselves, reroll.compile gathers rows (Shard(0)) over a mesh of one dimension. Use such a "
            "mesh, or fully_shard(model) alone."
        )
    dtype = (policy and policy.param_dtype) or parameter.dtype
    reduced = (policy and policy.reduce_dtype) or dtype
    return _Form(parameter.shape[0], mesh.size(), mesh.get_group().group_name, dtype, reduced)


def _shard(parameter: Any, form: _Form) -> Tensor:
    """A process's rows of a parameter, as many as every process has."""
    share: Any = _Share.apply
    shard: Tensor = share(parameter.to_local(), -(-form.rows // form.size), 1 / form.size)
    return shard


class _Share(torch.autograd.Function):
    """Rows with empty ones behind them; of the gradient, which is a sum over processes, a mean."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, part: float) -> Tensor:
        ctx.rows, ctx.part = len(shard), part
        if rows == len(shard):
            return shard.view_as(shard)
        return torch.cat([shard, shard.new_zeros(rows - len(shard), *shard.shape[1:])])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[: ctx.rows] * ctx.part, None, None


@cache
def _gathering_class(kind: Any, forms: tuple[tuple[str, _Form], ...]) -> type[nn.Module]:
    """A class of modules whose parameters are gathered as they are read."""
    body: dict[str, Any] = {name: _gathered(SHARD + name, form) for name, form in forms}
    if issubclass(kind, nn.RNNBase):
        body["_flat_weights"] = property(lambda self: [getattr(self, name) for name in self._flat_weights_names])
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__, **body})


def _gathered(slot: str, form: _Form) -> property:
    rows, size, group, dtype, reduced = form.rows, form.size, form.group, form.dtype, form.reduced
    apart: Any = _Gather.apply

    def gathered(self: nn.Module) -> Tensor:
        shard: Tensor = getattr(self, slot)
        alike = dtype == reduced
        every: Tensor = _gather(shard.to(dtype), size, group) if alike else apart(shard, size, group, dtype, reduced)
        return every if every.shape[0] == rows else every[:rows]

    return property(gathered)


def _gather(shard: Tensor, size: int, group: str) -> Tensor:
    """All processes' rows; the gradient of a process is the sum of all for its own."""
    every = torch.ops._c10d_functional_autograd.all_gather_into_tensor(shard, size, group)
    gathered: Tensor = torch.ops._c10d_functional.wait_tensor(every)
    return gathered


class _Gather(torch.autograd.Function):
    """The same, where gradients are added up in a dtype of their own, and stay in it."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, size: int, group: str, dtype: torch.dtype, reduced: torch.dtype) -> Tensor:
        ctx.size, ctx.group, ctx.reduced, ctx.given = size, group, reduced, shard.dtype
        every = torch.ops._c10d_functional.all_gather_into_tensor(shard.to(dtype), size, group)
        gathered: Tensor = torch.ops._c10d_functional.wait_tensor(every)
        # Torch 2.11 gives ``every``, too, as a result that is not used; as the same tensor it would take the gradient.
        return gathered.view(gathered.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ops = torch.ops._c10d_functional
        summed = ops.reduce_scatter_tensor(gradient.to(ctx.reduced).contiguous(), "sum", ctx.size, ctx.group)
        return ops.wait_tensor(summed).to(ctx.given), None, None, None, None
