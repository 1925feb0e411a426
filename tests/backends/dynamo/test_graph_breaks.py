"""Models whose graph Dynamo cuts: each piece is looked at, and it is said once where none has a loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from deep_networks import WIDTH, Stack, layers
from reroll.errors import NoRecurrenceError, RerollWarning

OPTIONS: dict[str, Any] = {"lowering": "eager"}


class Cut(nn.Module):
    """Blocks behind a place that Dynamo cannot read."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = Stack(*layers(count))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_BC: Tensor) -> Tensor:
        self.calls += 1
        x_BC = x_BC.tanh() * 2
        torch._dynamo.graph_break()
        y_BC: Tensor = self.blocks(x_BC)
        return y_BC


class Looking(nn.Module):
    """A loop over time that looks at a value in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.large = 0

    def forward(self, x_TBC: Tensor) -> Tensor:
        h_BC = torch.zeros_like(x_TBC[0])
        for x_BC in x_TBC:
            h_BC = torch.tanh(self.cell(x_BC + h_BC))
            if h_BC.mean() > 5:
                self.large += 1
        return h_BC


class Every(nn.Module):
    """Blocks with such a place between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers(4))

    def forward(self, x_BC: Tensor) -> Tensor:
        for block in self.blocks:
            x_BC = block(x_BC)
            torch._dynamo.graph_break()
        return x_BC


@contextmanager
def told() -> Iterator[list[str]]:
    """The texts of reroll's warnings inside."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in found if issubclass(each.category, RerollWarning)]


def calls(model: nn.Module, x: Tensor, count: int = 3) -> list[list[str]]:
    """What is said at each of some training steps."""
    run: Any = torch.compile(model, backend="reroll", options=OPTIONS)
    said = []
    for _ in range(count):
        with told() as texts:
            run(x).sum().backward()
        said.append(texts)
    return said


def test_a_loop_behind_a_cut_is_rolled_and_nothing_is_said() -> None:
    assert calls(Cut(6), torch.randn(4, WIDTH)) == [[], [], []]


def test_the_gradients_of_pieces_are_eagers() -> None:
    torch.manual_seed(0)
    run = torch.compile(Cut(6).double(), backend="reroll", options=OPTIONS)
    assert reroll.check(run, torch.randn(4, WIDTH).double().requires_grad_(), measure=False).equal


def test_explain_goes_on_to_the_piece_with_the_loop_and_puts_back_what_ran() -> None:
    model = Cut(6)
    report = reroll.explain(torch.compile(model, backend="reroll", options=OPTIONS), torch.randn(4, WIDTH))
    assert [loop.recurrence.steps for loop in report.loops] == [6]
    assert model.calls == 0


class Apart(nn.Module):
    """Two loops with a cut between them, of which the first counts calls in a buffer, and one behind the last cut."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.one, self.two = Stack(*layers(5)), Stack(*layers(4))
        self.wider, self.last = nn.Linear(3, WIDTH), nn.Linear(3, 2)

    def forward(self, x_BC: Tensor) -> Tensor:
        x_BC = self.wider(self.one(x_BC))
        self.calls += 1
        torch._dynamo.graph_break()
        x_BC = self.two(x_BC)
        torch._dynamo.graph_break()
        y: Tensor = self.last(x_BC)
        return y


def test_explain_shows_all_graphs_of_a_model() -> None:
    model = Apart()
    run = torch.compile(model, backend="reroll", options=OPTIONS)
    for _ in range(2):
        report = reroll.explain(run, torch.randn(4, WIDTH))
        each = (report, *report.others)
        assert [[loop.recurrence.steps for loop in one.loops] for one in each] == [[5], [4], []]
        assert float(model.calls) == 0
    text = report.text(120)
    assert "Other graph 1 of 2" in text
    assert "Other graph 2 of 2" in text
    assert text.count("4 blocks of") == 1
    assert [len(one["recurrences"]) for one in report.to_json()["others"]] == [1, 0]


def test_where_no_piece_has_a_loop_it_is_said_once_when_the_first_call_is_over() -> None:
    (text,), second, third = calls(Cut(2), torch.randn(4, WIDTH))
    assert not second
    assert not third
    assert "in any of the graphs (2 so far)" in text
    assert "graph_break()` at" in text
    assert "test_graph_breaks.py:" in text
    assert "TORCH_LOGS=graph_breaks" in text


