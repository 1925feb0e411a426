"""Memory against time, what budgets allow beside every contender: ``python benchmarks/frontier.py --jax PYTHON``.

For each network of ``speed.py``, at its usual length: reroll without a budget, within the least that it can do with,
within several budgets between the two, each some times as large as the one before, and within what the online
checkpoints of equinox held when this was measured last, to compare at equal memory. Beside it the contenders of
``speed.py``. All take turns on one core; CPU seconds, medians of the rounds, and the allocator's peak above inputs,
parameters and their gradients. A row is saved in ``results/frontier.json`` as soon as it is measured; ``--plot`` draws
``results/frontier.png``, memory and time with logarithmic axes: a mark for each contender, a curve for reroll.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from speed import OURS, Result, contend, measure_all, parser_of
from speed_networks import NETWORKS, Network
from torch import Tensor

import reroll

RESULT = Path(__file__).resolve().parent / "results" / "frontier.json"
BETWEEN = 4  # budgets between the least and what is held without one
WITHIN, EQUINOX = "reroll within", "equinox, 8 checkpoints"


def ladder(name: str, network: Network, x: Tensor) -> list[int]:
    """The least budget, those up to what is held without one, and what equinox held last time, in bytes."""
    try:
        reroll.compile(network, start="compiled", memory_budget=1)(x)
    except reroll.BudgetError as error:
        least = error.nbytes
    else:
        raise AssertionError("one byte is enough")
    most = reroll.explain(reroll.compile(network, start="compiled"), x).predicted_peak
    assert most is not None
    rungs = [round(least * (most / least) ** (rung / (BETWEEN + 1))) for rung in range(BETWEEN + 1)]
    return sorted({*rungs, *(held for held in _held_before(name) if least <= held <= most)})


def _held_before(name: str) -> list[int]:
    """The peak of equinox on this network in the result file, if it is there."""
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    before = rows.get(name, {"contenders": {}})["contenders"].get(EQUINOX)
    return [before["local_peak_bytes"]] if before else []


def row(name: str, rounds: int, core: int | None, jax: str | None) -> Result:
    """Everything about one network."""
    torch.manual_seed(0)
    make, inputs, steps = NETWORKS[name]
    network, x = make(), inputs(steps)
    budgets = {f"{WITHIN} {budget / 1e6:.2f} MB": {"memory_budget": budget} for budget in ladder(name, network, x)}
    return {"steps": steps, **contend(network, x, OURS | budgets, rounds, core, jax)}


def main() -> None:
    """Parse the options and measure."""
    options = parser_of(__doc__, rounds=9).parse_args()
    if options.row:
        print(json.dumps(row(options.row, options.rounds, options.core, options.jax)))
        return
    measure_all(options, RESULT, NETWORKS, __file__, WITHIN)


if __name__ == "__main__":
    main()
