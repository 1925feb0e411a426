"""What the graph around the recurrences holds while they run, found by running and reversing it on fake tensors.

Autograd itself says which gradients are added up in place and which are made anew: a parameter of the loop that a step
beside it uses too has gradients of its own in both, which are held until they are added. Private torch API, tried on
2.11 and 2.13: ``FakeTensorMode`` (no memory), and the ``_cdata`` of a storage, which says what shares memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from reroll.backends.construct.kernels import Results
from reroll.graph.fakes import fake_of, outside_dynamo
from reroll.graph.private import Watching, storage_id
from reroll.program.memory import OuterMemory


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes outside of the recurrences beside inputs, parameters and the gradients of these.

    Between forward and backward: ``outputs``, the results of the graph, and ``saved``, all else. ``running`` and
    ``reversing``: by the name of each recurrence what is held while it runs, its results included, and while it is
    reversed, without the gradients of its own results; the gradients that it adds up itself are among it where they
    become no parameter's gradient as they are: ``added``. ``unasked``: the gradients of its last carries that nobody
    gives.
    """

    outputs: int = 0
    saved: int = 0
    running: Mapping[str, int] = field(default_factory=dict)
    reversing: Mapping[str, int] = field(default_factory=dict)
    unasked: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[str, int] = field(default_factory=dict)

    def around(self, name: str) -> OuterMemory:
        """What is held around a recurrence."""
        turned = self.outputs + self.saved
        running, reversing = self.running.get(name, turned), self.reversing.get(name, 0)
        return OuterMemory(running, turned, reversing, self.unasked.get(name, 0), self.added.get(name, 0))


class _Standing(torch.autograd.Function):
    """Stands for a recurrence: saves its operands, gives results of the right shapes, and gradients of its operands."""

    @staticmethod
    def forward(ctx: Any, name: str, memory: Memory, last: Sequence[bool], results: Results, *operands: Tensor) -> Any:
        ctx.save_for_backward(*operands)
        ctx.set_materialize_grads(False)
        ctx.name, ctx.memory, ctx.last, ctx.carries = name, memory, last, results.last
        given = (*results.last, *results.rows)
        made = tuple(torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in given)
        ctx.mark_non_differentiable(*(each for each, like in zip(made, given, strict=True) if not like.requires_grad))
        memory.running[name] = memory.alive()  # with the outputs of all steps, which are written step by step
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = {storage_id(grad) for grad in grads if grad is not None}
        held = {key: block for key, block in ctx.memory.blocks().items() if key not in given}
        found = [torch.zeros_like(each) if need else None for each, need in _needed(ctx)]
        added = list(zip(found, ctx.last, strict=True))[len(ctx.carries) :]  # those of carries are handed on
        pairs = zip(ctx.carries, grads, strict=False)
        ctx.memory.unasked[ctx.name] = sum(each.nbytes for each, grad in pairs if each.requires_grad and grad is None)
        ctx.memory.reversed[ctx.name] = held, _blocks(grad for grad, last in added if grad is not None and not last)
        return (None, None, None, None, *found)


def _needed(ctx: Any) -> Iterator[tuple[Tensor, bool]]:
    return zip(ctx.saved_tensors, ctx.needs_input_grad[4:], strict=True)


Block = tuple["weakref.ref[Any]", int]


class Memory:
    """Which blocks of memory were seen, without keeping them alive; and what was alive when recurrences were reversed,
    with what each of them gave then."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.inputs = {storage_id(tensor) for tensor in inputs}
        self.seen: dict[int, Block] = {}
        self.running: dict[str, int] = {}
        self.unasked: dict[str, int] = {}
        self.reversed: dict[str, tuple[dict[int, Block], dict[int, Block]]] = {}

    def see(self, value: Any) -> None:
        """Note the memory of every tensor in a result, unless it is an input's."""
        for key, block in _blocks(_tensors(value)).items():
            if key not in self.inputs:
                self.seen[key] = block

    def blocks(self) -> dict[int, Block]:
        """The blocks that are still alive."""
        return {key: block for key, block in self.seen.items() if block[0]() is not None}

    def alive(self) -> int:
        """Bytes of the blocks that are still alive."""
        return sum(nbytes for _, nbytes in self.blocks().values())


