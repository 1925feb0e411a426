"""Whether a proof blames what is right: ``python benchmarks/proof_alarms.py``.

Each network of the tests' zoo is trained for some steps through both doors, in float64, float32 and bfloat16, at its
own length twice and at another one; every call is proved (``proof="always"``), in eager segments. What comes of it:

- proved: all that a proof compares is compared at each call; values: without gradients, and why
- alarm: a ProofError, which is a false alarm unless the program is wrong; disagrees: no error, but the gradients of the
  last call are not those of the plain model (float64 and float32)
- unproved: a call went on without a proof, and why; plain: no loop was played; refused: with a sentence
- invalid: the plain model fails at this precision

A process for each precision and door; the result goes to ``results/proof_alarms.json`` after each network, and a row
that is there is left alone without ``--again``. ``--show`` prints what is saved.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import machine
from torch import Tensor
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
LONGER = 4  # steps of the third call, more than of the others
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


def row(door: str, dtype: str, name: str) -> Row:
    """What comes of a network, here."""
    zoo = import_module("networks_zoo")
    network = zoo.load()[name]
    torch.compiler.reset()
    torch.set_default_dtype(DTYPES[dtype])
    torch.manual_seed(0)
    net = zoo.Net(network)
    plain = copy.deepcopy(net)
    try:
        expected = _trained(plain, plain, network)
    except Exception as error:  # noqa: BLE001  # of torch's, which has no such operation at this precision
        return ["invalid", _said(error)]
    compiled = (
        reroll.compile(net, **OPTIONS) if door == DOORS[0] else torch.compile(net, backend="reroll", options=OPTIONS)
    )
    with import_module("judge").played() as loops, _noted() as proofs:
        try:
            found = _trained(compiled, net, network)
        except ProofError as error:
            return [ALARM, _said(error)]
        except (RerollError, torch._dynamo.exc.TorchDynamoException) as error:
            return ["refused", _said(error)]
    return _judged(dtype, expected, found, bool(loops), proofs)


def _trained(run: Any, net: torch.nn.Module, network: Any) -> list[Tensor | None]:
    """The gradients of the last of some training steps; inputs are leaves where torch allows it."""
    for steps in (network.steps, network.steps, network.steps + LONGER):
        net.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        inputs = tree_map_only(
            Tensor, lambda v: v.requires_grad_(network.leaf) if v.is_floating_point() else v, network.inputs(steps)
        )
        results = [each for each in tree_leaves(run(*inputs)) if isinstance(each, Tensor) and each.requires_grad]
        if results:
            torch.stack([each.sin().sum() for each in results]).sum().backward()
    return [None if each.grad is None else each.grad.clone() for each in net.parameters()]


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


def names() -> list[str]:
    """The networks."""
    return [*import_module("networks_zoo").load()]


def counts(rows: dict[str, Row]) -> Counter[str]:
    """How many networks came to what."""
    return Counter(what for what, _ in rows.values())


def made_apart(door: str, dtype: str, wanted: list[str]) -> Iterator[tuple[str, Row]]:
    """Rows, made in a process of their own; where one ends early, so does the row it was at."""
    while wanted:
        command = [sys.executable, __file__, "--rows", door, dtype, *wanted]
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
    """Counts for each precision and door, and what was an alarm."""
    for dtype, doors in result["rows"].items():
        for door, rows in doors.items():
            print(f"{dtype}, {door}: {len(rows)} networks: {dict(counts(rows).most_common())}")
            for name, (what, why) in rows.items():
                print(f"  {name}: {what}: {why}\n" if what in (ALARM, DISAGREES, "ended") else "", end="")


def _print_rows(door: str, dtype: str, *wanted: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in wanted:
        print(json.dumps(row(door, dtype, name)), flush=True)


def main() -> None:
    """Measure, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="*", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--only", nargs="*", default=names(), metavar="NETWORK")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--show", action="store_true", help="print what is saved")
    parser.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rows:
        _print_rows(*given.rows)
        return
    result: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": {}}
    for dtype in () if given.show else given.dtypes:
        for door in DOORS:
            rows = result["rows"].setdefault(dtype, {}).setdefault(door, {})
            wanted = [each for each in given.only if given.again or each not in rows]
            for name, made in made_apart(door, dtype, wanted):
                rows[name] = made
                result["made"] = machine("python benchmarks/proof_alarms.py")
                RESULT.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
