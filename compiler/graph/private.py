"""Private torch API that the capture and the segments need, tried on 2.11 and 2.13, under plain names.

``torch._C._set_grad_enabled`` is the node by which Dynamo writes ``no_grad`` and ``enable_grad``. ``OpOverload`` is the
type of ``torch.ops`` functions, whose ``_schema`` says what they update and whose ``_overloadname`` spells them;
``HigherOrderOperator`` that of operators which run a function. Through ``_SingleLevelFunction`` every
``autograd.Function`` is applied; ``_is_any_autocast_enabled`` asks once for all devices. ``_LazyGraphModule`` writes
the Python code of a graph when it is called first: passes edit graphs that never are. ``_disable_current_modes``:
constants are real under a fake mode; ``TorchDispatchMode`` is asked for every operation of this thread.
``OpOverloadPacket`` is an operator with all of its overloads. Of a tensor, ``_version`` counts changes in place,
``_base`` is what it is a view of, and ``_cdata`` of its storage tells whether two share memory; torch has no public
name for these. ``_C._functions.DelayedError`` gives another tensor of the same memory.
``_unsafe_preserve_version_counter`` puts the first back, where values are as they were. Of a module,
``_compiled_call_impl`` is what ``Module.compile`` has set. ``_top_saved_tensors_default_hooks``: hooks on what autograd
saves. ``_are_functorch_transforms_active``: inside of ``vmap``.
``_linalg_check_errors`` looks at what a calculation with a matrix says of itself, and raises its error.
In ``torch.nn.modules.module``, ``_global_forward_hooks`` and three like it hold the hooks of all modules; in
``torch.nn.utils.parametrize``, ``_cache`` holds what ``parametrize.cached()`` keeps. The functions of ``torch._C`` in
``_SETTINGS`` are what public ones ask, which take ten times as long; one that is missing is left out.
``_get_fp32_precision_getter`` and ``_set_fp32_precision_setter`` are behind ``torch.backends.fp32_precision``.
``_get_dispatch_mode`` and ``_get_dispatch_mode_pre_dispatch`` tell tracers that are around, by
``_TorchDispatchModeKey``, and ``FakeTensor`` is what they give. ``_get_current_function_mode_stack``: what else is
around, as ``_len_torch_function_stack`` counts it; ``torch.utils._device`` has that of ``with torch.device(...)``.
``torch._dynamo.mutation_guard``: what Dynamo puts into the class of all modules when it first compiles.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate as map_aggregate
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

LazyGraphModule = _LazyGraphModule
CHECK = torch.ops.aten._linalg_check_errors.default
set_grad_enabled = torch._C._set_grad_enabled
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
_TRACERS = torch._C._TorchDispatchModeKey
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
outside_modes = _disable_current_modes
unseen = torch._C._DisableTorchDispatch  # a context in which no mode is asked for operations


def is_traced(values: Iterable[Any]) -> bool:
    """Whether a tracer is around, or gives one of the values: ``torch.export``, ``make_fx``, fake tensors."""
    modes = map(torch._C._get_dispatch_mode, (_TRACERS.FAKE, _TRACERS.FUNCTIONAL, _TRACERS.PROXY))
    before_autograd = torch._ops._get_dispatch_mode_pre_dispatch(_TRACERS.PROXY)
    around = any(mode is not None for mode in (*modes, before_autograd))
    return around or any(isinstance(value, FakeTensor) for value in values)


def compiled_in_place(model: Any) -> bool:
    """Whether ``Module.compile`` was called on a model: its calls go to what that made, and Dynamo reads no more."""
    return isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None


_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))


def hooks_of_all_modules() -> tuple[Any, ...]:
    """The hooks that every module calls (``torch.nn.modules.module.register_module_forward_hook`` and the like)."""
    return tuple(hook for name in _HOOKS for hook in getattr(torch.nn.modules.module, name).values())


@contextmanager
def without_hooks_of_all_modules() -> Iterator[None]:
    """Inside, modules call no hooks of all modules: those that are made here are none of the user's."""
    module = torch.nn.modules.module
    before = {name: getattr(module, name) for name in _HOOKS}
    if not any(before.values()):
        yield
        return
    vars(module).update({name: OrderedDict() for name in before})
    try:
        yield
    finally:
        vars(module).update(before)


