"""The modules of a user's model that blocks over depth belong to, by the names of the weights that they read.

Private torch API, tried on 2.11 and 2.13: ``_dynamo_source``, where Dynamo says what an input of its graph is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os.path import commonprefix

from torch import fx

from reroll.recurrence import Items, PerStep

_PART = re.compile(r"\['(\w+)'\]|\[(\d+)\]|\.(\w+)")
PATH = "path"
"""What a recorder notes an input's path in the model under, in ``meta``."""
_BETWEEN = ("self", "_modules", "_parameters", "_buffers")


def modules_of(graph: fx.Graph, operands: Sequence[fx.Node], xs: Sequence[PerStep], steps: int) -> tuple[str, ...]:
    """For each step the innermost module that holds all that it alone reads, as ``blocks.3``; "" if none does."""
    paths = {node.target: path_of(node) for node in graph.find_nodes(op="placeholder")}
    found = []
    for t in range(steps):
        read = [operands[x.operands[t]] for x in xs if isinstance(x, Items)]
        known = [path for node in read if node.op == "placeholder" and (path := paths.get(node.target))]
        found.append(".".join(commonprefix([path[:-1] for path in known])))
    return tuple(found)


def path_of(node: fx.Node) -> list[str]:
    """The path of an input in the model, as ``["blocks", "3", "weight"]``; empty if it has none."""
    if recorded := node.meta.get(PATH):
        return str(recorded).split(".")
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = name() if callable(name) else str(name)
    parts = ["".join(match) for match in _PART.findall(text)]
    return [part for part in parts if part not in _BETWEEN] if text.startswith("L['self']") else []
