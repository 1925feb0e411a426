"""Merge replays that run the same steps twice in a row.

A replay of an interval need not run its last child, which is taped right afterwards; and the replay of the last child
of the root is the forward itself, as nothing lies between them but the turn.
"""

from __future__ import annotations

import operator

from torch import fx

from reroll.context import Context
from reroll.instructions import before_turn, operands, write_run, write_save
from reroll.program import Node, Program, advance, backward, recompute, reload, tape, turn
from reroll.registry import register_pass


@register_pass("merge-replay")
def merge_replay(program: Program, _context: Context) -> Program:
    """Tape the last sub-chunk of each chunk while the chunk is replayed, and replay the last chunk in the forward."""
    program = program.copy()
    graph = program.graph
    for node in reversed(list(graph.nodes)):
        if node.target is recompute and not node.users:
            graph.erase_node(node)
    last = next((node for node in reversed(list(before_turn(graph))) if node.target in (advance, tape)), None)
    if last is not None and last.target is advance:
        _merge_last(graph, last)
    return program


def _merge_last(graph: fx.Graph, last: Node) -> None:
    """Replace the last advance by the replay of its steps, where that replay comes first in the backward half."""
    turned = next(user for user in last.users if user.target is turn)
    chain = _first_replay(turned)
    carry, start, stop = operands(last)
    if not chain or (operands(chain[0])[1], operands(chain[-1])[2]) != (start, stop):
        return
    kept = operands(chain[0])[0]
    if kept.target is operator.getitem:
        with graph.inserting_before(last):
            local = write_save(graph, carry, start)
        kept.replace_all_uses_with(local)
        _erase_read(graph, kept)
    for node in chain:
        last.prepend(node)
        if node.target is recompute:
            with graph.inserting_before(node):
                first = write_run(graph, advance, *operands(node))
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    last.replace_all_uses_with(chain[-1])
    graph.erase_node(last)


def _first_replay(turned: Node) -> list[Node]:
    """What lies between the turn and the first backward, without reads, if it ends with the tape of that backward.

    Nothing if it needs more than one carry that was kept before the turn.
    """
    chain: list[Node] = []
    node = turned.next
    while node.op == "call_function" and node.target is not backward:
        if node.target not in (reload, operator.getitem):
            chain.append(node)
        node = node.next
    if not chain or chain[-1].target is not tape:
        return []
    known = {operands(chain[0])[0], *chain}
    return chain if all(known.issuperset(node.all_input_nodes) for node in chain) else []


def _erase_read(graph: fx.Graph, picked: Node) -> None:
    """Erase a read that nobody uses any more, and the transfers that nobody needs without it."""
    node = picked
    while not node.users and node.op == "call_function":
        source = operands(node)[0]
        graph.erase_node(node)
        if not isinstance(source, Node) or node.target not in (operator.getitem, reload):
            return
        node = source