class Within(nn.Module):
    """Calls a function of which Dynamo makes a graph by itself, as it skips what calls it at first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks, self.held = Stack(*layers(count)), dict[str, Tensor]()

    def begin(self, x_BC: Tensor) -> None:
        for name in ("a", "b", "c", "d"):
            self.held[name] = torch.zeros_like(x_BC)

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def skipped(self, x_BC: Tensor) -> None:
        self.begin(x_BC)

    def forward(self, x_BC: Tensor) -> Tensor:
        self.skipped(x_BC)
        y_BC: Tensor = self.blocks(x_BC)
        return y_BC


def test_a_small_function_that_dynamo_reads_by_itself_is_not_the_model() -> None:
    assert calls(Within(6), torch.randn(4, WIDTH)) == [[], [], []]
    (text,), second, third = calls(Within(1), torch.randn(4, WIDTH))
    assert not second
    assert not third
    assert "found no recurrence" in text


class Packed(nn.Module):
    """Nothing but a layer on a packed sequence, before which Dynamo ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def forward(self, x_TBC: Tensor) -> Tensor:
        lengths = [x_TBC.shape[0]] * x_TBC.shape[1]
        return self.rnn(nn.utils.rnn.pack_padded_sequence(x_TBC, lengths))[1]  # type: ignore[no-any-return]


def test_a_model_of_which_dynamo_gives_no_graph_is_named_once() -> None:
    (text,), second, third = calls(Packed(), torch.randn(6, 4, WIDTH))
    assert not second
    assert not third
    assert ("was given no graph of the model" in text) == (torch.__version__ >= "2.13")  # the layer is named before
    assert "reroll.compile(model) in place of torch.compile" in text


def test_of_a_model_that_fails_it_is_said_only_that_dynamo_gives_it_up() -> None:
    class Failing(Cut):
        def forward(self, x_BC: Tensor) -> Tensor:
            super().forward(x_BC)
            raise ValueError("mine")

    run = torch.compile(Failing(2), backend="reroll", options=OPTIONS)
    with told() as texts, pytest.raises(ValueError, match="mine"):
        run(torch.randn(4, WIDTH))
    (text,) = texts
    assert "raised an exception while Dynamo read it" in text


def test_a_loop_over_time_that_dynamo_gives_up_is_named_at_once() -> None:
    (text,), second, third = calls(Looking(), torch.randn(6, 4, WIDTH))
    assert not second
    assert not third
    assert "does not see the loop in forward (" in text
    assert text.count("test_graph_breaks.py:") == 2
    assert "reroll.compile(model) in place of torch.compile" in text


def test_blocks_with_cuts_between_them_are_named_once() -> None:
    first, *later = calls(Every(), torch.randn(4, WIDTH))
    assert ["does not see the loop in forward" in text for text in first] == [True]
    assert not any(later)


def test_a_function_without_a_loop_that_is_given_up_is_not_named() -> None:
    def loss(x_BC: Tensor) -> Tensor:
        return x_BC * 2 if float(x_BC.sum()) > 0 else x_BC

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stack(*layers(4))

        def forward(self, x_BC: Tensor) -> Tensor:
            y_BC: Tensor = self.blocks(x_BC)
            return loss(y_BC)

    assert not any("does not see" in text for said in calls(Outside(), torch.randn(4, WIDTH)) for text in said)


