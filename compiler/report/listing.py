"""The graphs of a report as rows of text: the nodes of a step, the instructions of a training program."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from torch import Tensor, fx

from reroll.program.program import Program
from reroll.program.spelled import spelled_out
from reroll.program.timeline import Timeline

LONGEST = 160  # characters of one operand list
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of a step: ``shape`` of its value with the dtype, ``line`` of the user's code; empty if not known."""

    name: str
    op: str
    target: str
    args: str
    shape: str
    line: str


@dataclass(frozen=True, slots=True)
class InstructionRow:
    """An instruction: when it ``begins``, in seconds, and what local memory holds meanwhile, in bytes."""

    name: str
    kind: str
    operands: str
    begins: float
    local: int


def node_rows(graph: fx.Graph) -> list[NodeRow]:
    """The nodes of a graph in order."""
    return [
        NodeRow(
            node.name,
            node.op,
            _target(node),
            _shortened(", ".join([*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())])),
            _shape(node.meta.get("example_value", node.meta.get("val"))),
            source_line(str(node.meta.get("stack_trace", ""))),
        )
        for node in graph.nodes
    ]


def _target(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {' x '.join(map(str, value.shape)) or 'scalar'}"
    if isinstance(value, tuple | list):
        return ", ".join(filter(None, map(_shape, value)))
    return ""


def source_line(text: str) -> str:
    """``file.py:12`` of the innermost frame that a stack trace names; empty without one."""
    found = _FRAME.findall(text)
    return f"{PurePath(found[-1][0]).name}:{found[-1][1]}" if found else ""


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def instruction_rows(program: Program, trace: Timeline, most: int) -> tuple[list[InstructionRow], int]:
    """The first and last instructions of a program, ``most`` together, and how many between them are left out.

    ``trace`` is that of the program, not summed up.
    """
    played = list(spelled_out(program))
    left = max(len(played) - most, 0)
    kept: Sequence[int] = range(len(played))
    if left:
        kept = [*range(most - most // 2), *range(len(played) - most // 2, len(played))]
    rows = []
    for number in kept:
        each = played[number]
        operands = [played[source].name for source in each.reads]
        operands += [each.tier] if each.tier else []
        operands += [str(each.item)] if each.kind == "pick" else []
        steps = [f"steps {each.start:,} to {each.stop:,}"] if each.stop else []
        text = _shortened(", ".join([*operands, *steps]))
        rows.append(InstructionRow(each.name, each.kind, text, trace.times[number], trace.memory["local"][number]))
    return rows, left
