"""The options of a compilation: one frozen dataclass, the same names in ``options={}`` and as keywords."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypedDict, cast

from reroll.errors import OptionError, did_you_mean, nearest
from reroll.schedules.machine import REMOTE_TIERS
from reroll.schedules.named import find, schedule_names
from reroll.segment.cut.policy import Policy, Rule
from reroll.segment.facts import LOSSY
from reroll.words.units import parse_size

_CHOICES = {
    "codec": ("auto", "none", *LOSSY),
    "lowering": ("inductor", "eager"),
    "on_no_recurrence": ("warn", "error"),
    "proof": ("never", "first", "always"),
    "start": ("compiled", "eager"),
}


_OF_THE_DOOR = "It is an argument of reroll.compile, beside its options."
_NO_TIME = "Loops are found in what the model does, and nobody names time. Leave it out."
_OF_OTHERS = {
    "loss": _OF_THE_DOOR,
    **dict.fromkeys(("time_dim", "steps"), _NO_TIME),
    "options": "Pass options as keywords.",
    "fullgraph": "reroll.compile records a model, which breaks no graph. torch.compile takes it beside its options.",
    "dynamic": "reroll.compile and torch.compile take it beside the options: whether other sizes will come.",
    "backend": "reroll.compile is a way to call this backend: leave it out.",
    "mode": (
        "reroll has no modes: it records CUDA graphs where they gain time (cuda_graphs), and starts sooner with "
        "lowering='eager'. Leave it out."
    ),
    "disable": "Call the model itself, or set torch.compiler.set_stance('force_eager').",
}
"""What is said of arguments of other functions, which people take for options."""
_Schedule = Literal[
    "auto", "store_all", "standard", "every_k", "full", "remote", "hierarchical", "double", "double_merged", "revolve",
    "hrevolve",
]  # fmt: skip
_Tier = Literal["host", "disk", "local"]
Lowering = Literal["inductor", "eager"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asks for.

    schedule: where carries are kept, or the name of a registered schedule. ``auto``: the fastest that fits a
        ``memory_budget``; without one ``store_all`` where ``replay`` makes tapes small, else what needs the least
        memory of all that runs at most 5 % longer than ``store_all``; with a ``chunk`` ``standard``.
    memory_budget: local bytes of a training step of the compiled graph: an int, a text like ``"512MiB"``, or a float in
        (0, 1], the fraction of what plain PyTorch holds at its peak. ``auto``: most of what the device has free at each
        call.
    remote: where remote carries go: ``disk``, ``host`` or ``local``.
    segment: steps compiled together. chunk: steps between remote (or standard) checkpoints. slots: local checkpoints
        per chunk, the chunk's own start included; for ``revolve`` in all.
    codec: ``auto`` stores kept values compressed without loss, ``none`` as they are. ``bfloat16`` and ``int8`` round
        kept carries of which nothing is proved: the forward is exact, but replays start from rounded values, so
        gradients are approximate (``reroll.gradient_error`` measures by how much).
    lowering: ``inductor`` or ``eager``.
    start: ``eager``: a program runs eager segments at first. Compiled ones take over at the training call at which
        these have run for about as long as compiling takes, at the ninth at the earliest, the same in every run; calls
        without gradients compile nothing. ``compiled``: segments are compiled at the first call.
    keep, recompute: which values of a step the tape of a segment keeps wherever the backward is made of them, and which
        it never keeps, but makes again in the backward. Each is a name that ``reroll.name`` gave, the name of an
        operation ("mm", "aten.tanh"), a predicate of a ``reroll.StepValue``, or a tuple of these.
    passes: names of passes, in order (a tuple or a comma-separated text); None: ``reroll.DEFAULT_PASSES``.
    replay: whether backwards repeat products with weights from what is kept of spikes. ``auto``: where a tape of all
        steps then takes at most a tenth of plain BPTT's bytes, no schedule that runs steps again is asked for, and it
        pays: it halves the memory, or runs less again than what else fits a budget in bytes.
    truncate: truncated BPTT: no gradient of a state passes into iterations k - 1, 2 k - 1, ... of a loop over time, as
        if all states were detached every k iterations. These are not the gradients of the loss. Without a schedule or
        a budget, the tape of k steps is held at a time.
    verify: check that every recomputed carry equals the forward's bit for bit.
    proof: whether a program has to give what torch gives on the same values, forward and backward, before a result of
        it is given: ``first``, at its first call, which then takes a plain training step more; ``always``, at every
        call; ``never``. What differs is a ProofError.
    cuda_graphs: record segments as CUDA graphs, which launch all their kernels at once. Used only where a replay gives
        the same bits as the kernels one by one; of no effect on a CPU.
    spill_folder: folder of the disk tier; None: the system's temporary folder.
    depth: whether equal blocks over depth are rolled, too, each of which has weights of its own.
    on_no_recurrence: ``warn`` and compile as usual, or raise an ``error``.
    """

    schedule: str = "auto"
    memory_budget: int | float | str | None = None
    remote: str | Sequence[str] | None = None
    segment: int | None = None
    chunk: int | None = None
    slots: int | None = None
    codec: str = "auto"
    keep: Rule | Sequence[Rule] = ()
    recompute: Rule | Sequence[Rule] = ()
    lowering: str = "inductor"
    start: str = "eager"
    passes: str | Sequence[str] | None = None
    replay: bool | str = "auto"
    truncate: int | None = None
    verify: bool = False
    proof: str = "first"
    cuda_graphs: bool = True
    spill_folder: str | os.PathLike[str] | None = None
    depth: bool = True
    on_no_recurrence: str = "warn"

    def __post_init__(self) -> None:
        _check_choice("schedule", self.schedule, ("auto", *schedule_names()))
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("segment", "chunk", "slots", "truncate"):
            _check_count(name, getattr(self, name))
        for name in ("keep", "recompute"):
            object.__setattr__(self, name, _rules(name, getattr(self, name)))
        for name in ("passes", "remote"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))
        tiers = (*REMOTE_TIERS.names(), "local")
        if not isinstance(self.remote, str | tuple | list | None):
            raise OptionError(f"Option remote={self.remote!r} is not valid. Name one of: {', '.join(tiers)}.")
        for tier in self.tiers:
            _check_choice("remote", tier, tiers)
        if not isinstance(self.replay, bool) and self.replay != "auto":
            raise OptionError(f"Option replay={self.replay!r} is not valid. Use True, False or 'auto'.")
        for name in ("verify", "cuda_graphs", "depth"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"Option {name}={getattr(self, name)!r} is not a bool. Use True or False.")
        _check_passes(self.passes)
        _check_folder(self.spill_folder)
        parse_budget(self.memory_budget)
        _check_contradictions(self)

    @property
    def numbers(self) -> tuple[str, ...]:
        """What the schedule reads of the other options; ``auto`` takes a chunk, and tiers that it may use."""
        return ("chunk", "remote") if self.schedule == "auto" else find(self.schedule).numbers

    @property
    def automatic_budget(self) -> bool:
        """Whether the budget is what the device has free at each call."""
        return self.memory_budget == "auto"

    @property
    def may_be_thin(self) -> bool:
        """Whether the planner may choose what tapes hold: to meet a budget, where the user chose neither schedule nor
        values."""
        return self.schedule == "auto" and self.memory_budget is not None and not (self.keep or self.recompute)

    @property
    def moves_carries(self) -> bool:
        """Whether a schedule was asked for that moves carries to a tier."""
        return self.schedule != "auto" and "remote" in self.numbers

    @property
    def tiers(self) -> tuple[str, ...]:
        """The remote tiers that were asked for, fastest first."""
        if self.remote is None:
            return ()
        return (self.remote,) if isinstance(self.remote, str) else tuple(self.remote)

    def policy(self, where: str) -> Policy:
        """What ``keep`` and ``recompute`` ask, for the loop at ``where``."""
        return Policy(_rules("keep", self.keep), _rules("recompute", self.recompute), where)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Options:
        """Options from a mapping. An unknown name is an OptionError that names the nearest valid one."""
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"options={options!r} must be a mapping from names to values, such as {{'segment': 8}}.")
        given = dict(options or {})
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise OptionError(f"Unknown option {name!r}. {_OF_OTHERS.get(name) or _likely(str(name), names)}")
        return cls(**given)


