"""Where training steps on a card spend their time: milliseconds on the wall and of the host, and the longest kernels.

    python benchmarks/card_profile.py [--out FOLDER] [--seconds 60] [--kernels 10]

The steps are those of ``card.py``. Saved as ``card_profile.json`` after each of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from card import settings
from card_contenders import entrant
from card_points import CUDNN, FEED_FORWARD, LSTM, RECURRENT, SEGMENTS, SINGLE, SPIKINGJELLY, Point
from measuring import machine

JOBS: Mapping[Point, tuple[str, ...]] = {
    Point(RECURRENT, 1_024, 128, 1_024, (), 1): (SEGMENTS, "store_all", "standard", "double (host)"),
    Point(LSTM, 512, 128, 1_024, (), 1): (CUDNN, "store_all", "standard"),
    Point(SINGLE, 500, 16, 16_384, (), 1): (SPIKINGJELLY, "store_all"),
    Point(FEED_FORWARD, 512, 128, 1_024, (), 1): (SPIKINGJELLY, "store_all"),
}
ROUNDS = 5


def profiled(point: Point, name: str, kernels: int) -> dict[str, Any]:
    """One contender at one point."""
    found = entrant(name, point, point.inputs_on(torch.device("cuda", 0)))
    for _ in range(2):
        found.step()
    times = list[tuple[float, float]]()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        found.step()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin, queued - begin))
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        found.step()
        torch.cuda.synchronize()
    on_card = [each for each in profile.key_averages() if each.self_device_time_total and "reroll" not in each.key]
    on_card = [each for each in on_card if str(each.device_type).endswith("CUDA")]
    longest = sorted(on_card, key=lambda each: -each.self_device_time_total)
    wall, host = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ms": wall,
        "host_ms": host,
        "card_ms": sum(each.self_device_time_total for each in on_card) / 1e3,
        "launches": sum(each.count for each in on_card),
        "kernels": [[each.key[:90], each.count, each.self_device_time_total / 1e3] for each in longest[:kernels]],
    }


def main(given: list[str]) -> None:
    """Profile, save and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kernels", type=int, default=10)
    options = parser.parse_args(given)
    ends = time.monotonic() + options.seconds
    result: dict[str, Any] = {
        **machine(" ".join(["python benchmarks/card_profile.py", *given])),
        "device": torch.cuda.get_device_name(0),
        "points": {},
    }
    with settings(torch.device("cuda", 0)):
        for point, name in ((point, name) for point, names in JOBS.items() for name in names):
            if time.monotonic() > ends:
                return
            found = profiled(point, name, options.kernels)
            result["points"].setdefault(point.key, {})[name] = found
            (options.out / "card_profile.json").write_text(json.dumps(result, indent=1) + "\n")
            print(f"{point.key}, {name}: {found['ms']:.1f} ms, host {found['host_ms']:.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
