"""A run of ``card.py`` that may end at any moment: what is there is saved, and the next run goes on from it."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from card_contenders import AbsentError
from card_meter import Meter
from measuring import machine

Result = dict[str, Any]
_TRIES = 2


def command_line(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that all measurements on a card have. ``seconds``: how long they take, if nothing else is said."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results", help="of the result")
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing that would end later")
    return parser


def parsed(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """The options, with what was ``given``. Ends the process with a sentence where the device is not there."""
    options = parser.parse_args(given, argparse.Namespace(given=given))
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            "There is no CUDA device. --device cpu, with --quick where there is one, shows that the benchmark runs."
        )
    return options


@dataclass
class Brief:
    """A measurement on a card that is short enough to be begun anew: ``result`` is saved at ``path``."""

    path: Path
    result: Result
    ends: float
    device: torch.device

    @classmethod
    def asked(cls, doc: str | None, name: str, given: list[str]) -> Brief:
        """What a command asks for: a folder by ``--out``, seconds after which nothing is begun by ``--seconds``, and by
        ``--device cpu`` tiny sizes, which show nothing but that it runs."""
        options = parsed(command_line(doc, 60.0), given)
        card = "cpu" if options.device.type == "cpu" else torch.cuda.get_device_name(options.device)
        command = " ".join([f"python benchmarks/{name}.py", *given])
        result = {**machine(command), "device": card}
        return cls(options.out / f"{name}.json", result, time.monotonic() + options.seconds, options.device)

    @property
    def quick(self) -> bool:
        """Whether sizes are tiny."""
        return self.device.type == "cpu"

    @property
    def over(self) -> bool:
        """Whether nothing more is to be begun."""
        return time.monotonic() > self.ends

    def save(self) -> None:
        """Write the file."""
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


@dataclass
class Session:
    """``result`` is what was found so far, ``path`` where it is saved; ``ends`` on the monotonic clock, in seconds."""

    path: Path
    result: Result
    meter: Meter
    ends: float

    @classmethod
    def opened(cls, path: Path, meter: Meter, seconds: float, environment: Result) -> Session:
        """Go on with the file if there is one; a measurement during which the process ended is tried once more.

        Raises ValueError for a file of another device or size.
        """
        result: Result = json.loads(path.read_text()) if path.exists() else {"points": {}, "lengths": {}, "runs": []}
        for known in result["runs"][:1]:
            if differing := [key for key in ("device", "quick", "torch") if known[key] != environment[key]]:
                told = ", ".join(f"{key} {known[key]!r} and not {environment[key]!r}" for key in differing)
                raise ValueError(f"{path} was measured with {told}. Name another folder with --out.")
        for entry in (entry for row in result["points"].values() for entry in row["contenders"].values()):
            if len(entry.get("started", ())) >= _TRIES:
                entry["error"] = (
                    f"The process ended during this measurement, begun at {' and '.join(entry['started'])}."
                )
        result["runs"].append(environment)
        result["left_out"] = []
        return cls(path, result, meter, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the run is to end."""
        return self.ends - time.monotonic()

    def save(self) -> None:
        """Write the file, all of it or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(_plain(self.result), indent=1) + "\n")
        beside.replace(self.path)

    def leave_out(self, what: str, why: str) -> None:
        """Note what this run does not measure; the next one tries it."""
        self.result["left_out"].append({"what": what, "why": why})
        self.save()
        print(f"left out: {what}: {why}", flush=True)

    def attempt(self, entry: Result, what: str, measure: Callable[[], Result], expected: float = 0.0) -> bool:
        """Fill an entry anew by measuring, which may fail; whether that was done.

        expected: seconds that it may take; it is left out if so many are not left. Raises what the device failed with,
        if nothing can run on it any more.
        """
        if self.left <= expected:
            self.leave_out(what, f"{max(self.left, 0):.0f} s are left, and it may take {expected:.0f} s")
            return False
        entry["started"] = [*entry.get("started", ()), time.strftime("%Y-%m-%dT%H:%M:%S%z")]
        self.save()
        begin = time.monotonic()
        found = _tried(measure)
        entry.clear()
        entry.update(found, took_s=time.monotonic() - begin, run=len(self.result["runs"]) - 1)
        self.save()
        said = found.get("error") or found.get("absent") or "measured"
        print(f"{what}: {str(said).splitlines()[0][:160]}, {entry['took_s']:.1f} s, {self.left:.0f} left", flush=True)
        self.meter.settle()
        return True


def _tried(measure: Callable[[], Result]) -> Result:
    try:
        return measure()
    except AbsentError as error:
        return {"absent": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever a contender fails with is what was found of it
        return {"error": f"{type(error).__name__}: {error}"[:1_000]}


def _plain(value: Any) -> Any:
    """What JSON has: no NaN, no infinity; they become texts."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
