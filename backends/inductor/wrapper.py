"""The text of inductor's wrapper: the bytes that it holds at most, read off its allocations and last uses.

It has a plan of its own of allocations and reuse, in the statements ``empty_strided_cpu``, ``reinterpret_tensor``,
``del`` and ``return``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import torch

from reroll.graph.memory import Ledger, strided_nbytes

_CALLED = re.compile(r"(buf\w+) = [\w.]+\.\w+\(.*\)$")
_ITEM = re.compile(r"(buf\w+) = (buf\w+)\[\d+\]$")
_CHECKED = re.compile(r"assert_size_stride\((buf\w+), (.*), 'torch\.ops\.([\w.]+)'\)$")
_ASSIGNED = re.compile(r"(\w+) = (\w+)\((.*)\)(?:; del (\w+))?$")
_MOVED = re.compile(r"(\w+) = (\w+)(?:; del (\w+))?$")
_COMMENT = re.compile(r"\s+#.*$")


def wrapper_peak(source: str, inputs: Mapping[str, int], itemsizes: Mapping[str, int]) -> int | None:
    """The most bytes that inductor's wrapper holds; None where its source is not of the form that is understood.

    inputs: bytes of each owned input by name; the others take nothing. itemsizes: bytes of an element of the results of
    each operation by name; inductor writes down the shapes of what torch's own kernels give.
    """
    found = re.search(r"^def call\(|^    def call\(", source, re.MULTILINE)
    if found is None or "def partition_" in source:
        return None
    ledger = Ledger()
    for name, nbytes in inputs.items():
        ledger.allocate(name, nbytes)
    for line in source[found.start() :].splitlines()[1:]:
        line = _COMMENT.sub("", line).strip()
        if line.startswith("return "):
            return ledger.peak
        if not _understood(line, ledger, itemsizes):
            return None
    return None


def _understood(line: str, ledger: Ledger, itemsizes: Mapping[str, int]) -> bool:
    """Take account of one statement. False if it binds a buffer in a way that is not known."""
    if match := _CHECKED.fullmatch(line):
        return _given(match[1], match[2], itemsizes.get(match[3]), ledger)
    if _CALLED.fullmatch(line) or _ITEM.fullmatch(line):
        return True  # its size is checked in the next lines
    if line.startswith("del "):
        for name in line[4:].split(","):
            ledger.drop(name.strip())
        return True
    if match := _MOVED.fullmatch(line):
        ledger.alias(match[1], match[2])
        ledger.drop(match[3])
        return True
    if not line.startswith("buf"):
        return True
    match = _ASSIGNED.fullmatch(line)
    if match is None:
        return "=" not in line
    name, called, arguments, moved = match.groups()
    if called.startswith("empty_strided_"):
        ledger.allocate(name, _allocated(arguments))
    elif called == "reinterpret_tensor":
        ledger.alias(name, arguments.split(",")[0].strip())
    else:
        return False
    ledger.drop(moved)
    return True


def _given(name: str, layout: str, itemsize: int | None, ledger: Ledger) -> bool:
    """Take account of what torch's own kernel gave, unless it shares memory that is known. False if it has no size."""
    if itemsize is None:
        return False
    if name not in ledger.names:
        shape, stride = ast.literal_eval(f"({layout})")
        ledger.allocate(name, strided_nbytes(shape, stride, itemsize))
    return True


def _allocated(arguments: str) -> int:
    """Bytes of ``empty_strided_cpu((32, 256), (256, 1), torch.float32)``."""
    sizes, _, dtype = arguments.rpartition(", torch.")
    shape, stride = ast.literal_eval(f"({sizes})")
    return strided_nbytes(shape, stride, getattr(torch, dtype).itemsize)
