"""Everything about one point of ``card.py``: each contender alone, then all in turn."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from card_contenders import Entrant, entrant, network_of
from card_points import JAX, OURS, Point
from card_session import Result, Session
from contenders import CHECKPOINT, EAGER
from measuring import Step, aside, gradients, relative_error
from speed_peers import Peers
from torch import Tensor

from reroll.backends.runtime.recordings import Graphs
from reroll.errors import RerollWarning

REFERENCES = (EAGER, "store_all", CHECKPOINT)  # whose gradients the others are compared with: the first that can be run


class NoRoomError(Exception):
    """A plan is predicted to need more than there is."""


@dataclass(frozen=True)
class Measured:
    """A point while it is measured; ``steps``: what takes turns. ``reference``: gradients, and whose they are."""

    point: Point
    session: Session
    x: Tensor
    reference: tuple[str, list[Tensor]] | None
    entries: Mapping[str, Result]
    steps: dict[str, Step]


def measure(point: Point, session: Session, jax: str | None) -> None:
    """Fill the row of a point as far as time allows. ``jax``: a Python that has it."""
    row = row_of(point, session)
    entries = {name: row["contenders"].setdefault(name, {}) for name in point.contenders}
    todo = {name: entry for name, entry in entries.items() if not _is_done(entry, point.rounds)}
    if not todo:
        return
    if session.left <= 0:
        session.leave_out(f"{point.key}, {', '.join(todo)}", "no time is left")
        return
    x = point.inputs_on(session.meter.device)
    measured = Measured(point, session, x, _reference(point, session, x), todo, {})
    for name in todo:
        if name not in JAX:
            what, expected = f"{point.key}, {name}", expected_seconds(point, name, session)
            session.attempt(todo[name], what, partial(_alone, name, measured), expected)
    with _peers(measured, jax):
        _in_turn(measured)


def row_of(point: Point, session: Session) -> Result:
    """Where the result of a point is kept."""
    sizes = {key: getattr(point, key) for key in ("network", "steps", "batch", "neurons", "rounds", "lowering")}
    row: Result = session.result["points"].setdefault(point.key, {**sizes, "contenders": {}})
    return row


def _is_done(entry: Result, rounds: int) -> bool:
    return "error" in entry or "absent" in entry or len(entry.get("seconds", ())) >= max(rounds, 1)


def expected_seconds(point: Point, name: str, session: Session) -> float:
    """Seconds that three steps take, from what they took at the nearest other length; 0 where that is not known."""
    found = []
    for row in session.result["points"].values():
        seconds = row["contenders"].get(name, {}).get("seconds")
        if row["network"] == point.network and seconds:
            found.append((row["steps"], statistics.median(seconds)))
    steps, seconds = min(found, key=lambda each: abs(each[0] - point.steps), default=(1, 0.0))
    return 3 * float(seconds) * point.steps / steps


def _reference(point: Point, session: Session, x: Tensor) -> tuple[str, list[Tensor]] | None:
    """The gradients of the first that can be run. None if none can, of which a line tells."""
    for name in REFERENCES:
        try:
            found = entrant(name, point, x)
            planned(found, session)
            return name, gradients(found.step, found.network)
        except Exception as error:  # noqa: BLE001  # recorded where it is measured itself; here another may do
            print(f"{point.key}: no gradients of {name} to compare with: {str(error)[:200]}", flush=True)
        session.meter.settle()
    return None


def planned(found: Entrant, session: Session) -> Result:
    """What reroll says of a contender of its own. Raises NoRoomError if that is more than there is."""
    if found.report is None:
        return {}
    report, room = found.report(), session.meter.room()
    if room is not None and report.predicted_peak > room:
        raise NoRoomError(f"The plan is predicted to need {report.predicted_peak:,} bytes, and {room:,} are free.")
    (loop,) = report.loops
    return {
        "plan": loop.choice.describe(),
        "predicted_peak_bytes": report.predicted_peak,
        "remote_peak_bytes": sum(report.remote_peaks.values()),
        "predicted_s": report.measured_seconds or loop.trace().seconds,
        "steps_run_again": loop.tally.reforward_steps,
    }


def _alone(name: str, measured: Measured) -> Result:
    """Bytes, gradients and plan of one contender."""
    point, session = measured.point, measured.session
    network_of(point, measured.x.device).zero_grad(set_to_none=True)
    before = session.meter.allocated()
    with _told() as told:
        begin = time.perf_counter()
        found = entrant(name, point, measured.x)
        plan = planned(found, session)
        session.meter.seconds(found.step)
        warmed_up = time.perf_counter() - begin
        held = _held(found, before, session) if name in OURS else 0
        cost = session.meter.cost(found.step, found.network)
    given = [each.grad for each in found.network.parameters() if each.grad is not None]
    whose, expected = measured.reference or (None, [])
    result = {
        **plan,
        "warm_up_wall_s": warmed_up,
        "local_peak_bytes": cost.local_peak_bytes + held,
        "held_bytes": held,
        "working_bytes": session.meter.working(),
        "relative_error": relative_error(given, expected) if whose else None,
        "compared_with": whose,
        "seconds": [] if point.rounds else [cost.seconds],
        "told": told,
    }
    measured.steps[name] = found.step
    found.network.zero_grad(set_to_none=True)
    return result


@aside()
def _held(found: Entrant, before: int, session: Session) -> int:
    """Bytes that a contender of reroll holds from step to step: recorded kernels, of which each pays for its own, and
    what cuBLAS keeps for them, which the first contender of a process makes for all."""
    meter = session.meter
    for each in gc.get_objects():
        if type(each) is Graphs:  # a weak proxy of what is gone bears no isinstance
            each.forget()
    found.network.zero_grad(set_to_none=True)
    without = meter.allocated()
    meter.kept = max(meter.kept, without - before)
    meter.seconds(found.step)
    found.network.zero_grad(set_to_none=True)
    return meter.allocated() - without + meter.kept


@contextmanager
def _told() -> Iterator[list[str]]:
    """The texts of reroll's warnings inside: a plan that did not fit is replaced with a warning, not in silence."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, RerollWarning))


