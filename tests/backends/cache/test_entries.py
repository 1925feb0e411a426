"""Entries: whole, this user's own, ignored with a word where they are not what was written."""

from __future__ import annotations

import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import reroll
from reroll import RerollWarning
from reroll.backends.cache import entries
from reroll.backends.cache.entries import USES, find, keep
from reroll.backends.cache.traces import KIND, recall, remember
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
    assert found.graph.code == made.graph.code
    assert the_file(folder).stat().st_size > 1_000


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to others")
def test_another_users_entry_is_not_read(folder: Path) -> None:
    keep(KIND, "a key", b"some bytes")
    os.chown(the_file(folder), 12_345, -1)
    with pytest.warns(RerollWarning, match="was written by another user"):
        assert find(KIND, "a key") is None


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
    entries._make_room(folder / KIND)
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
