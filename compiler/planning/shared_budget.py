"""A budget that several recurrences of a graph share, by what a byte is worth in each.

Recurrences run one after another and are reversed in the opposite order. While one runs, those before it hold what they
keep for their backward. With plans of peaks ``p``, what is around the recurrence included, that keep ``k`` bytes, a
budget ``B`` is met where for every recurrence ``p_i + k_1 + ... + k_(i-1) <= B``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

_STATES = 1000  # partial choices that are followed at a time; of more, the one that keeps least is always among them


@dataclass(frozen=True, slots=True)
class Offer:
    """A plan that a recurrence may have: its peak with what is around it, what of it is kept between forward and
    backward, and its cost."""

    peak: int
    kept: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Partial:
    """Offers for the first recurrences, by their numbers, with the bytes that these keep and what they cost."""

    kept: int = 0
    cost: float = 0.0
    numbers: tuple[int, ...] = ()

    def followed_by(self, number: int, offer: Offer) -> _Partial:
        """The same with an offer for the next recurrence."""
        return _Partial(self.kept + offer.kept, self.cost + offer.cost, (*self.numbers, number))


def least(offers: Sequence[Sequence[Offer]]) -> int:
    """The least budget that one offer for each recurrence meets; recurrences are in the order in which they run."""
    needed = 0
    for mine in reversed(offers):
        needed = min(max(offer.peak, offer.kept + needed) for offer in mine)
    return needed


def cheapest(offers: Sequence[Sequence[Offer]], budget: int) -> tuple[int, ...] | None:
    """The number of the offer that each recurrence takes, so that all cost least within a budget; None if none do."""
    found = [_Partial()]
    for mine in offers:
        found = _best(
            partial.followed_by(number, offer)
            for partial in found
            for number, offer in enumerate(mine)
            if offer.peak + partial.kept <= budget
        )
    return min(found, key=attrgetter("cost")).numbers if found else None


def _best(partials: Iterable[_Partial]) -> list[_Partial]:
    """Those than which none keeps less and costs less."""
    found = list[_Partial]()
    for each in sorted(partials, key=attrgetter("kept", "cost")):
        if not found or each.cost < found[-1].cost:
            found.append(each)
    return found[:: -(-len(found) // _STATES)] if found else found
