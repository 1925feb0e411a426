"""The text of inductor's wrapper: the statements of its ``call``, and the bytes that it holds at most.

Inductor writes a Python function that allocates buffers, calls kernels, and deletes what it needs no more, with a plan
of its own of what uses whose memory. Each line is of one of the forms below, or foreign.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from reroll.errors import warn
from reroll.graph.memory import Allocations, Owned, Workspaces, strided_nbytes

_CALL = re.compile(r"^( *)def call\((?:self, )?args\):\n", re.MULTILINE)
_TUPLE = r"\([\d, ]*\)"
_VIEW = rf"reinterpret_tensor\((\w+), ({_TUPLE}), ({_TUPLE}), (\d+)\)"
_ALLOCATED = re.compile(rf"(\w+) = empty_strided_(\w+)\(({_TUPLE}), ({_TUPLE}), torch\.(\w+)\)")
_VIEWED = re.compile(rf"(\w+) = {_VIEW}(?:; del (\w+))?")
_MOVED = re.compile(r"(\w+) = (\w+)(?:; del (\w+))?")
_DELETED = re.compile(r"del (\w+(?:, \w+)*)")
_CHECKED = re.compile(r"assert_(size_stride|alignment)\((\w+), (.*?)(?:, 'torch\.ops\.([\w.]+)')?\)")
_CALLED = re.compile(r"(\w+)\((.*)\)")
_OPERAND = re.compile(rf"(?:{_VIEW}|(\w+))(?:, |$)")
_GIVEN = re.compile(r"buf\w+ = (?:[\w.]+\.\w+\(.*\)|buf\w+\[\d+\])")
_COMMENT = re.compile(r"(^|\s+)#.*$")


@dataclass(frozen=True, slots=True)
class Allocated:
    """``buf0 = empty_strided_cpu((32, 256), (256, 1), torch.float32)``."""

    name: str
    device: str
    size: str
    stride: str
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return _nbytes(f"{self.size}, {self.stride}", itemsize)


@dataclass(frozen=True, slots=True)
class View:
    """``reinterpret_tensor(buf0, (8, 4), (1, 8), 0)``: ``offset`` elements into a base."""

    base: str
    size: str
    stride: str
    offset: int


@dataclass(frozen=True, slots=True)
class Viewed:
    """``buf1 = reinterpret_tensor(...); del buf0``."""

    name: str
    view: View
    deleted: str | None


@dataclass(frozen=True, slots=True)
class Moved:
    """``buf1 = buf0; del buf0``."""

    name: str
    source: str
    deleted: str | None


@dataclass(frozen=True, slots=True)
class Deleted:
    """``del buf0, buf1``."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """``assert_size_stride(buf0, (4, 8), (8, 1), 'torch.ops.aten.mm.default')``, ``assert_alignment(...)``.

    operation: the one of torch's that gave the tensor, if it is named.
    """

    what: str
    name: str
    layout: str
    operation: str | None


@dataclass(frozen=True, slots=True)
class Called:
    """``cpp_fused_0(buf0, reinterpret_tensor(...), 24)``."""

    kernel: str
    operands: tuple[str | View | int, ...]


@dataclass(frozen=True, slots=True)
class RawLine:
    """``buf1 = torch.ops.aten.sort.default(buf0)``, ``buf2 = buf1[0]``: a ``Checked`` behind it says of what size."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """An empty line, or a comment."""


Form = Allocated | Viewed | Moved | Deleted | Checked | Called | RawLine | Nothing


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of the wrapper, as it is written and without its comment; one without a form is foreign."""

    line: str
    text: str
    form: Form | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The statements of ``call`` up to its ``return``, the last one.

    head: where ``def call`` begins in the source. start, end: where they are. indent: that of all; None if they differ.
    """

    head: int
    start: int
    end: int
    indent: str | None
    statements: tuple[Statement, ...]


def body_of(source: str) -> Body | None:
    """The body of a wrapper's ``call``; None where the source is of another form."""
    head = _CALL.search(source)
    if head is None or "def partition_" in source:
        return None
    lines = source[head.end() :].splitlines(keepends=True)
    last = next((at for at, line in enumerate(lines) if line.lstrip().startswith("return ")), None)
    if last is None:
        return None
    lines, indent = lines[: last + 1], head[1] + "    "
    flat = all(line.startswith(indent) and not line[len(indent) :].startswith((" ", "\t")) for line in lines)
    end = head.end() + sum(map(len, lines))
    return Body(head.start(), head.end(), end, indent if flat else None, tuple(map(_statement, lines)))


