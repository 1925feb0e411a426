"""Move saved carries to the tiers of the schedule, and bring them back right before they are used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from reroll.errors import OptionError
from reroll.program.context import Context
from reroll.program.program import Node, Program, save
from reroll.program.registry import register_pass
from reroll.program.writing import before_turn, operands, position, write_offload, write_pick, write_reload
from reroll.schedules.interval import Interval
from reroll.schedules.machine import REMOTE_TIERS


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the carry at one step is kept.

    ``chain`` holds the intervals that start there, outermost first; ``block`` is equal for carries of one transfer.
    """

    start: int
    chain: tuple[Interval, ...]
    block: Hashable


@register_pass("offload")
def offload(program: Program, context: Context) -> Program:
    """Replace every save whose interval is kept remotely, unless the forward itself or nobody reads it.

    The carries of a block are gathered by local saves until the last is made; a single carry is written at once.
    Raises OptionError for a tier that there is not.
    """
    places = {place.start: place for place in _places(context.root, 0, _Local())}
    if not places:
        return program
    program = program.copy(parts=False)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    forward = set(before_turn(program.graph))
    blocks: dict[Hashable, list[Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node.target is not save or not node.users or forward.intersection(node.users):
            continue
        place = places.get(position(node))
        if place:
            blocks[place.block].append(node)
    for saves in blocks.values():
        tier = places[position(saves[0])].chain[0].tier
        if tier not in REMOTE_TIERS:
            known = ", ".join(REMOTE_TIERS.names())
            raise OptionError(f"The schedule keeps carries in {tier!r}, but the remote tiers are {known}. Use one.")
        _move(program.graph, saves, tier, places, order)
    return program


class _Local:
    """Which intervals, and all inside of them, are kept locally; each object is looked at once."""

    def __init__(self) -> None:
        self.seen: dict[int, bool] = {}

    def __contains__(self, interval: Interval) -> bool:
        if id(interval) not in self.seen:
            inside = [child in self for child in interval.children]
            self.seen[id(interval)] = interval.tier == "local" and all(inside)
        return self.seen[id(interval)]


def _places(root: Interval, start: int, local: _Local, path: tuple[int, ...] = ()) -> Iterator[_Place]:
    """The places of all carries that are kept remotely: at most one for each step at which an interval starts, that of
    the outermost. ``path`` leads to ``root``, which starts at ``start``."""
    for number, (at, child) in enumerate(root.placed(start)):
        if child in local:
            continue
        yield from (inner for inner in _places(child, at, local, (*path, number)) if inner.start != at)
        chain = [child]
        while chain[-1].children:
            chain.append(chain[-1].children[0])
        alone = child.block is None
        if child.tier != "local":
            yield _Place(at, tuple(chain), (path, alone, number if alone else child.block, child.tier))


def _move(graph: fx.Graph, saves: list[Node], tier: str, places: Mapping[int, _Place], order: dict[Node, int]) -> None:
    """Write the carries of ``saves`` as one block and read it back for their users."""
    users = {kept: sorted(kept.users, key=order.__getitem__) for kept in saves}
    steps = [position(kept) for kept in saves]
    alone = len(saves) == 1
    carries = tuple(operands(saves[0])[:1]) if alone else tuple(saves)
    with graph.inserting_after(saves[-1]):
        block = write_offload(graph, carries, tier, steps[0])
    with graph.inserting_before(min((uses[0] for uses in users.values()), key=order.__getitem__)):
        first_read = write_reload(graph, block)
    for index, (kept, step) in enumerate(zip(saves, steps, strict=True)):
        picked = None
        for user, reader in zip(users[kept], places[step].chain, strict=False):
            with graph.inserting_before(user):
                if picked is None:
                    picked = write_pick(graph, first_read, index, step)
                elif reader.tier != "local":
                    picked = write_pick(graph, write_reload(graph, block), index, step)
            user.replace_input_with(kept, picked)
    if alone:
        graph.erase_node(saves[0])