def test_a_loop_over_settings_that_is_given_up_is_not_named() -> None:
    class Wrapped(nn.Module):
        """As models of transformers are: a wrapper looks at some settings and may log, which Dynamo does not read."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = Stack(*layers(6))

        def forward(self, x_BC: Tensor) -> Tensor:
            for name in ("use_cache", "training"):
                if getattr(self, name, False):
                    logging.getLogger(__name__).warning(name)
            y_BC: Tensor = self.blocks(x_BC)
            return y_BC

    assert calls(Wrapped(), torch.randn(4, WIDTH)) == [[], [], []]


def test_other_backends_are_not_listened_to() -> None:
    reroll.explain(torch.compile(Stack(*layers(4)), backend="reroll", options=OPTIONS), torch.randn(4, WIDTH))
    with told() as texts:
        torch.compile(Looking(), backend="eager")(torch.randn(6, 4, WIDTH))
    assert not texts


def test_fullgraph_raises_dynamos_error_and_nothing_else() -> None:
    run = torch.compile(Looking(), backend="reroll", options=OPTIONS, fullgraph=True)
    with told() as texts, pytest.raises(torch._dynamo.exc.Unsupported):
        run(torch.randn(6, 4, WIDTH))
    assert not texts


def test_who_wants_an_error_gets_it_at_the_first_piece() -> None:
    run = torch.compile(Cut(6), backend="reroll", options=OPTIONS | {"on_no_recurrence": "error"})
    with pytest.raises(NoRecurrenceError, match="found no recurrence"):
        run(torch.randn(4, WIDTH))


class Layered(nn.Module):
    """A layer of torch's over time between others."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), kind(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.first(x))[0]
        return y


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions need allow_rnn, which users set")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers_over_time_are_handed_over(kind: Any) -> None:
    for model in (Layered(kind), kind(4, 5)):
        run = torch.compile(model, backend="reroll", options={"lowering": "eager"})
        reroll.check(run, torch.randn(20, 3, 4), strict=True, measure=False)
        assert [loop.recurrence.steps for loop in reroll.explain(run, torch.randn(20, 3, 4)).loops] == [20]
    assert not torch._dynamo.config.allow_rnn


def test_other_backends_get_no_layers() -> None:
    graphs = list[Any]()

    def other(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module

    torch.compile(Layered(), backend="reroll", options={"lowering": "eager"})(torch.randn(20, 3, 4))
    torch._dynamo.reset()
    torch.compile(Layered(), backend=other)(torch.randn(20, 3, 4))
    assert not any(node.target is torch.lstm for module in graphs for node in module.graph.nodes)


@pytest.mark.parametrize("model", [Layered(), nn.LSTM(4, 5)])
def test_layers_that_are_not_handed_over_are_told_about(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reroll.backends.dynamo.graph_breaks._KEEPS_LAYERS", False)
    run = torch.compile(model, backend="reroll", options={"lowering": "eager"})
    with pytest.warns(reroll.RerollWarning, match="allow_rnn = True"):
        run(torch.randn(20, 3, 4))


@pytest.mark.parametrize("door", ["reroll.compile", "torch.compile"])
def test_a_record_is_no_remedy_for_whom_it_did_not_help(door: str) -> None:
    def cut(x: Tensor) -> Tensor:
        h = torch.zeros_like(x[0])
        for row in x:
            h = torch.tanh(h + row)
            print("a step")
        return h

    options: Any = {"lowering": "eager"}
    run = (
        reroll.compile(cut, **options)
        if door == "reroll.compile"
        else torch.compile(cut, backend="reroll", options=options)
    )
    with pytest.warns(RerollWarning, match="Take it out of the loop") as said:
        run(torch.randn(5, 3, requires_grad=True))
    assert ("in place of torch.compile" in str(said[0].message)) == (door == "torch.compile")


class Checking(nn.Module):
    """A cell over time that refuses some calls in its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x_TBI: torch.Tensor, most: int = 10) -> torch.Tensor:
        h_BH = x_TBI.new_zeros(x_TBI.shape[1], 4)
        for t, x_BI in enumerate(x_TBI):
            if t == most:
                raise ValueError("too long")
            h_BH = self.cell(x_BI, h_BH)
        return h_BH


def test_a_function_that_raises_while_dynamo_reads_it_is_told_of_and_the_remedy_helps() -> None:
    """Dynamo gives it up for good, and says nothing."""
    torch._dynamo.reset()
    compiled, x = torch.compile(Checking(), backend="reroll", options={"lowering": "eager"}), torch.randn(7, 2, 3)
    rolled = type(compiled(x).grad_fn)
    with pytest.warns(RerollWarning, match="raised an exception while Dynamo read it"), pytest.raises(ValueError):
        compiled(x, 3)
    assert type(compiled(x).grad_fn) is not rolled
    torch._dynamo.reset()
    assert type(compiled(x).grad_fn) is rolled
