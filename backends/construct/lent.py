"""Evaluation runs the forward halves that training has: segments are lent where both do the same to the same inputs.

What one step does without gradients is traced, and compared, operation by operation, with what the forward of a step of
training does. The tape that the forward makes besides is dropped, one segment at a time.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from reroll.backends.cache.settings import flags
from reroll.backends.cache.traces import way_of_reading
from reroll.backends.construct import kernels as compiling
from reroll.backends.construct.kernels import Kernels, passes_of, store_all_root
from reroll.backends.inductor.lower import Boxed, Segment
from reroll.backends.runtime.executable import Compiled
from reroll.graph.editing import content_of
from reroll.graph.effects import attribute
from reroll.graph.private import map_aggregate
from reroll.operations import of
from reroll.planning.options import Options
from reroll.recurrence import Recurrence
from reroll.segment.trace import Traced, trace

LOG = logging.getLogger(__name__)
_MOST = 16


class NotLentError(Exception):
    """No training program that runs compiled segments has forward halves that would serve."""


@dataclass(frozen=True, slots=True, eq=False)
class Untaped:
    """A forward of training of which the first ``outputs`` results are read, and the tape is not."""

    forward: Boxed
    outputs: int

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """The results. Empties the list of inputs."""
        return self.forward(inputs)[: self.outputs]


@dataclass(eq=False)
class Lender:
    """Segments of training, and what they were compiled by (``_alike``)."""

    kernels: Kernels
    alike: str

    @cached_property
    def content(self) -> str | None:
        """What their step does; traced when it is first asked for, which is by an evaluation."""
        assert self.kernels.context.recurrence is not None
        return _content(replace(self.kernels.context.recurrence, step=self.kernels.captured))


class Lenders:
    """The segments of training that may be lent: the last ones, whether or not their programs are still there, so that
    what an evaluation runs does not depend on when memory is freed. ``count``: how many there have been."""

    def __init__(self) -> None:
        self.count = 0
        self._found = deque[Lender](maxlen=_MOST)

    def add(self, kernels: Kernels, options: Options) -> None:
        """These have been compiled for training, and run from now on. Of those that draw random numbers, or that are
        recorded, no evaluation runs the forward."""
        if not kernels.random and kernels.compiled.graphs.device is None:
            self.count += 1
            self._found.append(Lender(kernels, _alike(options)))

    def forget(self) -> None:
        """Lend nothing of what there is."""
        self._found.clear()

    def find(self, recurrence: Recurrence, options: Options, lengths: Sequence[int]) -> Kernels:
        """What was added last of what does the same, in segments of such lengths. Raises NotLentError."""
        alike = _alike(options)
        serving = [
            each for each in self._found if each.alike == alike and set(lengths) <= set(each.kernels.compiled.segments)
        ]
        content = _content(recurrence) if serving else None
        for each in reversed(serving):
            if content is not None and each.content == content:
                return each.kernels
        raise NotLentError


LENDERS = Lenders()


def kernels_for(
    recurrence: Recurrence,
    options: Options,
    lengths: Sequence[int],
    loops: int,
    known: Mapping[int, Traced] | None = None,
) -> Kernels:
    """Segments of a recurrence: compiled now, or with ``start="eager"`` those that training has. ``known``: traces of
    such segments.

    Raises NotLentError.
    """
    if options.start == "compiled" or options.lowering == "eager":
        return compiling.compile_kernels(recurrence, options, lengths, loops, known)
    kernels = LENDERS.find(recurrence, options, lengths)
    compiled, traced = kernels.compiled, kernels.traced
    segments = {k: _untaped(compiled.segments[k]) for k in sorted(lengths, reverse=True)}
    return Kernels(
        traced=replace(traced, tangents=(), inputs=(), reaches=()),
        compiled=Compiled(segments, compiled.watch, compiled.once, compiled.graphs),
        context=replace(kernels.context, root=store_all_root(recurrence, lengths[0]), recurrence=recurrence),
        captured=recurrence.step,
        step=recurrence.step,
        replay=False,
    )


def _untaped(segment: Segment) -> Segment:
    return replace(
        segment,
        forward=Untaped(segment.forward, segment.outputs),
        backward=None,
        tangents=(),
        inputs=(),
        reaches=(),
        backward_graph=None,
        products={},
        tape=(),
        thin=None,
    )


def _alike(options: Options) -> str:
    """A text that is equal where the same step is compiled alike."""
    with torch.inference_mode(False), torch.enable_grad():
        return repr((flags(), passes_of(options), options.codec))


def _content(recurrence: Recurrence) -> str | None:
    """A text that is equal for recurrences whose forwards do the same to the same inputs; None where one step cannot be
    traced."""
    try:
        traced = trace(replace(recurrence, steps=max(recurrence.steps, 1)), 1, decompose=True)
    except Exception as error:  # noqa: BLE001  # of a look beside the call, which goes on with eager segments
        LOG.debug("a step of the loop at %s is not compared with others: %s", recurrence.where, error)
        return None
    results: Any = traced.graph.graph.output_node().args[0]
    texts = _texts(traced.graph)
    made, reads = [texts[each] for each in results[: traced.outputs]], [way_of_reading(x) for x in recurrence.xs]
    return repr((made, reads, traced.carries, traced.inputs_total, recurrence.any_length, recurrence.autocast))


def _texts(module: fx.GraphModule) -> Mapping[Any, str]:
    """For each node a text that is equal where the same is made of the same inputs."""
    found = dict[Any, Any]()
    for place, node in enumerate(module.graph.nodes):
        if node.op == "output":
            continue
        if node.op == "call_function" and of(node.target).view == "same":
            found[node] = found[node.all_input_nodes[0]]
            continue
        if node.op == "placeholder":
            value = node.meta["val"]
            parts: Any = place, tuple(value.shape), value.stride(), value.dtype, value.device
        elif node.op == "get_attr":
            parts = content_of(attribute(module, node))
        else:
            known = map_aggregate((node.args, node.kwargs), lambda leaf: found.get(leaf, leaf))
            parts = str(node.target), known
        found[node] = hashlib.sha256(repr(parts).encode()).hexdigest()
    return found
