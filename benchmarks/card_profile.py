"""Where training steps on a card spend their time: milliseconds on the wall and of the host, and the longest kernels.

    python benchmarks/card_profile.py [--out FOLDER] [--seconds 60] [--device cuda]

The steps are those of ``card.py``. Saved as ``card_profile.json`` after each of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from card import settings
from card_contenders import AbsentError, entrant
from card_points import CUDNN, FEED_FORWARD, LSTM, RECURRENT, SEGMENTS, SINGLE, SPIKINGJELLY, Point, small
from card_session import Brief
from measuring import aside

JOBS: Mapping[Point, tuple[str, ...]] = {
    Point(RECURRENT, 1_024, 128, 1_024, (), 1): (SEGMENTS, "store_all", "standard", "double (host)"),
    Point(LSTM, 512, 128, 1_024, (), 1): (CUDNN, "store_all", "standard"),
    Point(SINGLE, 500, 16, 16_384, (), 1): (SPIKINGJELLY, "store_all"),
    Point(FEED_FORWARD, 512, 128, 1_024, (), 1): (SPIKINGJELLY, "store_all"),
}
ROUNDS, KERNELS = 5, 10


def profiled(point: Point, name: str, device: torch.device) -> dict[str, Any]:
    """One contender at one point."""
    found = entrant(name, point, point.inputs_on(device))
    for _ in range(2):
        found.step()
    settle = torch.cuda.synchronize if device.type == "cuda" else _nothing
    times = list[tuple[float, float]]()
    with aside():
        for _ in range(ROUNDS):
            settle()
            begin = time.perf_counter()
            found.step()
            queued = time.perf_counter()
            settle()
            times.append((time.perf_counter() - begin, queued - begin))
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with aside(), torch.profiler.profile(activities=activities) as profile:
        found.step()
        settle()
    on_card = [each for each in profile.key_averages() if each.self_device_time_total and "reroll" not in each.key]
    on_card = [each for each in on_card if str(each.device_type).endswith("CUDA")]
    longest = sorted(on_card, key=lambda each: -each.self_device_time_total)
    wall, host = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ms": wall,
        "host_ms": host,
        "card_ms": sum(each.self_device_time_total for each in on_card) / 1e3,
        "launches": sum(each.count for each in on_card),
        "kernels": [[each.key[:90], each.count, each.self_device_time_total / 1e3] for each in longest[:KERNELS]],
    }


def _nothing() -> None:
    """A CPU is never behind."""


def _told(point: Point, name: str, device: torch.device) -> dict[str, Any]:
    try:
        return profiled(point, name, device)
    except AbsentError as error:
        return {"absent": str(error)}


def main(given: list[str]) -> None:
    """Profile, save and print."""
    brief = Brief.asked(__doc__, "card_profile", given)
    with settings(brief.device):
        for point, name in ((point, name) for point, names in JOBS.items() for name in names):
            if not brief.over:
                found = _told(small(point) if brief.quick else point, name, brief.device)
                brief.result.setdefault("points", {}).setdefault(point.key, {})[name] = found
                brief.save()
                print(f"{point.key}, {name}: {found.get('ms')} ms, host {found.get('host_ms')}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
