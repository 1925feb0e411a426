"""Every demo at a small size, run as a user runs it but for the process."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from processes import torchrun

DEMOS = Path(__file__).resolve().parents[2] / "demos"
FLOAT = r"([0-9.]+(?:e[+-]?\d+)?)"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> object:
    """What the demo ends with: None, or the sentence of its complaint."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(DEMOS))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    try:
        runpy.run_path(str(DEMOS / name), run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return None


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers at the places of FLOAT in the pattern."""
    found = re.search(pattern.replace("FLOAT", FLOAT), text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return [float(number) for number in found.groups()]


SMALL_DIGITS = ("--steps=32", "--neurons=24", "--batch=32", "--rounds=25", "--lowering=eager")


def test_digits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "digits.png"
    complaint = run(monkeypatch, "digits.py", *SMALL_DIGITS, "--accuracy=0.3", f"--out={picture}")
    text = capsys.readouterr().out
    assert complaint is None, text
    assert numbers("difference to plain BPTT FLOAT", text)[0] < 1e-12
    assert numbers("held-out digits: FLOAT", text)[0] >= 0.3
    (plain,), (rolled,) = (numbers(rf"{name} .*local peak FLOAT MB", text) for name in ("plain BPTT", "reroll"))
    assert rolled < plain / 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_digits_complains_about_low_accuracy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'digits.png'}"
    complaint = run(monkeypatch, "digits.py", "--steps=16", "--neurons=8", "--rounds=1", "--lowering=eager", out)
    assert re.fullmatch(r"Accuracy 0\.\d+ is below 0\.93\. Train for longer\.", str(complaint))


def test_adding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--steps=60", "--units=16", "--warm-up=100", "--rounds=60", "--lowering=eager", "--error=0.1")
    complaint = run(monkeypatch, "adding.py", *arguments)
    text = capsys.readouterr().out
    assert complaint is None, text
    (before,), (after,) = (numbers(rf"{name}: FLOAT", text) for name in ("after the warm-up", "at the full length"))
    assert after < min(before, 0.1)
    (plain,), (rolled,) = (numbers(rf"{name} .*local peak FLOAT MB", text) for name in ("plain BPTT", "reroll"))
    assert rolled < plain / 2


def test_inspect_graph(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(monkeypatch, "inspect_graph.py", "--steps=24", f"--page={page}") is None
    text = capsys.readouterr().out
    assert f"page: {page}" in text
    assert "offload_at12" in page.read_text("utf-8")
    for instruction in (
        "offload_at12",
        "reload_at12",
        "recompute_0to",
        "save_at",
        "backward_0to",
        "autograd_function_apply",
    ):
        assert instruction in text


@pytest.mark.usefixtures("fresh_registry")  # other tests may take the same name
def test_own_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "own_pass.py", "--steps=32") is None
    text = capsys.readouterr().out
    before, after = (numbers(rf"{name}: FLOAT writes, FLOAT reads", text) for name in ("default passes", "keep-last"))
    assert after == [count - 1 for count in before]
    assert "bit for bit: True" in text


@pytest.mark.usefixtures("fresh_registry")
def test_own_schedule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "own_schedule.py") is None
    text = capsys.readouterr().out
    (standard,), (growing,) = (numbers(rf"{name}: FLOAT carries kept", text) for name in ("standard", "growing"))
    assert growing < standard
    assert numbers(r"growing: .* FLOAT steps run again", text) < numbers(r"standard: .* FLOAT steps run again", text)


def test_train_ddp() -> None:
    pytest.importorskip("sklearn")
    small = ("--steps=24", "--neurons=32", "--rounds=26", "--lowering=eager", "--accuracy=0.3")
    done = torchrun(DEMOS / "train_ddp.py", *small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(r"Gradients of the first batch: FLOAT", done.stdout)[0] < 1e-5
    assert "round   25" in done.stdout


def test_gpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "gpt.png"
    small = ("--width=32", "--length=32", "--rounds=40", "--sample=20", "--lowering=eager")
    complaint = run(monkeypatch, "gpt.py", *small, "--share=0.4", "--loss=4.0", f"--out={picture}")
    text = capsys.readouterr().out
    assert complaint is None, text
    assert numbers("difference to plain PyTorch FLOAT", text)[0] < 1e-5
    (plain,), (rolled,) = (numbers(rf"{name} .*local peak FLOAT MB", text) for name in ("plain PyTorch", "reroll"))
    assert rolled <= 0.4 * plain + 0.01
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_snntorch_tutorial(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("snntorch")
    picture = tmp_path / "snntorch.png"
    small = ("--steps=16", "--hidden=256", "--epochs=1", "--lowering=eager")
    complaint = run(monkeypatch, "snntorch_tutorial.py", *small, f"--out={picture}")
    text = capsys.readouterr().out
    assert complaint is None, text
    assert numbers("FLOAT times less memory", text)[0] > 1
    (plain,), (rolled,) = (numbers(rf"{name} +accuracy FLOAT", text) for name in ("plain BPTT", "reroll"))
    assert abs(plain - rolled) < 0.05
    assert rolled > 0.2
    assert picture.read_bytes().startswith(b"\x89PNG")


SMALL_WORDS = ("--steps=60", "--channels=20", "--neurons=16", "--speakers=4", "--budget=64", "--lowering=eager")


def test_spoken_digits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "words.png"
    short = ("--rounds=20", "--every=10", "--accuracy=0.05", f"--out={picture}")
    complaint = run(monkeypatch, "spoken_digits.py", *SMALL_WORDS, *short)
    text = capsys.readouterr().out
    assert complaint is None, text
    assert "In float64, against plain BPTT: equal" in text
    (plain,), (rolled,) = (numbers(rf"{name} .*local peak FLOAT MB", text) for name in ("plain BPTT", "reroll"))
    assert rolled < plain / 2
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_words_backwards_have_as_many_events_in_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMOS))
    spoken = importlib.import_module("parts.spoken")
    words = spoken.vocabulary(100)
    assert torch.equal(words[10:], words[:10].flip(-1))
    events_TBC, numbers_B = spoken.recordings(words, each=2, channels=30)
    assert events_TBC.shape == (100, 40, 30)
    assert numbers_B.bincount().tolist() == [2] * 20
    assert 0.005 < events_TBC.float().mean() < 0.1
    pairs = [spoken.recordings(words[[each, each + 10]], 20, 30)[0] for each in range(3)]
    events_BC = torch.stack([events.sum(0) for events in pairs]).float()
    forth, back = events_BC[:, :20].mean(1), events_BC[:, 20:].mean(1)
    assert (forth - back).norm() < 0.3 * forth.norm()


def test_neural_ode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "ode.png"
    small = ("--steps=100", "--rounds=20", "--lowering=eager", "--error=1", f"--out={picture}")
    complaint = run(monkeypatch, "neural_ode.py", *small)
    text = capsys.readouterr().out
    assert complaint is None, text
    assert numbers("FLOAT times less memory", text)[0] > 2
    assert numbers("T=100: FLOAT at first", text)[0] < 1
    assert picture.read_bytes().startswith(b"\x89PNG")