_SETTINGS = (
    *("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "get_num_threads"),
    *("_get_deterministic_fill_uninitialized_memory", "is_anomaly_enabled", "is_anomaly_check_nan_enabled"),
    *("_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction"),
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic"),
    *("_get_mkldnn_enabled", "_get_nnpack_enabled"),
    *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled"),
    *("_is_multithreading_enabled", "is_autocast_cache_enabled", "_is_torch_function_enabled"),
)
_GETTERS = [getattr(torch._C, name) for name in _SETTINGS if hasattr(torch._C, name)]
_PRECISIONS = (
    ("generic", "all"),
    *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "matmul", "conv", "rnn")),
)


def precisions() -> tuple[str, ...]:
    """How float32 is rounded inside of products and convolutions, by backend. (``torch.get_float32_matmul_precision``
    and ``allow_tf32`` tell the same, but raise an error where it was set through ``torch.backends.fp32_precision``.)"""
    return tuple("ieee" if each == "none" else each for each in precisions_as_set())


def precisions_as_set() -> tuple[str, ...]:
    """The same, where what nobody has set is "none", as it is for the keys of inductor's cache."""
    return tuple(torch._C._get_fp32_precision_getter(*each) for each in _PRECISIONS)


def set_precisions(asked: tuple[str, ...]) -> None:
    """Set those that are others."""
    for (backend, kind), precision in zip(_PRECISIONS, asked, strict=True):
        if torch._C._get_fp32_precision_getter(backend, kind) != precision:
            torch._C._set_fp32_precision_setter(backend, kind, precision)


