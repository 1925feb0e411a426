"""What a plan must know of a machine: remote tiers, their capacity, bandwidth and latency; seconds of a segment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reroll.errors import MachineError, nearest
from reroll.words.registry import Registry
from reroll.words.units import parse_bandwidth, parse_seconds, parse_size


@dataclass(frozen=True, slots=True)
class RemoteTier:
    """What must be known of a remote tier to name it; ``reroll.backends.tiers`` makes it.

    ``default_of``: carries of a "cpu", or of any other "device", go there where no tier is asked for. ``spills``: it
    writes to the folder that the user names.
    """

    name: str
    default_of: str = ""
    spills: bool = False

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in ("local", "remote"):
            raise MachineError(
                f"A tier cannot be named {self.name!r}. Choose a name of letters, digits and underscores."
            )


REMOTE_TIERS: Registry[RemoteTier] = Registry("remote tier", MachineError)
"""All remote tiers, ours first and fastest first; what is not moved is "local"."""

REMOTE_TIERS.add(RemoteTier("host", default_of="device"), RemoteTier)
REMOTE_TIERS.add(RemoteTier("disk", default_of="cpu", spills=True), RemoteTier)

_SPEEDS = ("write", "read", "latency", "capacity")


@dataclass(frozen=True, slots=True)
class MachineTier:
    """A tier of memory outside of the device.

    ``capacity`` in bytes (None: as much as is asked for), ``write`` and ``read`` in bytes a second, ``latency`` in
    seconds for each transfer. Raises MachineError for numbers that no tier has.
    """

    name: str
    write: float
    read: float
    latency: float = 0.0
    capacity: int | None = None

    def __post_init__(self) -> None:
        REMOTE_TIERS.find(self.name)
        for way in ("write", "read"):
            rate = getattr(self, way)
            if not _is_number(rate) or rate <= 0:
                raise MachineError(
                    f"Tier {self.name!r} has {way}={rate!r}: bytes a second are finite and above zero. "
                    "Leave out a tier that moves nothing."
                )
        if not _is_number(self.latency) or self.latency < 0:
            raise MachineError(
                f"Tier {self.name!r} has latency={self.latency!r}: seconds are finite and not negative. "
                "Give 0 for none."
            )
        if self.capacity is not None and (not _is_number(self.capacity) or self.capacity < 1):
            raise MachineError(
                f"Tier {self.name!r} has capacity={self.capacity!r}: a tier holds at least one byte. "
                "Leave out a tier that holds nothing, and give None for one without end."
            )

    @classmethod
    def of(cls, name: str, given: str | float | Mapping[str, Any]) -> MachineTier:
        """A tier from a bandwidth, in bytes a second or as "2GB/s", or from a mapping with ``write``, ``read`` (one of
        them will do), ``latency`` ("50us") and ``capacity`` ("1TiB"). Raises MachineError and OptionError."""
        numbers = dict(given) if isinstance(given, Mapping) else {"write": given}
        for key in numbers:
            if key not in _SPEEDS:
                raise MachineError(f"Tier {name!r} has no number {key!r}. {nearest(str(key), _SPEEDS)}")
        rates = {
            way: parse_bandwidth(numbers[way], f"Tier {name!r}: {way}")
            for way in ("write", "read")
            if numbers.get(way) is not None
        }
        if not rates:
            raise MachineError(f"Tier {name!r} has no bandwidth. Give write or read, or both, such as '2GB/s'.")
        capacity = numbers.get("capacity")
        return cls(
            name,
            rates.get("write", rates.get("read", math.nan)),
            rates.get("read", rates.get("write", math.nan)),
            parse_seconds(numbers.get("latency", 0.0), f"Tier {name!r}: latency"),
            None if capacity is None else parse_size(capacity, f"Tier {name!r}: capacity"),
        )

    def write_seconds(self, nbytes: int, blocks: int = 1) -> float:
        """Seconds that writing so many bytes takes, one block after another."""
        return blocks * self.latency + nbytes / self.write

    def read_seconds(self, nbytes: int, blocks: int = 1) -> float:
        """Seconds that reading so many bytes takes, one block after another."""
        return blocks * self.latency + nbytes / self.read


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine by name, with its tiers by name. ``origin`` is "measured" or "given"."""

    name: str
    tiers: Mapping[str, MachineTier] = field(default_factory=dict)
    origin: str = "given"

    def __post_init__(self) -> None:
        for name, tier in self.tiers.items():
            if not isinstance(tier, MachineTier) or tier.name != name:
                raise MachineError(f"Machine {self.name!r} has {tier!r} as its tier {name!r}. Use Machine.of.")
        if self.origin not in ("measured", "given"):
            raise MachineError(f"Machine {self.name!r} is neither 'measured' nor 'given', but {self.origin!r}.")

    @classmethod
    def of(cls, tiers: Mapping[str, Any], name: str = "elsewhere") -> Machine:
        """A machine from tiers by name, each a bandwidth or a mapping: ``Machine.of({"disk": "2GB/s"})``.

        Raises MachineError and OptionError, each a sentence on the tier that is wrong.
        """
        if not isinstance(tiers, Mapping):
            raise MachineError(
                f"A machine is made of a mapping of tiers, such as {{'disk': '2GB/s'}}, not of {tiers!r}."
            )
        return cls(name, {tier: MachineTier.of(tier, given) for tier, given in tiers.items()})

    def tier(self, name: str) -> MachineTier:
        """The tier of that name. Raises MachineError if there is none."""
        if name not in self.tiers:
            known = ", ".join(self.tiers) or "none"
            raise MachineError(f"Nothing is known of the tier {name!r} of machine {self.name!r}; known: {known}.")
        return self.tiers[name]

    def to_json(self) -> str:
        """The machine as JSON, numbers in bytes and seconds."""
        tiers = {name: asdict(tier) for name, tier in self.tiers.items()}
        return json.dumps({"name": self.name, "origin": self.origin, "tiers": tiers}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """A machine as ``to_json`` wrote it. Raises MachineError for anything else."""
        try:
            read = json.loads(text)
            tiers = {name: MachineTier(**numbers) for name, numbers in read["tiers"].items()}
            return cls(str(read["name"]), tiers, read["origin"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, MachineError):
                raise
            raise MachineError(f"This is not the JSON of a machine ({type(error).__name__}: {error}).") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SegmentSeconds:
    """Seconds of one segment: run forward without keeping its tape, run forward with it, reversed, and reversed from a
    thin tape (0: there is none).

    Raises MachineError for seconds that are negative, infinite or not a number.
    """

    forward: float
    tape: float
    backward: float
    thin_backward: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise MachineError(
                    f"A segment has {name}={value!r} seconds, but seconds are finite and not negative. "
                    "Measure the segment again, or correct what was given."
                )


def pieces(steps: int, lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(length, how many of it) of the segments that make up a number of steps: the longest ones first."""
    for length in sorted(lengths, reverse=True):
        count, steps = divmod(steps, length)
        if count:
            yield length, count
    if steps:
        raise ValueError(f"no segment was compiled for the last {steps} steps")


def work_seconds(segments: Mapping[int, SegmentSeconds], kind: str, steps: int, thin: bool = False) -> float:
    """Seconds of a run ("advance", "recompute", "tape") or a "backward" over a number of steps, with ``thin`` tapes."""
    parts = ((segments[length], count) for length, count in pieces(steps, segments))
    if kind == "backward":
        return sum((each.thin_backward if thin else each.backward) * count for each, count in parts)
    return sum((each.tape if kind == "tape" else each.forward) * count for each, count in parts)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of segments by their length in steps, and the machine on which they were taken.

    ``overlapped``: transfers run beside the segments (two streams); else they block, as in the paper
    (arXiv 2412.11810).
    """

    segments: Mapping[int, SegmentSeconds]
    machine: Machine
    overlapped: bool = False

    def __post_init__(self) -> None:
        for length, seconds in self.segments.items():
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise MachineError(f"A segment has {length!r} steps, but it must have a whole number of at least 1.")
            if not isinstance(seconds, SegmentSeconds):
                raise MachineError(f"The segment of {length} steps takes {seconds!r}. Give SegmentSeconds.")

    def of(self, length: int) -> SegmentSeconds:
        """The seconds of a segment of ``length`` steps. Raises MachineError if they are not known."""
        if length not in self.segments:
            known = ", ".join(map(str, sorted(self.segments))) or "none"
            raise MachineError(f"The seconds of a segment of {length} steps are not known; known lengths are {known}.")
        return self.segments[length]

    def numbers(self, length: int, tier: str | None = None) -> dict[str, float]:
        """What formulas (``reroll.formulas``) ask of segments of ``length`` steps and of a remote tier."""
        each = self.of(length)
        found = {"segment": length, "forward": each.forward, "taping": each.tape, "backward": each.backward}
        if tier is None:
            return found
        place = self.machine.tier(tier)
        return {**found, "write": place.write, "read": place.read, "latency": place.latency}
