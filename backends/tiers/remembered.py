"""What calibrations found, kept on disk: one JSON file for each machine, version of torch and spill folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from reroll.errors import MachineError, RerollWarning
from reroll.schedules.machine import Machine

Origin = Mapping[str, str]
"""On what was measured: names and values, all text."""


def cache_folder() -> Path:
    """``REROLL_CACHE_DIR``, else ``reroll`` in ``XDG_CACHE_HOME`` or ``~/.cache``; for a user without a home, in the
    system's temporary folder."""
    own, shared = os.environ.get("REROLL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if shared:
        return Path(shared) / "reroll"
    try:
        return Path.home() / ".cache" / "reroll"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / "reroll"


def path_of(origin: Origin) -> Path:
    """The file of a calibration."""
    digest = hashlib.sha256(json.dumps(dict(origin), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"machine-{digest[:16]}.json"


def recall(origin: Origin) -> Machine | None:
    """The machine that was measured on ``origin``; None if there is none.

    A file that is broken, or speaks of another origin, is ignored with a RerollWarning.
    """
    path = path_of(origin)
    if not path.exists():
        return None
    try:
        read = json.loads(path.read_text("utf-8"))
        machine = Machine.from_json(json.dumps(read["machine"]))
        found = dict(read["measured_on"])
    except (OSError, ValueError, TypeError, KeyError, MachineError) as error:
        _ignore(path, f"is broken ({type(error).__name__}: {error})")
        return None
    other = [f"{name} {found.get(name)!r}, not {value!r}" for name, value in origin.items() if found.get(name) != value]
    if other:
        _ignore(path, f"was taken elsewhere ({'; '.join(other)})")
        return None
    return machine


def remember(origin: Origin, machine: Machine) -> None:
    """Write the file, whole or not at all, also where several processes do. A RerollWarning where it cannot be."""
    path = path_of(origin)
    text = json.dumps({"measured_on": dict(origin), "machine": json.loads(machine.to_json())}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        try:
            Path(file.name).replace(path)
        except OSError:
            Path(file.name).unlink()
            raise
    except OSError as error:
        warnings.warn(
            f"The calibration cannot be kept in {path.parent} ({error.strerror}), so it is measured again in every "
            "process. Set REROLL_CACHE_DIR to a folder that can be written.",
            RerollWarning,
            stacklevel=3,
        )


def _ignore(path: Path, why: str) -> None:
    warnings.warn(
        f"The calibration in {path} {why}; the machine is measured again.",
        RerollWarning,
        stacklevel=4,
    )
