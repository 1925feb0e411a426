"""In-place code becomes values: every update makes a new node, and later uses read that node.

Aliases are read off Dynamo's example values: two nodes alias when their fake tensors share a storage. A *root* is the
first node of a storage; the others are *views* of it, and so is what gives several of these at once. An update of a
view becomes an update of the root, after which stale views are taken again from the new root. Graph inputs that were
updated are written back once, at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from reroll.capture.normal.detached import cuts_gradients, memories, with_own_memory
from reroll.errors import CaptureError
from reroll.graph.effects import example, gives_operand, spelled
from reroll.graph.inplace import Place, operand, out_of_place, spell, storage_of, updated_places, updates_a_list
from reroll.graph.lines import where
from reroll.graph.private import map_aggregate, set_grad_enabled

_RESHAPES = ("squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "t_")
_CONVERSIONS = ("to", "type", "type_as", "contiguous", "float", "double", "half", "bfloat16", "cpu", "cuda")


def functionalise(graph: fx.Graph) -> fx.Graph:
    """A graph in which no node changes another one's value, but for final write-backs to inputs. Raises CaptureError
    for updates that cannot be followed."""
    if unseen := next(filter(updates_a_list, graph.nodes), None):
        raise CaptureError(
            f"{where(unseen)}: {spelled(unseen)} updates the tensors of a list in place. Update each by itself: "
            "for a, b in zip(these, those): a.add_(b)"
        )
    if any(map(_reshapes, graph.nodes)):
        graph = _with_views(graph)
    if any(map(gives_operand, graph.nodes)):
        graph = _with_aliases(graph)
    graph = with_own_memory(graph)
    updates = {node: places for node in graph.nodes if (places := updated_places(node))}
    touched = _touched(updates)
    if not touched:
        new = fx.Graph()
        new.output(new.graph_copy(graph, {}))
        return new
    return _Rewriter(touched - {None}).run(graph, updates)


def _touched(updates: Mapping[fx.Node, tuple[Place, ...]]) -> set[int | None]:
    """The memory that is updated."""
    return {storage_of(operand(node, place)) for node, places in updates.items() for place in places}


def _reshapes(node: fx.Node) -> bool:
    """Whether a node gives what another one made another shape in place."""
    source = node.all_input_nodes[:1]
    return spelled(node) in _RESHAPES and bool(source) and source[0].op in ("call_function", "call_method")


def _with_views(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which a tensor that is given another shape in place keeps its own, and a view of it is read
    from there on. Raises CaptureError where its own is not known."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    for node in (node for node in new.nodes if _reshapes(node)):
        source = node.all_input_nodes[0]
        if example(source) is example(node):
            source.meta["example_value"] = _before(source, node)
        node.op, node.target = "call_method", spelled(node)[:-1]
        later = {each for each in source.users if each is not node and node < each}
        source.replace_all_uses_with(node, delete_user_cb=later.__contains__)
    return new


def _before(source: fx.Node, node: fx.Node) -> torch.Tensor:
    """The example of a node before another one gave it another shape."""
    value: Any = example(node)
    args, kwargs = fx.map_arg((source.args, source.kwargs), lambda each: each.meta.get("example_value"))
    try:
        with torch.no_grad():
            target: Any = source.target
            call = getattr(type(args[0]), target) if source.op == "call_method" else target
            made = call(*args, **kwargs)
            own = value.detach().as_strided(made.shape, made.stride(), value.storage_offset())
    except Exception as error:
        raise CaptureError(
            f"{where(node)}: {spelled(node)} gives a tensor another shape in place, and its own is not known. Write "
            f"{spelled(node)[:-1]}, which makes a view."
        ) from error
    return own.requires_grad_(value.requires_grad)  # type: ignore[no-any-return]


def _with_aliases(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph in which dropouts that give their operand itself are that, where one of the two is updated, as
    that is seen in the other. Raises CaptureError where the examples of both lie otherwise."""
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    idle = dict.fromkeys(node for node in new.nodes if gives_operand(node))
    while True:
        touched = _touched({node: places for node in new.nodes if (places := updated_places(node))}) - {None}
        shared = (node for node in idle if touched & {storage_of(node), storage_of(node.all_input_nodes[0])})
        node = next(shared, None)
        if node is None:
            return new
        _share(new, node, node.all_input_nodes[0])
        del idle[node]


