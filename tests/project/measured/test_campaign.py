"""The campaign's own tools: what it makes, how it judges, how it makes failures smaller, and what it has kept."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import reroll
from reroll.backends.runtime.executable import Executable
from reroll.errors import BudgetError, ProofError, UnsupportedError

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "benchmarks" / "results" / "campaign.json"
sys.path.append(str(ROOT / "benchmarks" / "campaign"))

from blame import blame, without  # noqa: E402
from campaign import JUDGES, subject  # noqa: E402
from idioms import IDIOMS, idioms_of  # noqa: E402
from judge import DEFECTS, Text, Verdict, Way, first_line, judge, judge_calls, limited, outcome  # noqa: E402
from kinds import Model, model  # noqa: E402
from programs import Program, generate  # noqa: E402
from shrink import shrink  # noqa: E402
from stacks import ODD, stack  # noqa: E402
from turns import BEYOND, OUTSIDE, TURNS  # noqa: E402

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


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, Callable[[Any], Any]], None]:
    """Break what ways compile: an attribute is another one while the compiled model runs."""
    inner = Way.compiled

    def breaks(owner: Any, name: str, made_of: Callable[[Any], Any]) -> None:
        right = getattr(owner, name)

        def wrong(way: Way, model: Any) -> Any:
            run = inner(way, model)

            class Compiled:
                reroll_caller = run.reroll_caller

                def __call__(self, *args: Any, **kwargs: Any) -> Any:
                    with monkeypatch.context() as patch:
                        patch.setattr(owner, name, made_of(right))
                        return model(*args, **kwargs)

            return Compiled()

        monkeypatch.setattr(Way, "compiled", wrong)

    return breaks


COMPILE = Way("compile", EAGER)


def more(sine: Any) -> Any:
    """A sine that is larger by a thousandth."""
    return lambda value: sine(value) * 1.001


def test_a_wrong_gradient_is_called_so_and_made_small(broken: Any) -> None:
    broken(torch, "sin", more)
    read = PROGRAM.without("step", 4)
    read = Program(0, read.before, read.header, (*read.step, "c0 = torch.tanh(c0 @ self.w + m2)"), read.after, "(c0,)")
    failed = judge(read, COMPILE)
    assert failed.kind == "wrong"
    small = shrink(read, failed, lambda each: judge(each, COMPILE), 300)
    assert small.step == ("m1 = x[t]", "m2 = torch.sin(m1)", "c0 = torch.tanh(c0 @ self.w + m2)")
    assert small.before == ("c0 = h0 * 0.5",)
    assert small.after == ()
    assert judge(PROGRAM, COMPILE).kind == "equal"


FLAT = replace(  # batch norm of rows that are all equal gives rounding alone
    PROGRAM,
    before=("c0 = self.v.expand(B_, H_)", "c1 = h0"),
    step=("c0 = self.bn(c0) * 0.3", "m2 = torch.sin(x[t])", "c1 = torch.tanh(c1 @ self.w + m2)"),
    after=(),
    result="(c0, c1)",
)


def test_numbers_of_which_eager_has_no_digits_cannot_be_compared(broken: Any) -> None:
    broken(torch.nn.BatchNorm1d, "forward", lambda norm: lambda self, value: norm(self, value * (1 + 2.0**-52)))
    verdict = judge(FLAT, COMPILE)
    assert verdict.kind == "invalid"
    assert verdict.why.startswith("eager has no such digits: result[0]: ")
    smooth = replace(FLAT, before=("c0 = h0 * 0.5", "c1 = h0"))
    assert judge(smooth, COMPILE).kind == "equal"


def test_a_defect_beside_numbers_without_digits_is_seen(broken: Any) -> None:
    broken(torch, "sin", more)
    assert judge(FLAT, COMPILE).why.startswith("result[1]: ")
    broken(torch.nn.BatchNorm1d, "forward", lambda norm: lambda self, value: norm(self, value).detach())
    assert judge(FLAT, COMPILE) == Verdict("wrong", "requires_grad of result[0]: False instead of True")


@pytest.mark.parametrize("defect", ["surrogate", "threshold"])
def test_a_defect_of_spikes_is_seen(broken: Any, defect: str) -> None:
    spiking = replace(PROGRAM, step=("m1 = torch.sin(x[t])", "c0 = 0.5 * c0 + Spike.apply(m1 @ self.w - 0.21)"))
    if defect == "surrogate":  # spikes are far from their thresholds
        broken(torch, "sin", lambda sine: lambda value: sine(value) + 1e-7 * (value - value.detach()))
    else:
        broken(torch, "sin", lambda sine: lambda value: sine(value) - 0.1)
    assert judge(spiking, COMPILE).kind == "wrong"


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

    assert outcome(failing(BudgetError("No. 17"))) == Verdict("refused", "No. N")
    assert outcome(failing(KeyError(1))).kind == "raw"
    assert outcome(failing(ProofError("h is off"))).kind == "wrong"
    assert outcome(failing(UnsupportedError("Another layout; please report it."))).kind == "raw"
    assert outcome(lambda: ["h: off"]) == Verdict("wrong", "h: off")

    def endless() -> Any:
        while True:
            pass

    assert outcome(endless, 1).kind == "no answer"
    with limited(5):
        pass


@pytest.mark.parametrize(
    ("message", "counted"),
    [
        ("Traces differ at {}. Use torch.compile.", "Traces differ at <line>. Use torch.compile."),
        ("What {} reads or is given changes.", "What <line> reads or is given changes."),
        ("The loop in forward (/tmp/tmpa1/kinds4_5.py:17): Dynamo", "The loop in forward (kindsN_N.py:N): Dynamo"),
    ],
)
def test_equal_reasons_are_counted_together(message: str, counted: str) -> None:
    line = (
        'File "/tmp/tmpa1/kinds4_5.py", line 30, in <lambda>: f3 = lambda m, t: self.q[t](m) * x.split(5)[-1].mean(0)'
    )
    assert first_line(message.format(line)) == counted


def test_the_piece_to_blame_is_the_one_without_which_it_is_right() -> None:
    way = Way("backend", (*EAGER, ("schedule", "standard"), ("segment", 2)))

    def judged(other: Way) -> Verdict:
        options = dict(other.options)
        right = "compress" not in options.get("passes", reroll.DEFAULT_PASSES) or options["segment"] == 1
        return Verdict("equal" if right else "wrong")

    assert blame(Verdict("wrong"), way, judged) == ("compress", "long segments")
    assert {*reroll.DEFAULT_PASSES, "codec", "schedule"} <= {name for name, _ in without(way)}


HELD = Model(
    seed=0,
    parts=(
        ("init", ("self.n = 0", "self.q = collections.deque(maxlen=2)")),
        ("methods", ()),
        ("before", ("h = u",)),
        ("step", ("m1 = torch.sin(x[t]) * 0.5", "h = torch.tanh(m1 + h @ self.w)", "out.append(h)")),
        ("after", ("r = torch.stack(out)",)),
        ("between", ("net.n = number",)),
    ),
    header="for t in range(T_):",
    results=("r", "h * self.n"),
    calls=((12, 3, "train"), (7, 3, "train")),
)


@pytest.mark.parametrize("turns", [False, True])
def test_a_seed_makes_one_model_and_every_idiom_comes(turns: bool) -> None:
    seeds = [*range(1200), *range(4000, 4800)] if turns else range(1200)
    texts = [model(seed, turns=turns).source() for seed in seeds]
    assert texts[:20] == [model(seed, turns=turns).source() for seed in range(20)]
    for text in texts:
        compile(text, "model", "exec")
    later = {"outside": idioms_of(OUTSIDE), "beyond": idioms_of(BEYOND)}
    listed = {**TURNS, **later} if turns else IDIOMS
    made = [pattern(line) for idioms in listed.values() for each in idioms for line in each.split("\n")]
    whole = "\n".join({line: None for text in texts for line in text.split("\n")})
    assert [each.pattern for each in made if not each.search(whole)] == []


def pattern(line: str) -> re.Pattern[str]:
    """What a line of an idiom becomes, in part: what stands for something else, and what is helped, is left open."""
    text = line.partition(": ")[2].strip().removeprefix("{n} = ")
    parts = re.split(r"\{[a-zA-Z]\}", text)
    return re.compile("[^\n]*".join(re.escape(each.replace("{{", "{").replace("}}", "}")) for each in parts))


def test_calls_of_a_model_are_judged_and_what_they_leave_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Way.compiled

    def broken(change: Callable[[Any], object]) -> Verdict:
        def made(way: Way, net: Any) -> Any:
            run = compiled(way, net)

            def call(*args: Any) -> Any:
                result = run(*args)
                change(net)
                return result

            return call

        monkeypatch.setattr(Way, "compiled", made)
        return judge_calls(HELD, COMPILE)

    assert broken(lambda net: None) == Verdict("equal")
    assert "call 0, type of model.q: deque 1 2 instead of deque 0 2" in broken(lambda net: net.q.append(1)).why
    assert broken(lambda net: net.fc.weight.data.mul_(2)) == Verdict(
        "raw", "AttributeError: 'Net' object has no attribute 'fc'"
    )
    assert broken(lambda net: torch.rand(())).kind == "wrong"


def test_torch_alone_in_silence_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "compiled", lambda way, net: net)
    assert judge_calls(HELD, COMPILE) == Verdict("silent", "nothing is rolled of a call of 12 steps")

    def left(way: Way, net: Any) -> Any:
        def call(*args: Any) -> Any:
            reroll.errors.warn("Left.")
            return net(*args)

        return call

    monkeypatch.setattr(Way, "compiled", left)
    assert judge_calls(HELD, COMPILE) == Verdict("left", "Left.")


def test_a_wrong_call_is_made_small_and_kept_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "compiled", lambda way, net: lambda x, u: net(x, u * 1.001))
    monkeypatch.setattr("judge.MANY", 100)
    failed = judge_calls(HELD, COMPILE)
    assert failed.kind == "wrong"
    small = shrink(HELD, failed, lambda each: judge_calls(each, COMPILE), 100)
    assert (len(small.calls), small.results) == (1, ("r",))
    assert dict(small.parts)["init"] == dict(small.parts)["between"] == ()
    assert judge_calls(Text(0, small.source()), COMPILE).kind == "wrong"


@pytest.mark.parametrize("seed", [8, 42, 43, 60, 76, 1002, 1003])
def test_models_of_turns_are_right(seed: int) -> None:
    """Of some the gradient of each result by itself was another one, or zeros where eager has none."""
    made, way = subject("turns", seed)
    assert judge_calls(made, way).kind == "equal"


@pytest.mark.parametrize("seed", [4, 5])
def test_threads_may_call_a_model_at_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, way = subject("at once", seed)
    assert JUDGES["at once"](made, way).kind == "equal"
    monkeypatch.setattr(Way, "compiled", lambda way, net: lambda x, u: net(x * (1.001 if len(x) == 6 else 1), u))
    assert JUDGES["at once"](made, way).kind == "wrong"


@pytest.mark.parametrize("seed", [1068, 1098])
def test_what_torch_refuses_after_an_update_in_place_is_judged(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by plain torch where it saves copies."""
    made, way = subject("updated", seed)
    with pytest.warns(reroll.RerollWarning, match="Plain PyTorch does not go backward"):
        assert judge(made, way).kind == "equal"
    monkeypatch.setattr(Executable, "passed_on", lambda _, grads, __: [None] * len(grads))
    assert judge(made, way).kind == "wrong"


def kept(section: str) -> Any:
    found = json.loads(RESULT.read_text()).get(section)
    if found is None:
        pytest.skip("nothing of this kind has been kept")
    return found


SECTIONS = (
    "programs",
    "lowered",
    "sizes",
    "losses",
    "wholes",
    "truncated",
    "mutants",
    "stacks",
    "kinds",
    "kinds lowered",
)


@pytest.mark.parametrize("section", [*SECTIONS, "turns", "at once", "long", "updated"])
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
