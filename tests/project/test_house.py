"""The rules of the house, read off the sources: caps, names, import directions, docstrings.

Each rule is a function from a source to its violations. The mutants at the end show that each of them can fail.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("compiler", "passes", "backends")
FOLDERS = (*PACKAGES, "tests", "demos", "benchmarks")

FILE_LINES = {"demos": 99}
FILE_LINES_DEFAULT = 300
FUNCTION_LINES = 40
NESTING = 4
VAGUE = {"manager", "managers", "helper", "helpers", "util", "utils", "misc", "common"}

# Folder -> prefixes that its files may not import. compiler/__init__.py may, inside a function (a lazy re-export).
FORBIDDEN = {"compiler": ("reroll.passes", "reroll.backends"), "passes": ("reroll.backends",)}

# Private torch API lives in as few files as possible. Each use there carries the reason and the torch versions tried.
PRIVATE_TORCH = (
    "backends/dynamo.py",
    "backends/events.py",
    "backends/joint.py",
    "backends/lowering.py",
    "backends/outside.py",
    "backends/parallel.py",
    "backends/profiled.py",
    "backends/native_products.py",
    "backends/tracing.py",
    "backends/rolled.py",
    "backends/surroundings.py",
    "backends/together.py",
    "backends/toolchain.py",
    "compiler/capture*.py",
    "compiler/facts.py",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root and its text."""

    path: str
    text: str

    @property
    def folder(self) -> str:
        return self.path.partition("/")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> tuple[tokenize.TokenInfo, ...]:
        return tuple(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))


def long_files(source: Source) -> Iterator[str]:
    """A file has at most 300 lines, a demo fewer than 100."""
    lines, cap = source.text.count("\n"), FILE_LINES.get(source.folder, FILE_LINES_DEFAULT)
    if lines > cap:
        yield f"{source.path}: {lines} lines, at most {cap}"


def docstring_lines(node: ast.AST) -> set[int]:
    """The lines of every docstring in and under a node."""
    lines: set[int] = set()
    for owner in ast.walk(node):
        if isinstance(owner, (Function, ast.ClassDef)) and ast.get_docstring(owner, clean=False) is not None:
            first = owner.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def long_functions(source: Source) -> Iterator[str]:
    """A function has at most 40 lines of code: docstrings, comments and blank lines are free."""
    code = {n for t in source.tokens if t.type not in LAYOUT for n in range(t.start[0], t.end[0] + 1)}
    for node in source.functions:
        own = code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) - docstring_lines(node)
        if len(own) > FUNCTION_LINES:
            yield f"{source.path}:{node.lineno}: {node.name} has {len(own)} lines of code, at most {FUNCTION_LINES}"


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


