"""Inductor's wrapper with its calls of kernels, one after another, as one call.

Inductor writes a Python function that allocates buffers and calls kernels; for small tensors that takes longer than the
kernels. Here the text of that function is rewritten: calls with nothing foreign between them become one C++ function, a
chain, which calls the same kernels with the same pointers in the same order. Buffers that only these kernels see lie in
one workspace; where their lives do not meet they share its bytes. What dies among the calls is freed behind them.

Kernels that serve several sizes are given these as whole numbers. Then all numbers of a chain are in a table that is
one of its operands, so that the C++ is the same at all sizes, and built once.

A statement of a form that is not known stays as it is, and finds the names that it reads as they were.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reroll.backends.inductor.wrapper_codegen.wrapper import (
    Allocated,
    Called,
    Checked,
    Deleted,
    Form,
    Moved,
    RawLine,
    Statement,
    View,
    Viewed,
    body_of,
    tell_foreign,
)

_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\], r'''(.*?)'''\)$", re.MULTILINE | re.DOTALL)
KERNEL_NAME, _LINKED = re.compile(r"\bkernel\("), 'extern "C"'
_WHOLE = "const int64_t"
_LEAST = 2  # calls that make a chain
_LINE = 64  # bytes of a line of the cache, at which buffers of a workspace begin


@dataclass(frozen=True, slots=True)
class Ref:
    """Where a name points: ``offset`` elements into ``root``. ``view``: its size and stride, if it is a part."""

    root: str
    offset: int = 0
    view: str = ""


@dataclass(slots=True)
class Buffer:
    """A buffer that a chain allocates by ``text``, and the first and last call that is given it."""

    text: str
    nbytes: int
    first: int = -1
    last: int = -1
    place: int = 0


@dataclass(slots=True)
class Chain:
    """Calls that become one: (kernel, operands) of each, what names point to behind them, what was deleted."""

    names: dict[str, Ref] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    calls: list[tuple[str, list[Ref | int]]] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)

    def add(self, statement: Statement) -> None:
        """Take one statement, of a form that is known."""
        match statement.form:
            case Checked(name=name):
                self.checks += [] if name in self.names else [statement.text]
            case Allocated(name) as made:
                self.names[name] = Ref(name)
                self.buffers[name] = Buffer(statement.text, made.nbytes)
            case Viewed(name, view, deleted):
                self.names[name] = self._ref(view)
                self.dead |= {deleted} if deleted else set()
            case Moved(name, source, deleted):
                self.names[name] = self._ref(source)
                self.dead |= {deleted} if deleted else set()
            case Deleted(names):
                self.dead.update(names)
            case Called(kernel, operands):
                self._call(kernel, [each if isinstance(each, int) else self._ref(each) for each in operands])

    def _call(self, kernel: str, operands: list[Ref | int]) -> None:
        roots = [each.root for each in operands if isinstance(each, Ref)]
        for buffer in [self.buffers[root] for root in roots if root in self.buffers]:
            buffer.first = len(self.calls) if buffer.first < 0 else buffer.first
            buffer.last = len(self.calls)
        self.calls.append((kernel, operands))

    def _ref(self, operand: str | View) -> Ref:
        if isinstance(operand, str):
            return self.names.get(operand, Ref(operand))
        source = self._ref(operand.base)
        return Ref(source.root, source.offset + operand.offset, f"{operand.size}, {operand.stride}")


@dataclass(slots=True)
class _Writer:
    """The text that is made: lines of the body, definitions of chains, and names that are no longer bound. shared:
    whether the definitions are to serve other sizes, too."""

    kernels: dict[str, tuple[str, str]]
    shared: bool
    lines: list[str] = field(default_factory=list)
    chains: list[str] = field(default_factory=list)
    unbound: set[str] = field(default_factory=set)

    def keep(self, statements: Iterable[Statement]) -> None:
        """Write statements as they are, without deleting what is not there."""
        for each in statements:
            if isinstance(each.form, Deleted):
                there = [name for name in each.form.names if name not in self.unbound]
                self.lines += [f"del {', '.join(there)}"] if there else []
            else:
                self.lines.append(each.text)

    def chain(self, statements: Iterable[Statement], later: set[str]) -> None:
        """Write statements as one call. later: the names that statements behind them read."""
        chain = Chain()
        for each in statements:
            chain.add(each)
        bound = {name: ref for name, ref in chain.names.items() if name in later}
        outer = {ref.root for ref in bound.values()}
        inner = {name: buffer for name, buffer in chain.buffers.items() if name not in outer}
        nbytes = _place(inner.values())
        number = len(self.chains)
        self.lines += chain.checks
        self.lines += [buffer.text for name, buffer in chain.buffers.items() if name in outer]
        if nbytes:
            self.lines.append(f"buf_chain{number} = empty_strided_cpu(({nbytes}, ), (1, ), torch.uint8)")
        roots = (each.root for _, operands in chain.calls for each in operands if isinstance(each, Ref))
        pointers = list(dict.fromkeys(root for root in roots if root not in inner))
        numbers = _Numbers(f"numbers_{number}", self.shared)
        self.chains.append(_definition(number, chain.calls, self.kernels, pointers, inner, numbers))
        given = [*pointers, *([f"buf_chain{number}"] if nbytes else []), *numbers.operands]
        self.lines.append(f"chain_{number}({', '.join(given)})")
        self._bind(chain, bound, outer, [f"buf_chain{number}"] if nbytes else [])

    def _bind(self, chain: Chain, bound: dict[str, Ref], outer: set[str], spent: list[str]) -> None:
        """Leave the names as the statements would have."""
        for name, ref in bound.items():
            if ref.view:
                self.lines.append(f"{name} = reinterpret_tensor({ref.root}, {ref.view}, {ref.offset})")
            elif name != ref.root:
                self.lines.append(f"{name} = {ref.root}")
        made = chain.names.keys()
        there = {name for name in chain.dead if name not in made and name not in self.unbound}
        there |= {name for name in outer & chain.buffers.keys() if name in chain.dead}
        spent += sorted(there - bound.keys())
        self.lines += [f"del {', '.join(spent)}"] if spent else []
        self.unbound |= {name for name in made if name not in bound and name not in outer} | there


def included(sources: Iterable[str]) -> list[str]:
    """The lines by which kernels include headers, each once."""
    lines = [line for source in sources for line in source.split("\n") if line.startswith("#include")]
    return list(dict.fromkeys(lines))


def within(namespace: str, source: str, name: str) -> str:
    """A kernel under a name of its own, in a namespace, without its headers."""
    own = "\n".join(line for line in source.split("\n") if not line.startswith("#include"))
    return f"namespace {namespace} {{\n{KERNEL_NAME.sub(f'{name}(', own, count=1)}\n}}"


def chained(source: str, *, shared: bool = False) -> str:
    """The text of a wrapper with its chains; the text as it is where it is of another form. ``shared``: chains take
    numbers as an operand."""
    kernels = {match[1]: (match[2], match[3]) for match in _KERNEL.finditer(source) if _is_plain(match[2], match[3])}
    body = body_of(source)
    if not kernels:
        return source
    if body is None or body.indent is None:
        tell_foreign("kernels are called one by one, which takes longer")
        return source
    statements = [
        each if _is_known(each.form, kernels) else Statement(each.line, each.line) for each in body.statements
    ]
    writer = _Writer(kernels, shared)
    done = 0
    for begin, end in _runs(statements):
        writer.keep(statements[done:begin])
        writer.chain(statements[begin:end], set().union(*map(_words, statements[end:])))
        done = end
    writer.keep(statements[done:])
    if not writer.chains:
        return source
    made = "".join(f"{body.indent}{line}\n" for line in writer.lines)
    rest = source[body.head : body.start] + made + source[body.end :]
    return _defined(source[: body.head], writer, rest) + rest


def _is_plain(types: str, source: str) -> bool:
    """Whether a kernel takes pointers and whole numbers alone, and is one function."""
    known = all(kind.endswith("*") or kind == _WHOLE for kind in ast.literal_eval(f"[{types}]"))
    return known and source.count(_LINKED) == len(KERNEL_NAME.findall(source)) == 1


def _is_known(form: Form | None, kernels: Mapping[str, Any]) -> bool:
    """Whether a statement may stand in a chain."""
    match form:
        case None | RawLine() | Moved(deleted=None):
            return False
        case Called(kernel):
            return kernel in kernels
        case Allocated(device=device):
            return device == "cpu"
    return True


def _words(statement: Statement) -> set[str]:
    """The names in a statement; none of what it only deletes."""
    return set() if isinstance(statement.form, Deleted) else set(re.findall(r"\w+", statement.text))


def _runs(statements: Sequence[Statement]) -> Iterator[tuple[int, int]]:
    """(begin, end) of statements between two that are foreign, up to the last call and what is deleted behind it."""
    begin, end, calls = 0, 0, 0
    for at, form in enumerate([*(each.form for each in statements), None]):
        if form is None:
            if calls >= _LEAST:
                yield begin, end
            begin, calls = at + 1, 0
        elif isinstance(form, Called):
            end, calls = at + 1, calls + 1
        elif isinstance(form, Deleted) and end == at:
            end = at + 1


def _place(buffers: Iterable[Buffer]) -> int:
    """Give each buffer the lowest place in a workspace that is free while it lives; the bytes of the workspace."""
    placed: list[Buffer] = []
    for buffer in sorted((each for each in buffers if each.first >= 0), key=lambda each: (each.first, -each.nbytes)):
        meeting = sorted((o for o in placed if o.last >= buffer.first), key=lambda each: each.place)
        for other in meeting:
            if buffer.place + buffer.nbytes <= other.place:
                break
            buffer.place = max(buffer.place, -(-(other.place + other.nbytes) // _LINE) * _LINE)
        placed.append(buffer)
    return max((each.place + max(each.nbytes, 1) for each in placed), default=0)


@dataclass(slots=True)
class _Numbers:
    """The numbers of a chain: as they are, or, ``tabled``, by their places in a table that is an operand of it."""

    name: str
    tabled: bool
    values: list[int] = field(default_factory=list)

    def text(self, value: int) -> str:
        """A number as C++ has it."""
        if not self.tabled:
            return str(value)
        self.values.append(value)
        return f"numbers[{len(self.values) - 1}]"

    @property
    def operands(self) -> list[str]:
        """The table as an operand, if there is one."""
        return [self.name] if self.values else []

    @property
    def definition(self) -> str:
        """The table, as a wrapper defines it."""
        made = f"torch.tensor({self.values}, dtype=torch.int64, device='cpu')"  # whatever the user's default is
        return f"{self.name} = {made}\n" if self.values else ""


def _definition(
    number: int,
    calls: Sequence[tuple[str, list[Ref | int]]],
    kernels: dict[str, tuple[str, str]],
    pointers: list[str],
    inner: dict[str, Buffer],
    numbers: _Numbers,
) -> str:
    """A chain as inductor writes a kernel."""
    parts = {kernels[name]: f"part{at}" for at, name in enumerate(dict.fromkeys(name for name, _ in calls))}
    text = included(source for _, source in parts)
    for (_, source), part in parts.items():
        text.append(within(part, source, "run").replace(_LINKED, "static __attribute__((noinline))"))
    names = {root: f"p{at}" for at, root in enumerate(pointers)}
    names |= {root: f"(workspace + {numbers.text(buffer.place)})" for root, buffer in inner.items()}

    def operand(kind: str, value: Ref | int) -> str:
        if isinstance(value, int):
            return numbers.text(value)
        return f"({kind})({names[value.root]}) + {numbers.text(value.offset)}"

    made = list[str]()
    for name, operands in calls:
        values = map(operand, ast.literal_eval(f"[{kernels[name][0]}]"), operands)
        made.append(f"    {parts[kernels[name]]}::run({', '.join(values)});")
    pads = ["workspace"] if any(buffer.first >= 0 for buffer in inner.values()) else []
    given = [f"char* {name}" for name in [*(names[root] for root in pointers), *pads]]
    given += ["const int64_t* numbers"] if numbers.values else []
    text += [f"{_LINKED} void kernel({', '.join(given)})", "{", *made, "}"]
    types = ["char*"] * len(given)
    types[-1] = "const int64_t*" if numbers.values else types[-1]
    source = "\n".join(text)
    return f"{numbers.definition}chain_{number} = async_compile.cpp_pybinding({types}, r'''\n{source}\n''')"


def _defined(head: str, writer: _Writer, rest: str) -> str:
    """The definitions, with chains, and without the kernels that nothing else calls. rest: what comes behind them."""
    words = set(re.findall(r"\w+", rest))
    found = list(_KERNEL.finditer(head))
    kept, done = list[str](), 0
    for match in found:
        kept.append(head[done : match.start()] + (match[0] if match[1] in words else ""))
        done = match.end()
    return "".join([*kept, "\n\n", "\n\n".join(writer.chains), head[done:]])
