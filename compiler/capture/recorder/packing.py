"""How a record takes packed sequences: see ``ragged.py`` for what it has in their place."""

from __future__ import annotations

import operator
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.nn.utils.rnn import pack_padded_sequence

from reroll.capture.recorder.ragged import LONGEST, PACK, PAD, RAGGED, Packed, ended, fitting, whole


class Record(Protocol):
    """What writes a record: ``graph.GraphRecorder``."""

    graph: fx.Graph
    states: Any

    def operand(self, value: Any) -> Any:
        """An operand as a graph has it."""

    def know(self, value: Tensor, node: fx.Node) -> None:
        """Note that a node gives a tensor."""

    def noted(self, node: fx.Node, value: Any) -> fx.Node:
        """Note what a node gives."""

    def ask(self, what: str, answer: bool, node: fx.Node) -> None:
        """Note that the truth of a value is asked for."""

    def refuse(self, reason: str) -> Any:
        """Raise Unrecordable."""


class Packing:
    """The packed sequences of a record, known by the tensors that they hold."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.packed = dict[int, Packed]()

    def holds(self, value: Tensor) -> bool:
        """Whether a tensor is one of those that packed sequences hold."""
        return id(value) in self.packed

    def result(self, func: Any, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        """The result of what makes or reads a packed sequence; NotImplemented of all else."""
        name = getattr(func, "__name__", "")
        if name == PACK:
            return self._pack(*args)
        packed = self.packed.get(id(args[0])) if args else None
        if packed is None:
            return NotImplemented
        if args[0] is packed.sizes and name == "__getitem__" and args[1] == 0:
            first = func(*args)  # all sequences have a first step, so this is the size of the batch
            self.record.noted(self.record.graph.call_function(torch.full, ((), int(first))), first)
            return first
        if name in RAGGED:
            return self._layer(name, func, packed, args)
        return self._pad(packed, func, args) if name == PAD else NotImplemented

    def _pack(self, value: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Pack a batch whose sequences are as long as the input; the record has that and the lengths."""
        record = self.record
        padded, node = record.operand(value), record.operand(lengths)
        if batch_first:
            padded = record.graph.call_method("transpose", (padded, 0, 1))
            record.noted(padded, value.transpose(0, 1))
        fits = record.graph.call_function(fitting, (padded, node))
        record.ask(LONGEST, True, record.noted(fits, torch.ones((), dtype=torch.bool)))
        data, sizes, *_ = pack_padded_sequence(value, whole(value, lengths, batch_first), batch_first)
        return self._hold(Packed(data, sizes, padded, node))

    def _hold(self, packed: Packed) -> Any:
        self.packed[id(packed.data)] = self.packed[id(packed.sizes)] = packed
        return packed.data, packed.sizes

    def _layer(self, name: str, func: Any, packed: Packed, args: tuple[Any, ...]) -> Any:
        """Run a layer on a packed sequence; the record has its call on the padded batch."""
        record, (_, _, *rest) = self.record, args
        rest = record.operand(rest)
        data, *states = func(*args)
        record.states.note()  # dropout between layers draws
        steps, size = packed.padded.meta["example_value"].shape[:2]
        out = data.detach().new_zeros(steps, size, data.shape[-1]).requires_grad_(data.requires_grad)
        call = record.graph.call_function(RAGGED[name], (packed.padded, packed.lengths, *rest))
        record.noted(call, (out, *states))
        padded, *picks = (record.graph.call_function(operator.getitem, (call, n)) for n in range(1 + len(states)))
        for pick, value in zip((padded, *picks), (out, *states), strict=True):
            record.noted(pick, value)
        self._hold(Packed(data, packed.sizes, padded, packed.lengths))
        return data, *states

    def _pad(self, packed: Packed, func: Any, args: tuple[Any, ...]) -> Any:
        """Pad a packed sequence."""
        record, (_, _, batch_first, value, total) = self.record, args
        if total != packed.padded.meta["example_value"].shape[0]:
            record.refuse("a packed sequence is padded to another length than the input's")
        padded, lengths = func(*args)
        node = record.graph.call_function(ended, (packed.padded, packed.lengths, value))
        record.noted(node, padded.transpose(0, 1) if batch_first else padded)
        if batch_first:
            node = record.graph.call_method("transpose", (node, 0, 1))
        record.noted(node, padded)
        record.know(lengths, packed.lengths)
        return padded, lengths
