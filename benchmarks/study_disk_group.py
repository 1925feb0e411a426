"""A control group of Linux whose memory is limited, page cache included: what is written does not stay there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def limited(nbytes: int | None) -> Iterator[Callable[[], None] | None]:
    """Gives what a new process calls to be in a group with so many bytes of memory; None for no limit.

    Raises RuntimeError where there are no such groups, or they may not be made (it takes root).
    """
    if nbytes is None:
        yield None
        return
    older = GROUPS / "memory"
    group = (older if older.is_dir() else GROUPS) / f"reroll-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if older.is_dir() else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(nbytes))
    except OSError as error:
        raise RuntimeError(
            f"No control group with a limit on memory could be made in {GROUPS} ({error.strerror}). It takes root. "
            "Without one, gigabytes on a disk are measured in the page cache."
        ) from error

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield enter
    finally:
        group.rmdir()
