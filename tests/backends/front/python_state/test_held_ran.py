"""What code of installed libraries names, found only as a record runs: it has places among a record's operands."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll

NODES = """
import copy, node_kernels
from torch import nn

class Node(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.reset_values = {"v": 0.0}, {"v": 0.0}

    def forward(self, x):
        self.memory["v"] = node_kernels.charged(self.memory["v"], x)
        return self.memory["v"]
"""
KERNELS = """
import itertools
import torch

class Settings:
    def __init__(self):
        self.decay, self.others = 0.5, {"a": 1.0}

SETTINGS, NUMBERS = Settings(), itertools.count()
TABLE = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

def charged(v, x):
    next(NUMBERS)
    return torch.tanh(v * SETTINGS.decay + x * TABLE)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Two modules of an installed library."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name, source in (("node_kernels", KERNELS), ("nodes", NODES)):
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    for name in ("nodes", "node_kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("nodes"), importlib.import_module("node_kernels")


class Net(nn.Module):
    """A layer before a node of a library, whose state is in a dict that it holds."""

    def __init__(self, nodes: Any) -> None:
        super().__init__()
        self.enter, self.node = nn.Linear(3, 6).double(), nodes.Node()

    def forward(self, x_TBI: Tensor) -> Tensor:
        return torch.stack([self.node(self.enter(x_BI)) for x_BI in x_TBI])


@pytest.mark.parametrize("proof", ["first", "never"])
def test_state_settings_and_tables_of_a_library(library: tuple[Any, Any], proof: Any) -> None:
    """The state goes where it belongs, and a table that is changed, replaced or trained is that of the call."""
    nodes, kernels = library
    torch.manual_seed(0)
    plain = Net(nodes)
    copied = Net(nodes)
    copied.load_state_dict(plain.state_dict())
    run, table = reroll.compile(copied, lowering="eager", proof=proof), kernels.TABLE.clone()
    for call in range(9):
        if call == 2:
            table.mul_(2.0)
        if call == 3:
            kernels.SETTINGS.decay = 0.25
        trained = call >= 5
        x = torch.randn(12 + call % 2, 4, 3, dtype=torch.float64)
        found = []
        for net, forward in ((plain, plain), (copied, run)):
            kernels.TABLE = table.clone().requires_grad_(trained)
            net.zero_grad()
            y = forward(x)
            y.square().mean().backward()
            found.append([y, net.node.memory["v"], net.enter.weight.grad, *([kernels.TABLE.grad] if trained else [])])
            assert net.node.reset_values == {"v": 0.0}
            net.node.memory["v"] = net.node.memory["v"].detach()
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
