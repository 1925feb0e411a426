"""What one training was like, and a picture of several beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
from torch import Tensor

STYLES: dict[str, dict[str, Any]] = {
    "plain BPTT": {"color": "#b5443b", "linewidth": 4, "alpha": 0.4},  # wide, as the other lies upon it
    "reroll": {"color": "#2b6c8f", "linewidth": 1.2},
}


@dataclass
class History:
    """Losses and CPU seconds of all updates, and accuracies on what was held out, after how many updates."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)

    def add(self, loss: float, seconds: float) -> None:
        """Note an update."""
        self.losses.append(loss)
        self.seconds.append(seconds)

    def judge(self, right_N: Tensor) -> None:
        """Note which answers are right after the last update."""
        self.accuracies[len(self.losses)] = right_N.double().mean().item()

    def __str__(self) -> str:
        return f"{self.name:10} accuracy {self.accuracy:.3f}, {self.seconds_per_update:.3f} CPU s an update"

    @property
    def accuracy(self) -> float:
        """The last accuracy."""
        return list(self.accuracies.values())[-1]

    @property
    def seconds_per_update(self) -> float:
        """CPU seconds; the first update compiles, which the median does not see."""
        return median(self.seconds)


def smoothed(losses: Sequence[float], weight: float = 0.95) -> list[float]:
    """The running mean of losses."""
    return list(accumulate(losses, lambda mean, loss: weight * mean + (1 - weight) * loss))


def plot(histories: Sequence[History], title: str, path: Path) -> None:
    """Losses on the left, accuracies on the right, a colour for each way to train."""
    figure, (losses, accuracies) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    named = set[str]()
    for history in histories:
        label = history.name if history.name not in named else None
        style = STYLES[history.name]
        losses.plot(smoothed(history.losses), label=label, **style)
        accuracies.plot(list(history.accuracies), list(history.accuracies.values()), label=label, marker=".", **style)
        named.add(history.name)
    losses.set_ylabel("loss (running mean)")
    losses.set_title(title, loc="left", fontsize=10)
    accuracies.set_ylabel("accuracy on what was held out")
    accuracies.set_ylim(0, 1)
    for axes in (losses, accuracies):
        axes.set_xlabel("updates")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
