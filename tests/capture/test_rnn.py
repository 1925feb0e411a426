"""nn.RNN, nn.GRU and nn.LSTM, which arrive in Dynamo's graph as one node each: all their variants."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from agreement import compare, results, sizes
from reroll.capture.capture import capture
from reroll.errors import RerollWarning, UnsupportedError
from rnns import DOUBLE, B, H, I, Model, P, T, check, needs_final_states_of_lstm, sequence, state, whole

STORE_ALL: dict[str, Any] = {"schedule": "store_all"}


pytestmark = pytest.mark.usefixtures("double_precision", "rnn_layers")


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


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    rnn, inputs, loops = VARIANTS[name]
    if isinstance(rnn(), nn.LSTM):
        needs_final_states_of_lstm()
    assert len(check(Model(whole, rnn()), *inputs())) == loops


@pytest.mark.variants(4)
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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo of torch 2.11 and 2.12 fails on them with allow_rnn")
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
