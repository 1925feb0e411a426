"""The rules of the house that each file keeps: names, imports, docstrings, private torch API.

Each rule is a function from a source to its violations. The mutants at the end show that each of them can fail. The
rules for folders are in ``test_rooms.py``, those for what may import what in ``test_order.py``.
"""

import ast
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sources import PACKAGES, ROOT, Function, Source, dotted, imported, line, sources, within

DEMO_LINES = 99
NESTING = 4
VAGUE = {"manager", "managers", "helper", "helpers", "util", "utils", "misc", "common"}
UNUSUAL = {*["told", "given", "held", "behind", "apart", "together", "drawn", "spoken", "suited", "looked"]}

# Private torch API lives in as few files as possible. Each use there carries the reason and the torch versions tried.
PRIVATE_TORCH = (
    "compiler/capture/recorder/follow.py",
    "compiler/capture/recorder/valueless.py",
    "compiler/operations.py",
    "compiler/graph/private.py",
    "compiler/graph/fakes.py",
    "compiler/segment/joint/graph.py",
    "compiler/segment/linear/forms.py",
    "compiler/segment/trace.py",
    "backends/cache/*.py",
    "backends/measure/history.py",
    "backends/inductor/*.py",
    "backends/inductor/*/*.py",
    "backends/dynamo/*.py",
    "backends/processes/*.py",
    "backends/runtime/node.py",
    "backends/runtime/recordings.py",
    "backends/runtime/run.py",
    "backends/runtime/reach.py",
    "backends/runtime/shown.py",
    "backends/construct/artifacts.py",
    "backends/runtime/randomness.py",
)
PRIVATE_ATTRIBUTES = {"_version", "_base", "_cdata", "_schema", "_overloadname"}
VERSIONS = re.compile(r"2\.1[13]")

BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


def long_demos(source: Source) -> Iterator[str]:
    """A demo is read in one go: it has fewer than 100 lines."""
    lines = source.text.count("\n")
    if source.folder == "demos" and lines > DEMO_LINES:
        yield f"{source.path}: {lines} lines, at most {DEMO_LINES}"


def depth(node: ast.AST, level: int = 0) -> int:
    """How deep blocks nest under a node; an elif stays on the level of its if, an inner function starts anew."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (Function, ast.ClassDef, ast.Lambda)):
            continue
        elif_branch = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child, level + (isinstance(child, BLOCKS) and not elif_branch)))
    return deepest


def deep_nesting(source: Source) -> Iterator[str]:
    """Blocks nest at most four deep."""
    for node in source.functions:
        if depth(node) > NESTING:
            yield f"{source.path}:{node.lineno}: {node.name} nests {depth(node)} deep, at most {NESTING}"


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def vague_names(source: Source) -> Iterator[str]:
    """Nothing is called a manager, a helper or utils."""
    if VAGUE & words(Path(source.path).stem):
        yield f"{source.path}: a name that says nothing"
    for node in source.nodes:
        if isinstance(node, (Function, ast.ClassDef)) and VAGUE & words(node.name):
            yield f"{source.path}:{node.lineno}: {node.name} is a name that says nothing"


def unusual_names(source: Source) -> Iterator[str]:
    """The product's names are terms of the field, not words that only their author understands."""
    if source.folder not in PACKAGES:
        return
    if UNUSUAL & words(Path(source.path).stem):
        yield f"{source.path}: no term of the field"
    for node in source.nodes:
        if isinstance(node, (Function, ast.ClassDef)) and UNUSUAL & words(node.name):
            yield f"{source.path}:{node.lineno}: {node.name} is no term of the field"


def bare_excepts(source: Source) -> Iterator[str]:
    """An except names what it catches."""
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{source.path}:{node.lineno}: bare except"


def unfinished(source: Source) -> Iterator[str]:
    """No comment promises work."""
    for token in source.tokens:
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            yield f"{source.path}:{token.start[0]}: {token.string}"


def wrong_imports(source: Source) -> Iterator[str]:
    """Imports are absolute, and of ``reroll``: under a folder's name every class would exist twice."""
    for node in source.nodes:
        for name in imported(node):
            if name.startswith(".") or within(name, tuple(PACKAGES)):
                yield f"{source.path}:{line(node)}: imports {name}"


def borrowed_privates(source: Source) -> Iterator[str]:
    """A module of the package imports no private name of another one."""
    if source.folder not in PACKAGES:
        return
    for node in source.nodes:
        for name in imported(node):
            if re.match(r"reroll\b.*\._(?!_)", name):
                yield f"{source.path}:{line(node)}: imports {name}"


