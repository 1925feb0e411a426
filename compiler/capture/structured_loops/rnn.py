"""The calls behind ``nn.RNN``, ``nn.GRU`` and ``nn.LSTM`` as loops, one per layer and direction.

With ``torch._dynamo.config.allow_rnn`` each of these modules is one node of Dynamo's graph. The order of layers,
directions and dropout is torch's own (``aten/src/ATen/native/RNN.cpp``), so that dropout draws what eager draws under
the same seed. A step is torch's own cell, or its formula where the state is projected (LSTM with ``proj_size``).
Results have the dtypes that Dynamo says they have: under autocast on a CPU these are not always eager's.

Shapes: B batch, T time, I inputs, H hidden values, R hidden values handed on (H, or the size of the projection).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from reroll.capture.recorder.ragged import LAYERS, PACKED_MASK
from reroll.capture.structured_loops.emitter import Body, Emitter
from reroll.errors import UnsupportedError
from reroll.graph.editing import add_input
from reroll.graph.fakes import contiguous
from reroll.graph.lines import where

CELLS: dict[Any, Any] = {
    torch.rnn_tanh: torch.rnn_tanh_cell,
    torch.rnn_relu: torch.rnn_relu_cell,
    torch.gru: torch.gru_cell,
    torch.lstm: torch.lstm_cell,
}
_ARGUMENTS = ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")


@dataclass(frozen=True, slots=True, eq=False)
class Rnn:
    """One call: the input [T, B, I], the states [layers * ways, B, R or H], and the weights of each layer and way.

    ``lengths_B``, ``ends_TB1``: of sequences of several lengths, and where they have ended: their state stays as it is.
    """

    cell: Any
    x_TBI: fx.Node
    lengths_B: fx.Node | None
    ends_TB1: fx.Node | None
    states: tuple[fx.Node, ...]
    weights: tuple[tuple[fx.Node, ...], ...]
    ways: int
    dropout: float
    projected: bool


def expand(emitter: Emitter, node: fx.Node, env: Any, live: set[int]) -> list[fx.Node]:
    """Write a call out as loops; ``env`` maps old nodes to new ones, ``live`` are the results that anybody reads."""
    given = _arguments(node)
    batch_first = bool(given["batch_first"])
    rnn = _read(emitter, node, fx.map_arg(given, env), batch_first)
    out_TBR, finals = _layers(emitter, rnn, outputs=0 in live)
    out = [emitter.call(torch.transpose, out_TBR, 0, 1) if batch_first else out_TBR, *finals]
    likes: Any = node.meta["example_value"]
    results = [emitter.to(value, like.dtype) for value, like in zip(out, likes, strict=True)]
    shapes = [emitter.fake(value).shape for value in results]
    if any(shapes[index] != likes[index].shape for index in live):
        raise UnsupportedError(
            f"{where(node)}: this call gives the shapes {[tuple(shape) for shape in shapes]}, but Dynamo says "
            f"{[tuple(like.shape) for like in likes]} and traces what follows wrongly, as torch 2.11 and 2.12 do for "
            "states of nn.LSTM. Use a newer torch, or read the outputs only."
        )
    return results


def _arguments(node: fx.Node) -> dict[str, Any]:
    if node.target in LAYERS:
        names = (*_ARGUMENTS[:1], "lengths", *_ARGUMENTS[1:-1])
        return dict(zip(names, node.args, strict=True)) | {"batch_first": False}
    packed = "batch_sizes" in node.kwargs or (len(node.args) > 3 and not isinstance(node.args[3], bool))
    if packed:
        raise UnsupportedError(
            f"{where(node)}: a packed sequence has another batch size at every step, which a rolled loop cannot have. "
            "Pad the batch and mask what is behind each end, or keep this module out of the compiled function by "
            "torch.compiler.disable."
        )
    return dict(zip(_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)


def _read(emitter: Emitter, node: fx.Node, given: dict[str, Any], batch_first: bool) -> Rnn:
    hx = given["hx"]
    states = (hx,) if isinstance(hx, fx.Node) else tuple(hx)
    sizes = [emitter.fake(state).shape[-1] for state in states]
    projected = len(set(sizes)) > 1
    each = (4 if given["has_biases"] else 2) + (1 if projected else 0)
    weights = [tuple(given["params"][at : at + each]) for at in range(0, len(given["params"]), each)]
    target: Any = node.target
    target = LAYERS.get(target, target)
    x_TBI = emitter.call(torch.transpose, given["input"], 0, 1) if batch_first else given["input"]
    return Rnn(
        cell=CELLS[target],
        lengths_B=given.get("lengths"),
        ends_TB1=_ends(emitter, x_TBI, given["lengths"]) if "lengths" in given else None,
        x_TBI=x_TBI,
        states=states,
        weights=tuple(weights),
        ways=2 if given["bidirectional"] else 1,
        dropout=float(given["dropout"]) if given["train"] else 0.0,
        projected=projected,
    )


def _ends(emitter: Emitter, x_TBI: fx.Node, lengths_B: fx.Node) -> fx.Node:
    """Where sequences have ended, [T, B, 1]."""
    like = emitter.fake(x_TBI)
    steps_T1 = emitter.call(torch.unsqueeze, emitter.call(torch.arange, like.shape[0]), 1)
    ends_TB = emitter.call(operator.ge, steps_T1, lengths_B)
    return emitter.call(torch.unsqueeze, emitter.call(torch.Tensor.to, ends_TB, like.device), 2)


def _layers(emitter: Emitter, rnn: Rnn, outputs: bool) -> tuple[fx.Node, list[fx.Node]]:
    """The outputs of the last layer [T, B, ways * R], and the last states of all."""
    x_TBI, finals = rnn.x_TBI, []
    layers = len(rnn.weights) // rnn.ways
    for layer in range(layers):
        last_layer, rows = layer == layers - 1, []
        for way in range(rnn.ways):
            at = layer * rnn.ways + way
            initial = [emitter.call(torch.select, state, 0, at) for state in rnn.states]
            wanted = outputs or not last_layer
            last, ys = _loop(emitter, rnn, x_TBI, initial, rnn.weights[at], back=way == 1, outputs=wanted)
            finals.append(last)
            rows += ys
        if rows:
            x_TBI = rows[0] if rnn.ways == 1 else emitter.call(torch.cat, rows, -1)
        if rnn.dropout and not last_layer:
            x_TBI = _dropped(emitter, x_TBI, rnn)
    return x_TBI, [emitter.call(torch.stack, list(column)) for column in zip(*finals, strict=True)]


def _dropped(emitter: Emitter, x_TBR: fx.Node, rnn: Rnn) -> fx.Node:
    """Dropout between two layers, whose random numbers are those that torch draws."""
    if rnn.lengths_B is None:
        return emitter.call(torch.dropout, x_TBR, rnn.dropout, True)
    like_TBR = emitter.call(torch.Tensor.detach, x_TBR)
    return emitter.call(torch.mul, x_TBR, emitter.call(PACKED_MASK, like_TBR, rnn.lengths_B, rnn.dropout))


def _loop(
    emitter: Emitter,
    rnn: Rnn,
    x_TBI: fx.Node,
    initial: Sequence[fx.Node],
    weights: tuple[fx.Node, ...],
    *,
    back: bool,
    outputs: bool,
) -> tuple[list[fx.Node], list[fx.Node]]:
    """One layer in one direction. States start in the dtype that a step gives them, which autocast may lower."""
    xs = [x_TBI] if rnn.ends_TB1 is None else [x_TBI, rnn.ends_TB1]
    body = _body(emitter, rnn, [*initial, *xs, *weights], outputs)
    dtypes = [result.meta["example_value"].dtype for result in body.results]
    cast = [emitter.to(state, dtype) for state, dtype in zip(initial, dtypes, strict=False)]
    if cast != list(initial):
        body = _body(emitter, rnn, [*cast, *xs, *weights], outputs)
    return emitter.loop(body, cast, xs, weights, back)


def _body(emitter: Emitter, rnn: Rnn, operands: Sequence[fx.Node], outputs: bool) -> Body:
    """One step: ``(state..., x, weight...) -> (state'..., h')``. Calls on operands that look alike share it."""
    fakes, carried = [emitter.fake(operand) for operand in operands], len(rnn.states)
    read = carried + (1 if rnn.ends_TB1 is None else 2)
    each = (fake.select(0, 0) for fake in fakes[carried:read])
    values = [*(contiguous(fake) for fake in fakes[:carried]), *each, *fakes[read:]]
    looks = tuple((v.shape, v.stride(), v.dtype, v.device, v.requires_grad) for v in values)
    key = (rnn.cell, read, outputs, emitter.mode, looks)
    if key not in emitter.bodies:
        graph = fx.Graph()
        inner = Emitter(emitter.root, graph, rolled=False, mode=emitter.mode)
        names = _names(rnn, len(values))
        inputs = [add_input(graph, name, value) for name, value in zip(names, values, strict=True)]
        own = [*inputs[: carried + 1], *inputs[read:]]
        state = _projected(inner, own) if rnn.projected else _plain(inner, rnn.cell, own, carried)
        if rnn.ends_TB1 is not None:
            ends_B1 = inputs[carried + 1]
            state = [inner.call(torch.where, ends_B1, *pair) for pair in zip(inputs, state, strict=False)]
        graph.output((*state, *([state[0]] if outputs else [])))
        emitter.bodies[key] = Body(fx.GraphModule({}, graph))
    return emitter.bodies[key]


def _names(rnn: Rnn, count: int) -> tuple[str, ...]:
    states, projection = ("h", "c")[: len(rnn.states)], ("w_hr",) if rnn.projected else ()
    xs = ("x",) if rnn.ends_TB1 is None else ("x", "ended")
    biases = count - len(states) - len(xs) - 2 - len(projection)
    return (*states, *xs, "w_ih", "w_hh", *("b_ih", "b_hh")[:biases], *projection)


def _plain(emitter: Emitter, cell: Any, inputs: list[fx.Node], carried: int) -> list[fx.Node]:
    state, x_BI, weights = inputs[:carried], inputs[carried], inputs[carried + 1 :]
    if carried == 1:
        return [emitter.call(cell, x_BI, state[0], *weights)]
    both = emitter.call(cell, x_BI, tuple(state), *weights)
    return [emitter.call(operator.getitem, both, index) for index in range(2)]


def _projected(emitter: Emitter, inputs: list[fx.Node]) -> list[fx.Node]:
    """An LSTM step whose output is ``w_hr (o * tanh(c'))``: Sak, Senior, Beaufays, 2014, arXiv 1402.1128."""
    h_BR, c_BH, x_BI, w_ih, w_hh, *biases, w_hr = inputs
    linear = torch.nn.functional.linear
    b_ih, b_hh = ([bias] for bias in biases) if biases else ([], [])
    gates = emitter.call(operator.add, emitter.call(linear, x_BI, w_ih, *b_ih), emitter.call(linear, h_BR, w_hh, *b_hh))
    pieces = emitter.call(torch.chunk, gates, 4, 1)
    i, f, g, o = (emitter.call(operator.getitem, pieces, index) for index in range(4))
    kept = emitter.call(operator.mul, emitter.call(torch.sigmoid, f), c_BH)
    new = emitter.call(operator.mul, emitter.call(torch.sigmoid, i), emitter.call(torch.tanh, g))
    c_next_BH = emitter.call(operator.add, kept, new)
    h_BH = emitter.call(operator.mul, emitter.call(torch.sigmoid, o), emitter.call(torch.tanh, c_next_BH))
    return [emitter.call(linear, h_BH, w_hr), c_next_BH]
