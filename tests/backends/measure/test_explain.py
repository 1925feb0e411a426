"""explain: what it shows, what it predicts, and that it changes nothing."""

import html
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import reroll
from networks import RecurrentLIF, spikes
from reroll.errors import UnsupportedError
from reroll.segment.ops import parameter_name
from walks import Shared

EAGER = {"lowering": "eager", "segment": 2}
pytestmark = pytest.mark.usefixtures("shared_walks")


def compiled(model: Any, **options: Any) -> Any:
    return Shared(model, EAGER | options, fullgraph=False)


class Restless(nn.Module):
    """Everything that explain could disturb: hidden state on the module, running statistics, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.hidden: Tensor | None = None

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0]) if self.hidden is None else self.hidden
        self.calls += 1
        x_TBI = self.norm(x_TBI.flatten(0, 1)).view_as(x_TBI)
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(nn.functional.dropout(self.cell(h_BI), 0.5, self.training) + x_TBI[t])
        self.hidden = h_BI.detach()
        return h_BI


def state(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {name: value.clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    hidden = getattr(model, "hidden", None)
    found["hidden"] = None if hidden is None else hidden.clone()
    found["torch"], found["python"], found["mode"] = torch.get_rng_state(), random.getstate(), model.training
    return found


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    pairs = [(first[name], second[name]) for name in first]
    return first.keys() == second.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs
    )


@pytest.mark.parametrize("training", [True, False])
def test_explaining_changes_nothing(training: bool) -> None:
    model = Restless().train(training)
    fast, x = compiled(model), torch.randn(12, 3, 5)
    before = state(model)
    first = reroll.explain(fast, x)
    assert same(before, state(model))
    fast(x).sum().backward()
    after = state(model)
    assert not same(before, after)
    again = reroll.explain(fast, x)
    assert same(after, state(model))
    assert [loop.recurrence.steps for loop in (*first.loops, *again.loops)]
    assert reroll.explain(fast, x).predicted_peak == again.predicted_peak


@pytest.mark.parametrize("name", ["explain", "compile", "measure"])
def test_loading_draws_no_random_numbers(name: str) -> None:
    code = f"import random, reroll; state = random.getstate(); reroll.{name}; assert random.getstate() == state"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_explaining_first_leaves_the_same_training() -> None:
    x = spikes(10, batch=3, inputs=6)
    losses = []
    for explained in (False, True):
        torch.manual_seed(1)
        model = RecurrentLIF(6, 7, 2)
        fast = compiled(model)
        if explained:
            reroll.explain(fast, x)
        loss = fast(x).square().mean()
        loss.backward()
        losses.append((loss.detach(), model.Wr.weight.grad))
    for plain, after in zip(*losses, strict=True):
        torch.testing.assert_close(plain, after, rtol=0, atol=0)


def test_a_report_shows_the_plan() -> None:
    fast, x = compiled(RecurrentLIF(6, 7, 2), schedule="double", segment=2, chunk=6, slots=2), spikes(20, 3, 6)
    report = reroll.explain(fast, x)
    (loop,) = report.loops
    assert isinstance(report.graph, fx.Graph)
    assert report.graphs == loop.program.graphs
    assert isinstance(report.step, fx.GraphModule)
    targets = {getattr(node.target, "__name__", "") for graph in report.graphs for node in graph.nodes}
    assert {"offload", "reload", "reverse", "recompute", "tape", "backward"} <= targets
    assert any(node.op == "call_module" and node.target == loop.recurrence.name for node in report.outer.nodes)
    assert report.predicted_peak >= loop.prediction.peak > loop.prediction.most.held > 0
    assert report.remote_peaks["disk"] == loop.tally.tier_peaks["disk"] > 0
    assert loop.outputs == 0
    assert {line.nbytes for line in loop.carries} >= {3 * 7 * 4, 3 * 2 * 4}
    assert loop.trace().peak("local") == loop.prediction.peak
    assert report.to_json()["predicted_peak_bytes"] == report.predicted_peak
    assert f'value="{report.predicted_peak}"' in html.unescape(report._repr_html_())
    text = str(report)
    assert max(map(len, text.splitlines())) <= 140
    for shown in ("networks.py", "double (segment 2, chunk 6, slots 2, disk)", "steps re-run", "writes", "carry_v_bh"):
        assert shown in text
    assert f"{report.predicted_peak:,}" in text
    assert "Note" not in text


def test_outputs_of_all_steps_are_counted() -> None:
    report = reroll.explain(compiled(RecurrentLIF(6, 7, 2, mean=False)), spikes(20, 3, 6))
    (loop,) = report.loops
    assert loop.outputs == loop.recurrence.steps * 3 * 2 * 4
    assert report.outputs >= 20 * 3 * 2 * 4


class Spikes(nn.Module):
    """Carries spikes that are 0 or 1, and a trace that they leave."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        z_BI, trace_BI = torch.zeros_like(x_TBI[0]), torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            trace_BI = 0.5 * trace_BI + z_BI * x_TBI[t]
            z_BI = (trace_BI + x_TBI[t] > 0.3).to(x_TBI.dtype)
        return trace_BI