def settings_of_torch() -> tuple[Any, ...]:
    """What a model may ask torch for: precision, determinism, which kernels are allowed, threads."""
    einsum, mha = torch.backends.opt_einsum, torch.backends.mha
    more = (einsum.strategy, einsum.enabled, mha.get_fastpath_enabled())
    dtypes = (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda"))
    return (*(read() for read in _GETTERS), *precisions(), *more, *dtypes)


def modes_of_functions() -> list[Any]:
    """What a user has put around, in this thread, that sees every operation as Python calls it; not what says where
    tensors are made, nor reroll's own."""
    if not torch._C._len_torch_function_stack():
        return []
    found = [each for each in _get_current_function_mode_stack() if type(each) is not DeviceContext]
    return [each for each in found if type(each).__module__.partition(".")[0] not in ("reroll", "torch")]


_METHODS = dict(vars(torch.Tensor))


def set_methods() -> list[tuple[str, Any]]:
    """Attributes of the class of tensors that are other ones than when reroll was loaded."""
    now = vars(torch.Tensor)
    if now == _METHODS:
        return []
    names = sorted({*now, *_METHODS})
    return [(name, now.get(name)) for name in names if _METHODS.get(name) is not now.get(name)]


def modules_as_compiled() -> None:
    """Have Dynamo replace two methods of all modules now, for as long as the process runs, not when it first compiles:
    a key that was made before would be another one."""
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Inside, nothing is in the cache of ``torch.nn.utils.parametrize.cached()``; afterwards what was there before."""
    from torch.nn.utils import parametrize

    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def parametrized_once() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is on: weights that are made are kept, with their history."""
    from torch.nn.utils import parametrize

    return bool(parametrize._cache_enabled)


def is_overload(target: Any) -> bool:
    """Whether a call's target is an operator of ``torch.ops`` with a schema."""
    return isinstance(target, torch._ops.OpOverload)


def operator_name(node: torch.fx.Node) -> str:
    """The name of the operator that a node calls, whichever its overload; nothing where it calls none."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def is_higher_order(target: Any) -> bool:
    """Whether a call's target is an operator that runs a function of the user's."""
    return isinstance(target, torch._ops.HigherOrderOperator)


_OPERATORS = torch._ops.OpOverload, torch._ops.OpOverloadPacket


def is_operator(target: Any) -> bool:
    """Whether a call's target is an operator of ``torch.ops``, with or without the name of an overload."""
    return isinstance(target, _OPERATORS)


class Watching(TorchDispatchMode):
    """A mode that is asked for every operation inside. Operators that run a function (``torch.cond``) are one each."""

    supports_higher_order_operators = True


class OperationsSeen(Watching):
    """Lists the operators that run inside."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def is_of_users(target: Any) -> bool:
    """Whether a call's target is an operator of ``torch.ops`` that is neither torch's own nor ours."""
    return is_operator(target) and not str(target).startswith(("aten.", "prims.", "reroll."))


def written(target: Any) -> Iterator[tuple[int, str]]:
    """(position, name) of the arguments that an operator of ``torch.ops`` updates, by its schema."""
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield index, argument.name


def is_seeded(node: torch.fx.Node) -> bool:
    """Whether an operator draws random numbers: as it is tagged, but for attention without dropout."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            return bool(node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0))
    return True


def hint(value: Any) -> Any:
    """The number that a symbolic one stands for in this call, without a guard; None if it depends on data."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def is_mutable(target: Any) -> bool:
    """Whether an operator of ``torch.ops`` updates an operand, by its schema."""
    return bool(target._schema.is_mutable)


def operands_of(target: Any) -> list[tuple[str, str, bool]]:
    """What an operator of ``torch.ops`` takes, by its schema: names, types, and whether by keyword alone."""
    return [(each.name, str(each.type), each.kwarg_only) for each in target._schema.arguments]


def argument_names(target: Any) -> frozenset[str]:
    """The names of the arguments that an operator of ``torch.ops`` takes, by its schema."""
    return frozenset(argument.name for argument in target._schema.arguments)


def overload_name(target: Any) -> str:
    """The last part of an operator's name, as in ``aten.add.Tensor``."""
    return str(target._overloadname)


@contextmanager
def saved_as_it_is() -> Iterator[None]:
    """Inside, hooks that are outside of here do not see what autograd saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield  # as hooks of our own would keep results alive until Python collects
        return
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        yield


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def saved_as_copies() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which autograd saves copies, which later updates in place do not reach: of a model in which torch
    refuses to go backward after such an update, it gives the gradients of each value as it was when it was read."""
    return torch.autograd.graph.saved_tensors_hooks(lambda value: value.detach().clone(), _itself)


def was_updated(error: Exception) -> bool:
    """Whether torch refused to go backward, as a tensor that it had saved was updated in place afterwards."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


_PASSED_ON: Callable[[torch.Tensor], torch.Tensor] = torch._C._functions.DelayedError(
    "reroll.compile: a run that looks at a model without its values has none to go backward with.", 1
)


def another_of(value: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same memory that is no view for autograd, in a microsecond; with a history, through which
    no gradient goes, if the first one requires a gradient."""
    return _PASSED_ON(value)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts that."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor whose view it is for autograd; None if it is no view."""
    return tensor._base


def storage_id(value: torch.Tensor) -> int:
    """Identity of the memory behind a tensor."""
    return int(value.untyped_storage()._cdata)


def autocast_dtypes() -> tuple[tuple[str, torch.dtype | None], ...]:
    """The dtype of autocast on each kind of device, None where it is off."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds)


@contextmanager
def applied_functions(
    handler: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Every ``autograd.Function`` is applied by ``handler(function, inner, args, kwargs)``; ``inner`` applies it.

    But for that of ``checkpoint(use_reentrant=True)``: what it would make again in a backward is done with a history.
    """

    thread = threading.get_ident()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            return _run_at_once(*args)
        inner = super(_SingleLevelFunction, cls).apply
        return handler(cls, inner, args, kwargs) if threading.get_ident() == thread else inner(*args, **kwargs)

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _run_at_once(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """``run(*args)``, which needs gradients as torch has it: where one of ``args`` does."""
    needed = any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and needed):
        return run(*args)
