"""Streams and events of a simulated device, and the vector clocks by which races are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reroll.backends.tiers.device import Event

if TYPE_CHECKING:
    from simulated import SimulatedDevice

Clock = dict["SimulatedStream", int]


class Race(AssertionError):
    """Memory is read, written or freed while a copy from or to it may be under way."""


@dataclass(frozen=True, eq=False)
class Access:
    """A copy's access to bytes of memory, by its number in its stream."""

    start: int
    stop: int
    stream: SimulatedStream
    number: int
    writes: bool

    def is_over(self, known: Clock) -> bool:
        return known.get(self.stream, 0) >= self.number


@dataclass(eq=False)
class SimulatedEvent:
    """Over once the work of its stream is, up to a number; then all is that was known to be over there."""

    stream: SimulatedStream
    number: int
    known: Clock

    def synchronize(self) -> None:
        device = self.stream.device
        if device.ignores_this_wait():
            return
        with device.lock:
            self.stream.advance(self.number)
            learn(device.known_here(), self.known)


@dataclass(eq=False)
class SimulatedStream:
    """A queue of copies."""

    device: SimulatedDevice
    name: str
    known: Clock = field(default_factory=dict)
    queued: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    number: int = 0

    def record_event(self) -> SimulatedEvent:
        with self.device.lock:
            return SimulatedEvent(self, self.number, {**self.known, self: self.number})

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        if self.device.ignores_this_wait():
            return
        with self.device.lock:
            learn(self.known, event.known)
            if self in self.device.computes:
                event.stream.advance(event.number)
            else:
                self.push(lambda: event.stream.advance(event.number))

    def push(self, work: Callable[[], None]) -> int:
        """Queue work behind all that this thread knows to be over. Gives its number."""
        learn(self.known, self.device.known_here())
        self.number += 1
        self.queued.append((self.number, work))
        if not self.device.late:
            self.advance(self.number)
        return self.number

    def advance(self, number: int) -> None:
        """Do what is queued, up to a number."""
        while self.queued and self.queued[0][0] <= number:
            _, work = self.queued.popleft()
            work()


def learn(known: Clock, more: Clock) -> None:
    """Add to what is known to be over."""
    for stream, number in more.items():
        known[stream] = max(known.get(stream, 0), number)