def test_bytes_before_and_after_compression_are_reported() -> None:
    fast = compiled(Spikes(), schedule="standard", chunk=4, segment=2)
    x = torch.randn(25, 8, 16, requires_grad=True)
    assert "kept so far" not in str(reroll.explain(fast, x))
    fast(x).sum().backward()
    report = reroll.explain(fast, x)
    carries, plain, kept = report.loops[0].kept
    assert carries > 0
    assert 0 < kept < plain
    assert "kept so far" in str(report)


class Twice(nn.Module):
    """Two loops, the second over the outputs of the first from the last to the first, so that they are not fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(5, 8), nn.GRUCell(8, 5)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BH, states = x_TBI.new_zeros(x_TBI.shape[1], 8), []
        for t in range(x_TBI.shape[0]):
            h_BH = self.first(x_TBI[t], h_BH)
            states.append(h_BH)
        g_BI = x_TBI.new_zeros(x_TBI.shape[1], 5)
        for state in reversed(states):
            g_BI = self.second(state, g_BI)
        return g_BI


@pytest.mark.parametrize("budget", [30_000, 36_000, 40_000, 45_000, 60_000])
def test_a_budget_is_shared_by_the_recurrences_of_a_graph(budget: int) -> None:
    x = torch.randn(40, 4, 5)
    report = reroll.explain(compiled(Twice(), memory_budget=budget), x)
    first, second = report.loops
    assert first.budget == budget - first.outer_bytes >= first.prediction.peak
    assert second.budget == budget - second.outer_bytes - first.prediction.turned >= second.prediction.peak
    assert report.predicted_peak <= budget


@pytest.mark.parametrize("known", [True, False])
def test_a_budget_that_is_a_part_of_plains_counts_what_is_around(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (loop,) = reroll.explain(compiled(RecurrentLIF(6, 7, 2)), spikes(20, 3, 6)).loops
    whole = loop.outer_bytes + loop.plain().peak("local")
    monkeypatch.setattr("reroll.backends.dynamo.plain.plain_peak", lambda *_: whole if known else None)
    with nullcontext() if known else pytest.warns(reroll.RerollWarning, match="is a fraction of what reroll would"):
        (loop,) = reroll.explain(compiled(RecurrentLIF(6, 7, 2), memory_budget=0.75), spikes(20, 3, 6)).loops
    assert loop.budget == int(0.75 * whole) - loop.outer_bytes >= loop.prediction.peak


def test_no_recurrence_is_explained() -> None:
    with pytest.warns(reroll.RerollWarning):
        report = reroll.explain(compiled(nn.Linear(4, 2)), torch.randn(3, 4))
    assert report.loops == ()
    assert report.reason
    assert report.step is None
    assert report.predicted_peak == 0
    assert report.reason in str(report).replace("\n", " ")


def test_a_broken_graph_is_named() -> None:
    def broken(x_TBI: Tensor, weight: Tensor) -> Tensor:
        h_BI = x_TBI[0]
        for t in range(8):
            h_BI = torch.tanh(h_BI @ weight + x_TBI[t])
        torch._dynamo.graph_break()
        return h_BI * 2

    report = reroll.explain(compiled(broken), torch.randn(8, 3, 5), torch.randn(5, 5, requires_grad=True))
    assert len(report.loops) == 1
    assert "test_explain.py" in report.notes[0]
    assert "Note: Dynamo ended" in str(report)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(2, 2), lambda: abs, lambda: torch.compile(nn.Linear(2, 2), backend="eager")]
)
def test_what_reroll_did_not_compile_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(reroll.RerollError, match='backend="reroll"'):
        reroll.explain(make(), torch.randn(2, 2))


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("l_self_modules_back_parameters_weight_", "back.weight"),
        ("L_self_modules_layers_modules_0_parameters_bias_ih_", "layers.0.bias_ih"),
        ("l_net_parameters_r_", "r"),
        ("getattr_2", "getattr_2"),
    ],
)
def test_parameters_have_the_names_of_their_modules(name: str, plain: str) -> None:
    assert parameter_name(name) == plain


class Noisy(nn.Module):
    """Draws by probabilities, which normal numbers are not."""

    def forward(self, x_TBI: Tensor) -> Tensor:
        p_BI = x_TBI[0].sigmoid()
        for t in range(x_TBI.shape[0]):
            p_BI = (p_BI + torch.bernoulli(p_BI) + x_TBI[t].sigmoid()) / 3
        return p_BI


def test_segments_that_take_no_normal_numbers_are_not_timed() -> None:
    x = torch.randn(20, 3, 4, requires_grad=True)
    report = reroll.explain(compiled(Noisy(), schedule="standard"), x)
    (loop,) = report.loops
    assert loop.costs is None
    assert not loop.alternatives
    assert "No times are predicted. The segments of the loop at" in str(report)
    with pytest.raises(UnsupportedError, match="Name a schedule that needs no times"):
        compiled(Noisy(), schedule="hrevolve")(x)


def test_a_function_that_dynamo_reads_by_itself_is_not_taken_for_the_model() -> None:
    """It is compiled first, and has no loop: what calls it has."""

    def reset(x_TBI: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x_TBI.new_zeros(x_TBI.shape[1], 4) + 0.0

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(3, 4)

        def forward(self, x_TBI: Tensor) -> Tensor:
            h_BN = reset(x_TBI)
            for t in range(x_TBI.shape[0]):
                h_BN = self.cell(x_TBI[t], h_BN)
            return h_BN

    options: Any = EAGER
    run, x = torch.compile(Called(), backend="reroll", options=options), torch.randn(20, 2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", reroll.RerollWarning)
        run(x)
    assert [loop.recurrence.steps for loop in reroll.explain(run, x).loops] == [20]


class Late(nn.Module):
    """A loop of which the first iteration may do less than the others."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.cell, self.late = nn.Linear(5, 5), late

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = torch.tanh(self.cell(h_BI) + x_TBI[t])
            if not self.late or t > 0:
                h_BI = h_BI.sin().exp() * h_BI
        return h_BI


