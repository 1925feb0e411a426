"""What the graph around the recurrences holds between forward and backward, found by running it on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx


class _Standing(torch.autograd.Function):
    """Stands for a recurrence: saves its operands, gives results of the right shapes."""

    @staticmethod
    def forward(ctx: Any, results: tuple[Tensor, ...], *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*operands)
        return tuple(torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in results)


class Memory:
    """Which blocks of memory were seen, without keeping them alive."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = {_key(tensor) for tensor in inputs}
        self.seen: dict[int, tuple[weakref.ref[Any], int]] = {}

    def see(self, value: Any) -> None:
        """Note the memory of every tensor in a result, unless it is an input's."""
        for tensor in _tensors(value):
            if _key(tensor) not in self.inputs:
                storage = tensor.untyped_storage()
                self.seen[_key(tensor)] = (weakref.ref(storage), storage.nbytes())

    def alive(self) -> int:
        """Bytes of the blocks that are still alive."""
        return sum(nbytes for storage, nbytes in self.seen.values() if storage() is not None)


class _Walk(fx.Interpreter):
    """Runs a graph, notes the memory of its results, and does not run recurrences."""

    def __init__(self, module: fx.GraphModule, results: Mapping[str, tuple[Tensor, ...]], memory: Memory) -> None:
        super().__init__(module)
        self.results, self.memory = results, memory

    def run_node(self, n: fx.Node) -> Any:
        """One node; its results are noted."""
        result = super().run_node(n)
        if n.op not in ("placeholder", "get_attr", "output"):
            self.memory.see(result)
        return result

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A recurrence is stood for; other modules run."""
        if target not in self.results:
            return super().call_module(target, args, kwargs)
        return _Standing.apply(self.results[target], *args)  # type: ignore[no-untyped-call]


def held_outside(
    module: fx.GraphModule, results: Mapping[str, tuple[Tensor, ...]], fake: Callable[[Tensor], Tensor]
) -> tuple[int, int]:
    """Bytes that live between the forward and the backward of ``module`` beside inputs: (its results, all else).

    results: what each recurrence gives, by the name of its module. fake: gives a fake tensor like another. To be called
    under the fake mode.
    """
    inputs = [fake(node.meta["example_value"]) for node in module.graph.find_nodes(op="placeholder")]
    memory, outputs = Memory(inputs), Memory(inputs)
    given = _Walk(module, results, memory).run(*inputs)
    outputs.see(given)
    return outputs.alive(), memory.alive() - outputs.alive()


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
