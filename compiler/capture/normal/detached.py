"""Memory of its own for what ``detach`` gave and an update in place brings a gradient, where what it was taken of is
not read any more: ``h = h.detach(); h += f(x)``."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from reroll.graph.effects import example, is_torchs
from reroll.graph.inplace import operand, storage_of, updated_places
from reroll.graph.layouts import is_dense
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
    for node in [each for each in new.nodes if cuts_gradients(each)]:
        taken, others = _sharing(node)
        if _is_left(node, taken, others):
            _clone(node, taken)
    return new


def _sharing(node: fx.Node) -> tuple[dict[fx.Node, None], set[fx.Node]]:
    """What shares the memory of a node: what was taken of the node, and all else."""
    storage, taken, others = storage_of(node), {node: None}, set[fx.Node]()
    for each in node.graph.nodes:
        if each is not node and storage is not None and holds(each, storage):
            places = updated_places(each)
            bases = [operand(each, places[0])] if places else each.all_input_nodes
            known = next((base for base in bases if base in taken or base in others), None)
            if known in taken:
                taken[each] = None
            else:
                others.add(each)
    return taken, others


def holds(node: fx.Node, storage: int) -> bool:
    """Whether a node gives a tensor in some memory, alone or among others."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(each, torch.Tensor) and storage_id(each) == storage for each in values)


def _is_left(node: fx.Node, taken: dict[fx.Node, None], others: Set[fx.Node]) -> bool:
    """Whether nothing reads the others once what was taken is updated, and nothing updates them meanwhile."""
    updated = {each: {operand(each, place) for place in updated_places(each)} for each in node.graph.nodes}
    first = next((each for each, operands in updated.items() if operands & taken.keys()), node)
    return (
        all(_lies_in(example(each), node.meta["example_value"]) for each in taken)
        and all(each.op not in ("placeholder", "get_attr") and is_torchs(each) for each in others)
        and all(not first < user and is_torchs(user) for each in others for user in each.users)
        and not any(node < each for each, operands in updated.items() if operands & others)
    )


def _lies_in(value: torch.Tensor | None, whole: torch.Tensor) -> bool:
    """Whether all that a tensor reads are entries of another one, which fills its memory."""
    return value is not None and value.dtype == whole.dtype and is_dense(whole) and value.numel() <= whole.numel()


def _clone(node: fx.Node, taken: dict[fx.Node, None]) -> None:
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
