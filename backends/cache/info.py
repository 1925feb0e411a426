"""What is kept on disk, told to a user.

Private torch API, tried on 2.11 and 2.13: ``cache_dir`` of ``torch._inductor.runtime`` (where inductor keeps its code).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reroll.backends.cache.entries import DIGITS, UNKEPT, USES
from reroll.backends.cache.folder import cache_folder
from reroll.backends.cache.traces import KIND
from reroll.words.units import nbytes_text


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What is kept from one process to the next, and what of it this process has used. ``print`` shows it.

    folder: of this package. entries, nbytes: traced segments in it, and their size. found, missing, kept, ignored: how
    often this process found one, found none, wrote one, or could not use one. unkept: why others are not kept, and how
    often. compiled: the folder where inductor keeps what it compiled.
    """

    folder: Path
    entries: int
    nbytes: int
    found: int
    missing: int
    kept: int
    ignored: int
    compiled: Path
    unkept: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        held = f"{self.entries:,} traced segments of {nbytes_text(self.nbytes)}"
        used = f"{self.found} found, {self.missing} missing, {self.kept} written, {self.ignored} ignored"
        lines = [f"{self.folder}: {held}", f"in this process: {used}", f"compiled code: {self.compiled}"]
        return "\n".join([*lines, *(f"not kept ({times} times): {why}" for why, times in self.unkept.items())])


def cache_info() -> CacheInfo:
    """What ``REROLL_CACHE_DIR`` (else ``~/.cache/reroll``) holds, and what this process took from there.

    A folder that is not there holds nothing. Everything in it may be removed at any time.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder, sizes = cache_folder(), list[int]()
    with suppress(OSError):
        for entry in (folder / KIND).glob("?" * DIGITS):
            with suppress(OSError):  # another process may remove it
                sizes.append(entry.stat().st_size)
    uses = {name: USES[name] for name in ("found", "missing", "kept", "ignored")}
    return CacheInfo(folder, len(sizes), sum(sizes), **uses, compiled=Path(cache_dir()), unkept=dict(UNKEPT))
