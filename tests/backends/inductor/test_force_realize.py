"""Formulas that inductor would write out exponentially often are cut by stored values."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import reroll
from reroll.backends.inductor import force_realize


def doubling(c: Tensor, x: Tensor) -> tuple[Tensor]:
    """Ten steps, each of which reads what it reads three times."""
    for t in range(x.shape[0]):
        double = c + c
        c = 0.9 * c + torch.lerp(double, double, 0.3) + x[t]
    return (c,)


def graph_of(steps: int, decompositions: Any = None) -> fx.GraphModule:
    """The steps as a graph."""
    return make_fx(doubling, decompositions, tracing_mode="fake")(torch.randn(4), torch.randn(steps, 4))


def evaluations(graph: fx.GraphModule) -> int:
    """The most of any formula, where marked values are stored."""
    formulas: dict[fx.Node, force_realize._Formula] = {}
    most = 0
    for node in graph.graph.nodes:
        formula = force_realize._formula(node, formulas)
        most = max(most, formula.evaluations)
        stored = node.meta.get("inductor_realize_to_strides")
        formulas[node] = force_realize._Formula.stored(node) if stored else formula
    return most


def test_the_work_of_inductor_no_longer_grows_with_powers_of_the_steps() -> None:
    graph = graph_of(10)
    assert evaluations(graph) > 10_000
    assert force_realize.store_repeated(graph, most=500) > 1
    assert 100 < evaluations(graph) < 5 * 500


def test_what_is_read_a_few_times_stays_as_it_is() -> None:
    assert force_realize.store_repeated(graph_of(2)) == 0


@pytest.mark.inductor
def test_inductor_stores_what_is_marked() -> None:
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    stored = []
    for most in (force_realize.MOST, 60):
        graph = graph_of(3, select_decomp_table())
        given = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        marked = force_realize.store_repeated(graph, most)
        metrics.reset()
        with given[0].fake_mode, torch.no_grad(), config.patch(fx_graph_cache=False):
            compile_fx_inner(graph, given)
        stored.append((metrics.ir_nodes_pre_fusion, marked))
    (before, none), (after, some) = stored
    assert none == 0 < some
    assert before < after <= before + some  # torch 2.11 stores one of them by itself


@pytest.mark.inductor
def test_gradients_of_steps_that_read_twice_are_those_of_eager() -> None:
    c, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(9, 3, 4, dtype=torch.float64)

    def last(c: Tensor, x: Tensor) -> Tensor:
        return doubling(c, x)[0]

    report = reroll.check(reroll.compile(last, lowering="inductor"), c, x, measure=False)
    assert report.equal, report
