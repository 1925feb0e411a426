"""What is known of torch's operations: one record for each, whatever it is called by.

``of`` finds the record of an operator of ``torch.ops``, of a function of torch's or of Python's, and of the name of a
method: ``x * 2``, ``x *= 2``, ``torch.multiply(x, 2)``, ``x.mul_(2)`` and ``aten.mul.Tensor`` are one operation. What
torch says of an operation is asked of torch (``torch.Tag``); names stand below where it says nothing, each list with
its reason. Of what stands nowhere nothing is known, which is always safe: it mixes all entries, and may decide.

Private torch API, tried on 2.11 and 2.13: ``_schema`` of an operator, for what it takes and gives.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Operation:
    """The traits of an operation; each is False, empty or None where nothing is known.

    ``pointwise``: an entry of its result is made of one entry of each operand, with broadcasting.
    ``view``: it gives entries of its operand, none of them changed, and may give its memory: ``turned`` (other order of
    dimensions), ``reshaped``, ``sized`` (dimensions of size one), ``expanded``, ``part``, ``pieces`` or ``same``.
    ``moves``: it gives entries of its operands, none changed but for the dtype, in memory of its own: ``copied``,
    ``looked up`` by indices, ``selected`` from two, or ``same`` where it may give its operand. ``padded``: and others.
    ``makes``: a tensor that depends on nothing but sizes and numbers: ``zeros``, ``ones``, ``number``, ``range`` or
    ``empty``. ``like``: of the kind of its first operand. ``number_at``: the position of the number that fills it.
    ``reduction``: it makes one entry of all along some dimensions. ``random``: it may draw random numbers, as
    ``dropout`` does. ``casts``: to another dtype, entry by entry.
    ``decision``: gradients are nowhere, and what was decided may turn out otherwise when it is made again: it
    ``compares``, ``rounds``, or is another one that ``decides``; or it ``jumps`` and has a gradient all the same.
    ``kinked``: the gradient of what has a kink, which decides by all operands but the first.
    ``rows``: which rule of ``reroll.capture.rows.row_rules`` says where time is in its result.
    ``arithmetic``: of two operands, one of which may be a number that is another one at each step.
    ``linear``: its gradient is that of the operations that it consists of, which may be linear in a state.
    ``product``: of ``matrices``, ``batches`` of these, a ``vector`` or a ``kernel``.
    ``norm``: it normalizes by ``rows``, or over a ``batch``.
    ``exact``: on small whole numbers it gives the same in every arithmetic; ``monotone``: that, and it has its extremes
    where its operands have theirs.
    """

    name: str
    pointwise: bool = False
    view: str = ""
    moves: str = ""
    padded: bool = False
    makes: str = ""
    like: bool = False
    number_at: int | None = None
    reduction: bool = False
    random: bool = False
    dropout: bool = False
    casts: bool = False
    decision: str = ""
    kinked: bool = False
    rows: str = ""
    arithmetic: bool = False
    linear: bool = False
    product: str = ""
    norm: str = ""
    exact: bool = False
    monotone: bool = False

    @property
    def only_moves(self) -> bool:
        """Whether the result has no entry that its first operand, or one of a list of these, has not."""
        return self.view != "" or self.moves not in ("", "selected")

    @property
    def cheap(self) -> bool:
        """Whether it takes hardly more than to write its result, which is the same each time."""
        return self.makes not in ("", "empty") or self.moves == "copied" or self.padded

    @property
    def decides(self) -> bool:
        """Whether what it gives is never made a second time."""
        return self.decision in ("compares", "rounds", "decides")


# Other names of one operation, as torch documents them; a test runs both. An underscore at the end, those of Python's
# own methods and ``special_`` are taken off beforehand. The first of a group is the one that torch's schemas have.
_SPELLINGS = """
add iadd, sub subtract isub, mul multiply imul, div divide true_divide truediv itruediv,
floor_divide floordiv ifloordiv, remainder mod imod, pow ipow, bitwise_and and iand, bitwise_or or ior,
bitwise_xor xor ixor, bitwise_not invert inv, lshift ilshift, rshift irshift, neg negative, positive pos,
abs absolute, clamp clip, trunc fix, gt greater, ge greater_equal, lt less, le less_equal, ne not_equal,
acos arccos, acosh arccosh, asin arcsin, asinh arcsinh, atan arctan, atan2 arctan2, atanh arctanh,
sigmoid expit, digamma psi, lgamma gammaln, igamma gammainc, igammac gammaincc, mvlgamma multigammaln,
log_sigmoid logsigmoid, threshold _threshold, cat concat concatenate, transpose swapaxes swapdims,
movedim moveaxis, outer ger
"""
_CASTS = "_to_copy convert_element_type to float double half bfloat16 int long short char byte bool type type_as"
_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_REDUCTIONS = "sum mean amax amin prod logsumexp all any argmax argmin"
_MONOTONE = "add sub rsub mul neg maximum minimum clamp clamp_min clamp_max relu"
_IMAGES = "conv conv_transpose max_pool avg_pool adaptive_avg_pool adaptive_max_pool"
_FLAGS = {
    # Beside what torch tags so. Casts, detach and contiguous may give their operand itself; dropouts are it only while
    # they draw nothing; of where, masked_fill, rsub and float_power some ways to call them are made of others; a number
    # comes first in polygamma; the rest has no tag.
    "pointwise": f"{_CASTS} detach contiguous {_DROPOUTS} where masked_fill rsub float_power polygamma floor_divide"
    " log_sigmoid hardswish lshift rshift",
    "padded": "constant_pad_nd",
    "like": "zeros_like new_zeros ones_like new_ones full_like new_full empty_like new_empty",
    "reduction": f"{_REDUCTIONS} var var_mean",
    "dropout": _DROPOUTS,
    "casts": _CASTS,
    "kinked": "threshold hardtanh hardswish hardsigmoid hardshrink softshrink leaky_relu elu rrelu_with_noise logit"
    " _prelu_kernel _cdist _pdist smooth_l1_loss huber_loss multi_margin_loss multilabel_margin_loss"
    " grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d cudnn_grid_sampler"
    " _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine",
    "linear": "mul div add sub sum einsum matmul bmm mm outer getitem contiguous clone",
    "arithmetic": "add sub mul div pow",
    "monotone": _MONOTONE,
    "exact": f"{_MONOTONE} _to_copy to convert_element_type abs sign sgn square eq ne lt le gt ge heaviside"
    " logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not",
}
_KINDS = {
    "view": {
        "turned": "transpose permute movedim t numpy_T",
        "reshaped": "view reshape flatten unflatten view_as ravel _unsafe_view",
        "sized": "squeeze unsqueeze",
        "expanded": "expand expand_as broadcast_to",
        "part": "select narrow slice getitem diagonal unfold",
        "pieces": "unbind split split_with_sizes chunk tensor_split",
        "same": "alias detach",
    },
    "moves": {
        "copied": "clone _to_copy convert_element_type cat stack flip roll repeat select_scatter slice_scatter"
        " _unsafe_view",
        "looked up": "index_select gather",
        "selected": "where masked_fill",
        "same": "to contiguous lift_fresh lift_fresh_copy device_put broadcast_in_dim named",
    },
    "makes": {
        "zeros": "zeros zeros_like new_zeros",
        "ones": "ones ones_like new_ones",
        "number": "full full_like new_full scalar_tensor fill",
        "empty": "empty empty_like new_empty",
        "range": "arange",
    },
    "decision": {
        "compares": "gt ge lt le eq ne",
        "rounds": "floor ceil round trunc frac fmod remainder floor_divide",
        "decides": "sign sgn heaviside argmax bernoulli",
        "jumps": "threshold hardshrink copysign nextafter angle atan2",
    },
    "product": {"matrices": "mm addmm", "batches": "bmm baddbmm", "vector": "mv addmv", "kernel": "convolution"},
    "norm": {"rows": "native_layer_norm native_group_norm", "batch": "native_batch_norm"},
    "rows": {
        "reduced": _REDUCTIONS,
        "along": "softmax log_softmax cumsum cumprod index_select",
        "pieces": "chunk split",
        "one": "select unbind",
        "turned": "transpose permute movedim t",
        "reshaped": "view reshape flatten unflatten view_as ravel squeeze unsqueeze",
        "expanded": "expand expand_as broadcast_to",
        **{f"images {dims}": " ".join(f"{name}{dims}d" for name in _IMAGES.split()) for dims in (1, 2, 3)},
        "items": "group_norm interpolate pixel_shuffle pixel_unshuffle",
        "normed": "layer_norm rms_norm",
        **{name: name for name in ("linear", "embedding", "matmul", "batch_norm", "narrow", "cat", "stack", "getitem")},
        **{name: name for name in ("flip", "glu", "prelu")},
    },
}
_NUMBER_AT = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1}
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "gumbel", "fractional_max_pool", "multi_head_attention")
SPELLINGS = {other: own for own, *others in map(str.split, _SPELLINGS.split(",")) for other in others}
"""The own name of an operation, by its other names."""
_PLACES = ("torch", "_operator", "operator", "builtins", "math")  # modules of what is torch's, or Python's
_SPACES = ("aten", "prims", "reroll")


def of(target: Any) -> Operation:
    """The record of what a call's target does; one without traits where that is not torch's, Python's or reroll's."""
    if isinstance(target, str):
        return named(target)
    packet = getattr(target, "overloadpacket", target)
    if hasattr(packet, "overloads"):
        space, _, name = str(packet).partition(".")
        return named(name if space in _SPACES else "")
    module = getattr(target, "__module__", None) or "torch"
    return named(getattr(target, "__name__", "") if module.partition(".")[0] in _PLACES else "")


@functools.cache
def named(name: str) -> Operation:
    """The record of the operation of a name, in whatever way that is spelled."""
    own = _own_name(name)
    traits: dict[str, Any] = {trait: True for trait, names in _FLAGS.items() if own in names.split()}
    for trait, kinds in _KINDS.items():
        traits[trait] = next((kind for kind, names in kinds.items() if own in names.split()), "")
    pointwise = "pointwise" in traits or _is_tagged_pointwise(own)
    return Operation(
        own,
        **traits
        | {
            "pointwise": pointwise,
            "rows": "entries" if pointwise else traits["rows"],
            "kinked": own.endswith("_backward") and own.removesuffix("_backward") in _FLAGS["kinked"].split(),
            "linear": "linear" in traits or traits["view"] in ("turned", "reshaped", "sized", "expanded"),
            "number_at": _NUMBER_AT.get(own),
            "random": any(word in name for word in _RANDOM) or _draws(own) or _draws(f"{own}_"),
        },
    )


def torchs_arguments(known: Operation, names: Iterable[str]) -> dict[str, str]:
    """Which of the names of arguments are numpy's, each with torch's own: torch takes both, what reads a call one."""
    taken = {each.name for overload in _overloads(known.name) for each in overload._schema.arguments}
    numpys = {"axis": "dim", "keepdims": "keepdim"}
    return {name: own for name, own in numpys.items() if name in names and name not in taken and own in taken}


def placed(known: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """The operands of a call with those that have names in their places, if a schema of torch's has just these next."""
    for overload in _overloads(known.name):
        names = [each.name for each in overload._schema.arguments if not each.kwarg_only][len(args) :][: len(kwargs)]
        if names and set(names) == set(kwargs):
            return (*args, *(kwargs[name] for name in names)), {}
    return args, kwargs


def _own_name(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        return name if inner == "rand" else SPELLINGS.get(inner, inner)  # the and of what stands on the right
    plain = name.removesuffix("_") or name
    if plain.startswith("special_"):
        inner = plain.removeprefix("special_")
        plain = inner if inner in SPELLINGS or any(_overloads(inner)) else plain
    return SPELLINGS.get(plain, plain)


def _overloads(name: str) -> Iterator[Any]:
    packet: Any = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if hasattr(packet, "overloads"):
        yield from (getattr(packet, each) for each in packet.overloads())


def _is_tagged_pointwise(name: str) -> bool:
    """Whether torch's operation of this name goes entry by entry, in whatever way it is called."""
    called = [each for each in _overloads(name) if _gives_one_tensor(each)]
    return bool(called) and all(torch.Tag.pointwise in each.tags for each in called)


def _gives_one_tensor(overload: Any) -> bool:
    """Whether an operator takes a tensor first and gives one of its own, by its schema."""
    given, made = overload._schema.arguments, overload._schema.returns
    return [str(each.type) for each in (*given[:1], *made)] == ["Tensor", "Tensor"] and not overload._schema.is_mutable


def _draws(name: str) -> bool:
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in _overloads(name))
