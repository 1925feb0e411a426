"""Read carries back one chunk ahead, so that the transfer overlaps the work of the chunk reversed before."""

from __future__ import annotations

from reroll.program.context import Context
from reroll.program.program import Node, Program, backward, reload, reverse, turn
from reroll.program.registry import register_pass
from reroll.program.writing import RUNS, operands

WORK = (*RUNS, backward, reverse)


@register_pass("prefetch")
def prefetch(program: Program, context: Context) -> Program:
    """Move each reload to before the first work after the previous reload (for the first reload: after the turn).

    One block more is held locally; nothing moves where the context has no room for it. No reload moves to before the
    turn, or to before the offload of its block.
    """
    if not context.ahead or not program.graph.find_nodes(op="call_function", target=reload, sort=False):
        return program
    program = program.copy(parts=False)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    anchor: Node | None = None
    turned = False
    moves: list[tuple[Node, Node]] = []
    for node in program.graph.nodes:
        turned = turned or node.target is turn
        if turned and node.target is reload:
            if anchor is not None:
                moves.append((node, anchor))
            anchor = None
        elif turned and anchor is None and node.target in WORK:
            anchor = node
    for read, before in moves:
        block = operands(read)[0]
        if order[block] > order[before]:
            block.append(read)
        else:
            before.prepend(read)
    return program
