"""Machines, costs and quantities: every number that none can have is a sentence."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from reroll.errors import MachineError, OptionError
from reroll.schedules.machine import Costs, Machine, MachineTier, SegmentSeconds
from reroll.words.units import parse_bandwidth, parse_seconds, parse_size, seconds_text

WRONG_TIERS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"write": 0.0}, "Tier 'disk' has write=0.0: bytes a second are finite and above zero"),
    ({"read": -1e9}, "Tier 'disk' has read=-1000000000.0: bytes"),
    ({"write": math.nan}, "write=nan"),
    ({"read": math.inf}, "read=inf"),
    ({"read": "fast"}, "read='fast'"),
    ({"latency": math.nan}, "latency=nan: seconds are finite and not negative"),
    ({"latency": -1e-6}, "latency=-1e-06"),
    ({"capacity": 0}, "capacity=0: a tier holds at least one byte"),
    ({"capacity": -5}, "capacity=-5"),
    ({"name": "disc"}, "no remote tier 'disc'. Did you mean 'disk'"),
    ({"name": "local"}, "no remote tier 'local'. Valid are: host, disk"),
)
WRONG_MACHINES: tuple[tuple[Any, type[Exception], str], ...] = (
    ({"disk": "0GB/s"}, OptionError, "Tier 'disk': write='0GB/s' must be positive"),
    ({"disk": 0}, OptionError, "Tier 'disk': write=0 must be positive"),
    ({"disk": math.nan}, OptionError, "write=nan is not a bandwidth"),
    ({"disk": "2GB"}, OptionError, "write='2GB' is not a bandwidth. Write bytes a second, or a text such as '2GB/s'"),
    ({"disk": {"write": "1GB/s", "read": "-1GB/s"}}, OptionError, "Tier 'disk': read='-1GB/s' is not a bandwidth"),
    ({"disk": {"write": "1GB/s", "latency": "soon"}}, OptionError, "latency='soon' is not a time"),
    ({"disk": {"write": "1GB/s", "latency": -1}}, OptionError, "latency=-1 must not be negative"),
    ({"disk": {"write": "1GB/s", "capacity": 0}}, OptionError, "capacity=0 must be positive"),
    ({"disk": {"latency": "1ms"}}, MachineError, "has no bandwidth. Give write or read"),
    ({"disk": {"bandwidth": "1GB/s"}}, MachineError, "no number 'bandwidth'.*Valid are: write, read"),
    ({"tape": "1GB/s"}, MachineError, "no remote tier 'tape'"),
    ("2GB/s", MachineError, "made of a mapping of tiers"),
)


@pytest.mark.parametrize(("numbers", "sentence"), WRONG_TIERS)
def test_tiers_that_no_machine_has(numbers: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MachineError, match=sentence):
        MachineTier(**{"name": "disk", "write": 1e9, "read": 1e9, **numbers})


@pytest.mark.parametrize(("tiers", "error", "sentence"), WRONG_MACHINES)
def test_machines_that_cannot_be(tiers: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        Machine.of(tiers)


def test_a_machine_elsewhere() -> None:
    given = {"write": "1GB/s", "read": 2e9, "latency": "50us", "capacity": "1TiB"}
    machine = Machine.of({"disk": given, "host": "12GiB/s"}, name="node7")
    assert replace(machine.tier("disk"), latency=0.0) == MachineTier("disk", 1e9, 2e9, 0.0, 2**40)
    assert machine.tier("disk").latency == pytest.approx(5e-5)
    assert machine.tier("host") == MachineTier("host", 12 * 2.0**30, 12 * 2.0**30)
    assert Machine.of({"disk": {"read": "3GB/s"}}).tier("disk").write == 3e9
    assert machine.tier("disk").write_seconds(10**9) == pytest.approx(1.00005)
    assert machine.tier("disk").read_seconds(10**9) == pytest.approx(0.50005)
    assert Machine.from_json(machine.to_json()) == machine
    assert machine.origin == "given"
    with pytest.raises(MachineError, match="Nothing is known of the tier 'host' of machine 'elsewhere'; known: disk"):
        Machine.of({"disk": "1GB/s"}).tier("host")


def broken() -> list[str]:
    read = json.loads(Machine.of({"disk": "1GB/s"}).to_json())
    other = {**read["tiers"]["disk"], "name": "host"}
    changed = [{**read, "origin": "guessed"}, {**read, "tiers": {"disk": {}}}, {**read, "tiers": {"disk": other}}]
    zero = {**read, "tiers": {"disk": {**read["tiers"]["disk"], "write": 0}}}
    return ["", "{", "[]", "3", "null", "{}", *map(json.dumps, [*changed, zero])]


@pytest.mark.parametrize("text", broken())
def test_broken_json_of_a_machine(text: str) -> None:
    with pytest.raises(MachineError, match=r"\w"):
        Machine.from_json(text)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1e-9, "1ms", None, True])
@pytest.mark.parametrize("name", ["forward", "tape", "backward"])
def test_seconds_that_no_segment_takes(name: str, seconds: Any) -> None:
    with pytest.raises(MachineError, match=f"A segment has {name}=.* finite and not negative"):
        SegmentSeconds(**{"forward": 1.0, "tape": 1.0, "backward": 0.0, name: seconds})


def test_costs_of_segments() -> None:
    each, machine = SegmentSeconds(1.0, 2.0, 3.0), Machine.of({"disk": {"write": 4, "read": 5, "latency": 6}})
    costs = Costs({8: each}, machine)
    assert costs.of(8) == each
    assert costs.numbers(8) == {"segment": 8, "forward": 1.0, "taping": 2.0, "backward": 3.0}
    assert costs.numbers(8, "disk") == {**costs.numbers(8), "write": 4, "read": 5, "latency": 6}
    with pytest.raises(MachineError, match="segment of 4 steps are not known; known lengths are 8"):
        costs.of(4)
    wrong: Any = {8: (1.0, 2.0, 3.0)}
    for segments, sentence in (({0: each}, "A segment has 0 steps"), (wrong, "Give SegmentSeconds")):
        with pytest.raises(MachineError, match=sentence):
            Costs(segments, machine)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64KiB", 65536), ("1.5 kB", 1500), (" 2 gib ", 2**31), ("1e3", 1000), (".5MB", 500000), ("1TB", 10**12), (7, 7)],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text, "x") == nbytes
    assert parse_bandwidth(f"{text}/s", "x") == nbytes


@pytest.mark.parametrize(
    "text", ["", "-1", "12 bananas", "nan", "inf", "1e999", "5 kk", "0x10", "1,5MB", "٣ kBq", None]
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(OptionError, match=r"--budget=.* is not a size"):
        parse_size(text, "--budget")
    with pytest.raises(OptionError, match=r"--read=.* is not a bandwidth"):
        parse_bandwidth(f"{text}/s", "--read")


@pytest.mark.parametrize(
    ("text", "seconds"), [("0.3ms", 3e-4), ("50us", 5e-5), ("50 µs", 5e-5), ("2", 2.0), ("1h", 3600.0), (0.25, 0.25)]
)
def test_durations(text: float | str, seconds: float) -> None:
    assert parse_seconds(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1ms", "nan", "inf", "3 fortnights", math.nan, math.inf, True])
def test_what_is_no_time(text: Any) -> None:
    with pytest.raises(OptionError, match=r"--forward=.* is not a time"):
        parse_seconds(text, "--forward")


def test_durations_are_written_with_a_fitting_unit() -> None:
    written = [seconds_text(seconds) for seconds in (0, 3e-9, 5.21e-5, 0.00124, 71.4, 7500.0, 1200.0)]
    assert written == ["0 s", "3 ns", "52.1 us", "1.24 ms", "71.4 s", "2 h 5 min", "20 min"]
