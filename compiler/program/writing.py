"""Reading and writing the instructions of a training program: what passes share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import fx

from reroll.program.program import Node, advance, backward, offload, recompute, reload, reverse, save, tape, turn

RUNS = (advance, recompute, tape)


def operands(node: Node) -> tuple[Any, ...]:
    """The operands of an instruction, by position."""
    return cast(tuple[Any, ...], node.args)


def position(carry: Node) -> int:
    """The step at which a carry is valid."""
    node, args = carry, operands(carry)
    while node.target is save:
        node, args = args[0], operands(args[0])
    if node.op == "placeholder":
        return 0
    if node.target is operator.getitem:
        block = operands(args[0])[0]
        return position(operands(block)[0][args[1]])
    return cast(int, args[2])


def name_at(node: Node, origin: int) -> str:
    """The name of an instruction that is played; in a part that starts at step ``origin`` it says where in the program
    its steps are."""
    if not origin:
        return node.name
    if node.target is save:
        return f"save_at{origin + position(node)}"
    start, stop = operands(operands(node)[0] if node.target is backward else node)[1:]
    return f"{cast(Any, node.target).__name__}_{origin + start}to{origin + stop}"


def before_turn(graph: fx.Graph) -> Iterator[Node]:
    """The nodes of the forward half."""
    for node in graph.nodes:
        if node.target is turn:
            return
        yield node


def _write(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> Node:
    # create_node walks the operands that it is given as a pytree, half of its time: set them afterwards.
    node = graph.create_node("call_function", target, name=name)
    node.args = args
    return node


def write_run(graph: fx.Graph, run: Callable[..., Any], carry: Node, start: int, stop: int) -> Node:
    """``advance``, ``recompute`` or ``tape`` at the insertion point, named after its range."""
    return _write(graph, run, (carry, start, stop), f"{run.__name__}_{start}to{stop}")


def write_tape(graph: fx.Graph, carry: Node, start: int, stop: int, thin: bool) -> Node:
    """``tape`` at the insertion point, named after its range."""
    node = write_run(graph, tape, carry, start, stop)
    if thin:
        node.kwargs = {"thin": True}
    return node


def is_thin(taped: Node) -> bool:
    """Whether a tape is thin."""
    return bool(taped.kwargs.get("thin", False))


def write_save(graph: fx.Graph, carry: Node, at: int) -> Node:
    """``save`` at the insertion point, named after the step of the carry."""
    return _write(graph, save, (carry,), f"save_at{at}")


def write_offload(graph: fx.Graph, carries: tuple[Node, ...], tier: str, at: int) -> Node:
    """``offload`` at the insertion point, named after the step of its first carry."""
    return _write(graph, offload, (carries, tier), f"offload_at{at}")


def write_reload(graph: fx.Graph, block: Node) -> Node:
    """``reload`` at the insertion point, named like the offload of the block."""
    return _write(graph, reload, (block,), block.name.replace("offload", "reload"))


def write_pick(graph: fx.Graph, reloaded: Node, index: int, at: int) -> Node:
    """``operator.getitem`` at the insertion point, named after the step of the carry."""
    return _write(graph, operator.getitem, (reloaded, index), f"carry_at{at}")


def write_backward(graph: fx.Graph, taped: Node, grad: Node) -> Node:
    """``backward`` at the insertion point, named after the range of its tape."""
    _, start, stop = operands(taped)
    return _write(graph, backward, (taped, grad), f"backward_{start}to{stop}")


def write_reverse(graph: fx.Graph, carry: Node, grad: Node, part: str, at: int, steps: int) -> Node:
    """``reverse`` at the insertion point, named after the range of the part."""
    return _write(graph, reverse, (carry, grad, part, at), f"reverse_{at}to{at + steps}")
