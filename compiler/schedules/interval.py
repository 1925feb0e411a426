"""Where carries are kept: a schedule is a tree of intervals of steps.

The four schemes are those of Bencheikh, Finkbeiner, Neftci (2024), arXiv 2412.11810, for every number of steps T, chunk
C and number of slots K: a sub-chunk has ceil(C / K) steps, and only the last piece of a range may be short.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from reroll.errors import IllegalProgramError, OptionError


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of steps in a row, whose first carry is kept in ``tier`` ("local", "host", "disk").

    While the interval is run over (the root: by the forward; any other: by a replay from its own carry), the carry at
    the start of each child is kept in the child's tier; the first child shares the carry of its parent. If both are
    remote it is read again; if the child is local, what was read for the parent is held. An interval without
    children is taped and reversed as a whole; one with children is reversed child by child, last to first. A child that
    is ``taped`` is taped by the run over its parent, and its tape is kept in place of its first carry. Children that
    have the same ``block`` number and tier are written and read as one transfer. An interval without children that is
    ``thin`` keeps less on its tape, and its backward makes the rest again.

    Intervals do not say where they start, so equal ones may be one object: what is repeated is not spelled out.
    """

    steps: int
    tier: str = "local"
    children: tuple[Interval, ...] = ()
    block: int | None = None
    taped: bool = False
    thin: bool = False

    def __post_init__(self) -> None:
        """Refuse an empty interval, children that do not tile it, and a tape that is no leaf in local memory."""
        if self.steps < 1:
            raise IllegalProgramError(f"An interval of {self.steps} steps holds no step: it needs at least 1.")
        if self.children and sum(child.steps for child in self.children) != self.steps:
            raise IllegalProgramError(
                f"The children of an interval of {self.steps} steps do not tile it: they have "
                f"{sum(child.steps for child in self.children)} steps together. Give it children that add up."
            )
        if self.taped and (self.children or self.tier != "local"):
            raise IllegalProgramError(
                f"A taped interval of {self.steps} steps has {len(self.children)} children and lies in {self.tier!r}: "
                "tapes are local and are reversed as a whole. Leave out taped, or the children and the tier."
            )

    def placed(self, start: int = 0) -> Iterator[tuple[int, Interval]]:
        """The children, each with its first step, if the interval starts at step ``start``."""
        for child in self.children:
            yield start, child
            start += child.steps


def thinned(root: Interval, steps: int) -> Interval:
    """A tree with thin tapes: of all its steps, or of the first ``steps`` of one that tapes all in one run."""
    if root.children:
        return _thin(root, {})
    first, rest = Interval(min(steps, root.steps), taped=True, thin=True), root.steps - steps
    return replace(root, children=(first, Interval(rest, taped=True)) if rest > 0 else (first,))


def _thin(interval: Interval, known: dict[int, Interval]) -> Interval:
    """An interval with thin tapes; what is one object stays one."""
    if id(interval) not in known:
        inside = tuple(_thin(child, known) for child in interval.children)
        known[id(interval)] = replace(interval, children=inside, thin=not inside)
    return known[id(interval)]


def _pieces(steps: int, length: int, tier: str) -> tuple[Interval, ...]:
    """Intervals of ``length`` steps that tile ``steps``; only the last may be short."""
    count, rest = divmod(steps, length)
    whole = (Interval(length, tier),) * count
    return (*whole, Interval(rest, tier)) if rest else whole