@contextmanager
def _peers(measured: Measured, jax: str | None) -> Iterator[None]:
    """JAX's contenders, in a process that lives as long as this; what it tells is filled in."""
    wanted = [name for name in measured.entries if name in JAX]
    if not wanted or not measured.point.rounds:
        yield
        return
    if jax is None or measured.reference is None:
        why = "There are no gradients to compare with." if jax else "This Python has no JAX with equinox: --jax PYTHON."
        for name in wanted:
            measured.entries[name]["absent"] = why
        yield
        return
    network, session = network_of(measured.point, measured.x.device), measured.session
    peers = Peers(jax, network, measured.x, measured.reference[1], session.meter.clock, wanted)
    begun: Result = {}
    try:
        session.attempt(begun, f"{measured.point.key}, JAX", lambda: _entered(peers))
        for name in wanted:
            told = peers.told.get(name, begun)
            if told:
                compared = {"compared_with": measured.reference[0], "run": begun.get("run")}
                measured.entries[name].update({"seconds": [], **compared, **told})
        measured.steps.update({name: step for name, step in peers.steps.items() if name in wanted})
        yield
    finally:
        peers.__exit__(None, None, None)


def _entered(peers: Peers) -> Result:
    peers.__enter__()
    return {}


@aside()
def _in_turn(measured: Measured) -> None:
    """Seconds of all steps, one of each in every round."""
    session, point = measured.session, measured.point
    for number in range(point.rounds):
        begin = time.monotonic()
        for name, step in list(measured.steps.items()):
            entry = measured.entries[name]
            try:
                entry["seconds"].append(session.meter.seconds(step))
            except (RuntimeError, torch.OutOfMemoryError) as error:
                entry["error"] = f"In round {number + 1}: {type(error).__name__}: {error}"
                del measured.steps[name]
                session.meter.settle()
        session.save()
        took = time.monotonic() - begin
        if session.left < took and number + 1 < point.rounds:
            session.leave_out(f"{point.key}, rounds {number + 2} to {point.rounds}", f"a round takes {took:.0f} s")
            return


def known_jax() -> bool:
    """Whether this interpreter has what ``speed_jax.py`` imports."""
    return all(importlib.util.find_spec(name) for name in ("jax", "equinox"))
