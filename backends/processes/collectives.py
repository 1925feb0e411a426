"""Loops whose steps speak with other processes, by functional collectives: all have to play the same program.

A backward runs steps again, and with them their collectives, so processes with other plans would wait for each other
forever, or take one message for another. What makes plans differ from machine to machine is refused, and before every
call the processes compare their programs.

Private torch API, tried on 2.11 and 2.13: ``torch.ops._c10d_functional``, into which Dynamo turns collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.backends.inductor.lower import Segment
from reroll.backends.processes.wrappers import in_parts
from reroll.errors import CaptureError, OptionError, UnsupportedError
from reroll.planning.options import Options
from reroll.program.program import Program
from reroll.recurrence import Recurrence

_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.")
_WAIT = "_c10d_functional.wait_tensor"


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the processes of some groups, by their names, have to have in common to play a program together."""

    groups: tuple[str, ...]
    digest: int
    where: str

    @classmethod
    def of(cls, recurrence: Recurrence, program: Program, segments: Mapping[int, Segment]) -> Agreement | None:
        """None if no step speaks with others."""
        groups = groups_of(recurrence.step)
        if not groups:
            return None
        operands = [(tuple(e.shape), e.stride(), e.dtype, e.requires_grad) for e in recurrence.examples]
        halves = [half for each in segments.values() for half in (each.forward_graph, each.backward_graph) if half]
        spoken = [[_message(node) for node in _collectives(half)] for half in halves]
        text = repr((operands, spoken, [str(graph) for graph in program.graphs]))
        return cls(groups, int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]), recurrence.where)

    def agree(self, device: torch.device) -> None:
        """Wait for the other processes, and raise UnsupportedError in all if one of them has another program."""
        ops: Any = torch.ops._c10d_functional
        own = torch.tensor([self.digest, -self.digest], device=device)
        for group in self.groups:
            most = ops.wait_tensor(ops.all_reduce(own, "max", group))
            if most.tolist() != own.tolist():
                raise UnsupportedError(
                    f"The steps of the loop at {self.where} speak with other processes, which do not all play the same "
                    "program for it: they were given other shapes, numbers of steps or options. Give all the same: pad "
                    "sequences and batches, and use one memory_budget in bytes."
                )


def _message(node: fx.Node) -> str:
    """What a collective sends; inductor makes it one in place where it compiles a graph, and not where it finds it in a
    cache."""
    return str(node.target).replace("_.", ".")


def _collectives(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The collectives of a graph and of the functions in it, in their order."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            name = str(node.target)
            if node.op == "call_function" and name.startswith(_COLLECTIVES) and not name.startswith(_WAIT):
                yield node


def groups_of(step: fx.GraphModule) -> tuple[str, ...]:
    """The names of the groups of processes with which a step speaks, each once."""
    texts = (
        [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, str)] for node in _collectives(step)
    )
    return tuple(dict.fromkeys(names[-1] for names in texts))


def speaks(module: fx.GraphModule) -> bool:
    """Whether a graph speaks with other processes, in a loop or around."""
    return next(_collectives(module), None) is not None


def anywhere(here: bool, groups: Sequence[str], device: torch.device) -> bool:
    """Whether something is so in any of the processes of some groups, which all ask."""
    ops: Any = torch.ops._c10d_functional
    found = torch.tensor(int(here), device=device)
    for group in groups:
        found = ops.wait_tensor(ops.all_reduce(found, "max", group))
    return bool(found)


def check_collectives(recurrences: Sequence[Recurrence], options: Options) -> None:
    """Raise OptionError if a loop speaks with other processes, and its plan would follow the memory of this one.

    Raises UnsupportedError if a loop works on tensors that lie in parts in several processes.
    """
    for each in recurrences:
        if any(map(in_parts, each.examples)):
            raise UnsupportedError(
                f"The loop at {each.where} works on a DTensor, whose parts lie in several processes. Use its local "
                "part (to_local) before the loop and functional collectives in it, or leave this model to another "
                "backend."
            )
        if groups_of(each.step) and options.automatic_budget:
            raise OptionError(
                f"memory_budget='auto' follows the memory that a process has, but the steps of the loop at {each.where}"
                " speak with other processes, which all have to have the same plan. Give bytes, the same to all."
            )


def refuse_in_place(gm: fx.GraphModule) -> None:
    """Raise CaptureError if a collective changes a tensor that has a gradient.

    Eager passes its gradient by the collective, and Dynamo, which makes it functional, sends the gradient through one.
    """
    for node in gm.graph.find_nodes(op="call_method", target="copy_"):
        source = node.args[1]
        value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
        if str(getattr(source, "target", "")).startswith(_WAIT) and value is not None and value.requires_grad:
            raise CaptureError(
                "A collective changes a tensor in place whose gradient is wanted (dist.all_reduce and its kin): eager "
                "gives a gradient as if it were not there, and Dynamo another one. Use the functional one, of "
                "torch.distributed._functional_collectives, or detach the tensor."
            )
