"""Seconds of segments as a program plays them, before any call: a few of them are played on made-up values.

A kernel alone says too little: what Python does between two segments takes as long as a small one, and tapes that are
kept lie in memory that was not touched before.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from reroll.backends.construct.kernels import results_of
from reroll.backends.runtime.executable import Executable
from reroll.backends.runtime.run import Run, Start
from reroll.graph.fakes import laid_out_like
from reroll.graph.memory import result_nbytes
from reroll.program.program import store_all
from reroll.recurrence import Recurrence, Slices, between
from reroll.schedules.machine import SegmentSeconds
from reroll.segment.trace import dense

_FEW, _MORE = 2, 8  # segments of a play: the second takes as much longer as it has more
_LONG = 0.05  # seconds of a segment beside which what is between two of them does not count
_LARGE = 1 << 28  # bytes of all tapes of a play
_TIMES, _SECONDS = 5, 0.3  # plays of each, and what they may take together


def rehearsed(executable: Executable, alone: SegmentSeconds) -> tuple[float, float] | None:
    """Seconds of the longest segment in a forward and in a backward where some are played on a CPU; ``alone``: those of
    its kernels. Nothing where what is between two segments does not count: where each takes long, or keeps much."""
    length, both = max(executable.compiled.segments), alone.tape + alone.backward
    few_steps = executable.recurrence.steps < (_MORE + 1) * length or executable.recurrence.blocks
    if few_steps or both > _LONG or not alone.backward or _MORE * _kept(executable, length) > _LARGE:
        return None
    times = min(max(int(_SECONDS / ((_FEW + _MORE) * both)), 1), _TIMES)
    few, more = (_played(executable, segments * length, times) for segments in (_FEW, _MORE))
    forward, backward = ((after - before) / (_MORE - _FEW) for before, after in zip(few, more, strict=True))
    return max(forward, alone.tape), max(backward, alone.backward)


def _kept(executable: Executable, length: int) -> int:
    """Bytes that a segment gives, and keeps for its backward."""
    results = executable.compiled.segments[length].forward_graph.graph.output_node().all_input_nodes
    return sum(result_nbytes(node.meta.get("val")) for node in results)


def _played(executable: Executable, steps: int, times: int) -> tuple[float, float]:
    """Seconds of a forward and of a backward of the first steps, the least of several plays behind a first one."""
    short = _of_steps(executable, steps)
    operands = tuple(_operand(short.recurrence, number) for number in range(short.recurrence.operands))
    results = results_of(short.compiled.segments[short.program.segment], short.recurrence)
    given = [_ones(each) if each.requires_grad else None for each in (*results.last, *results.rows)]
    found = []
    for _ in range(1 + times):
        run = Run(short, Start.of(short, operands))
        run.forward(training=True)
        run.backward(given, keep=False)
        found.append((short.clock.forward or 0.0, short.clock.backward or 0.0))
    forwards, backwards = zip(*found[1:], strict=True)
    return min(forwards), min(backwards)


def _ones(like: Tensor) -> Tensor:
    return torch.ones(like.shape, dtype=like.dtype)


def _of_steps(executable: Executable, steps: int) -> Executable:
    """The first steps of a recurrence, all of whose tapes are kept."""
    recurrence = executable.recurrence
    short = replace(recurrence, steps=steps, xs=tuple(between(x, 0, steps) for x in recurrence.xs))
    return Executable.of(short, store_all(steps, max(executable.compiled.segments)), executable.compiled)


def _operand(recurrence: Recurrence, number: int) -> Tensor:
    """Normal numbers, or zeros where there are no floats, laid out like an example; of a sequence only what the steps
    read is touched, and it is as long as they need, where segments serve any length."""
    like = recurrence.examples[number]
    read = [x for x in recurrence.xs if isinstance(x, Slices) and x.operand == number]
    spans = [(x.dim, *_span(x, recurrence.steps)) for x in read]
    if not spans:
        weight = like.dim() > 1 and number in recurrence.constants
        return filled(laid_out_like(like), weight_std(like) if weight else 1.0)
    shape = list(like.shape)
    for dim, _, end in spans:
        shape[dim] = max(shape[dim], end)
    strides = like.stride() if shape == list(like.shape) else dense(shape, like.stride())
    made = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
    for dim, begin, end in spans:
        filled(made.narrow(dim, begin, end - begin), 1.0)
    return made


def _span(x: Slices, steps: int) -> tuple[int, int]:
    """The first index that some steps read of a sequence, and the one behind the last."""
    last = x.start + (steps - 1) * x.stride
    return min(x.start, last), max(x.start, last) + 1


def filled(made: Tensor, std: float) -> Tensor:
    """The tensor, with normal numbers in it; with zeros where it holds no floats. What is expanded is written once."""
    once = made[tuple(slice(None if step else 1) for step in made.stride())]
    if made.dtype.is_floating_point:
        once.normal_(std=std)
    else:
        once.zero_()
    return made


def weight_std(like: Tensor) -> float:
    """How far the entries of a weight spread, so that a product with it is as large as what it is multiplied with."""
    return float(max(like.shape[-1], 1) ** -0.5)
