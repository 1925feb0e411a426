"""Tiers move values of a device beside its work, on a simulated one: nothing is used, freed or reused too early."""

from __future__ import annotations

import gc
import inspect
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agreement import QUICK, compare
from bits import LOSSLESS
from networks import RecurrentLIF
from reroll.backends.codecs.codec import decode, encode
from reroll.backends.tiers import device as streams
from reroll.backends.tiers import disk, transfers
from reroll.backends.tiers.device import background_of
from reroll.backends.tiers.disk import DiskTier
from reroll.backends.tiers.host import HostTier
from reroll.backends.tiers.tier import Tier, payloads
from reroll.backends.tiers.transfers import Pool, Transfers, transfers_of
from reroll.errors import ShortageError, StorageError, UnsupportedError
from simulated import SimulatedDevice
from simulated_streams import Race
from simulation import CPU, check_races, executables, simulating

BUSY = 60  # calls of a tier
MAKE: dict[str, Callable[[Path], Tier]] = {"host": lambda _: HostTier(), "disk": DiskTier}
SCHEMES: dict[str, dict[str, Any]] = {
    "remote": {},
    "double": {"chunk": 4, "slots": 2},
    "hierarchical": {"chunk": 4},
}


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(seed % 50 * 7, generator=generator)
    return [noise, (noise > 0.8).float(), noise.bfloat16().view(-1, 1), noise.to(torch.complex64), noise > 0.5]


def keep_busy(device: SimulatedDevice, tier: Tier, seed: int = 0) -> None:
    """Write, prefetch, read and drop blocks in any order, while the device computes; their sources die at once.

    Two streams compute in turn; what is read is of the stream that was present as its prefetch was asked for.
    """
    rng = random.Random(seed)
    blocks: dict[int, Any] = {}
    asked: dict[int, Any] = {}
    for number in range(BUSY):
        device.compute = rng.choice(device.computes)
        device.computed()
        codecs = [*LOSSLESS[:4], "raw"]
        blocks[number] = tier.write([encode(v, c) for v, c in zip(values(number), codecs, strict=True)])
        for chosen in rng.sample(sorted(blocks), min(rng.randrange(3), len(blocks))):
            device.computed()
            device.compute = asked.setdefault(chosen, rng.choice(device.computes))
            if rng.random() < 0.4:
                blocks[chosen].prefetch()
                continue
            back = blocks[chosen].read()
            del asked[chosen]
            device.used(payloads(back))
            assert all(torch.equal(decode(a), b) for a, b in zip(back, values(chosen), strict=True))
            del back  # while its stream is the present one
            if rng.random() < 0.6:
                blocks.pop(chosen)
        if asked and rng.random() < 0.3:
            given_up = rng.choice(sorted(asked))
            del blocks[given_up], asked[given_up]
    device.computed()
    transfers_of(CPU).drain()
    if not device.is_idle():
        raise Race("Something is under way after all copies were waited for.")


@pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_are_moved_without_races(kind: str, late: bool, seed: int, tmp_path: Path) -> None:
    with simulating(late=late) as device:
        keep_busy(device, MAKE[kind](tmp_path), seed)
        deadline = time.monotonic() + 10  # for what the reading thread still holds
        while device.allocated and time.monotonic() < deadline:
            time.sleep(0.01)
        assert device.copies > BUSY
        assert device.allocated == 0


def waiting_lines() -> set[tuple[str, int]]:
    """The lines of ours that let a stream or a thread wait."""
    return {
        (path.name, number)
        for path in (Path(inspect.getfile(module)) for module in (transfers, disk))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\.(wait_event|synchronize)\(", line)
    }


@pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])
@pytest.mark.parametrize("line", sorted(waiting_lines()), ids=lambda line: f"{line[0]}:{line[1]}")
def test_every_wait_is_needed_and_a_missing_one_is_found(line: tuple[str, int], late: bool, tmp_path: Path) -> None:
    found = []
    for kind in MAKE:
        try:
            with simulating(late=late) as device:
                device.deaf = line
                keep_busy(device, MAKE[kind](tmp_path))
        except Race as race:
            found.append(str(race))
    assert found


