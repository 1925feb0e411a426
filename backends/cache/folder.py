"""The folder of what is kept, for this user alone."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """``REROLL_CACHE_DIR``, else ``reroll`` in ``XDG_CACHE_HOME`` or ``~/.cache``; for a user without a home, in a
    folder of the user's own in the system's temporary one."""
    own, shared = os.environ.get("REROLL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if shared:
        return Path(shared) / "reroll"
    try:
        return Path.home() / ".cache" / "reroll"
    except RuntimeError:
        return _homeless()


def _homeless() -> Path:
    """A folder of this user's own in the system's temporary folder, where everybody may make folders of any name."""
    return Path(tempfile.gettempdir()) / (f"reroll-{os.getuid()}" if hasattr(os, "getuid") else "reroll")


def is_anothers(folder: Path) -> bool:
    """Whether another user may have written what stands in a folder: it is the temporary one, and not this user's."""
    if folder != _homeless() or not hasattr(os, "getuid"):
        return False
    status = folder.lstat()
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or bool(status.st_mode & 0o077)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also where several processes do. Raises OSError where it cannot be.

    A folder that is missing is made, for this user alone.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_anothers(folder):
        raise PermissionError(errno.EPERM, "it is not this user's alone")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, delete=False) as file:
        written = Path(file.name)
        try:
            file.write(content)
            file.flush()
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)  # nothing, if it has its name
