"""nn.RNN, nn.GRU and nn.LSTM, which arrive in Dynamo's graph as one node each, and their cells.

T time, B batch, I inputs, H hidden values, P projected ones.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
import reroll.backends.build as build
from agreement import compare, results, sizes
from reroll.capture import capture
from reroll.errors import RerollWarning, UnsupportedError

T, B, I, H, P = 9, 3, 5, 7, 4  # noqa: E741
STORE_ALL: dict[str, Any] = {"schedule": "store_all"}
DOUBLE: dict[str, Any] = {"schedule": "double", "chunk": 4, "slots": 2, "segment": 2, "remote": "disk", "verify": True}


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch.set_default_dtype(torch.float32)


def needs_final_states_of_lstm() -> None:
    if torch.__version__ < "2.12":
        pytest.skip("Dynamo of torch 2.11 gives the last states of nn.LSTM wrong shapes")


class Model(nn.Module):
    """Parts that the networks share, around one of them."""

    def __init__(self, network: Callable[..., Any], rnn: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network
        self.l, self.r = nn.Linear(I, H), nn.Linear(H, H)
        self.rnn = rnn or nn.GRU(I, H, 2)

    def forward(self, *inputs: Any) -> Any:
        return self.network(self, *inputs)


def check(model: nn.Module, *inputs: Any, **options: Any) -> tuple[tuple[int, int], ...]:
    """Compare with plain eager autograd; give the recurrences as (steps, carries)."""
    different, made = compare(model, inputs, **{"schedule": "standard", **options})
    assert not different
    return sizes(made)


def sequence(steps: int = T) -> Tensor:
    return torch.randn(steps, B, I)


def state(rows: int, size: int = H) -> Tensor:
    return torch.randn(rows, B, size)


def whole(s: Model, x: Tensor, *states: Tensor) -> Any:
    return s.rnn(x, *((states,) if len(states) > 1 else states))


VARIANTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], int]] = {
    "tanh": (lambda: nn.RNN(I, H), lambda: (sequence(),), 1),
    "relu": (lambda: nn.RNN(I, H, nonlinearity="relu"), lambda: (sequence(), state(1)), 1),
    "gru": (lambda: nn.GRU(I, H, 2, bias=False), lambda: (sequence(), state(2)), 2),
    "gru both ways": (lambda: nn.GRU(I, H, 2, bidirectional=True, dropout=0.3), lambda: (sequence(),), 4),
    "lstm": (lambda: nn.LSTM(I, H), lambda: (sequence(), state(1), state(1)), 1),
    "lstm dropout": (lambda: nn.LSTM(I, H, 3, dropout=0.5), lambda: (sequence(),), 3),
    "lstm batch first": (
        lambda: nn.LSTM(I, H, 2, batch_first=True, bidirectional=True),
        lambda: (torch.randn(B, T, I), state(4), state(4)),
        4,
    ),
    "lstm projected": (lambda: nn.LSTM(I, H, 2, proj_size=P), lambda: (sequence(), state(2, P), state(2)), 2),
    "lstm projected both ways": (
        lambda: nn.LSTM(I, H, 2, proj_size=P, bidirectional=True, bias=False, dropout=0.2),
        lambda: (sequence(),),
        4,
    ),
    "lstm unbatched": (lambda: nn.LSTM(I, H, batch_first=True), lambda: (torch.randn(T, I),), 1),
    "two steps": (lambda: nn.GRU(I, H), lambda: (sequence(2),), 1),
    "one step": (lambda: nn.LSTM(I, H, 2, bidirectional=True, dropout=0.3), lambda: (sequence(1),), 0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    rnn, inputs, loops = VARIANTS[name]
    if isinstance(rnn(), nn.LSTM):
        needs_final_states_of_lstm()
    assert len(check(Model(whole, rnn()), *inputs())) == loops


@pytest.mark.parametrize("options", [STORE_ALL, DOUBLE], ids=["store_all", "double"])
@pytest.mark.parametrize("name", ["tanh", "gru both ways", "lstm dropout", "lstm projected"])
def test_schedules(name: str, options: dict[str, Any]) -> None:
    rnn, inputs, loops = VARIANTS[name]
    if isinstance(rnn(), nn.LSTM):
        needs_final_states_of_lstm()
    assert len(check(Model(whole, rnn()), *inputs(), **options)) == loops


def test_dropout_is_off_in_eval() -> None:
    needs_final_states_of_lstm()
    assert len(check(Model(whole, nn.LSTM(I, H, 2, dropout=0.5)).eval(), sequence())) == 2


@pytest.mark.inductor
def test_lstm_by_inductor() -> None:
    needs_final_states_of_lstm()
    model = Model(whole, nn.LSTM(I, H, 2))
    assert check(model, sequence(16), schedule="double", lowering="inductor", remote="disk") == ((16, 2), (16, 2))


def last_hidden(s: Model, x: Tensor) -> Tensor:
    hidden: Tensor = s.rnn(x)[1][-1]
    return hidden


def test_outputs_that_nobody_reads_are_not_stacked() -> None:
    different, made = compare(Model(last_hidden), (sequence(),), schedule="standard")
    assert not different
    assert [len(each.ys) for each in made[0].recurrences] == [1, 0]


def twice(s: Model, x: Tensor) -> Any:
    first, h = s.rnn(x)
    return first + s.rnn(x.flip(0), h)[0]


def chunks(s: Model, x: Tensor) -> Any:
    h, outputs = None, []
    for chunk in x.split(3):
        y, h = s.rnn(chunk, h)
        h = h.detach()
        outputs.append(y)
    return torch.cat(outputs), h


def then_a_loop(s: Model, x: Tensor) -> Any:
    y, h = s.rnn(x)[0], x.new_zeros(B, H)
    for t in range(x.shape[0]):
        h = torch.tanh(y[t] + s.r(h))
    return h


def after_a_loop(s: Model, x: Tensor) -> Any:
    h, rows = x.new_zeros(B, H), []
    for t in range(x.shape[0]):
        h = torch.tanh(s.l(x[t]) + s.r(h))
        rows.append(h[:, :I])
    return s.rnn(torch.stack(rows))


def in_place(s: Model, x: Tensor) -> Any:
    h0, y = torch.zeros(2, B, H), x * 2
    h0 += 1
    y[0] = 0
    out, h = s.rnn(y, h0)
    out.mul_(2)
    h += 1
    return out, h, h0, y


def half_without_gradients(s: Model, x: Tensor) -> Any:
    with torch.no_grad():
        y, h = s.rnn(x)
    return s.r(y) + s.rnn(x)[0], h


USES = {
    twice: ((9, 1),) * 4,
    chunks: ((3, 1),) * 6,
    then_a_loop: ((9, 1),) * 3,
    after_a_loop: ((9, 1),) * 3,
    in_place: ((9, 1),) * 2,
    half_without_gradients: ((9, 1),) * 4,
}


@pytest.mark.parametrize("network", USES, ids=lambda network: network.__name__)
def test_in_a_larger_network(network: Callable[..., Any]) -> None:
    assert check(Model(network), sequence(), codec="none") == USES[network]


def one_by_one(s: Model, x: Tensor) -> Any:
    h, rows = None, []
    for t in range(x.shape[0]):
        y, h = s.rnn(x[t : t + 1], h)
        rows.append(y)
    return torch.cat(rows), h


def one_by_one_batch_first(s: Model, x: Tensor, *states: Tensor) -> Any:
    rows, h = [], states if len(states) > 1 else states[0]
    for t in range(x.shape[1]):
        y, h = s.rnn(x[:, t].unsqueeze(1), h)
        rows.append(y[:, 0])
    return torch.stack(rows, 1), h


@pytest.mark.parametrize(
    ("rnn", "found"),
    [
        (lambda: nn.RNN(I, H, nonlinearity="relu"), (8, 1)),
        (lambda: nn.GRU(I, H, 2), (8, 2)),
        (lambda: nn.LSTM(I, H, 2, dropout=0.3), (8, 4)),
        (lambda: nn.LSTM(I, H, proj_size=P), (8, 2)),
    ],
)
def test_called_on_one_step_in_a_loop(rnn: Callable[[], nn.Module], found: tuple[int, int]) -> None:
    if isinstance(rnn(), nn.LSTM):
        needs_final_states_of_lstm()
    assert check(Model(one_by_one, rnn()), sequence()) == (found,)


def test_called_on_one_step_in_a_loop_with_given_states() -> None:
    needs_final_states_of_lstm()
    model = Model(one_by_one_batch_first, nn.LSTM(I, H, batch_first=True))
    assert check(model, torch.randn(B, T, I), state(1), state(1), **DOUBLE) == ((8, 2),)


def cells(s: Model, x: Tensor) -> Any:
    h: Any = (x.new_zeros(B, H),) * 2 if isinstance(s.rnn, nn.LSTMCell) else x.new_zeros(B, H)
    for t in range(x.shape[0]):
        h = s.rnn(x[t], h)
    return h


@pytest.mark.parametrize(("cell", "carries"), [(nn.RNNCell, 1), (nn.GRUCell, 1), (nn.LSTMCell, 2)])
def test_cells_in_loops(cell: Callable[..., nn.Module], carries: int) -> None:
    assert check(Model(cells, cell(I, H)), sequence()) == ((9, carries),)


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, lambda i, h: nn.LSTM(i, h, proj_size=P)], ids=["rnn", "gru", "lstm"])
def test_autocast(make: Callable[..., nn.Module]) -> None:
    if isinstance(make(I, H), nn.LSTM):
        needs_final_states_of_lstm()

    def network(s: Model, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return s.rnn(x)

    different, made = compare(
        Model(network, make(I, H)).float(), (sequence().float(),), tolerance=3e-2, schedule="standard"
    )
    assert not different
    assert sizes(made)


def test_other_lengths_and_batches() -> None:
    model = Model(whole)
    run = torch.compile(model, backend="reroll", fullgraph=True, options={"lowering": "eager"})
    for steps, batch in ((6, 2), (9, 2), (9, 4), (1, 4), (12, 1)):
        x = torch.randn(steps, batch, I)
        torch.testing.assert_close(run(x), model(x), rtol=1e-12, atol=1e-14)


def test_explain_names_the_line() -> None:
    fast = torch.compile(Model(whole), backend="reroll", options={"lowering": "eager"})
    report = reroll.explain(fast, sequence())
    assert report.loops[0].recurrence.steps == T
    assert "return s.rnn(" in report.loops[0].recurrence.where


def packed(s: Model, x: Tensor) -> Any:
    given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([T, 4, 2]))
    return nn.utils.rnn.pad_packed_sequence(s.rnn(given)[0])[0]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 fails on them with allow_rnn")
def test_packed_sequences_in_a_model_are_run_by_torch() -> None:
    model, x = Model(packed), sequence()
    expected = results(model, model, (x,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RerollWarning)
        found = results(torch.compile(model, backend="reroll", options={"lowering": "eager"}), model, (x,))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_packed_call_in_a_graph_is_refused() -> None:
    graph = fx.Graph()
    data, sizes_T, h, *params = (graph.placeholder(name) for name in ("data", "sizes", "h", "w_ih", "w_hh"))
    call = graph.call_function(torch.gru, (data, sizes_T, h, params, False, 1, 0.0, True, False))
    graph.output(graph.call_function(operator.getitem, (call, 0)))
    with pytest.raises(UnsupportedError, match="packed"):
        capture(fx.GraphModule({}, graph))


def test_equal_chunks_share_their_kernels() -> None:
    made, inner = [], build.compile_kernels

    def count(*given: Any) -> Any:
        made.append(inner(*given))
        return made[-1]

    with mock.patch.object(build, "compile_kernels", count):
        assert check(Model(chunks, nn.GRU(I, H)), sequence(12)) == ((3, 1),) * 4
    assert len(made) == 1
    with mock.patch.object(build, "compile_kernels", count):
        check(Model(chunks, nn.GRU(I, H)), sequence(10))  # the last chunk has one step, and is no loop
        check(Model(chunks, nn.GRU(I, H)), sequence(11))
    assert len(made) == 4