def private_uses(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name) of every use of private torch API: imports, chains of attributes, attributes of tensors and
    operators."""
    inner = {id(node.value) for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in source.nodes:
        names = imported(node) or [dotted(node)] * (id(node) not in inner)
        yield from ((line(node), name) for name in names if re.match(r"torch\.(.*\.)?_(?!_)", name))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            yield line(node), node.attr


def private_torch(source: Source) -> Iterator[str]:
    """Private torch API is used in the listed places only, each with its reason and the versions it was tried on."""
    if source.folder not in PACKAGES or not (uses := list(private_uses(source))):
        return
    if not any(Path(source.path).match(allowed) for allowed in PRIVATE_TORCH):
        yield from (f"{source.path}:{at}: {name}" for at, name in uses)
        return
    docstring, lines = ast.get_docstring(source.tree) or "", source.text.splitlines()
    if not VERSIONS.search(docstring):
        yield f"{source.path}: the docstring names no version of torch that its private API was tried on"
    for at, name in uses:
        told = docstring + lines[at - 1].partition("#")[2]
        if not any(part in told for part in (name.rpartition(".")[2], *re.findall(r"\b_\w+", name))):
            yield f"{source.path}:{at}: no word on why {name} is used"


def undocumented(source: Source) -> Iterator[str]:
    """In the package every module, public class and public function has a docstring."""
    if source.folder not in PACKAGES:
        return
    if ast.get_docstring(source.tree) is None:
        yield f"{source.path}: no docstring"
    for node in source.tree.body:
        if not isinstance(node, (Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None and "overload" not in map(dotted, node.decorator_list):
            yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


RULES = (
    long_demos,
    deep_nesting,
    vague_names,
    unusual_names,
    bare_excepts,
    unfinished,
    wrong_imports,
    borrowed_privates,
    private_torch,
    undocumented,
)
Rule = Callable[[Source], Iterator[str]]


def test_sources_keep_the_rules() -> None:
    found = ((rule, text) for source in sources() for rule in RULES for text in rule(source))
    violations = [f"{rule.__doc__} {text}" for rule, text in found]
    assert not violations, "\n".join(["", *violations])


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


DOC = '"""A."""\n'
TRIED, UNTRIED = '"""Reads ``torch._a``, tried on 2.13."""\n', '"""Reads ``torch._a``."""\n'


def nested(levels: int) -> str:
    """A function with so many blocks inside each other."""
    blocks = "".join("    " * level + "if x:\n" for level in range(1, levels + 1))
    return f"def f(x):\n{blocks}{'    ' * levels}    return\n"


MUTANTS: tuple[tuple[Rule, str, str, str], ...] = (
    (long_demos, "demos/a.py", "\n" * 99, "\n" * 100),
    (deep_nesting, "tests/a.py", nested(4), nested(5)),
    (vague_names, "tests/manage.py", "def helped(): ...\n", "class TapeManager: ...\n"),
    (unusual_names, "compiler/plan.py", "def needed(): ...\n", "def held_bytes(): ...\n"),
    (bare_excepts, "tests/a.py", "try: ...\nexcept OSError: ...\n", "try: ...\nexcept: ...\n"),
    (unfinished, "tests/a.py", "x = 'TODO'\n", "x = 1  # TODO: more\n"),
    (wrong_imports, "tests/a.py", "import reroll\n", "import compiler.program\n"),
    (wrong_imports, "passes/a.py", "from reroll.passes import b\n", "from . import b\n"),
    (borrowed_privates, "passes/a.py", "from reroll.graph import a\n", "from reroll.graph.a import _b\n"),
    (private_torch, "passes/a.py", f"{DOC}import torch.fx\n", "from torch.utils import _pytree\n"),
    (private_torch, "passes/a.py", "import torch.__future__\n", "import torch\ntorch._assert(True, '')\n"),
    (private_torch, "passes/a.py", "x.version\n", "x._version\n"),
    (private_torch, "backends/dynamo/a.py", f"{TRIED}import torch._a\n", f"{UNTRIED}import torch._a\n"),
    (private_torch, "backends/dynamo/a.py", f"{TRIED}import torch._a\n", f"{TRIED}import torch._b\n"),
    (undocumented, "passes/a.py", f"{DOC}def _f(): ...\n", f"{DOC}def f(): ...\n"),
)


@pytest.mark.parametrize(("rule", "path", "good", "bad"), MUTANTS)
def test_rules_can_fail(rule: Rule, path: str, good: str, bad: str) -> None:
    assert not list(rule(Source(path, good)))
    assert list(rule(Source(path, bad)))
