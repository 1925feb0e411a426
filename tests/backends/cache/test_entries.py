"""Entries: whole, this user's own, ignored with a word where they are not what was written."""

from __future__ import annotations

import errno
import os
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import reroll
from reroll import RerollWarning
from reroll.backends.cache import entries
from reroll.backends.cache.entries import USES, find, keep
from reroll.backends.cache.traces import KIND, recall, remember, trace_text
from reroll.segment.trace import trace
from six_inputs import six_inputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that nobody has written to, in a process that has not used one."""
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path / "cache"))
    USES.clear()
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    (path,) = (folder / KIND).iterdir()
    return path


def test_what_was_kept_is_found_under_its_key_alone(folder: Path) -> None:
    assert find(KIND, "a key") is None
    keep(KIND, "a key", b"some\nbytes")
    assert (find(KIND, "a key"), find(KIND, "another")) == (b"some\nbytes", None)
    assert dict(USES) == {"missing": 2, "kept": 1, "found": 1}
    assert oct(folder.stat().st_mode & 0o777) == "0o700"


@pytest.mark.parametrize("at", [0, 30, -1])
def test_a_flipped_byte_is_ignored_with_a_word(folder: Path, at: int) -> None:
    keep(KIND, "a key", b"some bytes")
    content = bytearray(the_file(folder).read_bytes())
    content[at] ^= 1
    the_file(folder).write_bytes(content)
    with pytest.warns(RerollWarning, match="is broken or of another key. It is ignored"):
        assert find(KIND, "a key") is None
    keep(KIND, "a key", b"some bytes")
    assert find(KIND, "a key") == b"some bytes", "written anew"


@pytest.mark.parametrize("nbytes", [0, 20, 160])
def test_half_an_entry_is_ignored_with_a_word(folder: Path, nbytes: int) -> None:
    keep(KIND, "a key", bytes(100))
    os.truncate(the_file(folder), nbytes)
    with pytest.warns(RerollWarning, match="is broken"):
        assert find(KIND, "a key") is None


def test_an_entry_under_another_name_is_ignored(folder: Path) -> None:
    keep(KIND, "a key", b"some bytes")
    the_file(folder).rename(entries._path(KIND, "another"))
    with pytest.warns(RerollWarning, match="of another key"):
        assert find(KIND, "another") is None


def test_whole_bytes_that_are_no_trace_are_ignored(folder: Path) -> None:
    keep(KIND, "a key", b"no pickle")
    with pytest.warns(RerollWarning, match="cannot be read .*It is ignored"):
        assert recall("a key") is None
    made = trace(six_inputs(), 2, decompose=True)
    remember("a key", made)
    found = recall("a key")
    assert found is not None
    assert trace_text(found) == trace_text(made)
    assert the_file(folder).stat().st_size > 1_000


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


STRANGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another user's": (lambda path: os.chown(path, 12_345, -1), "was written by another user"),
    "a link": (linked, "is a link"),
    "a pipe, which nobody writes to": (a_pipe, "is no file"),
    "a folder": (a_folder, "is no file"),
    "a second name": (lambda path: os.link(path, path.with_name("elsewhere")), "has another name elsewhere"),
    "a file of the group's": (lambda path: path.chmod(0o660), "may be written by other users"),
    "a file of everybody's": (lambda path: path.chmod(0o602), "may be written by other users"),
}
gives = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


@gives
@pytest.mark.parametrize("name", STRANGE)
def test_a_file_that_another_user_may_have_written_is_not_read(folder: Path, name: str) -> None:
    make, why = STRANGE[name]
    keep(KIND, "a key", b"some bytes")
    make(the_file(folder))
    with pytest.warns(RerollWarning, match=f"{why}. It is ignored"):
        assert find(KIND, "a key") is None
    if name != "a folder":
        keep(KIND, "a key", b"some bytes")
        assert find(KIND, "a key") == b"some bytes", "written anew"


OTHERS: dict[str, Callable[[Path], None]] = {
    "the group may write": lambda path: path.chmod(0o770),
    "everybody may write": lambda path: path.chmod(0o1777),
    "another user's": lambda path: os.chown(path, 12_345, -1),
}


@gives
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_that_others_may_write_in_is_not_used(folder: Path, name: str, inner: bool) -> None:
    keep(KIND, "a key", b"some bytes")
    OTHERS[name](folder / KIND if inner else folder)
    assert find(KIND, "a key") is None
    with pytest.warns(
        RerollWarning, match=r"Nothing can be kept in .* \((other users|it is another user's).*chmod go-w"
    ):
        keep(KIND, "another", b"some bytes")
    assert len(list((folder / KIND).iterdir())) == 1


def test_the_users_own_link_to_a_folder_is_followed_and_none_inside(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")
    keep(KIND, "a key", b"some bytes")
    assert find(KIND, "a key") == b"some bytes"
    (folder / KIND).rename(tmp_path / "moved")
    (folder / KIND).symlink_to(tmp_path / "moved")
    assert find(KIND, "a key") is None


@gives
def test_no_bytes_of_another_user_come_through_a_link_that_turns(folder: Path) -> None:
    """What a path names is swapped all the time between an entry of this user and one of another's."""
    keep(KIND, "a key", b"mine")
    mine, theirs = the_file(folder), folder / KIND / "theirs"
    content = entries._head("a key", b"theirs") + b"theirs"
    theirs.write_bytes(content)
    os.chown(theirs, 12_345, -1)
    kept, done = mine.read_bytes(), threading.Event()

    def swap() -> None:
        new = mine.with_name("new")
        while not done.is_set():
            new.symlink_to(theirs)
            new.replace(mine)
            new.write_bytes(content)
            os.chown(new, 12_345, -1)
            new.replace(mine)
            new.write_bytes(kept)
            new.replace(mine)

    turning = threading.Thread(target=swap)
    turning.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = {find(KIND, "a key") for _ in range(2_000)}
    finally:
        done.set()
        turning.join()
    assert b"theirs" not in found


