"""Whether a proof finds what is wrong: ``python benchmarks/proof_mutants.py``.

A fault is one edit of reroll's own code, as a programmer might make it: a row too many, a gradient left out, a state
that is stale. Each is switched on alone (``switched_on``: the code of a function is exchanged meanwhile), and each of
the networks of ``proof_networks.py`` is trained for a step, plainly and through reroll. Where results, gradients,
buffers or the next random number differ by more than rounding, the fault is one there: *caught* if the proof of the
first call raises an error, *missed* if it does not. (What a proof raises is noted, and the call goes on as it would
without one.) What fails without a proof, too, is no silent fault, and does not count, nor does a network that the fault
does not change.

All by eager lowering, in one process. The result goes to ``results/proof_mutants.json`` after each network;
``--only`` names faults, ``--on`` networks, ``--show`` prints what is saved.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import inspect
import json
import logging
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import proof_networks
import torch
from measuring import machine
from proof_faults import FAULTS, Fault
from proof_networks import BACKEND, NETWORKS, Model, Network
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import reroll
from reroll.backends.construct import kernels
from reroll.backends.construct.stages.proof import Proof
from reroll.segment.linear import cores

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support" / "compare"))
walks = importlib.import_module("walks")
Shared = walks.Shared
RESULT = Path(__file__).resolve().parent / "results" / "proof_mutants.json"
GOAL = 0.95
ALLOWED = {torch.float64: 1e-9, torch.float32: 2e-4}
RECORDING = ("capture.recorder.", "backends.front.")
"""Modules of which a profiler does not see what runs while a model is recorded: their faults are always tried."""
SAME, CAUGHT, MISSED, ERROR = "same", "caught", "missed", "error"
LOG = logging.getLogger(__name__)


def function_of(where: str) -> FunctionType:
    """The function that a fault edits."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module if module.startswith("torch.") else f"reroll.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    found = getattr(found, "fget", None) or getattr(found, "func", None) or getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType), f"{where} is {found}"
    return found


def edited(fault: Fault) -> Any:
    """The code of a function with its fault. Raises ValueError where the text is not there once."""
    function = function_of(fault.where)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.where} has {source.count(fault.before)} times {fault.before!r}")
    tree = ast.parse(source.replace(fault.before, fault.after))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    made: dict[str, Any] = {}
    flags = function.__code__.co_flags & 0x1000000  # from __future__ import annotations
    exec(compile(tree, inspect.getfile(function), "exec", flags=flags, dont_inherit=True), function.__globals__, made)
    return made[definition.name].__code__


@contextmanager
def switched_on(fault: Fault) -> Iterator[None]:
    """A fault, inside."""
    function = function_of(fault.where)
    before, function.__code__ = function.__code__, edited(fault)
    try:
        yield
    finally:
        function.__code__ = before


@dataclass(eq=False)
class Trained:
    """A network that is trained for a step, again and again from the same start."""

    network: Network
    start: dict[str, Tensor] = field(default_factory=dict)
    plain: list[Any] = field(default_factory=list)
    ran: set[CodeType] = field(default_factory=set)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        shape = self.network.steps, 3
        x = (
            torch.randint(6, shape)
            if self.network.integers
            else torch.randn(*shape, proof_networks.WIDE).to(self.network.dtype)
        )
        self.x = x.requires_grad_(not self.network.integers)
        self.model: nn.Module = Model(self.network.run, self.network.steps).to(self.network.dtype)
        self.start = copy.deepcopy(self.model.state_dict())
        self.plain = self.step(self.model)

    def compiled(self) -> Callable[..., Any]:
        """The model through its door, with a proof."""
        options = {"lowering": "eager", "proof": "first", **self.network.options}
        if self.network.door == BACKEND:
            return Shared(self.model, options)  # type: ignore[no-any-return]
        torch.compiler.reset()
        made: Callable[..., Any] = reroll.compile(self.model, **options)
        return made

    def step(self, run: Callable[..., Any]) -> list[Any]:
        """All that a training step shows."""
        self.model.load_state_dict(self.start)
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        torch.manual_seed(1)
        results = tree_leaves(run(self.x))
        read = range(len(results)) if self.network.read is None else self.network.read
        torch.stack([results[at].sin().mul(at + 1).sum() for at in read]).sum().backward()
        gradients = [self.x.grad, *(each.grad for each in self.model.parameters())]
        buffers = (each.clone() for each in self.model.buffers())
        return [*(each.detach() for each in results), *gradients, *buffers, torch.rand(1).to(self.network.dtype)]

    def look(self) -> None:
        """See which functions run, and that all is right without a fault."""
        sys.setprofile(lambda frame, *_: self.ran.add(frame.f_code))
        try:
            found = self.outcome()
        finally:
            sys.setprofile(None)
        assert found == (SAME, ""), f"without a fault: {found}"

    def outcome(self) -> tuple[str, str]:
        """What comes of the fault that is switched on, and what was said."""
        with noted() as raised:
            try:
                found = self.step(self.compiled())
            except Exception as error:  # noqa: BLE001  # whatever it fails with is no silent fault
                return ERROR, _said(error)
        if not differs(self.plain, found, ALLOWED[self.network.dtype]):
            return SAME, _said(raised[0]) if raised else ""
        return (CAUGHT, _said(raised[0])) if raised else (MISSED, "")