@pytest.mark.parametrize(("late", "left"), [(True, 1), (False, 0)])
def test_iterations_that_are_no_steps_are_told(late: bool, left: int) -> None:
    report = reroll.explain(compiled(Late(late), memory_budget="8KiB"), torch.randn(40, 3, 5))
    (loop,) = report.loops
    assert (loop.recurrence.left, loop.recurrence.steps) == (left, 40 - left)
    told = " ".join(str(report).replace("│", " ").split())
    assert ("by themselves 1 of 40 iterations, before and behind: they do other operations" in told) == bool(left)
    assert "for this loop, of which 0." in told
    assert report.to_json()["recurrences"][0]["left"] == left


def test_iterations_in_the_middle_of_which_a_step_begins_are_told() -> None:
    report = reroll.explain(compiled(RecurrentLIF(6, 7, 2)), spikes(20, 3, 6))
    (loop,) = report.loops
    assert loop.recurrence.within == (loop.recurrence.left > 0)
    assert loop.recurrence.steps + loop.recurrence.left == 20


class Rotated(nn.Module):
    """A step that is found begins in the middle of an iteration, with what the last one would do for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again, self.down = nn.Linear(2, 64), nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        w_BN = torch.tanh(self.up(x_TBI[0]))
        for t in range(x_TBI.shape[0]):
            w_BN = torch.tanh(self.again(torch.tanh(self.down(w_BN))) + self.up(x_TBI[t]))
        return w_BN


class Pairs(nn.Module):
    """Two iterations are one step."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.GRUCell(2, 4), nn.GRUCell(4, 4)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BN = x_TBI.new_zeros(x_TBI.shape[1], 4)
        for t in range(x_TBI.shape[0]):
            h_BN = self.one(x_TBI[t], h_BN)
            if t % 2:
                h_BN = self.other(h_BN, h_BN)
        return h_BN


@pytest.mark.parametrize(("make", "whole"), [(Rotated, 21), (Pairs, None)])
def test_iterations_are_counted_as_the_user_does(make: Callable[[], nn.Module], whole: int | None) -> None:
    """Or not at all, where a step may be several of them."""
    (loop,) = reroll.explain(compiled(make()), torch.randn(21, 3, 2)).loops
    left = loop.recurrence.left
    assert (loop.recurrence.steps + left == whole) if whole else (left == 0)


@pytest.mark.parametrize("door", ["reroll.compile", "torch.compile"])
def test_it_says_what_was_proved(door: str) -> None:
    x, options = torch.randn(12, 3, 2), {"lowering": "eager", "proof": "first"}

    def made(**more: Any) -> Any:
        given = options | more
        return reroll.compile(Pairs(), **given) if door == "reroll.compile" else compiled(Pairs(), **given)

    assert reroll.explain(made(proof="never"), x).proved == ""
    run = made()
    assert reroll.explain(run, x).proved == "nothing: no call was made yet"
    run(x)
    report = reroll.explain(run, x)
    assert re.fullmatch(r"values and gradients are those of torch on .*: off by \S+ of .*, in \S+ CPU s", report.proved)
    assert f"proved: {report.proved}" in re.sub(r"\s+", " ", report.text())
    assert report.to_json()["proved"] == report.proved
    with torch.no_grad():
        run = made()
        run(x[:9])
        assert "gradients were not compared, as no gradients are taken" in reroll.explain(run, x[:9]).proved


@pytest.mark.parametrize(("width", "said"), [(64, True), (1, False)])
def test_explain_names_the_outputs_where_they_are_much_of_the_peak(width: int, said: bool) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.readout = nn.GRU(3, 8), nn.Linear(8, width)

        def forward(self, x_TBI: Tensor) -> Tensor:
            return self.readout(self.rnn(x_TBI)[0])  # type: ignore[no-any-return]

    fast: Any = reroll.compile(Wide(), lowering="eager", schedule="standard")
    notes = reroll.explain(fast, torch.randn(400, 4, 3)).notes
    assert any("reroll.compile(model, loss=...)" in note for note in notes) == said