def test_without_descriptors_nothing_is_kept_and_the_limit_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(KIND, "a key", b"some bytes")

    def none_left(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", none_left)
    USES.clear()
    assert find(KIND, "a key") is None
    with pytest.warns(RerollWarning, match=r"Too many open files.*ulimit -n"):
        keep(KIND, "another", b"")


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    USES.clear()
    with pytest.warns(RerollWarning, match="Nothing can be kept in .*Set REROLL_CACHE_DIR"):
        keep(KIND, "a key", b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep(KIND, "another", b"")


def test_two_writers_leave_a_whole_entry(folder: Path) -> None:
    payloads = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda payload: keep(KIND, "a key", payload), payloads * 4))
    assert find(KIND, "a key") in payloads
    assert len(list((folder / KIND).iterdir())) == 1, "nothing half-written is left"


def test_what_was_used_longest_ago_goes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MOST_NBYTES", 2_500)
    for number in range(4):
        keep(KIND, str(number), bytes(1_000))
        os.utime(entries._path(KIND, str(number)), (number, number))
    assert find(KIND, "0") is not None  # and so used last
    entries._make_room(KIND)
    assert [find(KIND, str(number)) is not None for number in range(4)] == [True, False, False, True]


def test_the_info_says_what_is_there_and_what_was_used(folder: Path) -> None:
    empty = reroll.cache_info()
    assert (empty.folder, empty.entries, empty.nbytes, empty.kept) == (folder, 0, 0, 0)
    keep(KIND, "a key", bytes(1_000))
    find(KIND, "a key")
    find(KIND, "another")
    info = reroll.cache_info()
    assert (info.entries, info.nbytes) == (1, the_file(folder).stat().st_size)
    assert (info.found, info.missing, info.kept, info.ignored) == (1, 1, 1, 0)
    assert re.search(r"1 traced segments of .*\n.*1 found, 1 missing, 1 written, 0 ignored\n", str(info))