def tell_foreign(so: str, statement: str = "") -> None:
    """Warn, once for each consequence, that inductor's text is of another form: what follows, and where it is so."""
    if so in _TOLD:
        return
    _TOLD.add(so)
    where = f" (first at: {statement})" if statement else ""
    text = (
        f"The code that inductor of torch {torch.__version__} writes has a form that reroll does not know{where}, so "
        f"{so}. Results are not touched. Please report it."
    )
    warn(text)


_TOLD: set[str] = set()


def _statement(line: str) -> Statement:
    text = _COMMENT.sub("", line).strip()
    return Statement(line.strip(), text, _form(text))


def _form(text: str) -> Form | None:
    if not text:
        return Nothing()
    if match := _ALLOCATED.fullmatch(text):
        return Allocated(*match.groups())
    if match := _VIEWED.fullmatch(text):
        return Viewed(match[1], View(match[2], match[3], match[4], int(match[5])), match[6])
    if match := _MOVED.fullmatch(text):
        return Moved(*match.groups())
    if match := _DELETED.fullmatch(text):
        return Deleted(tuple(match[1].split(", ")))
    if match := _CHECKED.fullmatch(text):
        return Checked(*match.groups())
    if match := _CALLED.fullmatch(text):
        return None if _OPERAND.sub("", match[2]) else Called(match[1], tuple(_operands(match[2])))
    return RawLine() if _GIVEN.fullmatch(text) else None


def _operands(text: str) -> Iterator[str | View | int]:
    for base, size, stride, offset, name in _OPERAND.findall(text):
        yield int(name) if name.isdigit() else name or View(base, size, stride, int(offset))


def wrapper_peak(
    source: str, owned: Owned, itemsizes: Mapping[str, int], workspaces: Workspaces = MappingProxyType({})
) -> int | None:
    """The most bytes that inductor's wrapper holds; None where its source is not of the form that is understood.

    owned: blocks of inputs that die with it; others take nothing. itemsizes: bytes of an element of the results of
    each operation by name; inductor writes down the shapes of what torch's own kernels give. workspaces: bytes in which
    they work.
    """
    body = body_of(source)
    if body is None:
        tell_foreign("predicted peaks come from the operations instead, and may be further off")
        return None
    ledger = Allocations()
    ledger.own(owned)
    statements = _in_order(body.statements)
    foreign = next((each.line for each in statements if not _understood(each, ledger, itemsizes, workspaces)), None)
    if foreign is not None:
        tell_foreign("predicted peaks come from the operations instead, and may be further off", foreign)
    return ledger.peak if foreign is None else None


def _in_order(statements: Iterable[Statement]) -> Iterator[Statement]:
    """Statements as their memory goes: what a call of torch's reads is there until its results are, though inductor
    writes ``del`` first."""
    waiting = list[Statement]()
    given = False
    for each in statements:
        calls = isinstance(each.form, RawLine) and each.text.endswith(")")
        if given and isinstance(each.form, Deleted):
            waiting.append(each)
            continue
        if calls or not isinstance(each.form, RawLine | Checked | Nothing):
            yield from waiting
            waiting.clear()
            given = calls
        yield each
    yield from waiting


def _understood(
    statement: Statement, ledger: Allocations, itemsizes: Mapping[str, int], workspaces: Workspaces
) -> bool:
    """Take account of one statement. False if it binds a buffer in a way that is not known."""
    match statement.form:
        case Checked("size_stride", name, layout, str(operation)) if _is_buffer(name):
            if operation not in itemsizes:
                return False
            if name not in ledger.names:  # else it shares memory that is known
                ledger.allocate(name, _nbytes(layout, itemsizes[operation]))
            ledger.work(_works_in(workspaces, operation, layout))
        case Allocated(name) as buffer if _is_buffer(name):
            ledger.allocate(name, buffer.nbytes)
        case Viewed(name, View(source), deleted) if _is_buffer(name):
            ledger.alias(name, source)
            ledger.drop(deleted)
        case Moved(name, source, deleted):
            ledger.alias(name, source)
            ledger.drop(deleted)
        case Deleted(names):
            for name in names:
                ledger.drop(name)
        case None:
            return not (_is_buffer(statement.text) and "=" in statement.text)
    return True


def _works_in(workspaces: Workspaces, operation: str, layout: str) -> int:
    """Bytes in which an operation works that gives a tensor of this layout."""
    return workspaces.get((operation, tuple(ast.literal_eval(f"({layout})")[0])), 0) if workspaces else 0


def _is_buffer(text: str) -> bool:
    """Whether inductor named it: ``buf0``."""
    return text.startswith("buf")


def _nbytes(layout: str, itemsize: int) -> int:
    """Bytes of a tensor of ``(32, 256), (256, 1)``."""
    shape, stride = ast.literal_eval(f"({layout})")
    return strided_nbytes(shape, stride, itemsize)
