"""The folder of what is kept, for this user alone.

A folder or a file is opened once, and what is open is asked whose it is: what a path names may be another file a moment
later. What lies in the folder is opened by its name in what is open, and no link is followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WRITABLE = "Set REROLL_CACHE_DIR to a folder in which this user may write, and no other (chmod go-w)."
"""What helps where nothing can be kept."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # or a pipe would be waited for
_FOLDER = _READ | os.O_DIRECTORY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ForeignError(OSError):
    """Says why a file may be another user's."""


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
    return Path(tempfile.gettempdir()) / f"reroll-{os.geteuid()}"


@contextmanager
def own_folder(kind: str = "", *, make: bool = False) -> Iterator[int]:
    """The open folder of a kind of entries, or that of all of them. ``make``: one that is missing, for this user alone.

    Raises OSError where there is none, or where another user may write in it.
    """
    folder = cache_folder()
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    links = os.O_NOFOLLOW if folder == _homeless() else 0  # the user's own setting may be a link
    with _open(folder, _FOLDER | links) as root:
        _refuse_others_folder(root)
        if not kind:
            yield root
            return
        if make:
            with suppress(FileExistsError):
                os.mkdir(kind, 0o700, dir_fd=root)
        with _open(kind, _FOLDER | os.O_NOFOLLOW, root) as inner:
            _refuse_others_folder(inner)
            yield inner


def read_own(name: str, kind: str = "") -> bytes:
    """The bytes of a file of this user or of the system's. Raises OSError; ForeignError for a file that is none of
    these, or that another user may have written."""
    with own_folder(kind) as folder:
        try:
            opened = os.open(name, _READ | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ForeignError(errno.ELOOP, "is a link") from error
            raise
        try:
            _refuse_others_file(os.fstat(opened))
            with suppress(OSError):
                os.utime(opened)
            with os.fdopen(opened, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(opened)


def write_own(content: bytes, name: str, kind: str = "") -> None:
    """Write a file whole or not at all, also where several processes do. Raises OSError where it cannot be."""
    with own_folder(kind, make=True) as folder:
        unfinished = f"tmp{secrets.token_hex(8)}"
        opened = os.open(unfinished, _WRITE, 0o600, dir_fd=folder)
        try:
            with os.fdopen(opened, "wb") as file:
                file.write(content)
            os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):  # it has its name
                os.unlink(unfinished, dir_fd=folder)


@contextmanager
def _open(path: str | Path, flags: int, folder: int | None = None) -> Iterator[int]:
    opened = os.open(path, flags, dir_fd=folder)
    try:
        yield opened
    finally:
        os.close(opened)


def _refuse_others_folder(opened: int) -> None:
    status = os.fstat(opened)
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, "it is another user's")
    if status.st_mode & _OTHERS:
        raise PermissionError(errno.EPERM, "other users may write in it")


def _refuse_others_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ForeignError(errno.EPERM, "is no file")
    if status.st_uid not in (os.geteuid(), 0):
        raise ForeignError(errno.EPERM, "was written by another user")
    if status.st_mode & _OTHERS:
        raise ForeignError(errno.EPERM, "may be written by other users")
    if status.st_nlink > 1:  # none: another process has put a new one in its place
        raise ForeignError(errno.EPERM, "has another name elsewhere")
