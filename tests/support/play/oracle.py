"""Exact counts of schedules, made apart from this project (tests/support/data)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"
ORACLE: dict[str, Any] = json.loads((DATA / "schedule_counts.json").read_text())