class OptionsDict(TypedDict, total=False):
    """``Options`` by name, as keywords of ``reroll.compile``: for editors and type checkers. A registered schedule or
    tier may have any name."""

    schedule: _Schedule | str
    memory_budget: int | float | str | None
    remote: _Tier | str | Sequence[_Tier | str] | None
    segment: int | None
    chunk: int | None
    slots: int | None
    codec: Literal["auto", "none", "bfloat16", "int8"]
    keep: Rule | Sequence[Rule]
    recompute: Rule | Sequence[Rule]
    lowering: Lowering
    start: Literal["compiled", "eager"]
    passes: Sequence[str] | None
    replay: bool | Literal["auto"]
    truncate: int | None
    verify: bool
    proof: Literal["never", "first", "always"]
    cuda_graphs: bool
    spill_folder: str | os.PathLike[str] | None
    depth: bool
    on_no_recurrence: Literal["warn", "error"]


def _likely(name: str, names: Sequence[str]) -> str:
    """What is said of an unknown option; one that is like an argument of reroll.compile is taken for that."""
    question = did_you_mean(name, ("loss",), cutoff=0.7)
    return f"{question}{_OF_THE_DOOR}" if question else nearest(name, names)


class PartOfPlain(float):
    """A fraction of what plain PyTorch holds at its peak, ``nbytes``."""

    nbytes: int

    def __new__(cls, part: float, whole: int) -> PartOfPlain:
        """``whole``: the bytes of plain PyTorch."""
        made = super().__new__(cls, part)
        made.nbytes = int(part * whole)
        return made


