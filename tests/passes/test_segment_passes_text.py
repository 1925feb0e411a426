"""What each pass on halves of segments does: a few operations before it, and behind it.

Of two steps of two rows each; ``x`` holds the rows of all steps.
"""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from reroll.program.context import Context
from reroll.program.registry import run_on_half
from reroll.schedules.interval import Interval
from reroll.segment.facts import bits
from text import half_of, half_text

EAGER = Context(Interval(1))
COMPILED = replace(EAGER, lowering="inductor", vectors=True)


def behind(name: str, before: str, context: Context = COMPILED) -> str:
    """The half behind a pass, which is seen to keep its results."""
    half = half_of(before)
    assert half_text(half) == before
    values = [node.meta["val"] for node in half.graph.find_nodes(op="placeholder")]
    expected = half(*values)
    found = run_on_half(name, half, context)
    torch.testing.assert_close(found(*values), expected, rtol=1e-4, atol=1e-4)
    return half_text(found)


def test_batch_products_makes_one_product_of_those_that_wait_for_nothing() -> None:
    """Products with the state of the step before stay where they are."""
    before = dedent("""\
        h: f32[2, 4] = carry
        x: f32[2, 2, 3] = per_step
        w: f32[3, 4] = constant
        u: f32[4, 4] = constant
        x0: f32[2, 3] = aten.select.int(x, 0, 0)
        in0: f32[2, 4] = aten.mm.default(x0, w)
        back0: f32[2, 4] = aten.mm.default(h, u)
        h0: f32[2, 4] = aten.add.Tensor(in0, back0)
        x1: f32[2, 3] = aten.select.int(x, 0, 1)
        in1: f32[2, 4] = aten.mm.default(x1, w)
        back1: f32[2, 4] = aten.mm.default(h0, u)
        h1: f32[2, 4] = aten.add.Tensor(in1, back1)
        return h1
        """)
    assert behind("batch-products", before) == dedent("""\
        h: f32[2, 4] = carry
        x: f32[2, 2, 3] = per_step
        w: f32[3, 4] = constant
        u: f32[4, 4] = constant
        back0: f32[2, 4] = aten.mm.default(h, u)
        reshape: f32[4, 3] = aten.reshape.default(x, [4, 3])
        mm: f32[4, 4] = aten.mm.default(reshape, w)
        slice: f32[2, 4] = aten.slice.Tensor(mm, 0, 0, 2)
        h0: f32[2, 4] = aten.add.Tensor(slice, back0)
        slice_1: f32[2, 4] = aten.slice.Tensor(mm, 0, 2, 4)
        back1: f32[2, 4] = aten.mm.default(h0, u)
        h1: f32[2, 4] = aten.add.Tensor(slice_1, back1)
        return h1
        """)
    moving = before.replace(" = constant", "")
    assert behind("batch-products", moving) == moving
    lying = before.replace("return h1", "rows: f32[8] = aten.as_strided.default(h1, [8], [1], 0)\nreturn rows")
    assert behind("batch-products", lying) == lying


def test_merge_gradients_makes_one_product_of_a_sum_of_products() -> None:
    """What is multiplied is brought together in the order of time; a sum over rows, as of a bias, goes the same way."""
    before = dedent("""\
        x: f32[2, 2, 3] = per_step
        g0: f32[2, 6]
        g1: f32[2, 6]
        x0: f32[2, 3] = aten.select.int(x, 0, 0)
        x1: f32[2, 3] = aten.select.int(x, 0, 1)
        x1_t: f32[3, 2] = aten.permute.default(x1, [1, 0])
        x0_t: f32[3, 2] = aten.permute.default(x0, [1, 0])
        w1: f32[3, 6] = aten.mm.default(x1_t, g1)
        w0: f32[3, 6] = aten.mm.default(x0_t, g0)
        w: f32[3, 6] = aten.add.Tensor(w1, w0)
        b1: f32[1, 6] = aten.sum.dim_IntList(g1, [0], True)
        b0: f32[1, 6] = aten.sum.dim_IntList(g0, [0], True)
        b: f32[1, 6] = aten.add.Tensor(b1, b0)
        return w, b
        """)
    assert behind("merge-gradients", before) == dedent("""\
        x: f32[2, 2, 3] = per_step
        g0: f32[2, 6]
        g1: f32[2, 6]
        cat: f32[4, 6] = aten.cat.default([g0, g1], 0)
        sum: f32[1, 6] = aten.sum.dim_IntList(cat, [0], True)
        reshape: f32[4, 3] = aten.reshape.default(x, [4, 3])
        permute: f32[3, 4] = aten.permute.default(reshape, [1, 0])
        mm: f32[3, 6] = aten.mm.default(permute, cat)
        return mm, sum
        """)
    read = before.replace("return w, b", "return w, b, w0, b0")
    assert behind("merge-gradients", read) == read


