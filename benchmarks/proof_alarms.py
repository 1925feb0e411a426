"""Whether a proof blames what is right: ``python benchmarks/proof_alarms.py``.

Networks are trained for some steps, in float64, float32 and bfloat16; every call is proved (``proof="always"``), in
eager segments. There are four sets of them, the first, second and last through both doors:

- zoo: networks of the tests, at their own length twice and at another one
- doors: those that people have (``door_networks/``), twice; ``--libraries`` is the folder of ``doors.py``
- programs: 1,000 of the campaign, at three lengths, every second one through the other door
- spikes: the zoo's spiking networks at 1,000 steps

What comes of it:

- proved: all that a proof compares is compared at each call; values: without gradients, and why
- alarm: a ProofError, which is a false alarm unless the program is wrong; disagrees: no error, but the gradients of the
  last call are not those of the plain model (float64 and float32)
- unproved: a call went on without a proof, and why; plain: no loop was played; refused: with a sentence
- invalid: the plain model fails at this precision

A process for each set, precision and door; the result goes to ``results/proof_alarms.json`` after each network, and a
row that is there is left alone without ``--again``. ``--show`` prints what is saved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from door_networks import others, plain, spiking
from measuring import machine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import reroll
from reroll.backends.construct.stages.proof import Proof
from reroll.errors import ProofError, RerollError

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "proof_alarms.json"
sys.path += [str(HERE / "campaign"), str(HERE.parent / "tests" / "support" / "zoo")]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
DOORS = ("reroll.compile", "torch.compile")
OPTIONS: dict[str, Any] = {"lowering": "eager", "proof": "always"}
ALLOWED = {"float64": 1e-8, "float32": 1e-2}  # of a largest entry
LONGER = 4  # steps of the third call of a network of the zoo, more than of the others
SPIKING = ("lif", "lif_detach", "snn_two", "snntorch", "stochastic_spike", "adaptive_threshold", "refractory")
STEPS = 1000  # of spikes
PROGRAMS, LENGTHS = 1000, (9, 7, 5)  # of the campaign; the first length is that of their tables
PROVED, VALUES, ALARM, DISAGREES = "proved", "values", "alarm", "disagrees"
Row = list[str]  # what came of it, and why


@contextmanager
def _noted() -> Iterator[list[Proof]]:
    """The proofs that are made inside."""
    prove, found = Proof.prove, list[Proof]()

    def noting(self: Proof, *args: Any) -> None:
        found.append(self)
        prove(self, *args)

    with mock.patch.object(Proof, "prove", noting):
        yield found


class Case(NamedTuple):
    """What is compiled, the modules that are trained, the arguments of a call at a number of steps, the steps of its
    calls, and what is done before each."""

    run: Callable[..., Any]
    parts: tuple[nn.Module, ...]
    inputs: Callable[[int], tuple[Sequence[Any], dict[str, Any]]]
    lengths: tuple[int, ...]
    reset: Callable[[], object] = lambda: None


def _of_zoo(name: str, lengths: tuple[int, ...] = ()) -> Case:
    zoo = import_module("networks_zoo")
    network = zoo.load()[name]
    net = zoo.Net(network)

    def inputs(steps: int) -> tuple[Sequence[Any], dict[str, Any]]:
        given = network.inputs(steps)
        return tree_map_only(
            Tensor, lambda v: v.requires_grad_(network.leaf) if v.is_floating_point() else v, given
        ), {}

    return Case(net, (net,), inputs, lengths or (network.steps, network.steps, network.steps + LONGER))


def _of_doors(name: str) -> Case:
    network, dtype = DOORS_NETWORKS[name](), torch.get_default_dtype()
    given = tree_map_only(Tensor, lambda v: v.to(dtype) if v.is_floating_point() else v, network.inputs)
    parts = tuple(each.to(dtype) for each in network.parts)  # in place
    return Case(network.run, parts, lambda _: (given, {}), (0, 0), network.reset)


def _of_programs(seed: str) -> Case:
    program = import_module("programs").generate(int(seed))
    torch.manual_seed(program.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"program{seed}_{len(sys.modules)}.py"
        module = import_module("judge").loaded(program.source(), path)
    net, (args, kwargs) = module.Net(), module.inputs()
    leaves = [each.detach() for each in (*args, *kwargs.values())]

    def inputs(steps: int) -> tuple[Sequence[Any], dict[str, Any]]:
        cut = [each[:steps] for each in leaves[:2]]
        cut += [each[:, :steps] if number == BATCH_FIRST else each for number, each in enumerate(leaves[2:], 2)]
        cut = [each.clone().requires_grad_(each.is_floating_point()) for each in cut]
        return cut[: len(args)], dict(zip(kwargs, cut[len(args) :], strict=True))

    return Case(net, (net,), inputs, LENGTHS)


DOORS_NETWORKS = {**plain.NETWORKS, **spiking.NETWORKS, **others.NETWORKS}
BATCH_FIRST = 4  # of a program's inputs, the only one in which time is the second dimension
SETS: dict[str, Callable[[str], Case]] = {
    "zoo": _of_zoo,
    "doors": _of_doors,
    "programs": _of_programs,
    "spikes": lambda name: _of_zoo(name, (STEPS, STEPS)),
}


def names(of: str, door: str) -> list[str]:
    """The networks of a set that go through a door."""
    if of == "programs":
        return [str(seed) for seed in range(PROGRAMS) if seed % len(DOORS) == DOORS.index(door)]
    return {"zoo": [*import_module("networks_zoo").load()], "doors": [*DOORS_NETWORKS], "spikes": [*SPIKING]}[of]


def row(of: str, door: str, dtype: str, name: str) -> Row:
    """What comes of a network of a set, here."""
    torch.compiler.reset()
    torch.set_default_dtype(DTYPES[dtype])
    cases = []
    for _ in range(2):
        torch.manual_seed(0)
        cases.append(SETS[of](name))
    try:
        expected = _trained(cases[0].run, cases[0])
    except Exception as error:  # noqa: BLE001  # of torch's, which has no such operation at this precision
        return ["invalid", _said(error)]
    net = cases[1].run
    compiled = (
        reroll.compile(net, **OPTIONS) if door == DOORS[0] else torch.compile(net, backend="reroll", options=OPTIONS)
    )
    with import_module("judge").played() as loops, _noted() as proofs:
        try:
            found = _trained(compiled, cases[1])
        except ProofError as error:
            return [ALARM, _said(error)]
        except (RerollError, torch._dynamo.exc.TorchDynamoException) as error:
            return ["refused", _said(error)]
    return _judged(dtype, expected, found, bool(loops), proofs)


def _trained(run: Callable[..., Any], case: Case) -> list[Tensor | None]:
    """The gradients of the last of some training steps; inputs are leaves where torch allows it."""
    trained = [each for part in case.parts for each in nn.Module.parameters(part)]
    for steps in case.lengths:
        for each in trained:
            each.grad = None
        torch.manual_seed(1)
        case.reset()
        args, kwargs = case.inputs(steps)
        made = (each for each in tree_leaves(run(*args, **kwargs)) if isinstance(each, Tensor))
        results = [
            each.abs().sin().sum() if each.is_complex() else each.sin().sum() for each in made if each.requires_grad
        ]
        if results:
            torch.stack(results).sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in trained]


def _judged(dtype: str, expected: list[Any], found: list[Any], rolled: bool, proofs: list[Proof]) -> Row:
    if dtype in ALLOWED and any(_differ(*pair, ALLOWED[dtype]) for pair in zip(expected, found, strict=True)):
        return [DISAGREES, f"after {len(proofs)} proofs"]
    if not rolled:
        return ["plain", ""]
    missed = [each.missed or "no call was proved" for each in proofs if each.proved is None]
    if missed or not proofs:
        return ["unproved", (missed or ["no call was proved"])[0]]
    why = [each.proved.why for each in proofs if each.proved is not None and each.proved.why]
    return [VALUES, why[0]] if why else [PROVED, ""]


def _differ(before: Tensor | None, after: Tensor | None, allowed: float) -> bool:
    if before is None or after is None:
        return before is not after
    largest = before.abs().max().clamp(min=1e-3)
    return not torch.allclose(before, after, rtol=0, atol=float(allowed * largest), equal_nan=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def counts(rows: dict[str, Row]) -> Counter[str]:
    """How many networks came to what."""
    return Counter(what for what, _ in rows.values())


def made_apart(
    options: argparse.Namespace, of: str, door: str, dtype: str, wanted: list[str]
) -> Iterator[tuple[str, Row]]:
    """Rows, made in a process of their own; where one ends early, so does the row it was at."""
    given = ["--libraries", options.libraries] if options.libraries else []
    while wanted:
        command = [sys.executable, __file__, *given, "--rows", of, door, dtype, *wanted]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            done = 0
            for done, line in enumerate(process.stdout, 1):
                yield wanted[done - 1], json.loads(line)
        if done < len(wanted):
            yield wanted[done], ["ended", f"the process ended with {process.returncode}"]
            done += 1
        wanted = wanted[done:]


def show(result: dict[str, Any]) -> None:
    """Counts for each set, precision and door, and what was an alarm."""
    every = [(of, dtype, door) for of in SETS for dtype in DTYPES for door in DOORS]
    for of, dtype, door in every:
        rows = result["rows"].get(of, {}).get(dtype, {}).get(door, {})
        print(f"{of}, {dtype}, {door}: {len(rows)} networks: {dict(counts(rows).most_common())}")
        for name, (what, why) in rows.items():
            print(f"  {name}: {what}: {why}\n" if what in (ALARM, DISAGREES, "ended") else "", end="")


def _print_rows(of: str, door: str, dtype: str, *wanted: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in wanted:
        print(json.dumps(row(of, door, dtype, name)), flush=True)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", default=[*SETS], choices=[*SETS])
    parser.add_argument("--dtypes", nargs="*", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--only", nargs="*", metavar="NETWORK")
    parser.add_argument("--libraries", help="a folder with the libraries of door_networks, beside those installed")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    parser.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.libraries:
        sys.path.append(options.libraries)
    if options.rows:
        _print_rows(*options.rows)
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    wanted = ((of, dtype, door) for of in options.sets for dtype in options.dtypes for door in DOORS)
    for of, dtype, door in () if options.show else wanted:
        rows = result["rows"].setdefault(of, {}).setdefault(dtype, {}).setdefault(door, {})
        todo = [each for each in options.only or names(of, door) if options.again or each not in rows]
        for name, made in made_apart(options, of, door, dtype, todo):
            rows[name] = made
            result["made"] = machine("python benchmarks/proof_alarms.py --libraries FOLDER")
            RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
