"""Whether what compilers do wrong is found: ``python benchmarks/compiled_mutants.py``.

As ``proof_mutants.py``, but of compiled segments: a fault is an edit of what writes them (``compiled_faults.py``), of
reroll's or of torch's inductor, or one of inductor's three known faults with its mend switched off
(``backends/inductor/inductor_workarounds.py``). Eager segments are right meanwhile, which proofs find; compiled ones
are tried beside them (``backends/construct/stages/trial.py``), and must not run.

And of later calls: faults that begin with the second call of a program, as a state that is stale or memory that is used
again (``LATER``), with ``proof="always"``. The result goes to ``results/compiled_mutants.json`` after each network;
``--only`` names faults, ``--on`` networks, ``--show`` prints what is saved.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import proof_mutants
import proof_networks
import torch
from compiled_faults import FAULTS, LATER, UNMENDED
from measuring import machine
from proof_mutants import SAME, Trained, quietly, switched_on, walks
from proof_networks import BACKEND, NETWORKS, Network
from torch import Tensor, nn

from reroll.backends.inductor.sizes.family import forget

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests" / "backends" / "inductor"))
RESULT = HERE / "results" / "compiled_mutants.json"
INDUCTOR = {"lowering": "inductor", "start": "compiled"}
PARTS = ("compiled", "later")
WIDE = 16  # neurons, of which products have kernels of reroll's


@dataclass(eq=False)
class Compiled(Trained):
    """A network whose segments are compiled, afresh each time."""

    def compiled(self) -> Callable[..., Any]:
        """The model through its door, with a proof."""
        forget()
        return super().compiled()


@dataclass(eq=False)
class Known(Compiled):
    """A network of the test of a fault of inductor's, on which that shows."""

    make: Callable[[], tuple[nn.Module, Tensor]] | None = None

    def __post_init__(self) -> None:
        assert self.make is not None, "a network is made by its test"
        torch.manual_seed(0)
        self.model, self.x = self.make()
        self.start = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.plain = self.step(self.model)


@dataclass(eq=False)
class Again(Compiled):
    """A network that is trained for two steps, between which a fault begins."""

    fault: str = ""

    def step(self, run: Callable[..., Any]) -> list[Any]:
        """All that the second step shows, in which inputs and weights are others, and what is left of the first."""
        first, start, x = super().step(run), self.start, self.x
        self.start = {name: 1.25 * each if each.is_floating_point() else each for name, each in start.items()}
        self.x = (0.5 * x.detach()).requires_grad_()
        try:
            with switched_on(LATER[self.fault]) if self.fault else nullcontext():
                return [*first, *super().step(run)]
        finally:
            self.start, self.x = start, x


def joined() -> tuple[nn.Module, Tensor]:
    """Neurons with a threshold that adapts: a result is written over a part of a joined buffer."""
    model = importlib.import_module("test_joined").Adaptive(40, 60).double()
    for weight in (model.read.weight, model.back.weight):
        weight.data.mul_(10)
    return model, (torch.rand(50, 8, 40) < 0.4).double()


def scattered() -> tuple[nn.Module, Tensor]:
    """A step that sorts: what is scattered is read in place of what lies there."""
    found = importlib.import_module("test_scattered")
    return found.Scattering(found.STEPS["sorted"]), torch.randn(15, 3, 4, dtype=torch.float64).requires_grad_()


def pooled() -> tuple[nn.Module, Tensor]:
    """Max pooling behind batch norm: loops are fused side by side."""
    found = importlib.import_module("test_pooling")
    model = found.Pooled(found.POOLS["max_pool2d"]).double()
    for weight in (model.conv.weight, model.out.weight):
        weight.data.mul_(4)
    return model, (torch.rand(16, 16, 2, 16, 16) < 0.2).double()


def _by_inductor(name: str, **options: Any) -> Callable[[], Trained]:
    network = NETWORKS[name]
    return partial(Compiled, replace(network, options={**network.options, **INDUCTOR, "segment": 4, **options}))


