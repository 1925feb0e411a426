"""Tiers give back what was written, or say why not; and leave nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bits import LOSSLESS
from reroll.backends.codecs.codec import Encoded, decode, encode
from reroll.backends.tiers.disk import DiskBlock, DiskTier
from reroll.backends.tiers.host import HostTier
from reroll.backends.tiers.spill_file import SpillFile, filesystem
from reroll.backends.tiers.tier import Tier
from reroll.errors import OptionError, RerollWarning, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable


def values(seed: int, numel: int = 1000) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(numel, generator=generator)
    return [noise, (noise > 0.8).float(), noise.bfloat16().view(-1, 1), noise.to(torch.complex64), torch.empty(0, 3)]


def encoded(seed: int, numel: int = 1000) -> list[Encoded]:
    return [encode(value, codec) for value, codec in zip(values(seed, numel), LOSSLESS, strict=True)]


def check(block: object, seed: int, numel: int = 1000) -> None:
    back = [decode(value) for value in block.read()]  # type: ignore[attr-defined]
    assert all(torch.equal(*pair) for pair in zip(back, values(seed, numel), strict=True))


@pytest.fixture(params=["disk", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return DiskTier(tmp_path) if request.param == "disk" else HostTier()


def test_blocks_come_back_in_any_order(tier: Tier) -> None:
    rng = random.Random(0)
    blocks = {}
    for seed in range(300):
        size = rng.choice([0, 1, 100, 5000])
        blocks[seed] = (tier.write(encoded(seed, size)), size)
        if rng.random() < 0.6:
            chosen = rng.choice(sorted(blocks))
            check(blocks[chosen][0], chosen, blocks[chosen][1])
            if rng.random() < 0.7:
                blocks.pop(chosen)[0].drop()
        if rng.random() < 0.3:
            blocks[rng.choice(sorted(blocks))][0].prefetch()
    for seed, (block, size) in sorted(blocks.items(), reverse=True):
        check(block, seed, size)
        check(block, seed, size)


def test_what_is_dropped_is_gone(tier: Tier) -> None:
    block = tier.write(encoded(1))
    assert block.nbytes == sum(value.nbytes for value in encoded(1))
    block.drop()
    block.drop()
    with pytest.raises(StorageError, match="after it was dropped"):
        block.read()
    with pytest.raises(StorageError, match="after it was dropped"):
        block.prefetch()


def test_traffic_counts_transfers(tier: Tier) -> None:
    block = tier.write(encoded(1))
    block.prefetch()
    block.read()
    block.read()
    assert (tier.traffic.writes, tier.traffic.reads) == (1, 2)
    assert (tier.traffic.bytes_written, tier.traffic.bytes_read) == (block.nbytes, 2 * block.nbytes)


def test_host_keeps_a_copy() -> None:
    tensor = torch.ones(5)
    block = HostTier().write([encode(tensor, "raw", copy=False)])
    tensor.zero_()
    decode(block.read()[0]).zero_()
    assert torch.equal(decode(block.read()[0]), torch.ones(5))


def spilled(tier: DiskTier) -> SpillFile:
    assert tier._place is not None
    return tier._place.file


def length(tier: DiskTier) -> int:
    return os.fstat(spilled(tier)._file.fileno()).st_size


def test_the_file_is_reused_and_cut(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    for _ in range(5):
        blocks = [tier.write(encoded(seed)) for seed in range(10)]
        tier.drain()
        assert length(tier) == sum(block.nbytes for block in blocks)
        for block in blocks[::2]:
            block.drop()
        blocks[::2] = [tier.write(encoded(seed)) for seed in range(0, 10, 2)]
        tier.drain()
        assert length(tier) == sum(block.nbytes for block in blocks)
        for seed, block in enumerate(blocks):
            check(block, seed)
        del block, blocks
        gc.collect()
        assert length(tier) == 0


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_thousands_of_blocks_are_one_open_file(tmp_path: Path) -> None:
    before = open_files()
    tier = DiskTier(tmp_path)
    blocks = [tier.write([encode(torch.full((4,), float(i)), "raw")]) for i in range(3000)]
    assert open_files() <= before + 1
    assert list(tmp_path.iterdir()) == []
    assert all(decode(block.read()[0])[0] == i for i, block in enumerate(blocks))


def test_a_collected_tier_closes_its_file(tmp_path: Path) -> None:
    before = open_files()
    tier = DiskTier(tmp_path)
    block = tier.write(encoded(0))
    del tier
    check(block, 0)
    block.drop()
    del block
    deadline = time.monotonic() + 5
    while open_files() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert open_files() == before


def test_staging_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, real = DiskTier(tmp_path, staging=2), os.pwrite

    def slow(descriptor: int, view: memoryview, place: int) -> int:
        time.sleep(0.01)
        return real(descriptor, view, place)

    monkeypatch.setattr(os, "pwrite", slow)
    alive: list[weakref.ref[torch.Tensor]] = []
    kept = []
    for _ in range(10):
        block = [encode(torch.rand(100), "raw")]
        alive.append(weakref.ref(block[0].payload[0]))
        kept.append(tier.write(block))
        del block
        gc.collect()
        assert sum(ref() is not None for ref in alive) <= 2
    kept[0].prefetch()
    assert not any(ref() for ref in alive)
    with pytest.raises(OptionError, match="at least 1"):
        DiskTier(tmp_path, staging=0)


def full_disk(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["write", "drain", "prefetch", "read"])
def test_a_full_disk(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, staging=1)
    good = tier.write(encoded(0))
    tier.drain()
    monkeypatch.setattr(os, "pwrite", full_disk)
    block: DiskBlock = tier.write(encoded(1))
    block._stored.written.exception()
    act: dict[str, Callable[[], object]] = {"write": lambda: tier.write(encoded(2)), "drain": tier.drain}
    act |= {"prefetch": block.prefetch, "read": block.read}
    with pytest.raises(StorageError, match=r"cannot be written: No space left.*Free space"):
        act[how]()
    with pytest.raises(StorageError, match="No space left"):
        block.read()
    monkeypatch.undo()
    check(good, 0)
    check(tier.write(encoded(3)), 3)


def test_a_flipped_byte(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    block, other = tier.write(encoded(0)), tier.write(encoded(1))
    tier.drain()
    descriptor = spilled(tier)._file.fileno()
    for place in (0, 1234, block.nbytes - 1):
        byte = os.pread(descriptor, 1, place)
        os.pwrite(descriptor, bytes([byte[0] ^ 16]), place)
        with pytest.raises(StorageError, match="CRC-32 differs"):
            block.read()
        os.pwrite(descriptor, byte, place)
    check(block, 0)
    check(other, 1)


def test_a_short_file_and_a_closed_one(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    block = tier.write(encoded(0))
    tier.drain()
    os.ftruncate(spilled(tier)._file.fileno(), block.nbytes - 3)
    with pytest.raises(StorageError, match="3 bytes too early"):
        block.read()
    spilled(tier)._file.close()
    with pytest.raises(StorageError, match="cannot be read"):
        block.read()
    late = tier.write(encoded(1))
    with pytest.raises(StorageError, match="cannot be written"):
        tier.drain()
    late.drop()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, place: write(fd, view[:777], place))
    monkeypatch.setattr(os, "preadv", lambda fd, views, place: read(fd, [views[0][:555]], place))
    check(DiskTier(tmp_path).write(encoded(0)), 0)


def test_a_folder_that_vanishes_does_no_harm_and_a_missing_one_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    tier = DiskTier(folder)
    block = tier.write(encoded(0))
    folder.rmdir()
    check(block, 0)
    check(tier.write(encoded(1)), 1)
    with pytest.raises(StorageError, match=r"No spill file can be made in .*spill: No such file.*writable"):
        DiskTier(folder)


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    code = f"""
import signal, time, torch
from reroll.backends.codecs.codec import encode
from reroll.backends.tiers.disk import DiskTier
tier = DiskTier({str(tmp_path)!r})
blocks = [tier.write([encode(torch.rand(100000), "raw")]) for _ in range(8)]
tier.drain()
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
print("written", flush=True)
time.sleep(60)
"""
    for blow in (signal.SIGKILL, signal.SIGINT):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"written\n"
            child.send_signal(blow)
            assert child.wait(20) != 0
        assert list(tmp_path.iterdir()) == []


def test_file_systems_have_names(tmp_path: Path) -> None:
    assert filesystem("/proc") == "proc"
    assert filesystem(tmp_path) not in ("", "unknown")
    if filesystem("/dev/shm") == "tmpfs":
        with pytest.warns(RerollWarning, match="memory, not a disk"):
            DiskTier("/dev/shm")


def test_memory_is_the_callers(tmp_path: Path) -> None:
    """A profiler sees one thread: all that a round trip allocates must be freed in it."""
    tier = DiskTier(tmp_path)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _ in range(5):
            block = tier.write([encode(torch.rand(10000), "raw")])
            block.read()
            block.drop()
        tier.drain()
    events = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert len(events) >= 20
    assert sum(events) == 0


def test_what_is_dropped_while_it_is_read_fails_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    block = tier.write(encoded(1))
    tier.drain()
    read = spilled(tier).read

    def cut_before(*args: object) -> int:
        block._free()
        spilled(tier).cut()
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(spilled(tier), "read", cut_before)
    block.prefetch()
    reading = block._reading
    assert reading is not None
    assert reading.done.exception() is None
