"""What the values of a recorded graph depend on: which are the same at every call, and which are chance alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass
class Dependence:
    """What is known of the nodes so far.

    constant: those that depend on constants, sizes and numbers alone. chance: on these and on random numbers, or on
    what a function of the user's makes of these. updated: memory that is updated in place.
    """

    constant: set[fx.Node] = field(default_factory=set)
    chance: set[fx.Node] = field(default_factory=set)
    updated: set[Any] = field(default_factory=set)
    memory: dict[fx.Node, Any] = field(default_factory=dict)  # of each node that gives a tensor

    def note(self, node: fx.Node, updated: Sequence[fx.Node], unknown: bool = False) -> None:
        """Note an operation and what it updates in place; ``unknown``: it may make anything of constants."""
        read = node.all_input_nodes
        constant = not unknown and self.constant.issuperset(read)
        memory = {self.memory[leaf] for leaf in updated}
        self.updated |= memory
        if constant and not updated:
            self.constant.add(node)
        elif not updated and all(each in self.constant or each in self.chance for each in read):
            self.chance.add(node)
        elif updated and not constant:
            self.constant = {each for each in self.constant if self.memory.get(each) not in memory}
