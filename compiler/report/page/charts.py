"""The charts of a report's page, as HTML with inline SVG.

A chart is a panel: an SVG that stretches over its area, with axis labels as text beside it, so that text keeps its size
on a phone. Coordinates inside run from 0 to 1000 both ways, upwards positive in the arguments here.

Axes say where a value lies on them, and which values are written beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reroll.planning.alternative import Alternative, pareto
from reroll.program.timeline import WORK, Event, Stay, Timeline
from reroll.report.page.markup import Markup, element, joined
from reroll.words.units import nbytes_text, seconds_text

SIZE = 1000
CLOSE = 120  # segments of which each can be seen
_TICKS = 7  # of an axis of time, at most
MANY = 80  # stays of a tier, from which on they are drawn as fine lines
KINDS = {"advance": "forward", "recompute": "run again", "tape": "run and taped", "backward": "backward"}
Tick = tuple[float, str]


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    return f"{value:.1f}".removesuffix(".0")


def panel(
    inside: Iterable[Markup], y: Sequence[Tick], label: str, height: int, x: Sequence[Tick] = (), over: str = ""
) -> Markup:
    """A chart of ``height`` pixels that ``label`` describes. Ticks: (place from 0 to 1, text). ``over`` lies on it."""
    grid = "".join(f"M0 {number(SIZE * (1 - at))}H{SIZE}" for at, _ in y)
    svg = element(
        "svg",
        path(grid, "grid"),
        *inside,
        viewBox=f"0 0 {SIZE} {SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    ys = [element("span", text, style=f"--at:{100 * at:.2f}%") for at, text in y]
    xs = [element("span", text, style=f"--at:{100 * at:.2f}%") for at, text in x]
    return element(
        "div",
        element("div", *ys, class_="ys", aria_hidden="true"),
        element("div", svg, joined(over), class_="area"),
        element("div", *xs, class_="xs", aria_hidden="true") if xs else Markup(),
        class_="panel headed" if over else "panel",
        style=f"--h:{height}px",
    )


def path(drawn: str, class_: str) -> Markup:
    """A path of an SVG that is drawn in the colours of a class."""
    return element("path", d=drawn or "M0 0", class_=class_)


def placed(ticks: Scale) -> list[Tick]:
    """The ticks of a scale by their place."""
    return [(ticks.at(value), text) for value, text in ticks.ticks]


def note(text: str, x: float, class_: str = "note") -> Markup:
    """A word at a place of the time axis."""
    side = " left" if x > 0.85 else ""
    return element("span", text, class_=class_ + side, style=f"--x:{100 * x:.2f}%")


def time_scale(trace: Timeline) -> Scale:
    """The time axis that the charts of a recurrence share."""
    return seconds_scale(0, trace.seconds, trace.nominal)


def memory(trace: Timeline, tier: str, budget: int | None) -> Markup:
    """What one tier holds over time, with the turn, and the budget where it is near."""
    x, peak = time_scale(trace), trace.peak(tier)
    shown = budget if budget is not None and tier == "local" and budget <= 3 * peak else None
    y = bytes_scale(max(peak, shown or 0))
    points = [(SIZE * x.at(time), SIZE * (1 - y.at(nbytes))) for time, nbytes in _column(trace, tier)]
    line = "M0 1000" + "".join(f"H{number(at)}V{number(top)}" for at, top in points) + f"H{SIZE}V{SIZE}"
    inside = [path(f"{line}Z", f"fill {tier_class(tier)}"), path(line, f"line {tier_class(tier)}"), turn(trace)]
    over = note("turn", x.at(trace.turn)) if tier == "local" else Markup()
    if shown is not None:
        at = y.at(shown)
        inside.append(path(f"M0 {number(SIZE * (1 - at))}H{SIZE}", "budget"))
        side = "level left" if x.at(trace.turn) > 0.5 else "level"
        over = joined(over, element("span", f"budget {nbytes_text(shown)}", class_=side))
    label = f"Memory held in tier {tier} over time: at most {peak:,} bytes."
    return panel(inside, placed(y), label, 190 if tier == "local" else 100, placed(x), over)


def _column(trace: Timeline, tier: str) -> list[tuple[float, int]]:
    """The points of the step function where it changes."""
    pairs = zip(trace.times, trace.memory[tier], strict=True)
    found: list[tuple[float, int]] = []
    for time, nbytes in pairs:
        if not found or found[-1][1] != nbytes:
            found.append((time, nbytes))
    return found


def tier_class(tier: str) -> str:
    """The class that colours a tier; the style sheet has one colour for all that it does not know."""
    return f"tier-{tier}"


def turn(trace: Timeline) -> Markup:
    """The line where the forward ends."""
    at = number(SIZE * time_scale(trace).at(trace.turn))
    return path(f"M{at} 0V{SIZE}", "turn")


def schedule(trace: Timeline, unit: str = "step") -> Markup:
    """Steps of the sequence over time, in the manner of Figure 1 of arXiv 2412.11810: segments as strokes that rise
    (forward) or fall (backward), kept carries as level lines from when they are made until they are read. ``unit`` is
    what a step is called."""
    x, y = time_scale(trace), steps_scale(0, trace.steps)
    label = f"Which of the {trace.steps:,} {unit}s run when: forward, run again up to {trace.depth} times, backward."
    return panel([turn(trace), *_activity_paths(trace.events, trace.stays, x, y)], placed(y), label, 340, placed(x))


def closer(trace: Timeline) -> Markup:
    """The schedule from the turn on, as far as single segments can be told apart; time counts from the turn."""
    shown = [event for event in trace.events if event.kind in WORK and event.begin >= trace.turn][:CLOSE]
    first = trace.turn
    events = [replace(event, begin=event.begin - first, end=event.end - first) for event in shown]
    x = seconds_scale(0, events[-1].end, trace.nominal)
    y = steps_scale(min(event.start for event in shown), trace.steps)
    stays = [
        Stay(stay.tier, stay.step, max(stay.begin - first, 0), min(stay.end - first, x.high))
        for stay in trace.stays
        if stay.step >= y.low and stay.begin - first < x.high and stay.end > first
    ]
    label = f"The first {len(shown)} segments after the turn, over steps {y.low:,} to {y.high:,}."
    return panel(_activity_paths(events, stays, x, y), placed(y), label, 300, placed(x))


def _activity_paths(events: Sequence[Event], stays: Sequence[Stay], x: Scale, y: Scale) -> list[Markup]:
    """Stays, then segments, as one path for each tier and kind."""
    strokes: dict[str, list[str]] = {kind: [] for kind in ("tape", "advance", "recompute", "backward")}
    for event in events:
        if event.kind in WORK:
            low, high = (event.stop, event.start) if event.kind == "backward" else (event.start, event.stop)
            strokes[event.kind].append(f"M{_point(x.at(event.begin), y.at(low))}L{_point(x.at(event.end), y.at(high))}")
    kept: dict[str, list[str]] = {}
    for stay in stays:
        line = f"M{_point(x.at(stay.begin), y.at(stay.step))}H{number(SIZE * x.at(stay.end))}"
        kept.setdefault(stay.tier, []).append(line)
    drawn = [
        path("".join(lines), f"kept {tier_class(tier)}{' many' if len(lines) > MANY else ''}")
        for tier, lines in kept.items()
    ]
    return drawn + [path("".join(lines), f"stroke {kind}") for kind, lines in strokes.items() if lines]


def _point(x: float, y: float) -> str:
    return f"{number(SIZE * x)} {number(SIZE * (1 - y))}"


def transfers(trace: Timeline) -> Markup:
    """A lane for each direction of each remote tier."""
    x = time_scale(trace)
    lanes = []
    for track in trace.tracks()[1:]:
        events = [event for event in trace.events if event.track == track]
        drawn = "".join(
            f"M{number(SIZE * x.at(event.begin))} 0H{number(SIZE * x.at(event.end))}V{SIZE}"
            f"H{number(SIZE * x.at(event.begin))}Z"
            for event in events
        )
        count, nbytes = sum(event.count for event in events), sum(event.nbytes for event in events)
        label = f"Transfers, {track}: {count:,}, {nbytes:,} bytes."
        tier = tier_class(track.partition(" ")[2])
        lanes.append(panel([path(drawn, f"lane {tier}")], [(0.5, track)], label, 16))
    return joined(*lanes)


def legend(entries: Mapping[str, str]) -> Markup:
    """What the strokes of a chart are: class of the stroke -> text."""
    items = [element("li", element("i", class_=f"swatch {name}"), text) for name, text in entries.items()]
    return element("ul", *items, class_="legend")


def curve(alternatives: Sequence[Alternative]) -> Markup:
    """Local peak against time of each plan; those that nothing beats are joined, the chosen one is ringed.

    Its name stands above the chart, where no point lies, and a line leads down to it.
    """
    x, y = curve_scales(alternatives)
    best = pareto(alternatives)
    corners = [_point(x.at(each.seconds), y.at(each.peak)) for each in reversed(best)]
    inside = [path("M" + "L".join(corners), "line front")]
    for each in sorted(alternatives, key=lambda each: each.chosen):
        at, up = x.at(each.seconds), y.at(each.peak)
        if each.chosen:
            inside.append(path(f"M{_point(at, up)}V0", "leader"))
        place = f"M{_point(at, up)}h0.1"  # a canvas draws no line without a length
        inside.append(path(place, "dot chosen" if each.chosen else "dot best" if each in best else "dot"))
        if each.chosen:
            inside.append(path(place, "dot hole"))
    chosen = [each for each in alternatives if each.chosen]
    tags = [
        element(
            "p",
            each.name,
            class_="tag left" if x.at(each.seconds) > 0.5 else "tag",
            style=f"--x:{x.at(each.seconds):.4f}",
        )
        for each in chosen
    ]
    texts = [f"{each.name}: {nbytes_text(each.peak)} in {seconds_text(each.seconds)}" for each in chosen]
    label = f"Local peak against time of {len(alternatives)} plans. Chosen: {', '.join(texts) or 'none'}."
    return joined(*tags, panel(inside, placed(y), label, 260, placed(x)))


def curve_scales(alternatives: Sequence[Alternative]) -> tuple[Scale, Scale]:
    """Time and memory of plans: in ratios where the largest is several times the least, else in equal steps."""
    seconds, peaks = [each.seconds for each in alternatives], [each.peak for each in alternatives]
    y = bytes_log_scale(peaks) if max(peaks) > 6 * min(peaks) else bytes_scale(max(peaks))
    if max(seconds) > 3 * min(seconds) > 0:
        return seconds_log_scale(seconds), y
    margin = 0.08 * (max(seconds) - min(seconds)) or 0.1 * max(seconds)
    return seconds_scale(max(min(seconds) - margin, 0), max(seconds) + margin), y


def bar(parts: Sequence[tuple[str, int]]) -> Markup:
    """Parts of a whole as one bar, with a list of what they are."""
    whole = max(sum(nbytes for _, nbytes in parts), 1)
    pieces = [
        element("i", class_=f"part part-{index}", style=f"--w:{100 * nbytes / whole:.3f}%")
        for index, (_, nbytes) in enumerate(parts)
    ]
    items = [
        element("li", element("i", class_=f"swatch part-{index}"), f"{name} ", amount(nbytes))
        for index, (name, nbytes) in enumerate(parts)
    ]
    return joined(element("div", *pieces, class_="bar", aria_hidden="true"), element("ul", *items, class_="legend"))


def amount(nbytes: int) -> Markup:
    """Bytes for people, and exactly for programs."""
    return element("data", nbytes_text(nbytes), value=nbytes, title=f"{nbytes:,} bytes")


def amount_of_time(seconds: float) -> Markup:
    """Seconds for people, and exactly for programs."""
    return element("data", seconds_text(seconds), value=seconds)


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from ``low`` to ``high``. ``ticks`` are (value, text); ``log``: equal ratios are equally far apart."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = field(default=())

    def at(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        return (value - low) / (high - low) if high > low else 0.0


def bytes_scale(most: int) -> Scale:
    """Bytes from zero to a little more than ``most``, with ticks at powers of two."""
    high = 1.08 * max(most, 1)
    step = 2 ** math.ceil(math.log2(max(high / 4, 1)))
    return Scale(0, high, ticks=_ticks(0, high, step, nbytes_text))


def bytes_log_scale(values: Iterable[int]) -> Scale:
    """Bytes over orders of magnitude."""
    found = [max(value, 1) for value in values]
    low, high = _around(min(found), max(found))
    exponents = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    stride = max(-(-len(exponents) // 5), 1)
    ticks = tuple((2.0**exponent, nbytes_text(2**exponent)) for exponent in exponents[::stride])
    return Scale(low, high, log=True, ticks=ticks)


def seconds_log_scale(values: Iterable[float]) -> Scale:
    """Seconds over orders of magnitude, all of them positive."""
    found = list(values)
    low, high = _around(min(found), max(found))
    for factors in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        ticks = _factors(low, high, factors)
        if len(ticks) <= _TICKS:
            break
    stride = max(-(-len(ticks) // _TICKS), 1)
    return Scale(low, high, log=True, ticks=tuple((value, seconds_text(value)) for value in ticks[::stride]))


def _factors(low: float, high: float, factors: Sequence[float]) -> list[float]:
    """The numbers from ``low`` to ``high`` that are a power of ten times one of the ``factors``."""
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= value <= high]


def _around(low: float, high: float) -> tuple[float, float]:
    """The ends of a logarithmic axis, a twelfth of its length away from what it shows."""
    margin = max((high / low) ** 0.1, 1.3)
    return low / margin, high * margin


def seconds_scale(low: float, high: float, nominal: bool = False) -> Scale:
    """Seconds, or units of nominal costs."""
    step = max(_round(max(high - low, 1e-12) / 7), 1.0 if nominal else 0.0)

    def text(value: float) -> str:
        return _counted(value) if nominal or not value else seconds_text(value)

    return Scale(low, max(high, 1e-12), ticks=_ticks(low, high, step, text))


def steps_scale(low: int, high: int) -> Scale:
    """Steps of the sequence."""
    return Scale(low, high, ticks=_ticks(low, high, max(_round(max(high - low, 1) / 5), 1), _counted))


def _counted(value: float) -> str:
    return f"{value:,.0f}"


def _round(step: float) -> float:
    """The least of 1, 2, 5, 10, 20, ... and their tenths that is not below ``step``."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= 0.999 * step)


def _ticks(low: float, high: float, step: float, text: Callable[..., str]) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [index * step for index in range(first, last + 1)]
    return tuple((value, text(int(value) if text is nbytes_text else value)) for value in values)
