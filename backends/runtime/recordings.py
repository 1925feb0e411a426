"""Halves of segments recorded as CUDA graphs: one launch in place of one for every kernel.

A recorded half reads and writes the same memory each time: its inputs are copied there, and of its results what lasts
beyond the next call is copied out. Operands that are the same for all segments of a call are copied once (``hold``).
All recordings of a device share one pool of memory. A replay takes random numbers from torch's generator.

A recording is used only if its first replay gives what the same kernels gave one by one: bit for bit, or as near as
these come to themselves, where they add up in no fixed order; of a backward, on whose rounding nothing later depends,
up to rounding (cuDNN may take another algorithm while it is recorded). Halves that wait for the device (``nonzero``)
are not recorded, nor are those whose kernels take longer than their launches: copies of operands would cost more. Why
not torch's own cudagraph trees: they record anew for every set of results that are still alive, so for every step of a
schedule.

Private torch API, tried on 2.11 and 2.13: ``_foreach_copy_`` (many copies in one kernel).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from reroll.backends.runtime.randomness import random_state, set_random_state
from reroll.backends.tiers.device import device_of
from reroll.errors import is_shortage, warn
from reroll.graph.fakes import laid_out_like
from reroll.graph.layouts import is_dense

if TYPE_CHECKING:
    from reroll.backends.inductor.lower import Boxed
    from reroll.backends.tiers.device import Event

_RUNS = 3  # of which the quickest counts
_SEVERAL = -1  # in the place of the number of an input
_SPREAD = 16.0  # how much further from a run than another run a replay may be
_ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-5}
"""By how much of its largest entry a gradient may differ; of half precision it could be anything."""
Lasts = Callable[[int], bool]
"""Whether a result, by its number, is needed when the same half runs next."""


class Half(NamedTuple):
    """Which half of the segments of so many steps: ``forward`` or ``backward``."""

    steps: int
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a recording reads an input, and how it lies there. ``fixed``: it is memory of a held value, where nothing
    else may be copied. ``dense``: it has neither gaps nor overlaps. All this is asked for once: replays are many."""

    own: Tensor
    start: int
    layout: tuple[Any, ...]
    fixed: bool
    dense: bool

    @classmethod
    def of(cls, own: Tensor, fixed: bool) -> _Place:
        """The place that an input has."""
        return cls(own, own.data_ptr(), _layout(own), fixed, is_dense(own))


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph:
    """A half as it was recorded. ``aliases``: results that are memory of an input, and of which. ``dense``: those that
    have neither gaps nor overlaps, which are copied as they are."""

    places: tuple[_Place, ...]
    results: tuple[Tensor | None, ...]
    aliases: dict[int, int]
    dense: frozenset[int]
    again: Callable[[], None]

    @classmethod
    def of(
        cls,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor | None],
        aliases: dict[int, int],
        is_held: Callable[[Tensor], bool],
        again: Callable[[], None],
    ) -> CudaGraph:
        """A recording that reads ``inputs``, of which some are memory of held values."""
        places = tuple(_Place.of(own, is_held(own)) for own in inputs)
        dense = {
            number
            for number, each in enumerate(results)
            if each is not None and is_dense(each) and not each.is_conj() and not each.is_neg()
        }
        return cls(places, tuple(results), aliases, frozenset(dense), again)

    def moves(self, inputs: Sequence[Tensor]) -> list[tuple[_Place, Tensor]] | None:
        """The inputs that must be copied, and where to. None where it cannot run on these, as they are not laid out as
        those it was recorded with, or not where those were."""
        found = []
        for place, value in zip(self.places, inputs, strict=True):
            if _layout(value) != place.layout:
                return None
            if value.data_ptr() != place.start:
                if place.fixed:
                    return None
                found.append((place, value))
        return found

    def replay(self, inputs: list[Any], moves: Sequence[tuple[_Place, Tensor]], lasts: Lasts) -> list[Any]:
        """Run it on other inputs, which are taken out of the list."""
        given = list(inputs)
        inputs.clear()
        _copy((place.own, value, place.dense) for place, value in moves)
        self.again()
        copies = _Copies()
        found = [self._result(number, given, lasts, copies) for number in range(len(self.results))]
        _copy(copies.pairs)
        return found

    def _result(self, number: int, given: Sequence[Tensor], lasts: Lasts, copies: _Copies) -> Tensor | None:
        result = self.results[number]
        if result is None:
            return None
        if number in self.aliases:
            place, value = self.places[self.aliases[number]], given[self.aliases[number]]
            own = place.own
            if place.fixed:
                return result
            if result.data_ptr() == place.start and _layout(result) == place.layout:
                return value
            start = result.storage_offset() - own.storage_offset() + value.storage_offset()
            return value.as_strided(result.shape, result.stride(), start)
        return copies.of(result, number in self.dense) if lasts(number) else result


