"""What a user's pass makes of a step or a half is tried before it is compiled: a PassError has its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import reroll
from reroll.errors import PassError
from reroll.program.context import Context
from reroll.program.registry import register_pass

aten = torch.ops.aten
LIBRARY = torch.library.Library("passtest", "DEF")
LIBRARY.define("fails(Tensor value) -> Tensor")


def fails(value: Tensor) -> Tensor:
    raise ValueError("it fails on real values")


LIBRARY.impl("fails", fails, "CPU")
torch.library.register_fake("passtest::fails", torch.empty_like, lib=LIBRARY)
Rewrite = Callable[[fx.GraphModule, Context], Any]


class Leaky(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(3, 4)
        for row in x.unbind():
            h = torch.tanh(h @ self.weight + row)
        return h


def before_tanh(target: Any, *more: Any, method: bool = False) -> Rewrite:
    """A pass that puts a call in front of each ``tanh``."""

    def rewrite(module: fx.GraphModule, _context: Context) -> fx.GraphModule:
        graph = module.graph
        for node in [node for node in graph.nodes if node.op == "call_function" and "tanh" in str(node.target)]:
            if "backward" not in str(node.target):
                call = graph.call_method if method else graph.call_function
                with graph.inserting_before(node):
                    node.args = (call(target, (node.args[0], *more)),)
        return module

    return rewrite


def other_target(module: fx.GraphModule, _context: Context) -> fx.GraphModule:
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.target = aten.convolution.default
    return module


def removed(module: fx.GraphModule, _context: Context) -> fx.GraphModule:
    """A node is gone that others read."""
    next(node for node in module.graph.nodes if node.op == "call_function")._remove_from_list()
    return module


def summed(module: fx.GraphModule, _context: Context) -> fx.GraphModule:
    """A result has another shape, and what is noted of it does not say so."""
    output: Any = module.graph.output_node()
    place, result = next((at, each) for at, each in enumerate(output.args[0]) if isinstance(each, fx.Node))
    with module.graph.inserting_before(output):
        made = module.graph.call_function(aten.sum.default, (result,))
    made.meta = dict(result.meta)
    output.args = (tuple(made if at == place else each for at, each in enumerate(output.args[0])),)
    return module


def lost(module: fx.GraphModule, _context: Context) -> fx.GraphModule:
    output: Any = module.graph.output_node()
    output.args = (output.args[0][0],)
    return module


WRONG: dict[str, tuple[Rewrite, str]] = {
    "too few operands": (before_tanh(aten.addmm.default), "an operation that cannot run, %addmm"),
    "too many operands": (before_tanh(aten.neg.default, 1, 2), "an operation that cannot run, %neg"),
    "other shapes": (before_tanh(aten.mm.default, 3), "an operation that cannot run, %mm"),
    "no such method": (before_tanh("no_such_method", method=True), "cannot run, .*AttributeError"),
    "a number for a tensor": (before_tanh(len), "an operation that cannot run, .*tanh"),
    "another target": (other_target, "an operation that cannot run, .*convolution"),
    "a value that is needed": (removed, "is no graph|a step that cannot run"),
    "another result": (summed, "changed the (operands or )?results"),
    "one result": (lost, "changed the (operands or )?results|is no graph"),
}


def trained(rewrite: Rewrite, on: Any, **options: Any) -> tuple[Tensor, Tensor]:
    register_pass("own", on=on)(rewrite)
    torch.manual_seed(0)
    model, x = Leaky(), torch.randn(8, 3, 4, dtype=torch.float64)
    fast = reroll.compile(model, segment=2, lowering="eager", passes="own", **options)
    found = fast(x)
    found.sum().backward()
    return found, model(x)


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("on", ["step", "half"])
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_run_is_said_with_the_name_of_the_pass(name: str, on: str) -> None:
    rewrite, message = WRONG[name]
    with pytest.raises(PassError, match=f"Pass 'own' .*({message})"):
        trained(rewrite, on)


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize("on", ["step", "half"])
def test_a_pass_that_notes_no_values_is_taken(on: str) -> None:
    found, expected = trained(before_tanh(aten.mul.Tensor, 1.0), on)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("fresh_registry")
def test_what_fails_when_it_runs_has_the_name_of_its_pass() -> None:
    with pytest.raises(
        PassError, match=r"Pass 'own' left an operation that cannot run, fails.* it fails on real values"
    ):
        trained(before_tanh(torch.ops.passtest.fails.default), "half")