def _share(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Put the operand of a node in its place: what shares the node's memory shares that of the operand then."""
    value, made, storage = example(source), example(node), storage_of(node)
    if value is None or made is None or value.stride() != made.stride():
        raise CaptureError(
            f"{where(node)}: a dropout that drops nothing gives its operand itself. One of the two is updated in "
            "place, and they may lie otherwise. Write the update out of place."
        )
    for other in (each for each in graph.nodes if storage is not None and storage_of(each) == storage):
        old: torch.Tensor = other.meta["example_value"]
        offset = value.storage_offset() + old.storage_offset() - made.storage_offset()
        viewed = value.detach().as_strided(old.shape, old.stride(), offset)
        other.meta["example_value"] = viewed.requires_grad_(old.requires_grad)
    node.replace_all_uses_with(source)
    graph.erase_node(node)


@dataclass
class _Rewriter:
    """One functionalisation: old nodes to new ones, with the current version of each updated storage."""

    touched: set[int | None]
    new: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    roots: dict[int, fx.Node] = field(default_factory=dict)
    first: dict[int, fx.Node] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    taken: dict[fx.Node, int] = field(default_factory=dict)
    parents: dict[fx.Node, tuple[fx.Node, bool]] = field(default_factory=dict)

    def run(self, graph: fx.Graph, updates: dict[fx.Node, tuple[Place, ...]]) -> fx.Graph:
        for node in graph.nodes:
            if node.op == "output":
                self._write_back()
                self.new.output(fx.map_arg(node.args[0], self._current))
            elif node in updates:
                self._update(node, updates[node])
            else:
                self._copy(node)
        return self.new

    def _copy(self, node: fx.Node) -> None:
        self.env[node] = self.new.node_copy(node, self._current)
        storage = self._memory(node)
        if storage is None or storage not in self.touched:
            return
        if storage not in self.roots:
            self.roots[storage], self.versions[storage] = node, 0
            self.first[storage] = self.env[node]
            return
        bases = [base for base in node.all_input_nodes if self._memory(base) == storage]
        bases = bases or [base for base in node.all_input_nodes if storage in memories(base)]
        if not bases:
            raise CaptureError(
                f"{where(node)}: the value shares memory with one that is updated in place, in a way that reroll "
                "cannot follow. Write the update out of place."
            )
        same = _gives_itself(node, bases[0])
        self.parents[node] = (bases[0], same)
        self.taken[node] = -1 if same else self.versions[storage]

    def _current(self, old: fx.Node) -> fx.Node:
        """The new node that holds the present value of an old one."""
        storage = self._memory(old)
        if storage not in self.touched or storage is None or self.roots.get(storage) is old:
            return self.env[old]
        if self.taken[old] != self.versions[storage]:
            base, same = self.parents[old]
            self.env[old] = self._current(base) if same else self.new.node_copy(old, self._current)
            self.taken[old] = self.versions[storage]
        return self.env[old]

    def _memory(self, node: fx.Node) -> int | None:
        """The memory of a node; of one that gives several views of what it reads (rows, pieces), that of these."""
        own = storage_of(node)
        if own is not None or node.meta.get("example_value") is None:
            return own
        read = {each for base in node.all_input_nodes if (each := storage_of(base)) in self.touched}
        return next((each for each in read if each is not None and each in memories(node)), None)

    def _update(self, node: fx.Node, places: tuple[Place, ...]) -> None:
        values = [operand(node, place) for place in places]
        storages = [storage_of(value) for value in values]
        if len(set(storages)) < len(storages):
            raise CaptureError(f"{where(node)}: one operation updates the same memory twice. Write it out of place.")
        chains = tuple(self._chain(value, node) for value in values)
        swap = {value: self.env[self.roots[_known(storage)]] for value, storage in zip(values, storages, strict=True)}
        args, kwargs = list(fx.map_arg(node.args, self._current)), dict(fx.map_arg(node.kwargs, self._current))
        for place, value in zip(places, values, strict=True):
            if isinstance(place, int):
                args[place] = swap[value]
            else:
                kwargs[place] = swap[value]
        changed = self.new.call_function(out_of_place, (_spelled(node), places, chains, *args), kwargs)
        changed.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
        self._bind(node, changed, values)

    def _bind(self, node: fx.Node, changed: fx.Node, values: list[Any]) -> None:
        own = len(values) > 1 or (storage_of(node) is not None and storage_of(node) != storage_of(values[0]))
        for index, value in enumerate(values):
            storage = _known(storage_of(value))
            root = self.roots[storage]
            result = self.new.call_function(operator.getitem, (changed, index + 1)) if own else changed
            result.meta = dict(changed.meta, example_value=root.meta["example_value"])
            self.env[root] = result
            self.versions[storage] += 1
        if own:
            self.env[node] = self.new.call_function(operator.getitem, (changed, 0))
            self.env[node].meta = dict(node.meta)
            made = storage_of(node)
            if made is not None and made in self.touched:
                self.roots[made], self.versions[made] = node, 0
        elif storage_of(node) is not None:
            self.parents[node] = (values[0], True)
            self.taken[node] = -1

    def _chain(self, value: fx.Node, update: fx.Node) -> tuple[Any, ...]:
        """View operations from the root to a value, as (operation, operands, keywords), outermost first."""
        chain: list[Any] = []
        root = self.roots[_known(storage_of(value))]
        while value is not root:
            base, same = self.parents.get(value, (root, False))
            if not same and cuts_gradients(value):
                raise CaptureError(
                    f"{where(update)}: what detach() gave is updated in place with a gradient, and shares memory with "
                    "what it was taken of. Write clone() behind detach(), or the update out of place"
                )
            if not same:
                extra = value.args[1:]
                others: list[Any] = []
                map_aggregate((extra, value.kwargs), others.append)
                if value.args[:1] != (base,) or any(isinstance(leaf, fx.Node) for leaf in others):
                    raise CaptureError(
                        f"{where(update)}: an update through this view cannot be followed. Write it out of place."
                    )
                chain.append((_spelled(value), tuple(extra), dict(value.kwargs)))
            value = base
        return tuple(reversed(chain))

    def _write_back(self) -> None:
        """Write new values of inputs back, after all else; what is computed reads a copy of the old value."""
        for storage, root in self.roots.items():
            if root.op not in ("placeholder", "get_attr") or self.versions[storage] == 0:
                continue
            original = self.first[storage]
            before = (
                next(n for n in self.new.nodes if n.op != "placeholder") if root.op == "placeholder" else original.next
            )
            with self.new.inserting_before(before):
                copy = self.new.call_method("clone", (original,))
            copy.meta = dict(root.meta)
            original.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)  # type: ignore[misc]
            value = root.meta["example_value"]
            leaf = value.requires_grad and value.is_leaf
            if leaf:
                self.new.call_function(set_grad_enabled, (False,))
            self.new.call_method("copy_", (original, self.env[root]))
            if leaf:
                self.new.call_function(set_grad_enabled, (True,))
            self.env[root] = original
            self.versions[storage] += 1


def _gives_itself(node: fx.Node, base: fx.Node) -> bool:
    """Whether a node gives its first operand itself, as ``x.to(y)`` does where x has the type and device of y."""
    value, made = example(base), example(node)
    if value is None or made is None or node.args[:1] != (base,) or spelled(node) not in _CONVERSIONS:
        return False
    same = value.shape == made.shape and value.stride() == made.stride() and value.dtype == made.dtype
    return same and value.storage_offset() == made.storage_offset()


def _known(storage: int | None) -> int:
    assert storage is not None
    return storage


def _spelled(node: fx.Node) -> str:
    name = spell(node)
    if name is None:
        raise CaptureError(
            f"{where(node)}: the operation {node.target} has no importable name. "
            "Write it out of place; where it changes an array of numpy's, keep a tensor in its place (register_buffer)."
        )
    return name
