"""Results of a graph with loops lie in one memory where they do in the plain graph, and nowhere else.

Who changes a result in place changes all that share its memory. A rewritten graph has other memory than the plain one:
rows of a loop lie in one stack, and what is read of an array that a loop fills is the value that was written there.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from reroll.backends.runtime.undefined_grads import APART
from reroll.graph.effects import example, operation, spelled
from reroll.graph.layouts import laid_in
from reroll.graph.nested import leaves_of, with_leaves

_ByRows = defaultdict[Any, set[Any]]


def lay_results(outer: fx.Graph, plain: fx.Graph) -> None:
    """Give the results of ``outer`` memory as those of the ``plain`` graph have it."""
    _share(outer, plain)
    _separate(outer, plain)


def _share(outer: fx.Graph, plain: fx.Graph) -> None:
    """Make results views of another one, by the operations that do so in the plain graph."""
    given, before = (list(leaves_of(graph.output_node().args)) for graph in (outer, plain))
    whole, views = dict[fx.Node, int](), dict[int, tuple[fx.Node, list[fx.Node]]]()
    for at, each in enumerate(before):
        if isinstance(each, fx.Node) and isinstance(given[at], fx.Node):
            *chain, base = _views(each)
            views[at] = base, chain
    for at in sorted(views, key=lambda at: (len(views[at][1]), at)):
        base, chain = views[at]
        if all(_is_detached(each) for each in chain):
            whole.setdefault(base, at)
    made = dict[int, fx.Node]()
    for at, (base, chain) in views.items():
        source = whole.get(base, at)
        if source == at or given[source] is given[at] or not _may_be_view(before, given, at, source):
            continue
        made[at] = _viewed(outer, given[source], before[at], chain)
    _replace_results(outer, made)


def _may_be_view(before: Sequence[Any], given: Sequence[Any], at: int, source: int) -> bool:
    """Whether a result is to be a view of another one: it does not lie in its memory, or is one of all rows, which
    torch does not let be updated in place; and no gradient is lost."""
    needs = [bool(getattr(example(before[each]), "requires_grad", False)) for each in (at, source)]
    here = laid_in(given[at])
    return (here.rows is not None or here.memory != laid_in(given[source]).memory) and (needs[1] or not needs[0])


def _viewed(outer: fx.Graph, source: fx.Node, plain: fx.Node, chain: Sequence[fx.Node]) -> fx.Node:
    """A value, looked at by the operations of a chain, the last first; without a gradient where ``plain`` has none."""
    with outer.inserting_before(outer.output_node()):
        value = source
        for each in reversed(chain):
            if value is source and _is_detached(each):
                continue
            new = outer.create_node(each.op, each.target, (value, *each.args[1:]), dict(each.kwargs))
            new.meta, value = dict(each.meta), new
        if not getattr(example(plain), "requires_grad", False):
            value = outer.call_method("detach", (value,))
            value.meta = dict(plain.meta)
    return value


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """The views that lead from a value to this one, the last first, then the value, but for updates in place."""
    while True:
        source = node.args[0] if node.args else None
        others = [each for each in node.all_input_nodes if each is not source]
        if node.op not in ("call_function", "call_method") or not isinstance(source, fx.Node):
            break
        name = spelled(node)
        updates = name.endswith("_") and not name.endswith("__")
        several = node.target is operator.getitem and example(source) is None
        if not updates and (others or several or not _is_view(node)):
            break
        if not updates:
            yield node
        node = source
    yield node


def _is_view(node: fx.Node) -> bool:
    """Whether an operation gives the memory of its operand for certain: ``reshape`` may copy, lists of indices do."""
    if node.target is operator.getitem:
        parts = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(part is None or part is ... or type(part) in (int, slice) for part in parts)
    return operation(node).view not in ("", "pieces", "reshaped")


def _is_detached(node: fx.Node) -> bool:
    return operation(node).view == "same"


def _separate(outer: fx.Graph, plain: fx.Graph) -> None:
    """Give results memory of their own where they have that in the plain graph: rows of a loop lie in their stack, and
    who changes one of them in place would change the other."""
    output = outer.output_node()
    given = list(leaves_of(output.args))
    laid = {at: laid_in(each) for at, each in enumerate(given) if isinstance(each, fx.Node)}
    before = [
        laid_in(each).memory if isinstance(each, fx.Node) else None for each in leaves_of(plain.output_node().args)
    ]
    kept, moved = defaultdict[Any, _ByRows](lambda: defaultdict(set)), dict[int, fx.Node]()
    for at in sorted(laid, key=lambda at: laid[at].rows is not None):
        here = laid[at]
        beside = kept[here.memory].items()  # by the call that gives their rows: who has these apart in the plain graph
        if all((rows is not None and rows is here.rows) or whose <= {before[at]} for rows, whose in beside):
            kept[here.memory][here.rows].add(before[at])
        elif here.rows is not None:
            here.rows.meta.setdefault(APART, []).append(here.number)
        else:
            with outer.inserting_before(output):
                moved[at] = outer.call_method("clone", (given[at],))
            moved[at].meta = dict(given[at].meta)
    _replace_results(outer, moved)


def _replace_results(graph: fx.Graph, new: Mapping[int, fx.Node]) -> None:
    """Give other nodes as results, by their numbers."""
    output, numbers = graph.output_node(), itertools.count()
    output.args = with_leaves(lambda leaf: new.get(next(numbers), leaf), output.args)
