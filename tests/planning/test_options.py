"""Options: every wrong name and value is a sentence that says what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reroll.errors import OptionError
from reroll.planning.options import Options, parse_budget

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"shedule": "double"}, r"Unknown option 'shedule'. Did you mean 'schedule'\?"),
    ({"budget": 1}, r"Unknown option 'budget'. Did you mean 'memory_budget'\?"),
    ({"fullgraph": True}, r"Unknown option 'fullgraph'. reroll.compile records a model"),
    ({"mode": "max-autotune"}, r"Unknown option 'mode'. reroll has no modes"),
    ({"backend": "reroll"}, r"Unknown option 'backend'. reroll.compile is a way to call this backend"),
    ({"dynamic": True}, r"Unknown option 'dynamic'. reroll.compile and torch.compile take it beside"),
    ({"time_dim": 0}, r"Unknown option 'time_dim'. Loops are found in what the model does, and nobody names time"),
    ({"steps": "n"}, r"Unknown option 'steps'. Loops are found in what the model does, and nobody names time"),
    ({"los": 0}, r"Unknown option 'los'. Did you mean 'loss'\? It is an argument of reroll.compile"),
    ({"qqq": 1}, r"Unknown option 'qqq'. Valid are: schedule, memory_budget"),
    ({"schedule": "doubel"}, r"schedule='doubel' is not valid. Did you mean 'double'\?"),
    ({"schedule": None}, "schedule=None is not valid"),
    ({"schedule": ["double"]}, "schedule=.* is not valid"),
    ({"schedule": "hrevolv"}, r"schedule='hrevolv' is not valid. Did you mean 'hrevolve'\?"),
    ({"remote": "disc"}, r"remote='disc' is not valid. Did you mean 'disk'\?"),
    ({"remote": 3}, "remote=3 is not valid"),
    ({"remote": ("disk", 3)}, "remote=3 is not valid"),
    ({"codec": "lossy"}, "codec='lossy' is not valid. .*Valid are: auto, none"),
    ({"lowering": "Inductor"}, r"lowering='Inductor' is not valid. Did you mean 'inductor'\?"),
    ({"on_no_recurrence": "raise"}, "on_no_recurrence='raise' is not valid. .*warn, error"),
    ({"segment": 0}, "segment=0 must be a whole number of at least 1"),
    ({"segment": True}, "segment=True must be a whole number"),
    ({"chunk": 2.0}, "chunk=2.0 must be a whole number"),
    ({"slots": "4"}, "slots='4' must be a whole number"),
    ({"verify": "yes"}, "verify='yes' is not a bool"),
    ({"passes": 3}, "passes=3 must be a tuple of names or a comma-separated text"),
    ({"passes": ("save", 3)}, "passes=.* must be a tuple of names"),
    ({"spill_folder": "/no/such/folder", "remote": "disk"}, "spill_folder='/no/such/folder' is not a folder"),
    ({"remote": "disk"}, "remote='disk' alone has no effect"),
    ({"memory_budget": "lots"}, "memory_budget='lots' is not a size"),
    ({"memory_budget": "5 parsecs"}, "memory_budget='5 parsecs' is not a size"),
    ({"memory_budget": "0 MiB"}, "memory_budget='0 MiB' must be positive"),
    ({"memory_budget": -1}, "memory_budget=-1 must be positive"),
    ({"memory_budget": 0}, "memory_budget=0 must be positive"),
    ({"memory_budget": True}, "memory_budget=True must be positive"),
    ({"memory_budget": 1.5}, r"a float is a fraction in \(0, 1\]"),
    ({"memory_budget": float("nan")}, "memory_budget=nan must be positive"),
)
CONTRADICTORY: tuple[tuple[dict[str, Any], str], ...] = (
    ({"schedule": "standard", "remote": "disk"}, "remote='disk' has no effect with schedule='standard'"),
    ({"schedule": "store_all", "chunk": 4}, "chunk=4 has no effect with schedule='store_all'"),
    (
        {"schedule": "standard", "slots": 4},
        "slots=4 goes with one of 'hierarchical', 'double', .*, not with schedule='standard'",
    ),
    ({"schedule": "double", "slots": 9, "chunk": 4}, "slots=9 is more than the chunk=4 steps"),
    ({"schedule": "remote", "remote": "local"}, "remote='local' .* goes with schedule='double'"),
    ({"schedule": "double", "remote": ("local", "disk")}, "mixes 'local' with remote tiers"),
    ({"schedule": "double", "remote": ("host", "disk")}, "names several tiers; name one"),
    ({"schedule": "standard", "spill_folder": "."}, "spill_folder='.' has no effect without remote='disk'"),
    ({"schedule": "double", "remote": "local", "spill_folder": "."}, "spill_folder='.' has no effect"),
)
BUDGETS: tuple[tuple[Any, Any], ...] = (
    (None, None),
    (1000, 1000),
    (0.25, 0.25),
    (1.0, 1.0),
    ("1000", 1000),
    ("12 B", 12),
    ("1kB", 1000),
    ("1.5KiB", 1536),
    ("512MiB", 512 * 2**20),
    (" 2 gib ", 2**31),
    ("3GB", 3 * 10**9),
)


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_wrong(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        Options.of(options)


@pytest.mark.parametrize(("options", "sentence"), CONTRADICTORY)
def test_contradictory(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=f"Contradictory options: .*{sentence}"):
        Options.of(options)


def test_options_are_a_mapping() -> None:
    wrong: Any = ["schedule"]
    with pytest.raises(OptionError, match="must be a mapping from names to values"):
        Options.of(wrong)


@pytest.mark.parametrize(("given", "meant"), BUDGETS)
def test_budget(given: Any, meant: Any) -> None:
    found = parse_budget(given)
    assert found == meant
    assert type(found) is type(meant)


def test_right(tmp_path: Path) -> None:
    assert Options.of(None) == Options()
    options = Options.of(
        {"schedule": "double", "remote": "disk", "spill_folder": str(tmp_path), "chunk": 8, "slots": 8}
    )
    assert options.tiers == ("disk",)
    assert Options.of({"remote": ("disk",), "schedule": "remote"}).tiers == ("disk",)
    assert Options.of({"schedule": "remote", "spill_folder": str(tmp_path)}).spill_folder == str(tmp_path)


def test_lists_are_taken_as_tuples() -> None:
    options = Options.of({"passes": ["prefetch"], "remote": ["disk"], "schedule": "double"})
    assert (options.passes, options.remote) == (("prefetch",), ("disk",))
    assert hash(options)