@pytest.mark.variants(4)
@pytest.mark.parametrize("late", [True, False], ids=["late", "soon"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("schedule", SCHEMES)
def test_gradients_are_those_of_eager(schedule: str, tier: str, late: bool, double_precision: None) -> None:
    spikes = (torch.rand(19, 4, 6) < 0.4).double() * 2
    options = {"schedule": schedule, "remote": tier, **SCHEMES[schedule]}
    with simulating(late=late) as device:
        differences, _ = compare(RecurrentLIF(6, 8, 3), [spikes], calls=2, **options)
        assert not differences
        assert device.copies > 10
        gc.collect()
        assert device.allocated == 0


class Waits(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for, for which a device would have to be waited."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("schedule", SCHEMES)
def test_carries_are_kept_without_waiting_for_the_device(schedule: str) -> None:
    options: dict[str, Any] = {**QUICK, "schedule": schedule, "remote": "host", **SCHEMES[schedule]}
    with simulating():
        run = torch.compile(RecurrentLIF(6, 8, 3), backend="reroll", options=options)
        run(torch.ones(31, 4, 6)).sum().backward()  # which compares recordings
        with Waits() as waits:  # type: ignore[no-untyped-call]
            run(torch.ones(31, 4, 6)).sum().backward()
    assert waits.number <= 2, "more than for the carry that is given"


def test_a_value_that_is_changed_too_early_is_found() -> None:
    def reuse_at_once() -> None:
        with simulating() as device:
            value = torch.ones(5)
            block = HostTier().write([encode(value, "raw", copy=False)])
            value.zero_()
            device.used(payloads(block.read()))

    with pytest.raises(Race, match="changed before"):
        reuse_at_once()


def test_pinned_memory_is_used_again() -> None:
    with simulating() as device:
        tier = HostTier()
        for number in range(50):
            device.computed()
            block = tier.write([encode(torch.full((1000,), float(number)), "raw")])
            assert decode(block.read()[0])[0] == number
        assert len(device.slabs) == 1
        assert [slab.extents.stop for slab in transfers_of(CPU).pool.slabs] == [2 * 4032]  # this block and the next


def test_slabs_grow_and_keep_to_what_there_is() -> None:
    pool = Pool(SimulatedDevice(pinnable=(1 << 27) + (1 << 12)))
    small = [pool.take([torch.empty(1 << 10)]) for _ in range(3)]
    assert pool.nbytes == 1 << 26
    large = pool.take([torch.empty(1 << 24)])  # fills a slab of its own
    assert pool.nbytes == 1 << 27
    full = [pool.take([torch.empty((1 << 24) - 3 * (1 << 10))])]
    tiny = pool.take([torch.empty(3), torch.empty(5, dtype=torch.bool)])  # only a little can be pinned
    assert pool.nbytes == (1 << 27) + 128
    assert [part.data_ptr() % 64 for part in tiny.parts] == [0, 0]
    held = [*small, large, *full, tiny]
    starts = [part.data_ptr() for room in held for part in room.parts]
    assert len(set(starts)) == len(starts)
    del held, small, large, full, tiny
    pool.trim()
    assert pool.nbytes == 0


def test_memory_that_cannot_be_pinned_is_an_error_that_frees_all() -> None:
    with simulating(pinnable=(1 << 26) + 5) as device:
        tier = HostTier()
        blocks = [tier.write([encode(torch.ones(1 << 20), "raw")]) for _ in range(16)]
        with pytest.raises(StorageError, match=r"4 MiB .* cannot be pinned .* 64 MiB are\. Free memory"):
            tier.write([encode(torch.ones(1 << 20), "raw")])
        blocks.clear()
        assert [slab.extents.stop for slab in transfers_of(CPU).pool.slabs] == [0]
        device.used(payloads(tier.write([encode(torch.ones(1 << 20), "raw")]).read()))


def test_a_training_step_that_cannot_pin_leaves_nothing(double_precision: None) -> None:
    spikes = (torch.rand(19, 4, 6) < 0.4).double() * 2
    with simulating(pinnable=0) as device:
        with pytest.raises(StorageError, match="cannot be pinned"):
            compare(RecurrentLIF(6, 8, 3), [spikes], schedule="remote", remote="host")
        gc.collect()
        assert device.allocated == 0
        assert not transfers_of(CPU)._leaving
        device.pinnable = None
        assert not compare(RecurrentLIF(6, 8, 3), [spikes], schedule="remote", remote="host")[0]


@pytest.mark.parametrize("room", [pytest.param("less", marks=pytest.mark.campaign), "none"])
def test_where_the_device_has_no_room_for_what_comes_back(room: str, double_precision: None) -> None:
    spikes = (torch.rand(40, 4, 6) < 0.4).double() * 2
    options: dict[str, Any] = {"schedule": "double", "chunk": 16, "slots": 8, "remote": "host"}
    with simulating() as device:
        assert not compare(RecurrentLIF(6, 8, 3), [spikes], **options)[0]
    with simulating(room_for=device.most_allocated - 1 if room == "less" else 0) as device:
        if room == "less":  # than to read ahead
            assert not compare(RecurrentLIF(6, 8, 3), [spikes], **options)[0]
        else:
            with pytest.raises(ShortageError, match=r"ran out in the backward .*CUDA out of memory"):
                compare(RecurrentLIF(6, 8, 3), [spikes], **options)
        gc.collect()
        assert device.refused
        assert device.allocated == 0


def test_values_of_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streams.KINDS, "meta", lambda _: SimulatedDevice())
    with simulating(), pytest.raises(UnsupportedError, match=r"several devices \(cpu, meta\)"):
        background_of([encode(torch.ones(3), "raw"), encode(torch.ones(3, device="meta"), "raw")])


def test_programs_of_other_tests_are_played_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with executables() as made:
        compare(RecurrentLIF(6, 8, 3), [torch.ones(19, 4, 6)], schedule="double", chunk=4, slots=2)
    assert check_races(made[-1]) > 10
    monkeypatch.setattr(Transfers, "_let_go", lambda self, limit: self._leaving.clear())
    with pytest.raises(Race):
        check_races(made[-1])


def test_what_is_given_up_while_it_is_sent_outlives_the_copy() -> None:
    with simulating() as device:
        moving = transfers_of(CPU)
        parked = moving.park([torch.ones(3), torch.ones(5)])
        arrival, copy = moving.expect(parked.parts), device.copy

        def interrupted(*args: Any) -> None:
            copy(*args)
            arrival.targets.abandon()  # as a finalizer would, at any moment

        device.copy = interrupted  # type: ignore[assignment, method-assign]
        moving.send(arrival.targets, parked.parts, parked.written)
        assert not arrival.targets.tensors
        assert device.allocated == 0


def test_a_stream_that_is_never_joined_is_found() -> None:
    value = torch.ones(5)

    def copy_and_leave() -> None:
        with simulating() as device:
            side = device.side()
            side.wait_event(device.present().record_event())
            device.copy(device.pinned(20).view(torch.float32), value, side)

    with pytest.raises(Race, match="never joined"):
        copy_and_leave()
