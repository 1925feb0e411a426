"""Results of operations without their values, for runs of which only the operations are looked at.

What most operations give has a size, layout and type that follow from those of their operands. Where a model does no
others, the run that checks a length need not compute: an operation that is done once more on operands like earlier ones
gives a tensor that is like the earlier result in all but its values. Views, numbers of other types than floats, and
updates in place are computed. What shows Python a value raises ``NeedsValues``.

Private torch API, tried on 2.11 and 2.13: ``_C._functions.DelayedError`` gives another tensor of the same memory
that is no view for autograd, in a microsecond, with a history if the first one requires a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.graph.private import base_of, in_transform, storage_id

_POINTWISE = (
    "add sub rsub mul div truediv true_divide divide multiply subtract pow neg abs exp expm1 log log1p log2 log10 sqrt"
    " rsqrt reciprocal square sign sin cos tan erf sigmoid tanh relu relu6 leaky_relu elu selu celu gelu silu mish"
    " softplus softsign logsigmoid hardtanh hardsigmoid hardswish clamp clip clamp_min clamp_max where maximum minimum"
    " floor ceil round trunc frac fmod remainder masked_fill addcmul addcdiv lerp heaviside atan2 float double dropout"
)
_SHAPED = (
    "matmul mm bmm mv dot outer addmm addmv baddbmm addbmm einsum linear bilinear conv1d conv2d conv3d conv_transpose1d"
    " conv_transpose2d conv_transpose3d max_pool1d max_pool2d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d"
    " adaptive_avg_pool2d lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell softmax log_softmax"
    " layer_norm rms_norm group_norm batch_norm glu sum mean amax amin prod logsumexp norm var std cumsum cumprod diff"
    " cat concat stack flip roll tril triu pad interpolate scaled_dot_product_attention mse_loss l1_loss clone"
    " contiguous to type_as half bfloat16 reshape flatten normalize repeat cosine_similarity"
)
_COMPUTED = (
    "getitem setitem select narrow view unflatten squeeze unsqueeze transpose permute movedim swapaxes t expand"
    " expand_as view_as unbind chunk split detach diagonal zeros ones full empty tensor arange zeros_like ones_like"
    " empty_like full_like new_zeros new_ones new_full new_empty eye rand randn rand_like randn_like all any argmax"
    " argmin max min sort topk cpu as_tensor type linspace broadcast_tensors gather index_select scatter scatter_"
    " gt lt ge le eq ne logical_and logical_or logical_not logical_xor long int bool copy_ zero_ fill_ detach_"
    " is_complex element_size get_device result_type promote_types requires_grad_ uniform_ normal_ embedding"
    " cross_entropy nll_loss"
)
_WHOLE = "lstm gru rnn_tanh rnn_relu"
_OPERATORS = "add sub mul truediv div floordiv mod pow neg pos abs"  # ``__add__``, ``__radd__``, ``__iadd__``
_OTHERS = "getitem setitem len and or xor rand ror rxor iand ior ixor invert gt lt ge le eq ne"
_GETTERS = "T mT data grad_fn is_sparse is_cuda is_cpu is_meta is_quantized is_nested itemsize nbytes"
_PASSED_ON: Callable[[Tensor], Tensor] = torch._C._functions.DelayedError(
    "reroll.compile: a run that looks at a model without its values has none to go backward with.", 1
)
_BATCHED, _FEW = 3, 2  # dimensions of the input of a whole loop that is not packed, steps of it that are computed
_MOST = 4_096  # kinds of operands that are kept in mind


class NeedsValues(BaseException):
    """Raised in a run without values where one is asked for; no ``except Exception`` of a model catches it."""


@dataclass(slots=True)
class Like:
    """Tensors of one size, layout and type; ``made`` is the first of them, once one is asked for."""

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    made: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor) -> Like:
        """Those like a tensor."""
        return cls(value.shape, value.stride(), value.dtype, value.requires_grad)

    def __call__(self) -> Tensor:
        """One more of them."""
        if self.made is None:
            with torch.no_grad():
                self.made = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="cpu").zero_()
            self.made.requires_grad_(self.requires_grad)
        return _PASSED_ON(self.made)


Found = Like | tuple[Like, ...] | None


@dataclass(slots=True, eq=False)
class Valueless:
    """Gives results in place of operations. ``known``: by operation and operands, what results are like; None for those
    that must be computed."""

    known: dict[Any, Found] = field(default_factory=dict)

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: Any) -> Any:
        """What an operation gives in some modes. Raises NeedsValues for one that may show values or depend on them."""
        kind = _kinds().get(func)
        if kind is None or _sized_by_values(kind, args) or in_transform():
            raise NeedsValues
        if kind == "whole":
            return _whole(func, args, kwargs)
        key = None if kind in ("computed", "getitem") else _key(func, args, kwargs, modes, literal=kind == "shaped")
        like = self.known.get(key)
        if like is not None:
            return like() if isinstance(like, Like) else tuple(each() for each in like)
        result = func(*args, **kwargs)
        if key is not None and key not in self.known and len(self.known) < _MOST:
            self.known[key] = _like(result, args, kwargs)
        return result


def serves(colours: Iterable[tuple[Any, ...]]) -> bool:
    """Whether no event of these colours shows a value, or gives what depends on values but for these."""
    return all(isinstance(each[0], str | tuple) or each[0] in _kinds() for each in colours)


@functools.cache
def _kinds() -> Mapping[Any, str]:
    """What is known of operations, by the functions that a mode is told of."""
    operators, found = _OPERATORS.split(), dict[Any, str]()
    for names, kind in (
        ([f"{name}_" for name in _POINTWISE.split()], "computed"),
        ([f"__i{name}__" for name in operators], "computed"),
        ([f"__{name}__" for name in _OTHERS.split()], "computed"),
        (_COMPUTED.split(), "computed"),
        ([f"__{side}{name}__" for name in operators for side in ("", "r")], "pointwise"),
        (_POINTWISE.split(), "pointwise"),
        (["__matmul__", "__rmatmul__"], "shaped"),
        (_SHAPED.split(), "shaped"),
        (_WHOLE.split(), "whole"),
    ):
        owners = (torch, torch.nn.functional, Tensor)
        functions = (getattr(owner, name, None) for name in names for owner in owners)
        found |= {each: kind for each in functions if callable(each) and not isinstance(each, type)}
    found |= {getattr(Tensor, name).__get__: "computed" for name in _GETTERS.split()}
    found[Tensor.requires_grad.__set__] = "computed"  # type: ignore[attr-defined]
    return found | {Tensor.__getitem__: "getitem", torch.where: "where", Tensor.where: "where"}


def _sized_by_values(kind: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation that most often is not gives as many entries as values say: a mask as an index."""
    if kind == "getitem":
        return any(isinstance(each, Tensor | list) for each in _items(args[1]))
    return kind == "where" and len(args) == 1


