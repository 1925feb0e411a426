"""What a user asks of tapes: values of a step that are kept, and values that are made again in the backward.

In the manner of torch's selective checkpointing (``torch.utils.checkpoint.CheckpointPolicy``) and of JAX's
(``jax.checkpoint_policies``), but of the steps inside of a segment: a rule is a name that ``reroll.name`` gave, the
name of an operation, or a predicate. What the rules say nothing about stays the choice of
``reroll.segment.cut.partition``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from reroll.errors import OptionError, did_you_mean
from reroll.graph.editing import ancestors
from reroll.graph.memory import origin
from reroll.graph.names import names_of
from reroll.graph.private import is_overload

MOST_SHOWN = 12  # operations that a message lists


@dataclass(frozen=True, slots=True)
class StepValue:
    """A tensor that a step makes.

    ``name`` was given by ``reroll.name``, and is empty without. ``op`` is the operation of ATen, such as "aten.tanh",
    of the step as ``lowering`` has it (inductor takes some apart); of an input "input" or "carry". ``nbytes`` is its
    size as it is computed.
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int

    def describe(self) -> str:
        """A few words for a message."""
        named = f"{self.name!r}, " if self.name else ""
        return f"a value of shape {list(self.shape)} ({named}{self.op})"


Rule = str | Callable[[StepValue], bool]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of the options ``keep`` and ``recompute``, for the loop at ``where``."""

    keep: tuple[Rule, ...] = ()
    recompute: tuple[Rule, ...] = ()
    where: str = ""

    def __bool__(self) -> bool:
        return bool(self.keep or self.recompute)

    def ruled(self, values: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values that are to be kept, and those that are to be recomputed. Raises OptionError for one in both."""
        named = {text for node in values for text in names_of(node)}
        found = [{node for node in values if _meets(node, rules, named)} for rules in (self.keep, self.recompute)]
        for node in values:
            if node in found[0] and node in found[1]:
                raise OptionError(
                    f"In the loop at {self.where} keep={_spelled(self.keep)} and recompute="
                    f"{_spelled(self.recompute)} both hold of {describe(node)}. Take it out of one of them."
                )
        return found[0], found[1]

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Raise the OptionError that a value cannot be recomputed; ``reason`` says what it is."""
        raise OptionError(
            f"Option recompute={_spelled(self.recompute)} holds, in the loop at {self.where}, of {describe(node)}, and "
            f"that cannot be recomputed: it {reason}. Leave it out; a predicate can tell it by its op, name or dtype."
        )


NO_POLICY = Policy()


def check_texts(policy: Policy, values: Sequence[fx.Node]) -> None:
    """Raise OptionError for a rule that is a text and names none of the values, which are those of all loops."""
    named = sorted({text for node in values for text in names_of(node)})
    ops = sorted({operation(node) for node in values if node.op == "call_function"})
    for option, rules in (("keep", policy.keep), ("recompute", policy.recompute)):
        for rule in rules:
            if not isinstance(rule, str) or rule in named or any(rule in _ways(op) for op in ops):
                continue
            hint = did_you_mean(rule, [*named, *(way for op in ops for way in _ways(op))])
            given = ", ".join(map(repr, named)) if named else "none; give them with reroll.name(tensor, 'a name')"
            shown = ", ".join(ops[:MOST_SHOWN]) + (", ..." if len(ops) > MOST_SHOWN else "")
            raise OptionError(
                f"Option {option}={rule!r} names no value of the loop at {policy.where}. {hint}"
                f"Names given there: {given}. Operations: {shown}."
            )


def operation(node: fx.Node) -> str:
    """The name of what makes a value, such as "aten.tanh"; of an input what it is."""
    if node.op == "placeholder":
        return "carry" if "carry" in node.meta else "input"
    target: Any = node.target
    if target is operator.getitem:
        return operation(node.all_input_nodes[0])
    return f"{target.namespace}.{target.overloadpacket.__name__}" if is_overload(target) else str(target)


def values_of(node: fx.Node) -> Iterator[StepValue]:
    """The value of a node, once for each of its names; a view without a name goes by what it is of."""
    value, source = node.meta["val"], node if names_of(node) else origin(node)
    for text in names_of(source) or ("",):
        yield StepValue(text, operation(source), tuple(value.shape), value.dtype, value.numel() * value.element_size())


def describe(node: fx.Node) -> str:
    """A few words on a node's value, for a message."""
    return next(values_of(node)).describe()


def forward_values(graph: fx.Graph, outputs: int) -> list[fx.Node]:
    """The nodes that a policy is asked about, of a joint graph with ``outputs`` results of its forward.

    Of these results' making all tensors that are no views of others, and what has a name; of a call with several
    results all.
    """
    results: Any = graph.output_node().args[0]
    made = ancestors([node for node in results[:outputs] if isinstance(node, fx.Node)])
    made |= {node for node in graph.nodes if node.target is operator.getitem and node.all_input_nodes[0] in made}
    tensors = [node for node in graph.nodes if node in made and isinstance(node.meta.get("val"), Tensor)]
    return [node for node in tensors if names_of(node) or (node.op == "call_function" and origin(node) is node)]


def _meets(node: fx.Node, rules: tuple[Rule, ...], named: set[str]) -> bool:
    """Whether a rule holds of a node; a text that is a name somewhere is no operation. Predicates see what is made."""
    if not rules:
        return False
    own, ways = names_of(node), _ways(operation(node))
    texts = [rule for rule in rules if isinstance(rule, str)]
    if any(text in own or (text not in named and text in ways) for text in texts):
        return True
    made = origin(node).op != "placeholder"
    return made and any(rule(value) for rule in rules if not isinstance(rule, str) for value in values_of(node))


def _ways(op: str) -> tuple[str, ...]:
    """How an operation may be written."""
    return op, op.rpartition(".")[2]


def _spelled(rules: tuple[Rule, ...]) -> str:
    """Rules as the user may have written them."""
    texts = [repr(rule) if isinstance(rule, str) else getattr(rule, "__name__", repr(rule)) for rule in rules]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