def _whole(length: int, segment: int) -> int:
    """The least number of steps in whole segments that is not below ``length``."""
    return -(-length // segment) * segment


def _at_least_one(**numbers: int) -> None:
    """Raise OptionError for a number below one."""
    for name, number in numbers.items():
        if number < 1:
            raise OptionError(f"A schedule has {name}={number}, but {name} must be at least 1.")


def store_all(steps: int, *, segment: int = 1) -> Interval:
    """Plain back-propagation through time: one interval, taped by the forward. Local peak: T a."""
    _at_least_one(steps=steps, segment=segment)
    return Interval(steps)


def standard(steps: int, chunk: int, *, segment: int = 1) -> Interval:
    """One local carry per chunk. Local peak: (T / C) s + C a; each chunk is recomputed once."""
    return remote(steps, chunk, "local", segment=segment)


def remote(steps: int, chunk: int, tier: str, *, segment: int = 1) -> Interval:
    """One carry per chunk in ``tier``. Local peak: C a + s; each chunk is recomputed once."""
    _at_least_one(steps=steps, chunk=chunk, segment=segment)
    return Interval(steps, children=_pieces(steps, _whole(chunk, segment), tier))


def hierarchical(steps: int, chunk: int, slots: int, tier: str, *, segment: int = 1) -> Interval:
    """K carries per chunk, moved as one block. Local peak: K s + (C / K) a; each sub-chunk is recomputed once."""
    nested = double(steps, chunk, slots, tier, segment=segment)
    blocks = enumerate(nested.children)
    return Interval(steps, children=tuple(replace(sub, tier=tier, block=i) for i, c in blocks for sub in c.children))


def double(steps: int, chunk: int, slots: int, tier: str, *, segment: int = 1) -> Interval:
    """Chunk starts in ``tier``, then K local carries of the chunk that is reversed. Local peak: K s + (C / K) a.

    Each chunk is recomputed twice: once to keep its K carries, once to tape its sub-chunks. With ``tier="local"`` the
    T / C chunk starts are local too.
    """
    _at_least_one(slots=slots)
    chunks = remote(steps, chunk, tier, segment=segment).children
    length = _whole(-(-_whole(chunk, segment) // slots), segment)
    nested = {each.steps: replace(each, children=_pieces(each.steps, length, "local")) for each in chunks}
    return Interval(steps, children=tuple(nested[each.steps] for each in chunks))


def double_merged(steps: int, chunk: int, slots: int, tier: str, *, segment: int = 1) -> Interval:
    """Double without runs that repeat the run before them: the last sub-chunk of a chunk is taped while the chunk is
    replayed, and the replay of the last chunk is the forward itself."""
    chunks = double(steps, chunk, slots, tier, segment=segment).children
    merged = {each.steps: replace(each, children=_last_taped(each.children)) for each in chunks}
    return Interval(steps, children=(*(merged[each.steps] for each in chunks[:-1]), *merged[chunks[-1].steps].children))


def _last_taped(children: tuple[Interval, ...]) -> tuple[Interval, ...]:
    return (*children[:-1], replace(children[-1], tier="local", taped=True))


def best_chunk(steps: int, carry: int, tape: int) -> int:
    """The chunk C in steps for carries of ``carry`` units and taped steps of ``tape`` units: round(sqrt(T s / a)).

    For standard it minimises the local peak (T / C) s + C a. For remote, hierarchical and double the local peak alone
    falls with C without end, at the price of more transfers and off-chip memory; the same C is where the tape of a
    chunk equals what is kept of all chunks, C a = (T / C) s, so the local peak of double is O(T^(1/4)).
    """
    _at_least_one(steps=steps, carry=carry, tape=tape)
    return min(max(round(math.sqrt(steps * carry / tape)), 1), steps)


def best_slots(chunk: int, carry: int, tape: int) -> int:
    """The slots K with the least local peak K s + ceil(C / K) a, among the integers nearest to sqrt(C a / s)."""
    _at_least_one(chunk=chunk, carry=carry, tape=tape)
    near = math.isqrt(chunk * tape // carry)
    candidates = (min(max(near + offset, 1), chunk) for offset in (-1, 0, 1, 2))
    return min(candidates, key=lambda slots: slots * carry + -(-chunk // slots) * tape)


def best_local_double(steps: int, carry: int, tape: int) -> tuple[int, int]:
    """The chunk and slots of double with both levels on the device.

    They minimise ceil(T / C) s + (K - 1) s + (C / K) a over C = K n, where n is the sub-chunk. Without rounding
    K = (T a / s)^(1/3) and C = (T^2 s / a)^(1/3), and the local peak is 3 T^(1/3) for s = a.
    """
    _at_least_one(steps=steps, carry=carry, tape=tape)
    near = round((steps * tape / carry) ** (1 / 3))
    pairs: set[tuple[int, int]] = set()
    for slots in range(1, 2 * near + 4):
        chunks = round(math.sqrt(steps * tape / (slots * carry)))
        for count in range(max(chunks - 2, 1), chunks + 3):
            pairs.add((slots, -(-steps // (slots * count))))
    peak = {(k * n, k): -(-steps // (k * n)) * carry + (k - 1) * carry + n * tape for k, n in pairs}
    chunk, slots = min(peak, key=lambda pair: (peak[pair], pair))
    return chunk, slots
