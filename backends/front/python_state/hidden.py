"""Objects whose state is in no attribute: generators of random numbers, files in memory, digests.

A look at a model notes it, and puts it back. A program of reroll's does not move it on: a model that does is refused.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from reroll.backends.front.python_state.code_ownership import once_a_class
from reroll.capture.recorder.identity import is_a

BY_LINES = "by lines"
FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO)


class _Kind(NamedTuple):
    """How the state of objects of some classes is read, so that it can be compared, and put back, if it can."""

    classes: type | tuple[type, ...]
    read: Callable[[Any], Any]
    put_back: Callable[[Any, Any], object]


def _nothing(_: Any, __: Any) -> None:
    """A digest cannot go back."""


@cache
def _in_memory() -> tuple[type, ...]:
    return (io.StringIO, io.BytesIO, type(hashlib.md5()), type(hashlib.blake2b()))


@cache
def _kinds() -> tuple[_Kind, ...]:
    in_memory, digests = _in_memory()[:2], _in_memory()[2:]
    return (
        _Kind(random.Random, random.Random.getstate, random.Random.setstate),
        _Kind(np.random.RandomState, _of_numpys, lambda value, state: value.set_state(state.value)),
        _Kind(np.random.Generator, _of_generator, lambda value, state: _set_bits(value.bit_generator, state)),
        _Kind(np.random.BitGenerator, lambda value: _Numpys(value.state), _set_bits),
        _Kind(torch.Generator, _of_torchs, lambda value, state: value.set_state(torch.tensor(list(state)).byte())),
        _Kind(in_memory, _of_file, _set_file),
        _Kind(FILES, _place_in_file, _set_place),
        _Kind(digests, lambda value: value.digest(), _nothing),
    )


class _Numpys:
    """A state of numpy's, which holds arrays, equal to one of the same numbers."""

    def __init__(self, value: Any) -> None:
        self.value, self.text = value, _text(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Numpys) and other.text == self.text

    __hash__ = None  # type: ignore[assignment]


def _text(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return [(key, _text(item)) for key, item in value.items()]
    return value


def _of_numpys(value: Any) -> _Numpys:
    return _Numpys(value.get_state(legacy=False))


def _of_generator(value: Any) -> _Numpys:
    return _Numpys(value.bit_generator.state)


def _set_bits(value: Any, state: _Numpys) -> None:
    value.state = state.value


def _of_torchs(value: torch.Generator) -> bytes:
    return value.get_state().numpy().tobytes()


def _of_file(value: Any) -> Any:
    return None if value.closed else (value.tell(), value.getvalue())


def _place_in_file(value: Any) -> Any:
    """How far a file was read or written, and its size; ``BY_LINES`` where Python tells nobody, as it is read by lines;
    None of what is none on a disk, or closed, and of Python's own output."""
    own = any(value is each for each in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    if own or not _is_on_disk(value):
        return None
    try:
        place = value.tell()
    except OSError:
        return BY_LINES
    if value.writable():
        value.flush()
    return place, os.fstat(value.fileno()).st_size


def _is_on_disk(value: Any) -> bool:
    """Whether a file is open, and what is behind its buffers is a file of the system: no archive, pipe or console."""
    with suppress(ValueError):  # one that was closed, or taken from its buffer
        while not is_a(value, io.FileIO):
            value = getattr(value, "buffer" if is_a(value, io.TextIOBase) else "raw", None)
            if value is None:
                return False
        return type(value) is io.FileIO and bool(value.seekable())
    return False


def _set_place(value: Any, before: Any) -> None:
    """Go back, and take away what was written at its end since."""
    if before in (None, BY_LINES) or not _is_on_disk(value):
        return
    place, size = before
    if value.writable():
        value.flush()
        if os.fstat(value.fileno()).st_size > size:
            os.truncate(value.fileno(), size)
    value.seek(place)


def _set_file(value: Any, state: Any) -> None:
    if state is None or value.closed:
        return
    place, content = state
    value.seek(0)
    value.write(content)
    value.truncate()
    value.seek(place)


class Hidden:
    """An object with such a state, and the state as it was."""

    def __init__(self, value: Any, kind: _Kind) -> None:
        self.value, self._kind, self.before = value, kind, kind.read(value)

    @property
    def is_changed(self) -> bool:
        """Whether the state is another one now."""
        return bool(self._kind.read(self.value) != self.before)

    def restore(self) -> None:
        """Put the state back."""
        if self.is_changed:
            self._kind.put_back(self.value, self.before)


def hidden_in(value: Any) -> Hidden | None:
    """The state of an object, if it is one of these; torch's own generator is that of every graph."""
    kind = None if value is torch.default_generator else _kind_of(type(value))
    return None if kind is None else Hidden(value, kind)


def holds_bytes(value: Any) -> bool:
    """Whether what a model reads of an object may be the same at every call: a file in memory, a digest. Generators are
    left to those who draw from them."""
    return is_a(value, _in_memory())


def bytes_in(value: Any) -> Any:
    """What such an object holds."""
    kind = _kind_of(type(value))
    return None if kind is None else kind.read(value)


def hides_state(value: Any) -> bool:
    """Whether an object has such a state."""
    return _kind_of(type(value)) is not None


@once_a_class
def _kind_of(of: Any) -> _Kind | None:
    return next((each for each in _kinds() if issubclass(of, each.classes)), None)
