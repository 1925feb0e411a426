"""What is installed: every file in the wheel, one copy of every module, the entry point, the examples of docstrings."""

import doctest
import importlib
import importlib.metadata
import inspect
import shutil
import subprocess
import sys
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOLDERS = {"compiler": "reroll", "passes": "reroll/passes", "backends": "reroll/backends"}
PACKED = ("*.py", "*.cpp", "*.h", "*.html", "*.css", "*.js")


def installed_files() -> dict[str, str]:
    """Path in the wheel -> path in the repository, for every file that the wheel must hold."""
    paths = [path for folder in FOLDERS for kind in PACKED for path in sorted((ROOT / folder).rglob(kind))]
    names = [path.relative_to(ROOT).as_posix() for path in [*paths, ROOT / "compiler" / "py.typed"]]
    return {FOLDERS[name.partition("/")[0]] + "/" + name.partition("/")[2]: name for name in names}


def module_name(installed: str) -> str:
    return installed.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = sorted(module_name(name) for name in installed_files() if name.endswith(".py"))


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """What a fresh interpreter prints; ``path`` goes before everything that is installed."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{code}" if path else code
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, of a copy of the sources: a build folder left over would leak into it."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CITATION.cff", "build_backend.py"):
        shutil.copy(ROOT / file, source / file)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_wheel_holds_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert packed == set(installed_files())
        assert all(archive.read(name) == (ROOT / origin).read_bytes() for name, origin in installed_files().items())


def test_wheel_declares_the_backend_and_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"reroll-{PROJECT['project']['version']}.dist-info"
        declared = archive.read(f"{info}/entry_points.txt").decode()
        assert "[torch_dynamo_backends]\nreroll = reroll.backends.dynamo:reroll\n" in declared
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


def test_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    code = "import reroll, reroll.passes, reroll.backends.dynamo.entry as d; print(reroll.__file__, d.__file__)"
    assert run_python(code, cwd=tmp_path, path=wheel).count(str(wheel)) == 2


def package_folder(package: str, package_dir: dict[str, str]) -> str:
    """The folder that setuptools reads a package from: its nearest mapped parent, then its own name."""
    parts = package.split(".")
    depth = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in package_dir)
    return "/".join([package_dir[".".join(parts[:depth])], *parts[depth:]])


def test_every_folder_is_a_declared_package() -> None:
    declared = PROJECT["tool"]["setuptools"]
    folders = {package_folder(package, declared["package-dir"]) for package in declared["packages"]}
    assert folders == {Path(origin).parent.as_posix() for origin in installed_files().values()}


def test_no_module_exists_twice() -> None:
    code = (
        f"import importlib, sys\nfor name in {MODULES!r}: importlib.import_module(name)\n"
        "print([n for n in sys.modules if n.partition('.')[0] in ('compiler', 'passes', 'backends')])"
    )
    assert run_python(code, cwd=ROOT).strip() == "[]"


def test_entry_point_is_a_plain_function() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="reroll")
    assert isinstance(entry.load(), types.FunctionType)  # dynamo sets attributes on it


def test_versions_agree() -> None:
    version = importlib.import_module("reroll").__version__
    assert version == importlib.metadata.version("reroll") == PROJECT["project"]["version"]


def test_docstring_examples() -> None:
    """Of modules that have any: doctest takes half a second to find none."""
    for name in MODULES:
        module = importlib.import_module(name)
        assert ">>>" not in inspect.getsource(module) or doctest.testmod(module).failed == 0


def test_links_of_an_editable_install_are_brought_up_to_date(tmp_path: Path) -> None:
    """Also beside the ``__pycache__`` that Python writes among them; what is gone loses its link."""
    shutil.copy(ROOT / "build_backend.py", tmp_path)
    for folder in FOLDERS:
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
    (tmp_path / "compiler" / "old.py").touch()
    code = "import build_backend; print(build_backend.link())"
    links = Path(run_python(code, cwd=tmp_path, path=tmp_path).strip()) / "reroll"
    (links / "__pycache__").mkdir()
    (tmp_path / "compiler" / "old.py").rename(tmp_path / "compiler" / "new.py")
    run_python(code, cwd=tmp_path, path=tmp_path)
    assert {path.name for path in links.iterdir()} == {"new.py", "passes", "backends", "__pycache__"}
    assert (links / "new.py").is_file()
