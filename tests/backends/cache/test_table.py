"""Traces as plain data: what is read back is what was written, and nothing is called but torch's operators and ours."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reroll.backends.cache import table
from reroll.backends.cache.entries import Unkept
from reroll.backends.cache.steps import tensor_text
from reroll.backends.cache.table import BROKEN, read_back, written
from reroll.backends.cache.traces import trace_text
from reroll.graph.private import storage_id
from reroll.segment.trace import Traced, trace, trace_mode
from six_inputs import six_inputs


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(six_inputs(), 2, decompose=True)


def last_call(traced: Traced) -> Any:
    return [node for node in traced.graph.graph.nodes if node.op == "call_function"][-1]


def test_a_trace_is_text_and_comes_back_the_same(traced: Traced) -> None:
    payload = written(traced)
    assert set(json.loads(payload)) == {"nodes", "parts", "memories"}
    assert trace_text(read_back(payload, trace_mode())) == trace_text(traced)


VALUES: tuple[Any, ...] = (
    *(None, True, 3, -0.0, math.inf, 1e-320, "a\nbé", 2 + 3j),
    *((1, (2.5, [None])), [slice(None, 3), slice(1, None, 2)], torch.Size([2, 0]), frozenset({3, 1}), {"a": (1,)}),
    *(torch.float16, torch.complex64, torch.float8_e4m3fn, torch.strided, torch.channels_last),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.ops.aten.mul.Tensor, torch.ops.prims.sum.default),
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_kind_of_operand_comes_back(value: Any) -> None:
    put = json.loads(json.dumps(table._Writer({}).plain(value)))
    found = table._Reader([], [], trace_mode()).value(put)
    assert (type(found), repr(found)) == (type(value), repr(value))


def sharing(values: list[Tensor]) -> list[int]:
    """For each tensor, the first that lies in the same memory."""
    memories = [storage_id(each) for each in values]
    return [memories.index(each) for each in memories]


def test_tensors_that_share_memory_do_so_when_they_come_back() -> None:
    mode = trace_mode()
    with mode:
        base = torch.empty(7, 5, dtype=torch.complex64)
        odd = torch.empty(13, dtype=torch.uint8)[1:]
        values = [base, base[1:, ::2].t().conj(), torch.view_as_real(base)[..., 1], base.imag, odd]
        values.append(base.real.expand(2, 7, 5))
        values += [torch.empty(0, 3), torch.empty(2, 3, requires_grad=True), torch._neg_view(torch.empty(3))]
    writer = table._Writer({})
    put = json.loads(json.dumps(writer.plain(values)))
    memories = [table._memory(*each) for each in writer.memories]
    found = table._Reader([], memories, mode).value(put)
    for each, other in zip(found, values, strict=True):
        assert tensor_text(each) == tensor_text(other)
        assert each.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    assert sharing(found) == sharing(values)


HOSTILE: dict[str, Any] = {
    "Python": ["call_function", "builtins.eval"],
    "a module": ["call_function", "os.system.default"],
    "a call": ["call_function", "call"],
    "a user's operator": ["call_function", "mylib.run.default"],
    "torch.ops itself": ["call_function", "aten.__class__.__base__"],
    "no overload": ["call_function", "aten.mul.__init__"],
    "a method": ["call_method", "numpy"],
    "an attribute": ["get_attr", "training"],
    "a module's call": ["call_module", "training"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_table_finds_operators_alone(traced: Traced, name: str) -> None:
    content = json.loads(written(traced))
    place = next(place for place, line in enumerate(content["nodes"]) if line[1] == "call_function")
    content["nodes"][place][1:3] = HOSTILE[name]
    with pytest.raises(BROKEN):
        read_back(json.dumps(content).encode(), trace_mode())


@pytest.mark.parametrize(
    "value", [{"operator": "os.system"}, {"dtype": "load"}, {"layout": "float32"}, {"code": 1}, {}, {"node": 10**9}]
)
def test_an_operand_of_no_kind_is_refused(value: Any) -> None:
    with pytest.raises(BROKEN):
        table._Reader([], [], trace_mode()).value(value)


def test_what_a_table_cannot_say_is_made_anew(traced: Traced) -> None:
    node = last_call(traced)
    for value in (object(), print, torch.empty(2), b"bytes"):
        node.meta["theirs"] = value
        try:
            with pytest.raises(Unkept, match=f"holds {type(value).__name__}"):
                written(traced)
        finally:
            del node.meta["theirs"]


@pytest.mark.parametrize("at", range(0, 1_000, 83))
def test_half_a_table_is_an_error_that_is_known(traced: Traced, at: int) -> None:
    payload = written(traced)
    with pytest.raises(BROKEN):
        read_back(payload[: len(payload) * at // 1_000], trace_mode())
