"""Time and memory of a training step, network by network: ``python benchmarks/speed.py``.

Contenders: plain BPTT; ``torch.utils.checkpoint`` over segments of sqrt(T) steps; segments of 8 steps compiled by
inductor under it; JAX (``--jax PYTHON``, see ``speed_jax.py``); reroll as it is without options, its schedules, and
reroll without one of its rewrites, or with kernels called one by one (``chains.py``). All contenders of a network take
turns on one core; CPU seconds, medians of the rounds, and the allocator's peak above inputs, parameters and their
gradients. A row is saved in ``results/speed.json`` as soon as it is measured; ``--only`` names rows, ``--show`` prints.
``--more``: other lengths of network D, and torch's own layers, with the first contenders alone; the rows go to
``results/speed_more.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import cost_of, gradients, interleaved, pinned, relative_error, summary, told_apart, training_step
from rich.console import Console
from rich.table import Table
from speed_networks import MORE, NETWORKS, Checkpointed, CompiledSegments, Network
from speed_peers import Peers
from speed_plot import draw
from speed_profile import profile

import reroll
from reroll.backends.inductor.wrapper_codegen import unit as toolchain

HERE = Path(__file__).resolve().parent
RESULT, RESULT_MORE = (HERE / "results" / name for name in ("speed.json", "speed_more.json"))
EAGER, SINGLE = "eager BPTT", "reroll without chains"
OURS: dict[str, dict[str, Any]] = {
    "reroll": {},
    "reroll, standard": {"schedule": "standard"},
    "reroll, double (disk)": {"schedule": "double", "remote": "disk"},
    "reroll, double (disk), 4 steps a segment": {"schedule": "double", "remote": "disk", "segment": 4},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "reroll, 16 steps a segment": {"segment": 16},
    "reroll without replay": {"replay": False},
    **{
        f"reroll without {name}": {"passes": tuple(p for p in reroll.DEFAULT_PASSES if p != name)}
        for name in ("merge-gradients", "batch-products", "event-products", "split-biases", "pack-weights")
    },
}
VARIANTS[SINGLE] = {}
Result = dict[str, Any]


@contextmanager
def single_calls() -> Iterator[None]:
    """Inside, kernels are called one by one in what is compiled."""
    as_written = mock.patch.object(toolchain, "chained", lambda source: source)
    with as_written, torch._inductor.config.patch(fx_graph_cache=False):
        yield


def row(name: str, rounds: int, core: int | None, jax: str | None) -> Result:
    """Everything about one network."""
    torch.manual_seed(0)
    make, inputs, steps = (NETWORKS | MORE)[name]
    found = contend(make(), inputs(steps), OURS | VARIANTS if name in NETWORKS else OURS, rounds, core, jax)
    return {"steps": steps, **found}


def contend(
    network: Network,
    x: torch.Tensor,
    ours: Mapping[str, dict[str, Any]],
    rounds: int,
    core: int | None,
    jax: str | None,
) -> Result:
    """All contenders on one network, those of ``ours`` with their options, in turns."""
    models: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        EAGER: network,
        "torch.utils.checkpoint": Checkpointed(network),
        "inductor segments, checkpoint": CompiledSegments(network),
        **{each: reroll.compile(network, start="compiled", **options) for each, options in ours.items()},
    }
    training = {each: training_step(model, network, x) for each, model in models.items()}
    expected = gradients(training[EAGER], network)
    found: dict[str, Result] = {}
    with pinned(core):
        for each, step in training.items():
            begin = time.perf_counter()
            with single_calls() if each == SINGLE else nullcontext():
                step()
            first = time.perf_counter() - begin
            error = relative_error(gradients(step, network), expected)
            network.zero_grad(set_to_none=True)
            peak = cost_of(step, [network]).local_peak
            found[each] = {"first_step_wall_s": first, "relative_error": error, "local_peak_bytes": peak}
            if each in ours:
                report = reroll.explain(models[each], x)
                found[each]["plan"] = report.loops[0].choice.describe()
                found[each]["predicted_peak_bytes"] = report.predicted_peak
        with Peers(jax, network, x, expected) as peers:
            if failed := {each: told["error"] for each, told in peers.told.items() if "error" in told}:
                raise RuntimeError(f"JAX failed: {failed}")
            found.update(peers.told)
            times = summary(interleaved({**training, **peers.steps}, rounds), EAGER)
        where = {"profile": profile(training[SINGLE])} if SINGLE in training else {}
    return {**where, "contenders": {each: {**found[each], **times[each]} for each in found}}


def _command(name: str, options: argparse.Namespace, script: str) -> str:
    more = "--more " if options.more else ""
    asked = f"{more}--only '{name}' --rounds {options.rounds} --core {options.core}"
    return f"python benchmarks/{script} {asked}{' --jax PYTHON' if options.jax else ''}"


def measured(name: str, options: argparse.Namespace, script: str) -> Result:
    """A row of a script, in a process and an inductor cache of its own."""
    command = [sys.executable, script, "--row", name, "--rounds", str(options.rounds), "--core", str(options.core)]
    command += ["--jax", options.jax] if options.jax else []
    found, where = told_apart(name, command, _command(name, options, Path(script).name))
    return {**found, "environment": where}


def measure_rows(
    script: str,
    doc: str | None,
    names: Collection[str],
    row: Callable[[str, int, int | None], Result],
    show: Callable[[Result], None],
    core: int,
) -> None:
    """The command of a script of one table: measure its rows, each in a process of its own, save them in the file of
    the script's name, and print them. ``row``: of a name, with so many rounds on a core; ``core``: if none is asked
    for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=names, help="rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--core", type=int, default=core)
    parser.add_argument("--row", choices=names, help="measure one row here, and print it as JSON")
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    parser.set_defaults(more=False, jax=None)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(options.row, options.rounds, options.core)))
        return
    path = HERE / "results" / f"{Path(script).stem}.json"
    result: Result = json.loads(path.read_text()) if path.exists() else {}
    for name in [] if options.show else options.only or names:
        result[name] = measured(name, options, script)
        path.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def show(result: Result) -> None:
    """One table per network."""
    console = Console(width=130)
    for name, each in result.items():
        table = Table(title=f"{name}, T={each['steps']:,}")
        for heading in ("contender", "peak MB", "x eager", "CPU ms", "x eager", "error", "first s", "plan"):
            table.add_column(heading, justify="left" if heading in ("contender", "plan") else "right")
        base = each["contenders"][EAGER]["local_peak_bytes"]
        for who, of in each["contenders"].items():
            numbers = (f"{of['local_peak_bytes'] / 1e6:.2f}", f"{of['local_peak_bytes'] / base:.3f}")
            times = (f"{1e3 * of['median_s']:.0f}", f"{of['median_ratio']:.2f}")
            rest = (f"{of['relative_error']:.0e}", f"{of['first_step_wall_s']:.1f}", of.get("plan", ""))
            table.add_row(who, *numbers, *times, *rest)
        console.print(table)
        if where := each.get("profile"):
            shares = ", ".join(f"{kind} {share:.0%}" for kind, share in where["shares"].items())
            limit = f"dense products at torch's best: {1e3 * where['limit_s']:.0f} ms"
            console.print(f"{SINGLE} spends: {shares}; {limit}")


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options of a script that measures networks one by one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of networks")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--jax", help="a Python that has jax and equinox")
    parser.add_argument("--row", help="measure one network here, and print it as JSON")
    parser.add_argument("--plot", action="store_true", help="draw memory against time beside the result (matplotlib)")
    parser.add_argument("--show", action="store_true", help="print what was measured before")
    parser.set_defaults(more=False)
    return parser


def measure_all(
    options: argparse.Namespace, file: Path, networks: Iterable[str], script: str = __file__, within: str = ""
) -> None:
    """Measure what is asked for, save each row as it comes, print and draw."""
    result: Result = json.loads(file.read_text()) if file.exists() else {}
    for name in [] if options.show else options.only or networks:
        result[name] = measured(name, options, script)
        file.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    if options.plot:
        draw(result, file.with_suffix(".png"), within=within)


def main() -> None:
    """Parse the options and measure."""
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--more", action="store_true", help="other lengths of network D, and torch's own layers")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row(options.row, options.rounds, options.core, options.jax)))
        return
    measure_all(options, *((RESULT_MORE, MORE) if options.more else (RESULT, NETWORKS)))


if __name__ == "__main__":
    main()
