"""Packed sequences in a record: batches of sequences of several lengths, which torch's layers over time take.

``pack_padded_sequence`` puts the steps of all sequences that have not ended one after another, so the batch shrinks
from step to step, and its sizes depend on values. A record holds the padded batch and the lengths in its place, and
calls of torch's layers as calls of ``RAGGED``, which keep the state of a sequence that has ended. What is behind an end
is zero again when the batch is padded. On a run of a few steps all sequences are taken to be as long as the input.

torch draws the dropout between layers for packed values, as many as there are steps of all sequences. So does
``reroll::packed_mask``, which pads what it has drawn: the same random numbers under the same seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

PACK, PAD = "_pack_padded_sequence", "_pad_packed_sequence"
LONGEST = (
    "packs sequences of which the longest ends before the input does; cut the input to the longest sequence "
    "(x[:lengths.max()]) before it is given to the model"
)
_Layer = Callable[..., Any]
LIBRARY = torch.library.Library("reroll", "FRAGMENT")
LIBRARY.define(
    "packed_mask(Tensor like, Tensor lengths, float rate, *, Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A packed sequence: torch's own tensors, held so that they are known by identity, and what a record has of them.

    padded: the node of the padded batch, [T, B, ...]. lengths: that of the lengths, as sorted as the batch.
    """

    data: Tensor
    sizes: Tensor
    padded: fx.Node
    lengths: fx.Node


def steps_of(value: Tensor, batch_first: bool) -> int:
    """The number of steps of a padded batch."""
    return int(value.shape[1 if batch_first else 0])


def whole(value: Tensor, lengths: Tensor, batch_first: bool) -> Tensor:
    """Lengths with which all sequences are as long as the input."""
    return torch.full_like(lengths, steps_of(value, batch_first))


def fitting(x_TB: Tensor, lengths_B: Tensor) -> Tensor:
    """Whether torch would pack these, and the longest is as long as the input; a tensor with one entry."""
    longest = lengths_B.max() == x_TB.shape[0]
    return longest & (lengths_B.min() > 0) & (lengths_B[1:] <= lengths_B[:-1]).all()


def ended(x_TB: Tensor, lengths_B: Tensor, value: float) -> Tensor:
    """A padded batch with a value behind the end of each sequence."""
    steps_T1 = torch.arange(x_TB.shape[0]).unsqueeze(1)
    mask_TB = (steps_T1 >= lengths_B).to(x_TB.device)
    return x_TB.masked_fill(mask_TB.reshape(*mask_TB.shape, *(1,) * (x_TB.dim() - 2)), value)


@torch.library.impl(LIBRARY, "packed_mask", "CompositeExplicitAutograd")
def _packed_mask(
    like_TBR: Tensor, lengths_B: Tensor, rate: float, *, generator: torch.Generator | None = None
) -> Tensor:
    if rate == 1:
        return torch.zeros_like(like_TBR, memory_format=torch.contiguous_format)  # and draws nothing, as torch's
    if not fitting(like_TBR, lengths_B):  # an error, when the record's question is answered
        return torch.ones_like(like_TBR, memory_format=torch.contiguous_format)
    drawn = like_TBR.new_empty(int(lengths_B.sum()), like_TBR.shape[2])
    drawn.bernoulli_(1 - rate, generator=generator).div_(1 - rate)
    sizes = (torch.arange(like_TBR.shape[0]).unsqueeze(1) < lengths_B).sum(1)
    return pad_packed_sequence(PackedSequence(drawn, sizes))[0]


def _fake_mask(like_TBR: Tensor, lengths_B: Tensor, rate: float, *, generator: torch.Generator | None = None) -> Tensor:
    return torch.empty_like(like_TBR, memory_format=torch.contiguous_format)


torch.library.register_fake("reroll::packed_mask", _fake_mask, lib=LIBRARY)
PACKED_MASK = torch.ops.reroll.packed_mask.default
"""What dropout of this rate multiplies a padded batch [T, B, R] by, in which sequences have these lengths (on the CPU):
0, or one over the part that is kept; 0 behind each end."""


def _ragged(layer: _Layer) -> _Layer:
    """A layer on a padded batch [T, B, I] and lengths: outputs [T, B, R] and last states."""

    def run(x_TBI: Tensor, lengths_B: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(x_TBI, lengths_B)
        data, *states = layer(packed.data, packed.batch_sizes, *rest)
        out_TBR, _ = pad_packed_sequence(PackedSequence(data, packed.batch_sizes))
        return out_TBR, *states

    run.__name__ = run.__qualname__ = f"ragged_{layer.__name__}"
    return run


LAYERS: dict[_Layer, _Layer] = {_ragged(each): each for each in (torch.rnn_tanh, torch.rnn_relu, torch.gru, torch.lstm)}
"""torch's layers, by what stands for them in a record."""
RAGGED: dict[str, _Layer] = {layer.__name__: ragged for ragged, layer in LAYERS.items()}