@pytest.mark.parametrize(("columns", "merged"), [(4, False), (5, True)])
def test_merge_gradients_leaves_sums_over_many_rows_apart(columns: int, merged: bool) -> None:
    """On a CPU with vectors: where a product sums over half as many rows as its result is wide, or more."""
    before = dedent(f"""\
        x0_t: f32[3, 2]
        x1_t: f32[3, 2]
        g0: f32[2, {columns}]
        g1: f32[2, {columns}]
        w1: f32[3, {columns}] = aten.mm.default(x1_t, g1)
        w0: f32[3, {columns}] = aten.mm.default(x0_t, g0)
        w: f32[3, {columns}] = aten.add.Tensor(w1, w0)
        return w
        """)
    found = behind("merge-gradients", before)
    assert (found != before) == merged


def test_merge_gradients_adds_first_where_products_share_an_operand() -> None:
    before = dedent("""\
        x: f32[2, 2, 3] = per_step
        w: f32[3, 8] = constant
        x0: f32[2, 3] = aten.select.int(x, 0, 0)
        x1: f32[2, 3] = aten.select.int(x, 0, 1)
        y0: f32[2, 8] = aten.mm.default(x0, w)
        y1: f32[2, 8] = aten.mm.default(x1, w)
        y: f32[2, 8] = aten.add.Tensor(y0, y1)
        return y
        """)
    assert behind("merge-gradients", before) == dedent("""\
        x: f32[2, 2, 3] = per_step
        w: f32[3, 8] = constant
        x0: f32[2, 3] = aten.select.int(x, 0, 0)
        x1: f32[2, 3] = aten.select.int(x, 0, 1)
        add: f32[2, 3] = aten.add.Tensor(x0, x1)
        mm: f32[2, 8] = aten.mm.default(add, w)
        return mm
        """)


def test_event_products_are_those_of_spikes() -> None:
    """Products of other values stay, and so do small ones."""
    before = dedent("""\
        v: f32[64, 128] = carry
        w: f32[128, 128] = constant
        b: f32[128] = constant
        few: f32[128, 2] = constant
        g: f32[64, 128]
        above: bool[64, 128] = aten.gt.Scalar(v, 1)
        z: f32[64, 128] = prims.convert_element_type.default(above, torch.float32)
        y: f32[64, 128] = aten.addmm.default(b, z, w)
        z_t: f32[128, 64] = aten.permute.default(z, [1, 0])
        gw: f32[128, 128] = aten.mm.default(z_t, g)
        dense: f32[64, 128] = aten.mm.default(v, w)
        small: f32[64, 2] = aten.mm.default(z, few)
        return y, gw, dense, small
        """)
    assert behind("event-products", before) == dedent("""\
        v: f32[64, 128] = carry
        w: f32[128, 128] = constant
        b: f32[128] = constant
        few: f32[128, 2] = constant
        g: f32[64, 128]
        above: bool[64, 128] = aten.gt.Scalar(v, 1)
        z: f32[64, 128] = prims.convert_element_type.default(above, torch.float32)
        event_product: f32[64, 128] = reroll.event_product.default(b, z, w, 0.2, 0)
        event_outer: f32[128, 128] = reroll.event_outer.default(z, g, 0.28, 0)
        dense: f32[64, 128] = aten.mm.default(v, w)
        small: f32[64, 2] = aten.mm.default(z, few)
        return event_product, event_outer, dense, small
        """)
    assert behind("event-products", before, EAGER) == before


