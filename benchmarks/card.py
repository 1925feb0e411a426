"""Time and memory of training steps on a card, with everything that they are to be compared with, in eight minutes.

    python benchmarks/card.py [--out FOLDER] [--seconds 480] [--jax PYTHON] [--only NETWORK ...]

Networks: recurrent LIF of 1,024 neurons (batch 128, T=256 to 65,536), LSTM of 1,024, feed-forward and convolutional
spiking ones. Contenders: plain BPTT; ``torch.utils.checkpoint``; segments of 8 steps compiled by inductor, with their
tapes kept, and under ``torch.utils.checkpoint``; reroll's schedules with the host and the disk; ``nn.LSTM`` (cuDNN's);
SpikingJelly's Triton kernels; JAX's scan, nested remat and equinox's checkpoints, in a process of their own on the same
card (``speed_jax.py``; by default of this Python, if it has them). All in float32, without TF32.

Peaks are those of torch's allocator above inputs, parameters and their gradients (JAX: temporaries of the compiled
program), seconds those on the wall until the card is done, medians of rounds in which the contenders take turns; the
gradients of all are compared with eager's, or those of the first of ``card_measure.REFERENCES`` that fits. Then the
longest sequences within 1 GiB and within the card. Every measurement is saved at once in ``card_<card>.json``; what
fails is recorded with its error, what there is no time for is named under ``left_out``, and the same command goes on
from there. ``--show`` only draws and prints. ``--device cpu --quick`` runs all of it at sizes that show nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from card_figures import figures, show
from card_lengths import longest
from card_measure import known_jax, measure
from card_meter import meter_of
from card_plot import draw_all
from card_points import CUDNN, EVERYONE, LENGTHS, NETWORKS, SPIKINGJELLY, points
from card_session import Session, command_line, parsed
from measuring import machine

HERE = Path(__file__).resolve().parent


@contextmanager
def settings(device: torch.device) -> Iterator[None]:
    """Products in float32, one thread on a CPU, and room for what Dynamo compiles of all networks together."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # that of products is off by default
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = tf32


def environment(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and how this run is measured."""
    device = options.device
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        **machine(" ".join(["python", "benchmarks/card.py", *options.given])),
        "device": card.name if card else "cpu",
        "device_bytes": card.total_memory if card else None,
        "cuda": torch.version.cuda,
        "quick": options.quick,
        "precision": "float32, no TF32",
    }


def parse(given: list[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = command_line(__doc__, 480.0)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS), help="networks")
    parser.add_argument("--most-steps", type=int, default=LENGTHS[-1], help="of the points that are measured")
    parser.add_argument("--contenders", nargs="*", choices=(*EVERYONE, CUDNN, SPIKINGJELLY), help="only these")
    parser.add_argument("--jax", default=sys.executable if known_jax() else None, help="a Python with jax and equinox")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, eager lowering: shows that it runs")
    parser.add_argument("--show", action="store_true", help="measure nothing; tables and plots from the result file")
    return parsed(parser, given)


def main(given: list[str]) -> dict[str, Any]:
    """Measure, save, print and draw."""
    options = parse(given)
    where, meter = environment(options), meter_of(options.device)
    path = options.out / f"card_{re.sub('[^A-Za-z0-9]+', '-', where['device'])}.json"
    begin = time.monotonic()
    if options.show:
        return shown(json.loads(path.read_text()), path)
    session = Session.opened(path, meter, options.seconds, where)
    with settings(options.device):
        todo = points(options.quick, options.only, options.contenders, options.most_steps)
        for point in todo:
            measure(point, session, options.jax)
        longest(todo, session)
    where["took_s"] = time.monotonic() - begin
    session.result["figures"] = figures(session.result)
    session.save()
    return shown(session.result, path)


def shown(result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Print and draw a result, also one of a run that was ended before it came to its figures."""
    result["figures"] = figures(result)
    show(result)
    draw_all(result, path)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
