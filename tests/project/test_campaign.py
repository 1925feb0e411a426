"""The campaign's own tools: what it makes, how it judges, how it makes failures smaller, and what it has kept."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import reroll
from reroll.errors import LengthError

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "campaign.json"
sys.path.append(str(ROOT / "benchmarks" / "campaign"))

from blame import blame, without  # noqa: E402
from judge import DEFECTS, Verdict, Way, judge, limited, outcome  # noqa: E402
from programs import Program, generate  # noqa: E402
from shrink import shrink  # noqa: E402
from stacks import ODD, stack  # noqa: E402

KINDS = {
    "several carries": "c2 = ",
    "numbers as carries": "s = 0|c1 = 0",
    "counters": "n += 1",
    "backward": "reversed(range",
    "strided": "range(0, x.shape[0], 2)",
    "nested": "for k in range(",
    "two in a row": "d0 = ",
    "two sequences": "zip(x.unbind(0), u.unbind(0))",
    "lists picked": "[-1]",
    "stacked": "torch.stack(out0, 1)",
    "concatenated": "torch.cat(out0, 0)",
    "summed": "sum(out0)",
    "in part": "[::2]",
    "delays": "out0[-2] if len(out0) > 1",
    "tables": "self.table[t]",
    "branches": "if t % 3 == 0:",
    "updates in place": "mul_(0.9)",
    "transposes": "turned.t()",
    "detach": ".detach()",
    "surrogates": "Spike.apply(m|Spike.apply(c",
    "buffers": "self.count += 1",
    "dropout": "F.dropout(",
    "batch norm": "self.bn(",
    "frozen parameters": "requires_grad_(False)",
    "dicts": 'return {"c0"',
    "dataclasses": "return Result(",
    "batch first": "bf[:, t]",
    "keyword arguments": '"labels": labels}',
    "mixed dtypes": ".float())",
    "embeddings": "self.emb(i",
    "convolutions": "F.conv1d(",
}
PROGRAM = Program(
    seed=0,
    before=("y = x * 2", "c0 = h0 * 0.5"),
    header="for t in range(x.shape[0]):",
    step=("m1 = x[t]", "m2 = torch.sin(m1)", "if t == 0:", "    m1 = m1 * 0.5", "c0 = torch.tanh(c0 @ self.w + m1)"),
    after=("r0 = c0 * 2",),
    result="(c0,)",
)
EAGER = (("lowering", "eager"),)


@pytest.fixture(autouse=True)
def _dtype() -> Any:
    yield
    torch.set_default_dtype(torch.float32)


def test_a_seed_makes_one_program_and_all_that_is_promised_is_made() -> None:
    texts = [generate(seed).source() for seed in range(600)]
    assert texts[:20] == [generate(seed).source() for seed in range(20)]
    assert len(set(texts)) == len(texts)
    for text in texts:
        compile(text, "program", "exec")
    assert {kind for kind, marks in KINDS.items() if not any(m in t for t in texts for m in marks.split("|"))} == set()


@pytest.mark.parametrize("door", ["backend", "compile"])
def test_a_program_that_is_right_is_called_so(door: str) -> None:
    assert judge(PROGRAM, Way(door, EAGER)).kind == "equal"


def test_what_eager_cannot_do_is_no_program() -> None:
    assert judge(PROGRAM.without("before", 1), Way("backend", EAGER)).kind == "invalid"


def test_a_wrong_gradient_is_called_so_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Way.compiled

    def wrong(way: Way, model: Any) -> Any:
        """Compiled right, but for what a sine gives."""
        run, sine = inner(way, model), torch.sin

        class Compiled:
            reroll_caller = run.reroll_caller

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                monkeypatch.setattr(torch, "sin", lambda value: sine(value) * 1.001)
                try:
                    return model(*args, **kwargs)
                finally:
                    monkeypatch.setattr(torch, "sin", sine)

        return Compiled()

    monkeypatch.setattr(Way, "compiled", wrong)
    way = Way("compile", EAGER)
    read = PROGRAM.without("step", 4)
    read = Program(0, read.before, read.header, (*read.step, "c0 = torch.tanh(c0 @ self.w + m2)"), read.after, "(c0,)")
    failed = judge(read, way)
    assert failed.kind == "wrong"
    small = shrink(read, failed, lambda each: judge(each, way), 300)
    assert small.step == ("m1 = x[t]", "m2 = torch.sin(m1)", "c0 = torch.tanh(c0 @ self.w + m2)")
    assert small.before == ("c0 = h0 * 0.5",)
    assert small.after == ()
    assert judge(PROGRAM, way).kind == "equal"


def test_a_seed_makes_one_stack_and_every_oddity_comes() -> None:
    texts = [stack(seed).text for seed in range(1500)]
    assert texts[:20] == [stack(seed).text for seed in range(20)]
    for text in texts:
        compile(text, "stack", "exec")
    marks = [each.split("{j}")[0].format(k=3) for each in ODD]
    assert [mark for mark in marks if not any(mark in text for text in texts)] == []


def test_a_stack_of_blocks_is_judged_and_rolled() -> None:
    way = Way("backend", (*EAGER, ("schedule", "standard")))
    plain = next(stack(seed) for seed in range(200) if "blocks[2].table = blocks[" in stack(seed).text)
    assert judge(plain, way).kind == "equal"


def test_how_a_comparison_ended() -> None:
    def failing(error: Exception) -> Any:
        def differences() -> Any:
            raise error

        return differences

    assert outcome(failing(LengthError("No. 17"))) == Verdict("refused", "No. N")
    assert outcome(failing(KeyError(1))).kind == "raw"
    assert outcome(lambda: ["h: off"]) == Verdict("wrong", "h: off")

    def endless() -> Any:
        while True:
            pass

    assert outcome(endless, 1).kind == "no answer"
    with limited(5):
        pass


def test_the_piece_to_blame_is_the_one_without_which_it_is_right() -> None:
    way = Way("backend", (*EAGER, ("schedule", "standard"), ("segment", 2)))

    def judged(other: Way) -> Verdict:
        options = dict(other.options)
        right = "compress" not in options.get("passes", reroll.DEFAULT_PASSES) or options["segment"] == 1
        return Verdict("equal" if right else "wrong")

    assert blame(Verdict("wrong"), way, judged) == ("compress", "long segments")
    assert {*reroll.DEFAULT_PASSES, "codec", "schedule"} <= {name for name, _ in without(way)}


def kept(section: str) -> Any:
    found = json.loads(RESULT.read_text()).get(section)
    if found is None:
        pytest.skip("nothing of this kind has been kept")
    return found


@pytest.mark.parametrize("section", ["programs", "mutants", "stacks"])
def test_what_is_kept_of_programs_adds_up_and_no_defect_is_open(section: str) -> None:
    found = kept(section)
    runs = found["runs"]
    assert all(sum(run["counts"].values()) == run["seeds"][1] - run["seeds"][0] for run in runs)
    assert all(before["seeds"][1] <= after["seeds"][0] for before, after in pairwise(runs))
    for kind, reasons in found["reasons"].items():
        assert sum(reasons.values()) == sum(run["counts"].get(kind, 0) for run in runs)
    bad = sum(run["counts"].get(kind, 0) for run in runs for kind in DEFECTS)
    assert len(found["defects"]) == bad
    assert [row for row in found["defects"] if "mended" not in row] == []


def test_no_operation_is_wrong() -> None:
    rows = kept("operations")["rows"]
    why = {
        f"{name}, {way}: {text}"
        for name, row in rows.items()
        for way, each in row.items()
        for text in each.get("reasons", ())
    }
    assert {each for each in why if any(f": {kind}: " in each for kind in DEFECTS)} == set()
    assert sum(each["counts"].get("equal", 0) for row in rows.values() for each in row.values()) > 900


def test_no_network_is_wrong() -> None:
    rows = kept("networks")["rows"]
    assert {(name, way) for name, row in rows.items() for way, each in row.items() if each["kind"] in DEFECTS} == set()
