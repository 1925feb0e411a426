"""Results of operations without their values, for runs of which only the operations are looked at.

What most operations give has a size, layout and type that follow from those of their operands. Where a model does no
others, the run that checks a length need not compute: an operation that is done once more on operands like earlier ones
gives a tensor that is like the earlier result in all but its values. Views, numbers of other types than floats, and
updates in place are computed. What shows Python a value raises ``NeedsValues``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reroll.graph.private import another_of, base_of, in_transform, set_grad_enabled, storage_id

_POINTWISE = (
    "add sub rsub mul div truediv true_divide divide multiply subtract pow neg abs exp expm1 log log1p log2 log10 sqrt"
    " rsqrt reciprocal square sign sin cos tan erf sigmoid tanh relu relu6 leaky_relu elu selu celu gelu silu mish"
    " softplus softsign logsigmoid hardtanh hardsigmoid hardswish clamp clip clamp_min clamp_max where maximum minimum"
    " floor ceil round trunc frac fmod remainder masked_fill addcmul addcdiv lerp heaviside atan2 float double"
)
_SHAPED = (
    "matmul mm bmm mv dot outer addmm addmv baddbmm addbmm einsum linear bilinear conv1d conv2d conv3d conv_transpose1d"
    " conv_transpose2d conv_transpose3d max_pool1d max_pool2d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d"
    " adaptive_avg_pool2d lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell softmax log_softmax"
    " layer_norm rms_norm group_norm batch_norm glu sum mean amax amin prod logsumexp norm var std cumsum cumprod diff"
    " cat concat stack flip roll tril triu pad interpolate scaled_dot_product_attention mse_loss l1_loss clone"
    " contiguous to type_as half bfloat16 reshape flatten normalize repeat cosine_similarity dropout"
)
_COMPUTED = (
    "getitem setitem select narrow view unflatten squeeze unsqueeze transpose permute movedim swapaxes t expand"
    " expand_as view_as unbind chunk split detach diagonal zeros ones full empty tensor arange zeros_like ones_like"
    " empty_like full_like new_zeros new_ones new_full new_empty eye rand randn rand_like randn_like all any argmax"
    " argmin max min sort topk cpu as_tensor type linspace broadcast_tensors gather index_select scatter"
    " gt lt ge le eq ne logical_and logical_or logical_not logical_xor long int bool detach_"
    " is_complex element_size get_device result_type promote_types requires_grad_ embedding"
    " cross_entropy nll_loss"
)
_WHOLE = "lstm gru rnn_tanh rnn_relu"
_OPERATORS = "add sub mul truediv div floordiv mod pow neg pos abs"  # ``__add__``, ``__radd__``, ``__iadd__``
_WRITES = "copy zero fill uniform normal scatter"  # with an underscore behind
_OTHERS = "len and or xor rand ror rxor iand ior ixor invert gt lt ge le eq ne"
_GETTERS = "T mT data is_sparse is_cuda is_cpu is_meta is_quantized is_nested itemsize nbytes"
_LIKE = ("pointwise", "shaped", "where")
_MADE = "zeros ones full empty arange linspace eye rand randn"  # of numbers alone: a tensor there would be one of these
_SIZES = "select narrow view unflatten expand chunk split diagonal topk repeat roll reshape flatten new_zeros"
_BATCHED, _FEW = 3, 2  # dimensions of the input of a whole loop that is not packed, steps of it that are computed
_SMALL = 1 << 16  # entries of results of which the first is copied
_MOST = 4_096  # kinds of operands that are kept in mind


class NeedsValues(BaseException):
    """Raised in a run without values where one is asked for; no ``except Exception`` of a model catches it."""


@dataclass(slots=True)
class Like:
    """Tensors of one size, layout and type. All share the memory of ``made``: a copy of the first one if that is small,
    so that whoever reads one unseen finds a value that it could have, or zeros."""

    sizes: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    made: Tensor | None = None

    @classmethod
    def of(cls, value: Tensor) -> Like:
        """Those like a tensor."""
        found = cls(value.shape, value.stride(), value.dtype, value.requires_grad)
        if value.numel() <= _SMALL:
            found.made = found._empty().copy_(value.detach()).requires_grad_(value.requires_grad)
        return found

    def __call__(self) -> Tensor:
        """One more of them."""
        if self.made is None:
            self.made = self._empty().zero_().requires_grad_(self.requires_grad)
        return another_of(self.made)

    def _empty(self) -> Tensor:
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device="cpu")


Found = Like | tuple[Like, ...] | None


@dataclass(slots=True, eq=False)
class Valueless:
    """Gives results in place of operations. ``given``: identities of the memory that the model is given or holds, which
    is seen from elsewhere, too. ``known``: by operation and operands, what results are like; None for those that must
    be computed. ``asked``: whether a value was needed, which a model may hide from whoever runs it."""

    given: frozenset[int] = frozenset()
    known: dict[Any, Found] = field(default_factory=dict)
    asked: bool = False

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: Any) -> Any:
        """What an operation gives in some modes. Raises NeedsValues for one that may show values or depend on them."""
        kind = _kinds().get(func)
        if self.asked or kind is None or in_transform() or self._depends(kind, func, args, kwargs):
            self.asked = True
            raise NeedsValues
        if kind == "whole":
            return _whole(func, args, kwargs)
        key = _key(func, args, kwargs, modes, literal=kind == "shaped") if kind in _LIKE else None
        like = self.known.get(key)
        if like is not None:
            return like() if isinstance(like, Like) else tuple(each() for each in like)
        result = func(*args, **kwargs)
        if key is not None and key not in self.known and len(self.known) < _MOST:
            self.known[key] = _like(result, args, kwargs)
        return result

    def _depends(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the size of a result depends on values, such as with a mask as an index, or others may see it."""
        if kind == "updates":
            return args[0].is_floating_point() and storage_id(args[0]) in self.given
        if kind == "getitem":
            return any(isinstance(each, list) or _tensors([each]) for each in _items(args[1]))
        if kind == "where":
            return len(args) + len(kwargs) == 1
        first = _sized().get(func)
        return first is not None and bool(_tensors((*args[first:], *kwargs.values())))