def parse_budget(budget: int | float | str | None) -> int | float | None:
    """Bytes as an int; a float in (0, 1] is a fraction of ``store_all``'s memory, where plain PyTorch's is not known.
    None: none is given, or it is what the device has free ("auto")."""
    if budget == "auto":
        return None
    if isinstance(budget, PartOfPlain):
        return budget.nbytes
    if hasattr(budget, "__index__") and not isinstance(budget, bool):  # numpy's, too
        budget = operator.index(cast("SupportsIndex", budget))
    if isinstance(budget, str):
        try:
            return parse_size(budget, "Option memory_budget")
        except OptionError as error:
            if re.fullmatch(r"0?\.\d+", budget):
                text = f"Option memory_budget={budget!r} is less than a byte. As a fraction write {budget}, not a text."
                raise OptionError(text) from None
            raise OptionError(f"{error} A budget may also be a fraction such as 0.1, or 'auto'.") from None
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not math.isfinite(budget) or budget <= 0:
        raise OptionError(
            f"Option memory_budget={budget!r} must be positive bytes, a text like '512MiB', a fraction, or 'auto'."
        )
    if isinstance(budget, float) and budget > 1:
        raise OptionError(f"Option memory_budget={budget!r}: a float is a fraction in (0, 1]; give bytes as an int.")
    return budget


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"Option {name}={value!r} is not valid. {nearest(str(value), choices)}")


def _check_count(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"Option {name}={value!r} must be a whole number of at least 1.")


