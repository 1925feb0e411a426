"""The files of a bug report: a repro and a benchmark that run alone, and a folder of every stage."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

import reroll
from reroll.errors import UnsupportedError
from reroll.planning.options import Options
from reroll.report.repro import parts
from reroll.report.repro.functions import with_operations
from reroll.report.repro.loop_source import LoopSource, modes, value_text
from reroll.report.repro.source import Source, value_of

if TYPE_CHECKING:
    from reroll.report.report import Loop, Report

_IMPORTS = (
    "from __future__ import annotations",
    "",
    "import functools",
    "import math",
    "import os",
    "import platform",
    "import statistics",
    "import sys",
    "import time",
)
_NO_DATA = (
    "It holds the operations of each loop, shapes, dtypes, layouts and options, and no value of any tensor:\n"
    "all that is computed with is random, by SEED. What the model does around its loops is not here."
)
_REPRO = f"""The loops of a model, trained once by reroll and once in eager PyTorch, and compared.

Written by Report.write_repro. {_NO_DATA}

    python {{name}}        prints what differs; exit code 1 where something does, 0 where nothing does"""
_BENCHMARK = f"""The loops of a model in eager PyTorch, by torch.compile (inductor) and by reroll, side by side.

Written by Report.write_benchmark. {_NO_DATA}

    python {{name}}                 CPU seconds in turns, local peaks, gradients against eager's
    python {{name}} eager reroll    without inductor, which unrolls a loop: minutes, where it has many steps"""
_STAGE = "{title}\n\nWritten by Report.save. Step through it: python -m pdb {name}"


def write_repro(report: Report, path: Path) -> None:
    """See ``Report.write_repro``."""
    main = "say_versions(WRITTEN_WITH)\n    raise SystemExit(compare(LOOPS, OPTIONS, SEED))"
    functions = (parts.versions, parts.say_versions, parts.loss, parts.of_loop, parts.compare, parts.equal)
    path.write_text(_file(report, path.name, _REPRO, functions, main), "utf-8")


def write_benchmark(report: Report, path: Path) -> None:
    """See ``Report.write_benchmark``."""
    main = "say_versions(WRITTEN_WITH)\n    race(LOOPS, OPTIONS, SEED, sys.argv[1:])"
    training = (parts.of_loop, parts.loss, parts.gradients, parts.largest_error)
    functions = (parts.versions, parts.say_versions, *training, parts.race, parts.first_call, parts.in_turns)
    path.write_text(_file(report, path.name, _BENCHMARK, functions, main), "utf-8")


def _file(report: Report, name: str, about: str, functions: Sequence[Callable[..., Any]], main: str) -> str:
    loops = _all_loops(report)
    if not loops:
        raise UnsupportedError(f"There is no loop to write: no recurrence was found ({report.reason}).")
    options, source = changed_options(loops[0].options), Source()
    shared = len(loops) > 1 and options.get("memory_budget", "auto") != "auto"
    classes = [
        LoopSource(each.captured or each.recurrence, f"Loop{n}", source, _share(each) if shared else None)
        for n, each in enumerate(loops)
    ]
    plans = [f"# {each.name}, there: {loop.choice.describe()}" for each, loop in zip(classes, loops, strict=True)]
    whole: list[Callable[..., Any]] = [parts.made, *functions]
    written = [inspect.getsource(each).strip() for each in whole]
    pieces = [
        f'"""{about.format(name=name)}\n"""',
        "\n".join([*_IMPORTS, "from collections.abc import Callable, Mapping, Sequence", "from typing import Any"])
        + "\n\n"
        + "\n".join(source.imports),
        "\n".join(["SEED = 0", f"OPTIONS = {_dict(options)}", f"WRITTEN_WITH = {_dict(parts.versions())}", *plans]),
        *_own_passes(loops[0].options),
        *written[:1],
        *source.definitions,
        *(each.text for each in classes),
        f"LOOPS = ({', '.join(each.name for each in classes)},)",
        *written[1:],
        f'if __name__ == "__main__":\n    {main}',
    ]
    return "\n\n\n".join(pieces) + "\n"


def _share(loop: Loop) -> int:
    """The bytes that the plan of a loop takes by itself, where it also returns its last carry and all its rows."""
    return loop.plan.prediction.peak + loop.needs.carry + loop.outputs


def _all_loops(report: Report) -> list[Loop]:
    """Those of the graph, and of the other graphs of the model."""
    return [loop for each in (report, *report.others) for loop in each.loops]


def _own_passes(options: Options) -> Iterator[str]:
    """A comment that names the passes which the reader has to register."""
    named = options.passes.split(",") if isinstance(options.passes, str) else options.passes or ()
    own = [name.strip() for name in named if name.strip() not in reroll.DEFAULT_PASSES]
    if own:
        yield f"# The code of passes is not written. Register {', '.join(own)} here, or take them out of OPTIONS."


def changed_options(options: Options) -> dict[str, Any]:
    """The options that are not as by default, as keywords; a folder is left out, as another machine has not got it.

    Raises UnsupportedError for those that a file cannot say, or cannot compare.
    """
    if options.truncate is not None:
        raise UnsupportedError(
            f"A repro compares with plain autograd, and truncate={options.truncate} cuts gradients. Compile the model "
            "without truncate, explain that, and write its repro."
        )
    found = {}
    for field in fields(Options):
        value = getattr(options, field.name)
        rules = value if isinstance(value, tuple) else ()
        if any(callable(rule) for rule in rules):
            raise UnsupportedError(
                f"The option {field.name} has a function, whose code is not written. Name values by reroll.name or by "
                "their operation, and explain that."
            )
        if value != (() if field.name in ("keep", "recompute") else field.default) and field.name != "spill_folder":
            found[field.name] = value
    return found


def _dict(values: dict[str, Any]) -> str:
    lines = [f"    {name!r}: {value!r},\n" for name, value in values.items()]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"


def save(report: Report, folder: Path) -> None:
    """See ``Report.save``."""
    folder.mkdir(parents=True, exist_ok=True)
    data = report.to_json()
    (folder / "report.txt").write_text(f"{report}\n", "utf-8")
    report.save_html(folder / "report.html")
    (folder / "report.json").write_text(json.dumps(data, indent=1), "utf-8")
    (folder / "versions.json").write_text(json.dumps(parts.versions(), indent=1), "utf-8")
    (folder / "outer.txt").write_text(f"{report.outer}\n", "utf-8")
    for number, loop in enumerate(_all_loops(report)):
        _save_loop(loop, folder, f"loop{number}")
    for name, write in (("repro.py", write_repro), ("bench.py", write_benchmark)):
        try:
            write(report, folder / name)
        except UnsupportedError as error:
            (folder / f"{name}.refused.txt").write_text(f"{error}\n", "utf-8")


def _save_loop(loop: Loop, folder: Path, name: str) -> None:
    shown = {each.name: repr(getattr(loop.options, each.name)) for each in fields(Options)}
    (folder / f"{name}_options.json").write_text(json.dumps(shown, indent=1), "utf-8")
    plan = {**asdict(loop.choice), "text": loop.choice.describe(), "why": loop.why}
    (folder / f"{name}_plan.json").write_text(json.dumps(plan, indent=1), "utf-8")
    (folder / f"{name}_program.txt").write_text("\n\n".join(map(str, loop.program.graphs)) + "\n", "utf-8")
    captured = (loop.captured or loop.recurrence).step
    stages = {"step": captured, "step_rewritten": loop.recurrence.step, **loop.halves}
    for stage, graph in stages.items():
        if stage != "step_rewritten" or graph is not captured:
            path, title = folder / f"{name}_{stage}.py", f"The {stage.replace('_', ' ')} of {loop.recurrence.name}."
            around = [] if stage in loop.halves else modes(loop.recurrence)  # halves have casts of their own
            path.write_text(_stage(graph, path.name, title, around), "utf-8")


def _stage(graph: fx.GraphModule, name: str, title: str, around: Sequence[str]) -> str:
    """A graph as a file that runs it once on random values, within these modes; as a list of its nodes, where code
    cannot say it."""
    source = Source()
    try:
        arguments = source.function(with_operations(graph), "run", title)
    except UnsupportedError as error:
        return f'"""{title}\n\nIt does not run: {error}\n\n{graph.graph}\n"""\n'
    inputs = graph.graph.find_nodes(op="placeholder")
    values = [f"    {_example(node)},  # {argument}" for node, argument in zip(inputs, arguments, strict=True)]
    pieces = [
        f'"""{_STAGE.format(title=title, name=name)}\n"""',
        "\n".join([*_IMPORTS[:2], "import math", "from collections.abc import Sequence", "", *source.imports]),
        inspect.getsource(parts.made).strip(),
        *source.definitions,
        "\n".join(["torch.manual_seed(0)", "inputs = (", *values, ")", *_call(around)]),
    ]
    return "\n\n\n".join(pieces) + "\n"


def _call(around: Sequence[str]) -> Iterator[str]:
    """The lines that run a stage within some modes."""
    for depth, mode in enumerate(around):
        yield f"{'    ' * depth}with {mode}:"
    yield f"{'    ' * len(around)}results = run(*inputs)"


def _example(node: fx.Node) -> str:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return "torch.tensor(0.5)" if value is None else repr(value)
    return value_text(value, "state", tuple(value.shape))