def serves(colours: Iterable[tuple[Any, ...]]) -> bool:
    """Whether no event of these colours shows a value, or gives what depends on values but for these."""
    return all(isinstance(each[0], str | tuple) or each[0] in _kinds() for each in colours)


@functools.cache
def _kinds() -> Mapping[Any, str]:
    """What is known of operations, by the functions that a mode is told of."""
    operators = _OPERATORS.split()
    found = dict.fromkeys(_functions(_COMPUTED.split()), "computed")
    found |= dict.fromkeys(_functions(f"__{name}__" for name in _OTHERS.split()), "computed")
    found |= dict.fromkeys(_functions(f"{name}_" for name in f"{_POINTWISE} {_WRITES}".split()), "updates")
    found |= dict.fromkeys(_functions(f"__i{name}__" for name in operators), "updates")
    found |= dict.fromkeys(_functions(f"__{side}{name}__" for name in operators for side in ("", "r")), "pointwise")
    found |= dict.fromkeys(_functions(_POINTWISE.split()), "pointwise")
    found |= dict.fromkeys(_functions(_SHAPED.split()), "shaped")
    found |= dict.fromkeys(_functions(_WHOLE.split()), "whole")
    found |= {getattr(Tensor, name).__get__: "computed" for name in _GETTERS.split()}
    found |= {Tensor.requires_grad.__set__: "computed", set_grad_enabled: "computed"}  # type: ignore[attr-defined]
    found |= {Tensor.__matmul__: "shaped", Tensor.__rmatmul__: "shaped", Tensor.__setitem__: "updates"}
    return found | {Tensor.__getitem__: "getitem", torch.where: "where", Tensor.where: "where"}


@functools.cache
def _sized() -> Mapping[Any, int]:
    """Operations that are given sizes or places, and the number of operands before these."""
    return dict.fromkeys(_functions(_SIZES.split()), 1) | dict.fromkeys(_functions(_MADE.split()), 0)


def _functions(names: Iterable[str]) -> list[Any]:
    owners = (torch, torch.nn.functional, Tensor)
    functions = (getattr(owner, name, None) for name in names for owner in owners)
    return [each for each in functions if callable(each) and not isinstance(each, type)]


def _items(value: Any) -> tuple[Any, ...]:
    if isinstance(value, slice):
        return value.start, value.stop, value.step
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
    """The tensors in some operands, in lists of them and in slices."""
    return [each for value in values for item in _items(value) for each in _items(item) if isinstance(each, Tensor)]
