"""Memory of its own for what ``detach`` gave and an update in place brings a gradient, where what it was taken of is
not read any more: ``h = h.detach(); h += f(x)``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set

import torch
from torch import fx

from reroll.graph.effects import example, is_torchs
from reroll.graph.inplace import operand, updated_places
from reroll.graph.layouts import is_dense
from reroll.graph.nested import tensors_of
from reroll.graph.private import storage_id


def cuts_gradients(view: fx.Node) -> bool:
    """Whether a view is one of ``detach`` that needs a gradient after all: an update in place has brought it."""
    value = view.meta.get("example_value")
    name = view.target if isinstance(view.target, str) else getattr(view.target, "__name__", "")
    return isinstance(value, torch.Tensor) and value.requires_grad and name in ("detach", "detach.default")


def with_own_memory(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which such a ``detach`` is cloned; itself where there is none. A later update of the one is
    seen in the other in any other case: what ``functionalise`` refuses."""
    if not any(map(cuts_gradients, graph.nodes)):
        return graph
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    sharing = defaultdict[int, list[fx.Node]](list)
    for node in new.nodes:
        for memory in memories(node):
            sharing[memory].append(node)
    for node in [each for each in reversed(new.nodes) if cuts_gradients(each)]:  # what is taken of it has its own then
        memory = storage_id(node.meta["example_value"])
        taken, others = _taken_of(node, sharing[memory])
        if _is_left(node, taken, others):
            own = _clone(node, taken)
            sharing[memory] = [each for each in sharing[memory] if each in others or each is node]
            sharing[storage_id(own.meta["example_value"])] = [own, *(each for each in taken if each is not node)]
    return new


def _taken_of(node: fx.Node, sharing: Sequence[fx.Node]) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """Of what shares the memory of a node, in the graph's order: what was taken of the node, and all else."""
    taken, others = {node: None}, set[fx.Node]()
    for each in sharing:
        if each is not node:
            places = updated_places(each)
            bases = [operand(each, places[0])] if places else each.all_input_nodes
            if next((base for base in bases if base in taken or base in others), None) in taken:
                taken[each] = None
            else:
                others.add(each)
    return taken, others


def memories(node: fx.Node) -> set[int]:
    """The memory of the tensors that a node gives, alone or several."""
    return {storage_id(each) for each in tensors_of(node.meta.get("example_value"))}


def _updates(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """What updates one of some nodes in place, in the graph's order."""
    found = {
        user for each in nodes for user in each.users if any(operand(user, at) is each for at in updated_places(user))
    }
    return sorted(found)


def _is_left(node: fx.Node, taken: dict[fx.Node, None], others: Set[fx.Node]) -> bool:
    """Whether nothing reads the others once what was taken is updated, and nothing updates them meanwhile."""
    first = next(iter(_updates(taken)), node)
    return (
        all(_lies_in(example(each), node.meta["example_value"]) for each in taken)
        and all(each.op not in ("placeholder", "get_attr") and is_torchs(each) for each in others)
        and all(not first < user and is_torchs(user) for each in others for user in each.users)
        and not any(node < each for each in _updates(others))
    )


def _lies_in(value: torch.Tensor | None, whole: torch.Tensor) -> bool:
    """Whether all that a tensor reads are entries of another one, which fills its memory."""
    return value is not None and value.dtype == whole.dtype and is_dense(whole) and value.numel() <= whole.numel()


def _clone(node: fx.Node, taken: dict[fx.Node, None]) -> fx.Node:
    """Put a clone behind a node, of which all was taken then: in memory of its own."""
    value: torch.Tensor = node.meta["example_value"]
    memory = value.detach().new_empty(value.numel())
    with node.graph.inserting_before(node.next):
        own = node.graph.call_method("clone", (node,))
    own.meta = dict(node.meta)
    node.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    node.meta["example_value"] = value.detach()
    for each in [own, *(each for each in taken if each is not node)]:
        old = each.meta["example_value"]
        viewed = memory.as_strided(old.shape, old.stride(), old.storage_offset() - value.storage_offset())
        each.meta["example_value"] = viewed.requires_grad_(old.requires_grad)
    return own
