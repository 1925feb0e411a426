"""Draw the pictures of the gallery, one for each demo: ``python docs/site/gallery.py [names]``.

Demos that draw one themselves are run with fewer updates: what a step holds does not depend on how long was trained.
"""

import re
import runpy
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt

import reroll

ROOT = Path(__file__).resolve().parents[2]
DEMOS, OUT = ROOT / "demos", ROOT / "docs" / "tutorials" / "gallery"
sys.path.insert(0, str(DEMOS))


def demo(name: str, *arguments: str) -> None:
    """Run a demo as a user does. That too few updates miss an accuracy is no error here."""
    sys.argv = [name, *arguments]
    with suppress(SystemExit):
        runpy.run_path(str(DEMOS / f"{name}.py"), run_name="__main__")


def digits() -> None:
    demo("digits", "--rounds=3", f"--out={OUT / 'digits.png'}")


def gpt() -> None:
    demo("gpt", "--rounds=3", "--sample=5", f"--out={OUT / 'gpt.png'}")


def snntorch_tutorial() -> None:
    demo("snntorch_tutorial", "--epochs=6", "--lowering=eager", f"--out={OUT / 'snntorch_tutorial.png'}")


def neural_ode() -> None:
    demo("neural_ode", "--rounds=60", f"--out={OUT / 'neural_ode.png'}")


def adding() -> None:
    """What a training step holds, by plain BPTT and by reroll."""
    from parts.memory_curves import live_bytes, plot

    names = runpy.run_path(str(DEMOS / "adding.py"), run_name="demo")
    network, curves = names["Adder"](32, 1000), {}
    compiled = reroll.compile(network, schedule="standard", lowering="eager")
    for name, model in {"plain BPTT": network, "reroll": compiled}.items():
        call = partial(names["step"], model, *names["sequences"](1000, 32))
        call()
        network.zero_grad()
        curves[name] = live_bytes(call)
    plot(curves, "One training step of 1,000 time steps", OUT / "adding.png")


def planned(path: Path, steps: int, **options: Any) -> None:
    """The plan of the small spiking network of the demos."""
    from parts.spiking import Network, spike_trains

    model = reroll.compile(Network(neurons=16), lowering="eager", **options)
    reroll.explain(model, spike_trains(torch.rand(4, 64), steps)).plot(path)


def inspect_graph() -> None:
    planned(OUT / "inspect_graph.png", 32, schedule="double", segment=2, chunk=16, slots=2)


def own_pass() -> None:
    passes = runpy.run_path(str(DEMOS / "own_pass.py"), run_name="demo")["PASSES"]
    planned(OUT / "own_pass.png", 64, schedule="double", chunk=16, passes=passes)


def own_schedule() -> None:
    runpy.run_path(str(DEMOS / "own_schedule.py"), run_name="demo")
    planned(OUT / "own_schedule.png", 200, schedule="growing", chunk=16, segment=4)


def train_ddp() -> None:
    """The loss over the updates of two processes."""
    small = ["--steps=32", "--neurons=48", "--rounds=151", "--lowering=eager", "--accuracy=0"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(DEMOS / "train_ddp.py"), *small], capture_output=True, text=True, check=True)
    found = [(int(update), float(loss)) for update, loss in re.findall(r"round +(\d+): loss ([\d.]+)", done.stdout)]
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot(*zip(*found, strict=True), marker="o", color="#2b6c8f")
    axes.set(xlabel="update", ylabel="loss", ylim=0)
    axes.set_title("Two processes train one network", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(OUT / "train_ddp.png", dpi=150)


DRAWN = (digits, snntorch_tutorial, neural_ode, adding, gpt, inspect_graph, own_pass, own_schedule, train_ddp)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wanted = sys.argv[1:]  # demos have arguments of their own
    for draw in DRAWN:
        if not wanted or draw.__name__ in wanted:
            draw()
