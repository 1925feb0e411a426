"""Which piece of reroll is to blame for a failure: that without which the same program comes out right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from judge import Verdict, Way

import reroll

PIECES: dict[str, dict[str, Any]] = {
    "inductor": {"lowering": "eager"},
    "codec": {"codec": "none"},
    "replay": {"replay": False},
    "long segments": {"segment": 1},
    "schedule": {"schedule": "store_all", "chunk": None, "slots": None, "remote": None},
}
"""Pieces beside the passes, and the options that do without each."""


def blame(failed: Verdict, way: Way, judge: Callable[[Way], Verdict]) -> tuple[str, ...]:
    """The pieces without which a program is right that fails with all of them; ``judge`` says what becomes of it."""
    return tuple(name for name, other in without(way) if judge(other).kind == "equal" != failed.kind)


def without(way: Way) -> Iterator[tuple[str, Way]]:
    """The way with one piece left out in turn, by the name of the piece."""
    options = dict(way.options)
    for name in reroll.DEFAULT_PASSES:
        passes = tuple(each for each in reroll.DEFAULT_PASSES if each != name)
        yield name, replace(way, options=tuple(sorted({**options, "passes": passes}.items())))
    for name, changed in PIECES.items():
        left = {key: value for key, value in {**options, **changed}.items() if value is not None}
        if left != options:
            yield name, replace(way, options=tuple(sorted(left.items())))
