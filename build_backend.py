"""setuptools, with editable installs that mypy and pyright can follow (PEP 517, PEP 660).

setuptools' own editable install of three folders that are one package is an import hook, which type checkers and
editors do not run. Here a ``.pth`` file names a folder of links that has the shape of the wheel. What is linked are
folders, so that a new file is seen at once; only a new file or folder directly in ``compiler/`` needs another install.
"""

from __future__ import annotations

import tempfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
ROOT = Path(__file__).resolve().parent
LINKS = ROOT / ".editable"
KIND = "Wheel-Version: 1.0\nGenerator: reroll\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def link() -> Path:
    """The folder of links, made or brought up to date."""
    package = LINKS / "reroll"
    package.mkdir(parents=True, exist_ok=True)
    parts = {path.name: path for path in [*(ROOT / "compiler").iterdir(), ROOT / "passes", ROOT / "backends"]}
    parts.pop("__pycache__", None)  # Python writes one of its own among the links
    for link in package.iterdir():
        if link.is_symlink() and link.readlink() != parts.get(link.name):
            link.unlink()
    for name, path in parts.items():
        if not (package / name).is_symlink():
            (package / name).symlink_to(path)
    return LINKS


def build_editable(
    wheel_directory: str, config_settings: dict[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Write a wheel that holds the metadata and a path; its name."""
    with tempfile.TemporaryDirectory() as scratch:
        info = build_meta.prepare_metadata_for_build_editable(scratch, config_settings)
        files = {
            f"{info}/{path.relative_to(Path(scratch, info)).as_posix()}": path.read_bytes()
            for path in sorted(Path(scratch, info).rglob("*"))
            if path.is_file()
        }
    files["__editable__.reroll.pth"] = f"{link()}\n".encode()
    files[f"{info}/WHEEL"] = KIND.encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    name = f"{info.removesuffix('.dist-info')}-0.editable-py3-none-any.whl"
    with ZipFile(Path(wheel_directory, name), "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return name


def _digest(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