def _last_to_use(recurrence: fx.Node) -> list[bool]:
    """For each operand of a recurrence whether it is an input of the graph that nothing uses after the recurrence.

    The gradient of such an operand comes first, so autograd adds the others to it in place, and it becomes the
    gradient of the input; where another comes first, a sum is made of the two.
    """
    order = {node: index for index, node in enumerate(recurrence.graph.nodes)}

    def late(node: fx.Node) -> bool:
        views = (user for user in node.users if len(user.all_input_nodes) == 1)
        return any(order[user] > order[recurrence] for user in node.users) or any(map(late, views))

    return [node.op == "placeholder" and not late(node) for node in recurrence.args if isinstance(node, fx.Node)]


class _Walk(fx.Interpreter):
    """Runs a graph, and does not run recurrences."""

    def __init__(self, module: fx.GraphModule, results: Mapping[str, Results], memory: Memory) -> None:
        super().__init__(module)
        self.results, self.memory = results, memory

    def run_node(self, n: fx.Node) -> Any:
        """A recurrence is stood for; other nodes run."""
        if n.op != "call_module" or n.target not in self.results:
            return super().run_node(n)
        operands, _ = self.fetch_args_kwargs_from_env(n)
        results = self.results[str(n.target)]
        return _Standing.apply(n.target, self.memory, _last_to_use(n), results, *operands)  # type: ignore[no-untyped-call]


class _Watching(Watching):
    """Notes the memory of the results of all operations, those of autograd included."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.memory.see(result)
        return result


def _operand(node: fx.Node, fake: Callable[[Tensor], Tensor]) -> Any:
    """What stands for an input: no leaf where the graph changes it, as autograd has it; or a size."""
    value = node.meta["example_value"]
    if not isinstance(value, Tensor):
        return value
    changed = any(user.target == "copy_" and user.args[0] is node for user in node.users)
    made = fake(value)
    return made.clone() if changed and made.requires_grad else made


def outside(module: fx.GraphModule, results: Mapping[str, Results], fake: Callable[[Tensor], Tensor]) -> Outside:
    """What ``module`` holds around its recurrences.

    results: what each recurrence gives, by the name of its module; what a gradient goes through requires one. fake:
    gives a fake tensor like another. To be called under the fake mode.
    """
    operands = [_operand(node, fake) for node in module.graph.find_nodes(op="placeholder")]
    inputs = list(_tensors(operands))
    memory, outputs = Memory(inputs), Memory(inputs)
    with _Watching(memory):
        found = _Walk(module, results, memory).run(*operands)
        outputs.see(found)
        held = outputs.alive(), memory.alive() - outputs.alive()
        wanted = [each for each in _tensors(found) if each.requires_grad]
        del found
        try:
            torch.autograd.backward(wanted, [torch.empty_like(each) for each in wanted])
        except RuntimeError:  # an operation whose backward does not take fake tensors: say what it is at most
            most = sum(held) + 2 * sum(each.nbytes for each in inputs if each.requires_grad)
            return Outside(*held, memory.running, dict.fromkeys(results, most))
    final = {storage_id(each.grad) for each in inputs if each.is_leaf and each.grad is not None}
    added = {name: _other(given, final) for name, (_, given) in memory.reversed.items()}
    reversing = {name: _other(held, final) + added[name] for name, (held, _) in memory.reversed.items()}
    return Outside(*held, memory.running, reversing, memory.unasked, added=added)


def _other(blocks: Mapping[int, Block], final: set[int]) -> int:
    """Bytes of the blocks that are not, at the end, the gradient of an input."""
    return sum(nbytes for key, (storage, nbytes) in blocks.items() if storage() is None or key not in final)


def _blocks(tensors: Iterator[Tensor]) -> dict[int, Block]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {int(storage._cdata): (weakref.ref(storage), storage.nbytes()) for storage in storages}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def outside_of(module: fx.GraphModule, results: Mapping[str, Results]) -> Outside:
    """What a graph holds around its recurrences, which give ``results``, by their names."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with outside_dynamo(mode), mode:
        return outside(module, results, partial(fake_of, mode))


def bytes_around(module: fx.GraphModule, results: Mapping[str, Results]) -> dict[str, OuterMemory]:
    """What a graph holds around each of its recurrences, as ``outside_of`` has it."""
    held = outside_of(module, results)
    return {name: held.around(name) for name in results}
