"""Networks as their libraries write them train as in eager: every schedule, several lengths, both doors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import case_plain
import case_snntorch
import case_spikingjelly
import case_torch
from reroll.capture.capture import capture as capture_graph
from reroll.recurrence import Capture
from training import (
    SCHEDULES,
    Case,
    built,
    compare,
    compare_schedules,
    precision,
    quiet,
    through_backend,
    through_front_door,
)

FAMILIES = {
    "torch": case_torch.CASES,
    "snntorch": case_snntorch.CASES,
    "spikingjelly": case_spikingjelly.CASES,
    "plain": case_plain.CASES,
}
CASES = {f"{family}-{name}": case for family, cases in FAMILIES.items() for name, case in cases.items()}
STANDARD = SCHEDULES[1]
# One of each kind; benchmarks/campaign/libraries.py runs all networks under all schedules and through both doors.
OF_A_KIND = ("torch-gru_cell", "torch-lstm", "spikingjelly-lif", "spikingjelly-if_multi_step")
DAILY = (
    *(name for name in CASES if name.startswith("plain")),
    *("torch-gru_cell", "torch-lstm", "torch-gru_dropout", "torch-lstm_cell"),
    *("spikingjelly-if_multi_step", "spikingjelly-poisson_encoder"),
    *("spikingjelly-carried_over", "snntorch-rleaky", "snntorch-leaky_hidden"),
)
ANY_LENGTH = (
    *("plain-delays", "plain-loss_inside", "plain-nested", "plain-bidirectional", "plain-teacher_forcing"),
    *("torch-gru_cell", "torch-lstm_deep", "spikingjelly-carried_over", "spikingjelly-lif_multi_step_float64"),
    *("snntorch-leaky_hidden", "spikingjelly-parametric_lif_multi_step", "spikingjelly-convolutional_multi_step"),
)
SAME_STRUCTURE = (
    *OF_A_KIND,
    "snntorch-rleaky",
    "plain-delays",
    "plain-loss_inside",
)


@pytest.fixture(autouse=True)
def _what_dynamo_captures(request: pytest.FixtureRequest) -> None:
    if torch.__version__ >= "2.13":
        return
    name = request.node.name
    if "snntorch" in name and not name.startswith("test_any_length"):
        pytest.skip("Dynamo of torch 2.11 and 2.12 breaks the graph at ``mem == None``")
    if "torch-lstm" in name and "cell" not in name:
        pytest.skip("Dynamo of torch 2.11 and 2.12 gives the last states of nn.LSTM wrong shapes, which reroll refuses")


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", DAILY)
def test_every_schedule(name: str) -> None:
    found, loops = compare_schedules(CASES[name])
    assert not {options: texts for options, texts in found.items() if texts}
    assert loops == CASES[name].loops


@pytest.mark.parametrize("name", OF_A_KIND)
def test_other_lengths(name: str) -> None:
    assert not compare(CASES[name], through_backend, STANDARD, CASES[name].lengths)


@pytest.mark.variants(4)
@pytest.mark.parametrize(("at", "name"), enumerate(ANY_LENGTH))
def test_any_length(at: int, name: str) -> None:
    options = {**SCHEDULES[1 + at % (len(SCHEDULES) - 1)], "segment": 1 + at // 4 % 2}
    assert not compare(CASES[name], through_front_door, options, (13, 4, 33))


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", ["snntorch-leaky"])
def test_inductor(name: str) -> None:
    case = CASES[name]
    assert not compare(case, through_backend, {"lowering": "inductor", "segment": 4}, (case.steps,))


def captured(case: Case, steps: int) -> Capture:
    """What is captured of the first batch."""
    found = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(capture_graph(gm))
        return gm.forward

    torch._dynamo.reset()
    with precision(case.dtype), quiet(case):
        model = built(case)
        torch.compile(model, backend=backend, fullgraph=True)(*case.lengthwise(steps)[0])
    return found[0]


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", SAME_STRUCTURE)
def test_structure_does_not_depend_on_the_length(name: str) -> None:
    found = [captured(CASES[name], steps) for steps in (7, 10)]
    calls = [[str(node.target) for node in capture.outer.nodes if node.op.startswith("call")] for capture in found]
    steps = [[len(r.step.graph.nodes) for r in capture.recurrences] for capture in found]
    lengths = [[r.steps for r in capture.recurrences] for capture in found]
    assert calls[0] == calls[1]
    assert steps[0] == steps[1]
    assert [b - a for a, b in zip(lengths[0], lengths[1], strict=True)] == [3] * len(lengths[0])


class Packed(torch.nn.Module):
    """Sequences of different lengths, packed as torch's documentation does."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        y: torch.Tensor = pad_packed_sequence(self.lstm(packed)[0])[0]
        return y


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo fails on packed sequences with allow_rnn")
def test_packed_sequences_are_refused_by_line_or_run_as_in_eager() -> None:
    model, x, lengths = Packed(), torch.randn(6, 2, 3), torch.tensor([6, 4])
    with torch._dynamo.config.patch(allow_rnn=True):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pack_padded_sequence(.|\n)*test_networks.py"):
            through_backend(model, STANDARD)(x, lengths)
        broken = torch.compile(model, backend="reroll", options=dict(STANDARD))
        assert torch.equal(broken(x, lengths), model(x, lengths))


def test_what_dynamo_refuses_of_snntorch_is_named_by_its_line() -> None:
    snn = case_snntorch.snn
    model = case_snntorch.Passed(snn.Leaky(beta=0.8, reset_delay=False), snn.Leaky(beta=0.8))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leaky\.py(.|\n)*if self\.reset_mechanism_val == 0"):
        through_backend(model, STANDARD)(torch.randn(6, 2, 3))


def test_the_docs_name_the_layers_that_are_trained_here() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "spiking.md").read_text("utf-8").split())
    modules = [module for case in CASES.values() for module in case.make().modules()]
    parts = {"RecurrentOneToOne", "ATan", "Flatten", "MaxPool2d", "PoissonEncoder"}  # of layers, or without a state
    for library, version in (("snnTorch", "1.0.0"), ("SpikingJelly", "2.0.0")):
        own = {type(each).__name__ for each in modules if type(each).__module__.startswith(f"{library.lower()}.")}
        named = page.split(f"- {library} {version}: ")[1].split(". ")[0].split(" - ")[0]
        told = set(re.findall(r"[A-Z]\w+", named.split("On torch")[0]))
        assert {name.removesuffix("Node") for name in own - parts} == told
