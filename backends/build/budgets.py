"""Whether the machine has what a memory budget allows."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from reroll.backends.tiers.available import free_bytes, total_bytes
from reroll.errors import RerollWarning
from reroll.options import Options, parse_budget
from reroll.report.tables import nbytes_text


def within_machine(options: Options, device: torch.device) -> Options:
    """The options with a budget of no more bytes than the device has in total.

    A RerollWarning says so where the budget is larger than that, or than what is free now. Fractions stay as they are.
    """
    budget = parse_budget(options.memory_budget)
    if not isinstance(budget, int):
        return options
    free, total = free_bytes(device), total_bytes(device)
    asked = f"memory_budget={options.memory_budget!r} ({nbytes_text(budget)})"
    if total is not None and budget > total:
        text = f"{asked} is more than the {nbytes_text(total)} of memory that this machine has. The plan keeps to that."
        warnings.warn(text, RerollWarning, stacklevel=2)
        return replace(options, memory_budget=total)
    if free is not None and budget > free:
        text = (
            f"{asked} is more than the {nbytes_text(free)} of memory that are free now. The plan keeps to the budget, "
            "so it may need memory that others hold. Give a smaller budget."
        )
        warnings.warn(text, RerollWarning, stacklevel=2)
    return options
