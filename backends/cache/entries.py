"""Entries: bytes on disk, each under a text of everything that they depend on.

A file holds a line of JSON (digests of the text and of the bytes), then the bytes. It is read by the user who wrote it,
and where both digests agree.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from reroll.backends.cache.folder import WRITABLE, ForeignError, cache_folder, own_folder, read_own, write_own
from reroll.errors import remedy, warn

MOST_NBYTES = 1 << 30
"""Of all entries together; those that were used longest ago go first."""

DIGITS = 64
"""Of the name of an entry; what is being written has a shorter one."""
_MANY = 64  # entries after which a process looks at how much there is


class Unkept(Exception):  # no error: what it is about is made anew
    """Says that something is not kept on disk, and why."""


USES: Counter[str] = Counter()
"""How often a trace was ``found``, ``missing``, ``kept`` or ``ignored`` in this process, or anything ``unwritable``.
What is kept of other kinds is counted by ``uses`` of its own."""
UNKEPT: Counter[str] = Counter()
"""Why something was not kept, and how often."""


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _name(key: str) -> str:
    return _digest(key.encode())


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / _name(key)


def unkept(reason: Unkept) -> None:
    """Note that something is not kept, and why."""
    UNKEPT[str(reason)] += 1


def find(kind: str, key: str, uses: Counter[str] = USES) -> bytes | None:
    """The bytes of an entry, None where there is none. A broken one is ignored with a RerollWarning."""
    try:
        content = read_own(_name(key), kind)
    except ForeignError as error:
        ignore(kind, key, str(error.strerror), uses)
        return None
    except OSError:
        uses["missing"] += 1
        return None
    payload = content.partition(b"\n")[2]
    if content[: len(content) - len(payload)] != _head(key, payload):
        ignore(kind, key, "is broken or of another key", uses)
        return None
    uses["found"] += 1
    return payload


def ignore(kind: str, key: str, why: str, uses: Counter[str] = USES) -> None:
    """Say that an entry is not used, and let it be written anew."""
    uses["ignored"] += 1
    warn(
        f"reroll's cache: {_path(kind, key)} {why}. It is ignored, and what it was for is made anew.",
    )


def keep(kind: str, key: str, payload: bytes, uses: Counter[str] = USES) -> None:
    """Write an entry. A RerollWarning, once, where the folder cannot be written."""
    try:
        write_own(_head(key, payload) + payload, _name(key), kind)
    except OSError as error:
        USES["unwritable"] += 1
        if USES["unwritable"] == 1:
            warn(
                f"Nothing can be kept in {cache_folder()} ({error.strerror}), so every process makes anew what it "
                f"could have found there. {remedy(error, WRITABLE)}",
            )
        return
    uses["kept"] += 1
    if uses["kept"] % _MANY == 1:
        _make_room(kind)


def _head(key: str, payload: bytes) -> bytes:
    told = {"key": _digest(key.encode()), "sha256": _digest(payload)}
    return json.dumps(told).encode() + b"\n"


def _make_room(kind: str) -> None:
    """Remove what was used longest ago, until the rest is small enough."""
    with suppress(OSError), own_folder(kind) as folder, os.scandir(folder) as found:  # another process may do the same
        entries = [(each.stat(follow_symlinks=False), each.name) for each in found]
        total = sum(status.st_size for status, _ in entries)
        for status, name in sorted(entries, key=lambda entry: entry[0].st_mtime):
            if total <= MOST_NBYTES:
                return
            os.unlink(name, dir_fd=folder)
            total -= status.st_size