def test_event_products_know_a_carry_by_its_facts_and_turn_a_weight_once() -> None:
    before = dedent("""\
        z: f32[64, 128] = carry
        g: f32[64, 128]
        w: f32[128, 128] = constant
        gain: f32[1] = constant
        w_t: f32[128, 128] = aten.permute.default(w, [1, 0])
        y: f32[64, 128] = aten.mm.default(z, w_t)
        scaled: f32[64, 128] = aten.mul.Tensor(z, gain)
        y_scaled: f32[64, 128] = aten.mm.default(scaled, w_t)
        g_t: f32[128, 64] = aten.permute.default(g, [1, 0])
        gw: f32[128, 128] = aten.mm.default(g_t, z)
        return y, y_scaled, gw
        """)
    assert behind("event-products", before, replace(COMPILED, facts=(bits(torch.float32),))) == dedent("""\
        z: f32[64, 128] = carry
        g: f32[64, 128]
        w: f32[128, 128] = constant
        gain: f32[1] = constant
        w_t: f32[128, 128] = aten.permute.default(w, [1, 0])
        event_rows: f32[128, 128] = reroll.event_rows.default(w_t)
        event_product: f32[64, 128] = reroll.event_product.default(None, z, event_rows, 0.2, 0)
        scaled: f32[64, 128] = aten.mul.Tensor(z, gain)
        event_product_1: f32[64, 128] = reroll.event_product.default(None, scaled, event_rows, 0.2, 0)
        event_outer: f32[128, 128] = reroll.event_outer.default(z, g, 0.28, 0)
        permute: f32[128, 128] = aten.permute.default(event_outer, [1, 0])
        clone: f32[128, 128] = aten.clone.default(permute, memory_format=torch.contiguous_format)
        return event_product, event_product_1, clone
        """)
    assert behind("event-products", before, COMPILED) == before


def test_split_biases_adds_a_bias_behind_the_product_where_points_read_it() -> None:
    before = dedent("""\
        x: f32[2, 3]
        w: f32[3, 4] = constant
        b: f32[4] = constant
        y: f32[2, 4] = aten.addmm.default(b, x, w)
        h: f32[2, 4] = aten.tanh.default(y)
        return h
        """)
    assert behind("split-biases", before) == dedent("""\
        x: f32[2, 3]
        w: f32[3, 4] = constant
        b: f32[4] = constant
        mm: f32[2, 4] = aten.mm.default(x, w)
        neg: f32[4] = aten.neg.default(b)
        sub: f32[2, 4] = aten.sub.Tensor(mm, neg)
        h: f32[2, 4] = aten.tanh.default(sub)
        return h
        """)
    assert behind("split-biases", before, EAGER) == before
    returned = before.replace("return h", "return h, y")
    assert behind("split-biases", returned) == returned


def test_pack_weights_lays_a_weight_out_once_for_all_products_with_it() -> None:
    before = dedent("""\
        x: f32[2, 3]
        z: f32[2, 3]
        w: f32[3, 8] = constant
        b: f32[8] = constant
        y: f32[2, 8] = aten.mm.default(x, w)
        y_biased: f32[2, 8] = aten.addmm.default(b, x, w)
        by_events: f32[2, 8] = reroll.event_product.default(None, z, w, 0.2, 0)
        return y, y_biased, by_events
        """)
    assert behind("pack-weights", before) == dedent("""\
        x: f32[2, 3]
        z: f32[2, 3]
        w: f32[3, 8] = constant
        b: f32[8] = constant
        pack_weight: f32[1, 3, 32] = reroll.pack_weight.default(w)
        packed_product: f32[2, 8] = reroll.packed_product.default(x, pack_weight, 8, 0)
        packed_product_1: f32[2, 8] = reroll.packed_product.default(x, pack_weight, 8, 0)
        add: f32[2, 8] = aten.add.Tensor(packed_product_1, b)
        packed_event_product: f32[2, 8] = reroll.packed_event_product.default(z, pack_weight, None, 8, 0.35, 0)
        return packed_product, add, packed_event_product
        """)
    assert behind("pack-weights", before, replace(COMPILED, vectors=False)) == before
    for left in (before.replace(" = constant", ""), before.replace("8]", "7]")):  # not constant; few columns
        assert behind("pack-weights", left) == left