def imported(node: ast.AST) -> list[str]:
    """The dotted names that a statement imports; of ``from a import b`` it gives ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + ".".join(filter(None, (node.module, alias.name))) for alias in node.names]
    return []


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the modules or lies in one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def line(node: ast.AST) -> int:
    """The line of a statement or an expression."""
    return int(getattr(node, "lineno", 0))


def lazy_scopes(source: Source) -> Iterator[ast.AST]:
    """Where an import is not run when the module is: functions, and what is only for type checkers."""
    yield from source.functions
    for node in source.nodes:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield node


def wrong_imports(source: Source) -> Iterator[str]:
    """Imports are absolute, of ``reroll``, and point down: backends to passes to compiler."""
    lazy = source.path == "compiler/__init__.py"
    inner = {id(node) for scope in lazy_scopes(source) for node in ast.walk(scope)} if lazy else set()
    for node in source.nodes:
        forbidden = PACKAGES if id(node) in inner else PACKAGES + FORBIDDEN.get(source.folder, ())
        for name in imported(node):
            if name.startswith(".") or within(name, forbidden):
                yield f"{source.path}:{line(node)}: imports {name}"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain on a name, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def private_torch(source: Source) -> Iterator[str]:
    """Private torch API is used in the listed files only."""
    if source.folder not in PACKAGES or any(Path(source.path).match(allowed) for allowed in PRIVATE_TORCH):
        return
    inner = {id(node.value) for node in source.nodes if isinstance(node, ast.Attribute)}
    for node in source.nodes:
        names = imported(node) or [dotted(node)] * (id(node) not in inner)
        yield from (f"{source.path}:{line(node)}: {name}" for name in names if re.match(r"torch\.(.*\.)?_(?!_)", name))


def undocumented(source: Source) -> Iterator[str]:
    """In the package every module, public class and public function has a docstring."""
    if source.folder not in PACKAGES:
        return
    if ast.get_docstring(source.tree) is None:
        yield f"{source.path}: no docstring"
    for node in source.tree.body:
        if not isinstance(node, (Function, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{source.path}:{node.lineno}: {node.name} has no docstring"


RULES = (
    long_files,
    long_functions,
    deep_nesting,
    vague_names,
    bare_excepts,
    unfinished,
    wrong_imports,
    private_torch,
    undocumented,
)
Rule = Callable[[Source], Iterator[str]]


def sources() -> Iterator[Source]:
    """Every Python file of the project."""
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        yield Source(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def test_sources_keep_the_rules() -> None:
    found = ((rule, text) for source in sources() for rule in RULES for text in rule(source))
    violations = [f"{rule.__doc__} {text}" for rule, text in found]
    assert not violations, "\n".join(["", *violations])


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


DOC = '"""A."""\n'
LINES = "    x = 1\n"


def nested(levels: int) -> str:
    """A function with so many blocks inside each other."""
    blocks = "".join("    " * level + "if x:\n" for level in range(1, levels + 1))
    return f"def f(x):\n{blocks}{'    ' * levels}    return\n"


MUTANTS: tuple[tuple[Rule, str, str, str], ...] = (
    (long_files, "compiler/a.py", "\n" * 300, "\n" * 301),
    (long_files, "demos/a.py", "\n" * 99, "\n" * 100),
    (
        long_functions,
        "tests/a.py",
        f'def f():\n    """A\n\n    B."""\n\n    # c\n{LINES * 39}',
        f"def f():\n{LINES * 40}",
    ),
    (deep_nesting, "tests/a.py", nested(4), nested(5)),
    (vague_names, "tests/manage.py", "def helped(): ...\n", "class TapeManager: ...\n"),
    (bare_excepts, "tests/a.py", "try: ...\nexcept OSError: ...\n", "try: ...\nexcept: ...\n"),
    (unfinished, "tests/a.py", "x = 'TODO'\n", "x = 1  # TODO: more\n"),
    (wrong_imports, "compiler/a.py", "from reroll import program\n", "from reroll import passes\n"),
    (wrong_imports, "compiler/a.py", "import reroll.cost\n", "def f():\n    import reroll.backends.cpu\n"),
    (wrong_imports, "compiler/__init__.py", "def f():\n    import reroll.passes\n", "import reroll.passes\n"),
    (wrong_imports, "passes/a.py", "import reroll.passes.b\n", "from reroll.backends import cpu\n"),
    (wrong_imports, "tests/a.py", "import reroll\n", "import compiler.program\n"),
    (wrong_imports, "passes/a.py", "from reroll.passes import b\n", "from . import b\n"),
    (private_torch, "passes/a.py", f"{DOC}import torch.fx\n", "from torch.utils import _pytree\n"),
    (private_torch, "passes/a.py", "import torch.__future__\n", "import torch\ntorch._assert(True, '')\n"),
    (undocumented, "passes/a.py", f"{DOC}def _f(): ...\n", f"{DOC}def f(): ...\n"),
)


@pytest.mark.parametrize(("rule", "path", "good", "bad"), MUTANTS)
def test_rules_can_fail(rule: Rule, path: str, good: str, bad: str) -> None:
    assert not list(rule(Source(path, good)))
    assert list(rule(Source(path, bad)))
