"""A tier of one's own: registered once, asked for by its name, measured as the others are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from reroll.backends.codecs.codec import Encoded
from reroll.backends.tiers import calibrate as calibration
from reroll.backends.tiers.tier import TIERS, Traffic, copied, payloads, register_tier, with_payloads
from reroll.errors import MachineError, OptionError
from reroll.schedules.machine import REMOTE_TIERS, RemoteTier

B, I, H, T = 3, 4, 5, 30  # noqa: E741


@dataclass(eq=False)
class Book:
    """Values on a shelf, copied both ways."""

    shelf: Shelf
    values: list[Encoded]

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values)

    def prefetch(self) -> None:
        """Nothing is far on a shelf."""

    def read(self) -> list[Encoded]:
        self.shelf.traffic.reads += 1
        return with_payloads(self.values, map(copied, payloads(self.values)))

    def drop(self) -> None:
        self.values = []


@dataclass(eq=False)
class Shelf:
    """A tier in memory."""

    traffic: Traffic = field(default_factory=Traffic)

    def write(self, values: Sequence[Encoded]) -> Book:
        self.traffic.writes += 1
        return Book(self, with_payloads(values, map(copied, payloads(values))))

    def settle(self) -> None:
        """A write is done when it returns."""

    def drain(self) -> None:
        """A write is done when it returns."""


@pytest.fixture
def shelves(fresh_registry: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Shelf]:
    """Lets a tier be known; all shelves that are made from then on."""
    made: list[Shelf] = []

    def make(_folder: object) -> Shelf:
        made.append(Shelf())
        return made[-1]

    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    register_tier(RemoteTier("shelf"), make, lambda _folder: 1 << 20)
    return made


class Net(nn.Module):
    """A small recurrence, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h = nn.Linear(I, H), nn.Linear(H, H)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH = x_TBI.new_zeros(B, H)
        for x_BI in x_TBI:
            h_BH = torch.tanh(self.i(x_BI) + self.h(h_BH))
        return h_BH


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "remote", "chunk": 6},
        {"schedule": "hierarchical", "chunk": 6, "slots": 2},
        {"schedule": "double", "chunk": 6, "slots": 2},
        {"schedule": "hrevolve", "slots": 2},
    ],
)
def test_training_through_a_shelf(
    options: dict[str, Any], shelves: list[Shelf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a speed at which hrevolve takes it, however busy the machine is."""
    monkeypatch.setattr(calibration, "_moves", lambda _tier, nbytes, _device: (nbytes * 1e-12, nbytes * 1e-12))
    net, x_TBI = Net(), torch.randn(T, B, I)
    twin = copy.deepcopy(net)
    fast = reroll.compile(twin, remote="shelf", lowering="eager", **options)
    fast(x_TBI).square().sum().backward()
    net(x_TBI).square().sum().backward()
    for found, expected in zip(twin.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)
    last = shelves[-1].traffic
    assert last.reads >= last.writes > 0
    (loop,) = reroll.explain(fast, x_TBI).loops
    assert set(loop.tally.tier_peaks) == {"shelf"}


def test_a_shelf_is_measured(shelves: list[Shelf], tmp_path: Path) -> None:
    machine = reroll.calibrate(folder=tmp_path)
    assert set(machine.tiers) == {"host", "disk", "shelf"}
    assert machine.tier("shelf").capacity == 1 << 20
    assert reroll.calibrate(folder=tmp_path).tier("shelf").write == machine.tier("shelf").write
    assert len(shelves) == 1


def test_names_of_tiers(shelves: list[Shelf]) -> None:
    assert {kind.name for kind in TIERS.values()} == set(REMOTE_TIERS.names())
    with pytest.raises(MachineError, match=r"Remote tier name 'disk' of .* is taken by reroll.*disk:DiskTier"):
        register_tier(RemoteTier("disk"), lambda _folder: Shelf(), lambda _folder: None)
    for name in ("local", "remote", "", "a shelf"):
        with pytest.raises(MachineError, match=f"cannot be named {name!r}"):
            RemoteTier(name)
    with pytest.raises(OptionError, match="Did you mean 'shelf'"):
        reroll.Options(schedule="double", remote="shelv")
    assert not shelves


def test_a_tier_is_unknown_without_its_registration() -> None:
    assert {kind.name for kind in TIERS.values()} == set(REMOTE_TIERS.names()) == {"host", "disk"}
    with pytest.raises(OptionError, match=r"remote='shelf' is not valid\. Valid are: host, disk, local"):
        reroll.Options(schedule="double", remote="shelf")