@dataclass(slots=True)
class _Copies:
    """Copies of results, laid out as these are: what reads them is compiled for that. ``pairs``: those that are still
    to be filled, from what, and that they are dense."""

    pairs: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)
    shared: dict[Any, Tensor] = field(default_factory=dict)

    def of(self, result: Tensor, dense: bool) -> Tensor:
        """Results with gaps or overlaps are most often views of one value, whose memory is copied once (``shared``)."""
        if dense:
            made = torch.empty_like(result)
            self.pairs.append((made, result, True))
            return made
        return result.clone() if is_dense(result) else self._part(result)

    def _part(self, result: Tensor) -> Tensor:
        storage = result.untyped_storage()
        key = storage.data_ptr(), result.dtype, result.is_conj(), result.is_neg()
        if key not in self.shared:
            self.shared[key] = result.as_strided((storage.nbytes() // result.itemsize,), (1,), 0).clone()
        return self.shared[key].as_strided(result.shape, result.stride(), result.storage_offset())


def _copy(moves: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
    """Copy the second of each to the first, which is laid out alike: those that are dense by one kernel for each type,
    as a launch for each takes the host longer than all of them take the card."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value, dense in moves:
        if dense:
            places, values = groups.setdefault(value.dtype, ([], []))
            places.append(place)
            values.append(value)
        else:
            place.copy_(value)
    for places, values in groups.values():
        torch._foreach_copy_(places, values)


@dataclass(slots=True)
class _Turns:
    """Recordings share memory, so those of a device run one after another. ``last``: the end of the last turn;
    ``users``: whose recordings they are."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    last: Event | None = None
    users: weakref.WeakSet[Graphs] = field(default_factory=weakref.WeakSet)


@cache
def _turns_of(_device: torch.device | None) -> _Turns:
    return _Turns()


class Graphs:
    """The recordings of all halves of a recurrence's segments. Without a ``device`` halves just run."""

    def __init__(self, device: torch.device | None, where: str = "", random: bool = False) -> None:
        self.device = None if device is None else device_of(device)
        self._turns = _turns_of(device)
        self.worthwhile: bool | None = None  # whether its device waits for launches, once that is known
        self._where, self._random = where, random
        self._recordings: dict[Half, CudaGraph | None] = {}
        self._turns.users.add(self)
        self._held: dict[Hashable, tuple[Callable[[], Tensor | None], Tensor]] = {}  # what was held last, and our copy

    @contextmanager
    def using(self) -> Iterator[None]:
        """Use the memory of the device's recordings alone, behind those who have used it, be it on other streams."""
        if self.device is None:
            yield
            return
        with self._turns.lock:
            present = self.device.present()
            if self._turns.last:
                present.wait_event(self._turns.last)
            try:
                yield
            finally:
                self._turns.last = present.record_event()

    def hold(self, kind: str, values: Sequence[Tensor]) -> list[Tensor]:
        """The values where recordings find them, until others of this kind are held."""
        if self.device is None:
            return list(values)
        return [self._hold((kind, number), v) if is_dense(v) else v for number, v in enumerate(values)]

    def play(
        self, key: Half, run: Boxed, inputs: list[Any], lasts: Lasts, onto: Callable[[], Sequence[Any]] = tuple
    ) -> list[Any]:
        """The results of a half, recorded the first time. Takes the inputs out of the list.

        onto: for the first inputs memory where they may be copied, if they are not in one place each time.
        """
        if self.device is None:
            return list(run(inputs))
        if key not in self._recordings:
            return self._record(key, run, inputs, lasts, onto())
        recording = self._recordings[key]
        if recording is None:
            return list(run(inputs))
        moves = recording.moves(inputs)
        if moves is None:
            self._recordings[key] = None
            self._say("they are given operands that are laid out in several ways")
            return list(run(inputs))
        return recording.replay(inputs, moves, lasts)

    def results(self, key: Half) -> Sequence[Any]:
        """The memory of a recorded half's results; those that are memory of its inputs are None."""
        recording = self._recordings.get(key)
        if recording is None:
            return ()
        return [None if number in recording.aliases else each for number, each in enumerate(recording.results)]

    def forget(self) -> None:
        """Free all recordings, and what is held for them. They are made anew where they are played again."""
        with self._turns.lock:
            self._recordings.clear()
            self._held.clear()

    def draw_anew(self) -> None:
        """Forget recordings that draw random numbers: since another could not be made, torch's generator has a new
        state, of which these know nothing."""
        if self._random:
            self._recordings = {key: None for key, recorded in self._recordings.items() if recorded is None}

    def _hold(self, key: Hashable, value: Tensor) -> Tensor:
        known = self._held.get(key)
        own = known[1] if known and _alike(known[1], value) else torch.empty_like(value)
        if known is None or known[0]() is not value or known[1] is not own:
            self._held[key] = _nothing, own  # until all is copied, should this thread be interrupted
            own.copy_(value)
        self._held[key] = weakref.ref(value), own
        return own

    def _record(self, key: Half, run: Boxed, inputs: list[Any], lasts: Lasts, onto: Sequence[Any]) -> list[Any]:
        """Run a half, and record it if it can be. Gives what it gave before it was recorded."""
        given = list(inputs)
        before = random_state(given) if self._random else None
        expected = list(run(inputs))
        after = random_state(given) if self._random else None
        self._recordings[key] = None
        reason = _unrecordable([*given, *expected])
        if reason is None:
            try:
                recorded, reason = self._recorded(key, run, given, expected, onto, before)
                if recorded and not self._is_slower(recorded, run, given, lasts):
                    self._recordings[key] = recorded
            except RuntimeError as error:
                for each in self._turns.users:
                    each.draw_anew()
                reason = str(error).splitlines()[0]
                if is_shortage(error):
                    reason = f"memory ran out while they were recorded ({reason})"
        if after is not None:
            set_random_state(after)
        if reason:
            self._say(reason)
        return expected

    def _say(self, reason: str) -> None:
        text = (
            f"Segments of the loop at {self._where} are launched kernel by kernel, as they cannot be recorded as a "
            f"CUDA graph: {reason}. That is slower, nothing else; cuda_graphs=False says that it is meant."
        )
        warn(text)

    def _recorded(
        self, key: Half, run: Boxed, given: Sequence[Tensor], expected: Sequence[Any], onto: Sequence[Any], before: Any
    ) -> tuple[CudaGraph | None, str | None]:
        assert self.device is not None
        if before is not None:
            set_random_state(before)
        twice, waits = self.device.watched(lambda: list(run(list(given))))
        if waits:
            return None, "an operation in them waits for the device, as indexing by truth values does"
        places = [*onto, *[None] * (len(given) - len(onto))]
        inputs = tuple(self._place(value, place) for value, place in zip(given, places, strict=True))
        results, again = self.device.record(lambda: list(run(list(inputs))))
        found = {number: _source(each, inputs) for number, each in enumerate(results) if each is not None}
        aliases = {number: of for number, of in found.items() if of is not None}
        if _SEVERAL in aliases.values():
            return None, "a result is the memory of several inputs"
        if not all(_same_kind(results[number], inputs[of]) for number, of in aliases.items()):
            return None, "a result is the memory of an input, read as another type"
        for own, value in zip(inputs, given, strict=True):
            if not _same_place(own, value):
                own.copy_(value)
        if before is not None:
            set_random_state(before)
        again()
        agrees = partial(_agrees, exact=key.name == "forward")
        if not all(itertools.starmap(agrees, zip(results, expected, twice, strict=True))):
            return None, "a replay gives other values than its kernels do one by one"
        return CudaGraph.of(inputs, results, aliases, self._is_kept_memory, again), None

    def _is_slower(self, recorded: CudaGraph, run: Boxed, given: Sequence[Tensor], lasts: Lasts) -> bool:
        """Whether a recording, with its copies, takes longer than its kernels launched one by one."""
        assert self.device is not None
        kernels = min(self.device.seconds(lambda: run(list(given))) for _ in range(_RUNS))

        def replayed() -> None:
            recorded.replay(list(given), recorded.moves(given) or (), lasts)

        return min(self.device.seconds(replayed) for _ in range(_RUNS)) > kernels

    def _is_kept_memory(self, value: Tensor) -> bool:
        """Whether it is memory of a held value."""
        storage = value.untyped_storage().data_ptr()
        return any(own.untyped_storage().data_ptr() == storage for _, own in self._held.values() if own.numel())

    def _place(self, value: Tensor, place: Tensor | None) -> Tensor:
        """Where a recording reads an input."""
        if self._is_kept_memory(value):
            return value
        if place is not None and _alike(place, value):
            return place
        return laid_out_like(value)


def _source(result: Tensor, inputs: Sequence[Tensor]) -> int | None:
    """Of which input a result is memory, of several in one storage that which is just there, else which holds it;
    ``_SEVERAL`` if none holds all of it, None if it is no input's."""
    storage = result.untyped_storage().data_ptr()
    there = [n for n, own in enumerate(inputs) if own.numel() and own.untyped_storage().data_ptr() == storage]
    if not there or not result.numel():
        return None
    begin, end = _extent(result)
    same = (n for n in there if _same_place(inputs[n], result))
    around = (n for n in there if _extent(inputs[n])[0] <= begin and end <= _extent(inputs[n])[1])
    return next(same, next(around, _SEVERAL))


def _extent(value: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a value, and behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + (last + 1) * value.itemsize


def _nothing() -> None:
    """What is referred to weakly, and is gone."""


def _unrecordable(values: Sequence[Any]) -> str | None:
    """Why a half cannot be recorded, if what it takes or gives says that."""
    tensors = [value for value in values if value is not None]
    if not all(isinstance(value, Tensor) for value in tensors):
        return "it takes or gives numbers"
    devices = sorted({str(value.device) for value in tensors})
    return f"its values are on {' and '.join(devices)}" if len(devices) > 1 else None


def _layout(value: Tensor) -> tuple[Any, ...]:
    """How a value lies in memory."""
    return value.shape, value.stride(), value.dtype


def _alike(one: Tensor, other: Tensor) -> bool:
    return _layout(one) == _layout(other)


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and _alike(one, other)


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(_bytes_of(one), _bytes_of(other))


def _agrees(result: Tensor | None, expected: Tensor | None, twice: Tensor | None, exact: bool) -> bool:
    """Whether a result is what was expected, as far as two runs of the same kernels are alike, and up to rounding if it
    need not be ``exact``."""
    if _same_bits(result, expected):
        return True
    if result is None or expected is None or twice is None or not result.dtype.is_floating_point:
        return False
    allowed = _SPREAD * _furthest(twice, expected)
    if not exact:
        allowed += _ROUNDING.get(result.dtype, 0.0) * float(expected.abs().max())
    return _furthest(result, expected) <= allowed


def _furthest(one: Tensor, other: Tensor) -> float:
    """The largest difference of two entries."""
    return float(one.sub(other).abs_().max())


def _same_kind(one: Tensor | None, other: Tensor) -> bool:
    """Whether the same bytes say the same."""
    if one is None:
        return False
    return (one.dtype, one.is_conj(), one.is_neg()) == (other.dtype, other.is_conj(), other.is_neg())


def _bytes_of(value: Tensor) -> Tensor:
    """The bytes of the elements, in their order."""
    value = value.resolve_conj().resolve_neg()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.contiguous().view(-1).view(torch.uint8)