def _rules(name: str, given: object) -> tuple[Rule, ...]:
    """One rule or several as a tuple."""
    rules = tuple(given) if isinstance(given, tuple | list) else (given,)
    if not all(callable(rule) or (isinstance(rule, str) and rule) for rule in rules):
        raise OptionError(
            f"Option {name}={given!r} is not valid. Give a name that reroll.name gave, the name of an operation, a "
            "predicate of a reroll.StepValue, or a tuple of these."
        )
    return rules


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_passes(passes: object) -> None:
    named = isinstance(passes, tuple | list) and all(isinstance(name, str) for name in passes)
    if passes is not None and not isinstance(passes, str) and not named:
        raise OptionError(f"Option passes={passes!r} must be a tuple of names or a comma-separated text.")


def _check_folder(folder: object) -> None:
    if folder is None:
        return
    if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
        raise OptionError(f"Option spill_folder={folder!r} is not a folder. Create it first, or leave the option out.")


def _check_contradictions(options: Options) -> None:
    both = [rule for rule in options.policy("").keep if rule in options.policy("").recompute]
    if both:
        raise OptionError(
            f"Contradictory options: keep and recompute both have {both[0]!r}. Take it out of one of them."
        )
    contradictions = (_tier_contradictions, _size_contradictions, _codec_contradictions)
    for sentence in (sentence for found in contradictions for sentence in found(options)):
        raise OptionError(f"Contradictory options: {sentence}.")


def _tier_contradictions(options: Options) -> Iterator[str]:
    schedule, remote = options.schedule, options.remote
    if "local" in options.tiers and len(options.tiers) > 1:
        yield f"remote={remote!r} mixes 'local' with remote tiers; name either"
    if len(options.tiers) > 1:
        yield f"remote={remote!r} names several tiers; name one"
    if "local" in options.tiers and schedule not in ("double", "double_merged", "auto"):
        yield f"remote='local' (both levels on the device) goes with schedule='double', not {schedule!r}"
    if options.tiers and schedule == "auto" and options.memory_budget is None:
        yield (
            f"remote={remote!r} alone has no effect: without a budget schedule='auto' moves nothing. "
            "Give a memory_budget too, or schedule='double'"
        )
    if options.tiers and "remote" not in options.numbers:
        moving = ", ".join(repr(name) for name in schedule_names() if "remote" in find(name).numbers)
        yield (
            f"remote={remote!r} has no effect with schedule={schedule!r}, which keeps all carries local. "
            f"Leave remote out, or use one of {moving}"
        )
    spilling = [tier.name for tier in REMOTE_TIERS.values() if tier.spills]
    spills = not set(spilling).isdisjoint(options.tiers) or (not options.tiers and options.moves_carries)
    if options.spill_folder is not None and not spills:
        wanted = " or ".join(f"remote={name!r}" for name in spilling)
        yield f"spill_folder={options.spill_folder!r} has no effect without {wanted}"


def _size_contradictions(options: Options) -> Iterator[str]:
    schedule, chunk, slots = options.schedule, options.chunk, options.slots
    if chunk is not None and "chunk" not in options.numbers:
        yield f"chunk={chunk} has no effect with schedule={schedule!r}"
    if slots is not None and "slots" not in options.numbers:
        having = ", ".join(repr(name) for name in schedule_names() if "slots" in find(name).numbers)
        yield f"slots={slots} goes with one of {having}, not with schedule={schedule!r}"
    if slots is not None and chunk is not None and slots > chunk:
        yield f"slots={slots} is more than the chunk={chunk} steps they divide"
    if schedule == "revolve" and slots is not None and options.memory_budget is not None:
        yield f"slots={slots} and a memory_budget both say how much revolve may keep; name either"


def _codec_contradictions(options: Options) -> Iterator[str]:
    codec = options.codec
    if codec in LOSSY and options.verify:
        yield (
            f"codec={codec!r} rounds kept carries, and verify=True asks that recomputed ones equal the forward's bit "
            "for bit. Use codec='auto', or leave verify out"
        )
    if codec in LOSSY and options.schedule == "store_all":
        yield f"codec={codec!r} has no effect with schedule='store_all', which keeps no carries"
