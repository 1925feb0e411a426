"""Tests on a card: CUDA's, or with ``REROLL_CARD=simulated`` the CPU as a device that works in the background."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from simulation import simulating


@pytest.fixture(autouse=True)
def _no_races() -> None:
    """The device is there, or simulated anyway: programs are not played on another one, which forgets this one."""


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device. Products and convolutions keep all bits of float32."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
        yield torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()
        return
    if os.environ.get("REROLL_CARD") != "simulated":
        pytest.skip("needs a CUDA device")
    with simulating():
        yield torch.device("cpu")


@pytest.fixture
def real_card(card: torch.device) -> torch.device:
    """The device, which is no simulated one."""
    if card.type != "cuda":
        pytest.skip("needs a CUDA device, and this one is simulated")
    return card
