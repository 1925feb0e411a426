"""Calibration: what is measured, what is remembered, and what is measured again."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import reroll
from reroll.backends.cache.folder import cache_folder
from reroll.backends.tiers import calibrate as calibration
from reroll.backends.tiers import disk
from reroll.backends.tiers.available import free_memory, total_memory
from reroll.backends.tiers.calibrate import fit, path_of, recall, remember, seconds_of
from reroll.errors import OptionError, RerollWarning
from reroll.schedules.machine import Machine

MACHINE = Machine.of({"disk": {"write": "1GB/s", "read": "2GB/s", "latency": "50us"}, "host": "9GB/s"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were measured, in no time."""
    found: list[Path] = []

    def fake(spill: Path) -> Machine:
        found.append(spill)
        return replace(MACHINE, name=f"machine{len(found)}", origin="measured")

    monkeypatch.setattr(calibration, "_measured", fake)
    return found


def test_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    machine = reroll.calibrate(folder=folder)
    assert machine.origin == "measured"
    assert set(machine.tiers) == {"host", "disk"}
    assert all(tier.capacity is not None and tier.capacity > 2**20 for tier in machine.tiers.values())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    again = reroll.calibrate(folder=folder)
    assert [tier.write for tier in again.tiers.values()] == [tier.write for tier in machine.tiers.values()]


def test_a_folder_that_cannot_be_measured(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere is not a folder .* Create it first"):
        reroll.calibrate(folder=folder / "nowhere")


def test_once_for_each_folder_and_again_by_force(folder: Path, measured: list[Path]) -> None:
    (folder / "other").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reroll.calibrate(folder=folder).name == "machine1"
        assert reroll.calibrate(folder=str(folder)).name == "machine1"
        assert reroll.calibrate(folder=folder / "other").name == "machine2"
        assert reroll.calibrate(force=True, folder=folder).name == "machine3"
        assert reroll.calibrate(folder=folder).name == "machine3"
    assert measured == [folder, folder / "other", folder]


def test_capacities_are_those_of_the_moment(
    folder: Path, measured: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free in (10**9, 10**6, 0):
        monkeypatch.setattr(disk, "free_disk", lambda _, free=free: free)
        assert reroll.calibrate(folder=folder).tier("disk").capacity == max(free, 1)
    assert len(measured) == 1


def foreign(name: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        read = json.loads(text)
        read["measured_on"][name] = "another"
        return json.dumps(read)

    return change


BROKEN: tuple[tuple[Callable[[str], str], str], ...] = (
    (lambda text: text[: len(text) // 2], "is broken"),
    (lambda _: "", "is broken"),
    (lambda _: "[1]", "is broken"),
    (lambda text: text.replace('"write": 1', '"write": -1'), "is broken .*write="),
    (lambda text: text.replace("measured_on", "on"), "is broken"),
    (foreign("machine"), "was taken elsewhere .*machine 'another', not"),
    (foreign("torch"), "was taken elsewhere .*torch 'another', not"),
    (foreign("cpu"), "was taken elsewhere .*cpu 'another', not"),
)


@pytest.mark.parametrize(("change", "why"), BROKEN)
def test_a_file_that_does_not_fit_is_measured_again(
    change: Callable[[str], str], why: str, folder: Path, measured: list[Path]
) -> None:
    reroll.calibrate(folder=folder)
    (path,) = cache_folder().iterdir()
    path.write_text(change(path.read_text()))
    with pytest.warns(RerollWarning, match=f"{path.name} {why}.*measured again"):
        assert reroll.calibrate(folder=folder).name == "machine2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reroll.calibrate(folder=folder).name == "machine2"
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written(folder: Path, measured: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("REROLL_CACHE_DIR", str(folder / "file" / "cache"))
    with pytest.warns(RerollWarning, match="cannot be kept in .* Set REROLL_CACHE_DIR"):
        assert reroll.calibrate(folder=folder).name == "machine1"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REROLL_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/reroll")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/reroll")


def test_the_cache_of_a_user_without_a_home_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REROLL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    origin = {"machine": "m"}
    assert cache_folder() == tmp_path / f"reroll-{os.getuid()}"
    remember(origin, MACHINE)
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    assert recall(origin) == MACHINE
    cache_folder().chmod(0o777)  # so anybody may have put a file there
    assert recall(origin) is None
    with pytest.warns(RerollWarning, match="other users may write in it.*Set REROLL_CACHE_DIR"):
        remember(origin, MACHINE)


def test_writers_at_once_leave_a_whole_file(folder: Path) -> None:
    origin = {"machine": "m"}
    remember(origin, MACHINE)
    seen: list[Machine | None] = []

    def work(number: int) -> None:
        for _ in range(10):
            remember(origin, replace(MACHINE, name="m" * 1000 * number))
            seen.append(recall(origin))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 40
    assert None not in seen
    assert list(cache_folder().iterdir()) == [path_of(origin)]


def test_fit_finds_latency_and_bandwidths() -> None:
    sizes = [1 << 16, 1 << 19, 1 << 22]
    writes, reads = ([2e-5 + size / rate for size in sizes] for rate in (1e9, 3e9))
    assert fit(sizes, writes, reads) == pytest.approx((2e-5, 1e9, 3e9))
    faster = [1.1e-5, 8e-5, 1e-3]  # small blocks move faster than large ones
    latency, write, read = fit(sizes, faster, faster)
    assert latency == 0.0
    assert min(np.array(sizes) / faster) <= write == pytest.approx(read)
    assert fit(sizes, [1e-3] * 3, [1e-3] * 3)[1] > 0


def test_seconds_of_a_call() -> None:
    calls: list[float] = []
    assert seconds_of(lambda: time.sleep(0.002), most_seconds=0.01) >= 0.002
    assert seconds_of(lambda: calls.append(time.perf_counter()), most_seconds=0.0) >= 0
    assert len(calls) == 2  # a warm-up and one


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_what_the_control_groups_leave(version: int, tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group = "sys/fs/cgroup/memory/a"
    if version == 2:
        names, group = ("memory.max", "memory.current", "inactive_file"), "sys/fs/cgroup/a"
    assert free_memory(tmp_path) is None
    assert total_memory(tmp_path) is None
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert total_memory(tmp_path) == 9000 * 1024
    assert free_memory(tmp_path) == 8000 * 1024
    write("proc/self/cgroup", "4:memory:/a/b\n3:cpu:/\n" if version == 1 else "0::/a/b\n")
    write(f"{group}/{names[0]}", "5000000\n")
    write(f"{group}/{names[1]}", "4000000\n")
    assert free_memory(tmp_path) == 1000000
    assert total_memory(tmp_path) == 5000000
    write(f"{group}/memory.stat", f"anon 5\n{names[2]} 300000\n")
    assert free_memory(tmp_path) == 1300000
    write(f"{group}/b/{names[0]}", "max\n" if version == 2 else "9223372036854771712\n")
    write(f"{group}/b/{names[1]}", "1\n")
    assert free_memory(tmp_path) == 1300000
    write(f"{group}/{names[1]}", "6000000\n")
    assert free_memory(tmp_path) == 0