def _items(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: Any, *, literal: bool) -> Any:
    """The operation, what its tensors are like, and its other operands, numbers among them where these are ``literal``.
    None where an operand is of another kind, or lies elsewhere."""
    parts = [func, modes, torch.is_grad_enabled()]
    for value in (*args, *kwargs.items()):
        if not _add(value, parts, literal=literal):
            return None
    return tuple(parts)


def _add(value: Any, parts: list[Any], *, literal: bool) -> bool:
    kind = type(value)
    if kind is Tensor or kind is torch.nn.Parameter:
        parts += (value.shape, value.stride(), value.dtype, value.requires_grad)
        return bool(value.is_cpu)
    if kind is float or kind is int:
        parts.append((kind, value) if literal else kind)
        return True
    if kind is tuple or kind is list:
        parts.append((kind, len(value)))
        return all(_add(each, parts, literal=literal) for each in value)
    parts.append(value)
    return value is None or kind in (bool, str, torch.dtype, torch.Size, torch.memory_format)


def _like(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Found:
    """What a result is like, if others like it may stand for it: floats in memory of their own."""
    results = _items(result) if type(result) in (Tensor, tuple) else (None,)
    if not all(_plain(each) for each in results):
        return None
    read = {storage_id(each) for each in _tensors((*args, *kwargs.values()))}
    if read & {storage_id(each) for each in results}:
        return None
    found = tuple(map(Like.of, results))
    return found if type(result) is tuple else found[0]


def _whole(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a whole loop over time gives, such as that of ``nn.LSTM``: its last states are those of the first steps, and
    its rows are as many as they should be."""
    x, dim = args[0], 1 if args[-1] is True else 0
    if kwargs or x.dim() != _BATCHED or not x.is_cpu or x.shape[dim] <= _FEW:
        return func(*args, **kwargs)
    rows, *last = func(x.narrow(dim, 0, _FEW), *args[1:])
    sizes, strides, step = list(rows.shape), [0] * _BATCHED, 1
    sizes[dim] = x.shape[dim]
    for at in sorted(range(_BATCHED), key=rows.stride):
        strides[at], step = step, step * sizes[at]
    return (Like(torch.Size(sizes), tuple(strides), rows.dtype, rows.requires_grad)(), *last)


def _plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.is_cpu
        and value.layout == torch.strided
        and value.is_floating_point()
        and base_of(value) is None
    )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [each for value in values for item in _items(value) for each in _items(item) if isinstance(each, Tensor)]