def _known(make: Callable[[], tuple[nn.Module, Tensor]], segment: int) -> Callable[[], Trained]:
    network = Network(print, 0, BACKEND, options={**INDUCTOR, "segment": segment, "schedule": "standard"})
    return partial(Known, network, make=make)


COMPILED: Mapping[str, Callable[[], Trained]] = {
    "elman": _by_inductor("elman"),
    "gru, revolve": _by_inductor("gru, revolve"),
    "lstm": _by_inductor("lstm, budget", memory_budget=None),
    "lif, replay": _by_inductor("lif, replay"),
    "alif": _by_inductor("alif"),
    "fast weights": _by_inductor("fast weights", segment=3),
    "joined buffers": _known(joined, 6),
    "sorted": _known(scattered, 5),
    "max pooling": _known(pooled, 7),
}
TWICE: Mapping[str, Callable[[], Again]] = {
    name: partial(Again, replace(NETWORKS[name], options={**NETWORKS[name].options, "proof": "always"}))
    for name in ("elman, double", "gru, revolve", "lif, replay", "alif", "dropout, double", "weights of steps")
}
TWICE = {
    **TWICE,
    "lstm, by inductor": partial(
        Again, replace(NETWORKS["lstm, budget"], options={**INDUCTOR, "segment": 4, "proof": "always"})
    ),
}


@contextmanager
def unmended(name: str) -> Iterator[None]:
    """A fault of FAULTS, or a known one of inductor's without its mend, inside."""
    with UNMENDED[name]() if name in UNMENDED else switched_on(FAULTS[name]):
        yield


def found_compiled(network: str, faults: list[str]) -> dict[str, tuple[str, str]]:
    """What comes of each fault of compiled segments on a network; of the known ones on those of their tests, which take
    long."""
    wide = mock.patch.object(proof_networks, "WIDE", WIDE)
    with walks.kept(), torch._inductor.config.patch(force_disable_caches=True), wide:
        trained = COMPILED[network]()
        faults = [each for each in faults if (each in UNMENDED) == isinstance(trained, Known)]
        assert trained.outcome() == (SAME, ""), "without a fault"
        found = dict[str, tuple[str, str]]()
        for each in faults:
            with unmended(each):
                found[each] = trained.outcome()
        assert trained.outcome() == (SAME, ""), "without a fault"
    return found


def found_later(network: str, faults: list[str]) -> dict[str, tuple[str, str]]:
    """What comes of each fault that begins with the second call."""
    with walks.kept():
        trained = TWICE[network]()
        assert trained.outcome() == (SAME, ""), "without a fault"
        found = dict[str, tuple[str, str]]()
        for trained.fault in faults:
            found[trained.fault] = trained.outcome()
    return found


NETWORKS_OF = {"compiled": COMPILED, "later": TWICE}
FAULTS_OF = {"compiled": [*FAULTS, *UNMENDED], "later": [*LATER]}
FOUND = {"compiled": found_compiled, "later": found_later}


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="*", metavar="FAULT")
    parser.add_argument("--on", nargs="*", metavar="NETWORK")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    given = parser.parse_args()
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    torch.set_num_threads(1)
    for part in given.parts:
        names, networks = FAULTS_OF[part], NETWORKS_OF[part]
        kept = result.setdefault(part, {"faults": {}})
        kept["faults"] = {name: kept["faults"].get(name, {}) for name in names}
        faults = [each for each in names if given.only is None or each in given.only]
        for network in (each for each in networks if given.on is None or each in given.on) if not given.show else ():
            began = time.process_time()
            with quietly():
                found = FOUND[part](network, faults)
            for name in faults:
                outcomes = {**kept["faults"][name], network: found.get(name, (SAME, ""))}
                kept["faults"][name] = {each: outcomes[each] for each in networks if each in outcomes}
                kept["faults"][name] = {k: v for k, v in kept["faults"][name].items() if v[0] != SAME}
            print(network, round(time.process_time() - began), Counter(what for what, _ in found.values()), flush=True)
            result["environment"] = machine("python benchmarks/compiled_mutants.py")
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
        proof_mutants.show(kept)


if __name__ == "__main__":
    main()
