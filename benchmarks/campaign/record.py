"""What the campaign has found, in one file: a section for each kind of evidence, with where and by what it was made."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "campaign.json"
Section = dict[str, Any]


def read(path: Path, section: str) -> Section:
    """A section of the file, empty where there is none."""
    found: Section = json.loads(path.read_text()).get(section, {}) if path.exists() else {}
    return found


def write(path: Path, section: str, found: Mapping[str, Any]) -> None:
    """Put a section in place of the one that is there; others stay."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, section: found}, indent=1) + "\n")


def environment(command: str) -> Section:
    """Where and by what something was measured."""
    sys.path.append(str(Path(__file__).parents[1]))  # behind this folder
    made: Section = importlib.import_module("measuring").machine(command)
    return made