@contextmanager
def noted() -> Iterator[list[Exception]]:
    """Proofs are made inside, but what they raise is noted: so the call goes on as it would without one."""
    prove, raised = Proof.prove, list[Exception]()

    def go_on(*args: Any) -> None:
        try:
            prove(*args)
        except Exception as error:  # noqa: BLE001  # whatever it fails with, the call gives no result
            raised.append(error)

    with mock.patch.object(Proof, "prove", go_on):
        yield raised


def differs(expected: list[Any], found: list[Any], allowed: float) -> bool:
    """Whether two steps show something else."""
    return len(expected) != len(found) or any(_differ(*pair, allowed) for pair in zip(expected, found, strict=True))


def _differ(before: Tensor | None, after: Tensor | None, allowed: float) -> bool:
    if before is None or after is None:
        return before is not after
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    if not before.numel():
        return False
    return not bool((before - after).abs().max() <= allowed * before.abs().max().clamp(min=1e-3))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:220]


@contextmanager
def quietly() -> Iterator[None]:
    """Nothing is kept on a disk or said, and small states are done together where they are linear."""
    logging.disable(logging.WARNING)
    settings = torch._dynamo.config.patch(allow_rnn=True), mock.patch.object(cores, "LEAST", 1)
    try:
        with warnings.catch_warnings(), settings[0], settings[1]:
            warnings.simplefilter("ignore")
            with mock.patch.object(kernels, "trace_key", return_value=None):
                yield
    finally:
        logging.disable(logging.NOTSET)


def measured(name: str, faults: list[str]) -> dict[str, tuple[str, str]]:
    """What comes of each fault on a network; nothing of those in functions that are not called."""
    with walks.kept():
        trained = Trained(NETWORKS[name])
        trained.outcome()  # what Dynamo calls once is no part of what runs
        trained.look()
        found = dict[str, tuple[str, str]]()
        for each in faults:
            where = FAULTS[each].where
            if where.startswith(RECORDING) or function_of(where).__code__ in trained.ran:
                with switched_on(FAULTS[each]):
                    found[each] = trained.outcome()
        trained.look()
    return {each: what for each, what in found.items() if what[0] != SAME}


def scores(result: dict[str, Any]) -> tuple[int, int]:
    """Of how many pairs of a fault and a network that differ how many were caught."""
    counts = Counter(what for each in result["faults"].values() for what, _ in each.values())
    return counts[CAUGHT], counts[CAUGHT] + counts[MISSED]


def show(result: dict[str, Any]) -> None:
    """A line for each fault, and the score."""
    table = Table(
        "fault", "caught", "missed", "errors", title="networks on which a fault is caught, missed, or no silent one"
    )
    for name, each in result["faults"].items():
        groups: dict[str, list[str]] = {CAUGHT: [], MISSED: [], ERROR: []}
        for network, (what, _) in each.items():
            groups[what].append(network)
        table.add_row(name, str(len(groups[CAUGHT])), ", ".join(groups[MISSED]), str(len(groups[ERROR])))
    Console(width=150).print(table)
    caught, all_ = scores(result)
    kinds = sum(any(what in (CAUGHT, MISSED) for what, _ in each.values()) for each in result["faults"].values())
    part = caught / max(all_, 1)
    networks = len({network for found in result["faults"].values() for network in found})
    print(f"{kinds} faults show on {networks} networks; caught {caught} of {all_}: {part:.3f} (goal {GOAL})")


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--on", nargs="*", default=list(NETWORKS), choices=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    given = parser.parse_args()
    saved: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"faults": {}}
    result = {
        "faults": {name: saved["faults"].get(name, {}) for name in FAULTS},
        **{k: saved[k] for k in saved if k != "faults"},
    }
    torch.set_num_threads(1)
    for network in given.on if not given.show else ():
        began = time.process_time()
        with quietly():
            found = measured(network, given.only)
        for name in given.only:
            outcomes = {**result["faults"][name], network: found.get(name)}
            result["faults"][name] = {each: outcomes[each] for each in NETWORKS if outcomes.get(each)}
        seconds = result.setdefault("seconds", {})
        seconds[network] = time.process_time() - began
        result["environment"] = machine("python benchmarks/proof_mutants.py")
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(network, round(seconds[network]), Counter(what for what, _ in found.values()), flush=True)
    show(result)


if __name__ == "__main__":
    main()
