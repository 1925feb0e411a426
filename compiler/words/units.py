"""Sizes, bandwidths and durations as people write them: "64KiB", "2GB/s", "0.3ms"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from reroll.errors import OptionError

SIZES: Mapping[str, int] = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},
}
"""Bytes of a unit, which is written in small or large letters, with or without a B."""

DURATIONS: Mapping[str, float] = {
    **dict.fromkeys(("", "s"), 1.0),
    **dict.fromkeys(("us", "µs"), 1e-6),
    "ms": 1e-3,
    "ns": 1e-9,
    "min": 60.0,
    "h": 3600.0,
}
"""Seconds of a unit."""

_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)\s*([^\W\d]*)\s*")


def parse_size(given: int | float | str, name: str) -> int:
    """Bytes of a number of bytes or a text like "512MiB". ``name`` is what errors call it. Raises OptionError."""
    found = _amount(given, SIZES, bytes_too=True)
    if found is None:
        raise OptionError(f"{name}={given!r} is not a size. Write a number of bytes, or a text such as '512MiB'.")
    if found < 1:
        raise OptionError(f"{name}={given!r} must be positive.")
    return int(found)


def parse_bandwidth(given: int | float | str, name: str) -> float:
    """Bytes a second of a number, or of a text like "2GB/s". Raises OptionError."""
    rate = re.fullmatch(r"(.*)/\s*s\s*", given) if isinstance(given, str) else None
    found = _amount(rate[1] if rate else given, SIZES, bytes_too=True)
    if isinstance(given, str) and rate is None:
        found = None
    if found is None:
        raise OptionError(f"{name}={given!r} is not a bandwidth. Write bytes a second, or a text such as '2GB/s'.")
    if found <= 0:
        raise OptionError(f"{name}={given!r} must be positive: a tier that moves nothing keeps nothing. Leave it out.")
    return found


def parse_seconds(given: int | float | str, name: str) -> float:
    """Seconds of a number, or of a text like "0.3ms". Raises OptionError."""
    found = _amount(given, DURATIONS)
    if found is None:
        raise OptionError(f"{name}={given!r} is not a time. Write seconds, or a text such as '0.3ms'.")
    if found < 0:
        raise OptionError(f"{name}={given!r} must not be negative.")
    return found


def seconds_text(seconds: float) -> str:
    """Seconds with the unit that leaves up to four digits: 52.1 us, 1.24 ms, 71.4 s, 2 h 5 min."""
    if seconds == 0:
        return "0 s"
    for unit, most, scale in (("ns", 1e-6, 1e9), ("us", 1e-3, 1e6), ("ms", 1.0, 1e3), ("s", 1000.0, 1.0)):
        if seconds < most:
            return f"{seconds * scale:.3g} {unit}"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"


def _amount(given: int | float | str, units: Mapping[str, float], *, bytes_too: bool = False) -> float | None:
    """The number in its base unit; None where it is not one, not finite, or its unit is unknown."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    if not isinstance(given, str):
        return float(given) if math.isfinite(given) else None
    match = _WRITTEN.fullmatch(given)
    unit = match[2].lower().removesuffix("b" if bytes_too else "") if match else ""
    if match is None or unit not in units:
        return None
    found = float(match[1]) * units[unit]
    return found if math.isfinite(found) else None


def nbytes_text(nbytes: int) -> str:
    """Bytes with the unit that leaves up to four digits: 512 B, 33.2 KiB, 1.24 MiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
