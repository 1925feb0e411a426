"""All mutants of a training program that differ from it in one place."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import fx

from reroll.program.program import Node, Program, backward, offload, reload, reverse, turn

Edit = Callable[[fx.Graph, list[Node]], None]


def kind(node: Node) -> str:
    if node.target in (turn, backward, reverse) or node.name == "grad":
        return "grad"
    return {offload: "block", reload: "reloaded"}.get(node.target, "carry")  # type: ignore[arg-type]


def drop(index: int, heir: int | None) -> Edit:
    def edit(graph: fx.Graph, nodes: list[Node]) -> None:
        if heir is not None:
            nodes[index].replace_all_uses_with(nodes[heir])
        graph.erase_node(nodes[index])

    return edit


def move(index: int, before: int) -> Edit:
    return lambda graph, nodes: nodes[before].prepend(nodes[index])


def double(index: int, before: int, rewire: bool) -> Edit:
    def edit(graph: fx.Graph, nodes: list[Node]) -> None:
        with graph.inserting_before(nodes[before]):
            copy = graph.node_copy(nodes[index])
        if rewire:
            nodes[index].replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)

    return edit


def set_operand(index: int, place: int, value: Callable[[list[Node]], Any]) -> Edit:
    def edit(graph: fx.Graph, nodes: list[Node]) -> None:
        nodes[index].update_arg(place, value(nodes))

    return edit


def operand_edits(index: int, node: Node, count: int, parts: Collection[str]) -> Iterator[Edit]:
    """Each operand set to every other value or part, each integer changed by one, each block permuted and shortened."""
    for place, operand in enumerate(node.args):
        if isinstance(operand, Node):
            yield from (
                set_operand(index, place, lambda nodes, other=other: nodes[other])  # type: ignore[misc]
                for other in range(count)
            )
        elif isinstance(operand, int):
            yield from (set_operand(index, place, lambda _, n=operand + d: n) for d in (-1, 1))  # type: ignore[misc]
        elif isinstance(operand, str) and operand in parts:
            yield from (set_operand(index, place, lambda _, n=name: n) for name in parts)  # type: ignore[misc]
        elif isinstance(operand, tuple):
            orders = [operand[::-1], operand[1:], operand[:-1], operand[:1] * len(operand)]
            for order in orders:
                names = [each.name for each in order if isinstance(each, Node)]
                yield set_operand(
                    index,
                    place,
                    lambda nodes, names=names: tuple(n for name in names for n in nodes if n.name == name),  # type: ignore[misc]
                )


def edits(graph: fx.Graph, parts: Collection[str]) -> Iterator[Edit]:
    """All edits of a graph in one place."""
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes[1:-1], start=1):
        if not node.users:
            yield drop(index, None)
        heirs = (i for i, other in enumerate(nodes[:-1]) if kind(other) == kind(node) and i != index)
        yield from (drop(index, heir) for heir in heirs)
        yield from (move(index, before) for before in range(1, len(nodes)) if before not in (index, index + 1))
        yield from (
            double(index, min(index + d, len(nodes) - 1), rewire) for d in (1, 2, 5) for rewire in (True, False)
        )
        yield from operand_edits(index, node, len(nodes) - 1, parts)
    yield from operand_edits(len(nodes) - 1, nodes[-1], len(nodes) - 1, parts)


def mutants(program: Program) -> Iterator[Program]:
    """All mutants of a program that differ in one place, of its graph or of a part."""
    unchanged = str(program)
    for number, graph in enumerate(program.graphs):
        for edit in edits(graph, program.parts):
            mutant = program.copy()
            try:
                edit(mutant.graphs[number], list(mutant.graphs[number].nodes))
            except RuntimeError:  # fx itself refuses to erase a node that is its own heir's operand
                continue
            if str(mutant) != unchanged:
                yield mutant
