"""Build what is released, and try it as users will: ``make release``.

The wheel and the sdist are built from what is committed, checked by twine, and installed in fresh environments, one for
each version of torch. There, away from the sources, ``python -m reroll doctor`` trains a small network and compares its
gradients. Nothing is uploaded: docs/background/releases.md says what comes next.

``--torch`` names versions (all that are supported, if it is left out), ``--index`` where torch is from, such as
``https://download.pytorch.org/whl/cpu``: torch of PyPI brings gigabytes of CUDA.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TORCHES = ("2.11.0", "2.12.0", "2.13.0")


def main() -> None:
    """Build, check and try, or exit with the first step that failed."""
    given = arguments()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    for problem in (problems := disagreements(version)):
        print(f"release: {problem}", file=sys.stderr)
    if problems:
        sys.exit(1)
    files = build()
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for torch in given.torch:
        for file in files:
            attempt(file, torch, given.index)
    print(f"reroll {version}: {len(files)} files, tried with torch {', '.join(given.torch)}")


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions of torch")
    parser.add_argument("--index", help="an index that torch is installed from")
    return parser.parse_args()


def disagreements(version: str) -> list[str]:
    """Where a file names another version than pyproject.toml does."""
    wanted = {
        "CITATION.cff": f"version: {version}\n",
        "CHANGELOG.md": f"## [{version}]",
        "compiler/__init__.py": f'__version__ = "{version}"\n',
        "release/conda/meta.yaml": f'{{% set version = "{version}" %}}\n',
    }
    return [
        f"{name} lacks {text.strip()!r}: pyproject.toml says version {version}"
        for name, text in wanted.items()
        if text not in (ROOT / name).read_text("utf-8")
    ]


def build() -> list[str]:
    """The paths of the wheel and the sdist, made from what is committed."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run("git", "-C", str(ROOT), "worktree", "add", "--detach", "--force", folder)
        try:
            run(sys.executable, "-m", "build", "--outdir", str(DIST), folder)
        finally:
            run("git", "-C", str(ROOT), "worktree", "remove", "--force", folder)
    return sorted(map(str, DIST.iterdir()))


def attempt(file: str, torch: str, index: str | None) -> None:
    """Install a file beside a torch, in an environment of its own, and have it train."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, *(["--index-url", index] if index else []), f"torch=={torch}")
        run(*pip, f"torch=={torch}", file)
        run(python, "-m", "reroll", "doctor", cwd=folder)


def run(*command: str, cwd: str | None = None) -> None:
    """Run a command, or exit as it does."""
    print("+", *command, flush=True)
    done = subprocess.run(command, cwd=cwd, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
