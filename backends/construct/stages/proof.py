"""A program is proved before its first result is given: forward and backward, it gives what torch gives on the same
values.

The reference is what the user wrote: the model itself, or the graph that Dynamo made of it, run by torch. Both runs
begin with the same random numbers, and gradients are taken for the same incoming ones, which are drawn by a generator
of their own. Of ``lowering="inductor"`` the eager segments of the same loops are proved, whose operations are torch's:
that a loop was found, fused, cut, packed, planned and played right. Beside them compiled segments are tried, one by
one (``trial``), as how inductor rounds may decide otherwise over many steps.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from reroll.backends.construct.budget_allocation import plain_plan
from reroll.backends.construct.build import SHARE
from reroll.backends.construct.plan import Built
from reroll.backends.construct.replan import Plans
from reroll.backends.construct.stages.seen import (
    EXACT,
    FOLLOWING,
    NOISES,
    SHORT,
    Difference,
    Rounding,
    Seen,
    compared,
    following,
    moved,
    note_result,
    rounding_of,
    spread_of,
    without_noise,
)
from reroll.backends.construct.stages.trial import Trials
from reroll.backends.processes.wrappers import alone
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.backends.tiers.available import free_bytes, free_disk
from reroll.backends.tiers.device import home_of
from reroll.backends.tiers.spill_file import SpillFile, spill_folder
from reroll.errors import BudgetError, ProofError, is_shortage, warn
from reroll.graph.nested import places_of
from reroll.graph.private import saved_as_copies, saved_as_it_is, storage_id, version_of, was_updated
from reroll.passes import DEFAULT_PASSES
from reroll.planning.options import Options, parse_budget

LOG = logging.getLogger(__name__)
Run = Callable[..., Any]
_SMALL = 1 << 20  # bytes of an input of which a run is given a copy, whatever a program is said to change
_SPILLED = 8 << 30  # bytes of a tape that is written to a disk for a proof: a quarter of a minute
OTHERWISE = (
    "The model does something else than when its program was made, and nothing that is compared between calls says so."
)
_TRIES = 8
_NONE_TAKEN = "no gradients are taken"
_BOTH = "values and gradients"
_NO_ROOM = "there is no room for what torch saves for them"
_BY_STEPS = "gradients are compared with those of the loops as captured, run step by step with checkpoints"
_COPIES = "torch where it saves copies of what is updated in place"
_REMEDY = (
    "Use lowering='eager' for this model until it is mended; proof='never' lets the compiled ones run all the same."
)


@dataclass(frozen=True, slots=True)
class Proved:
    """What was compared, the largest difference relative to the largest entry of its tensor, and CPU seconds; why
    gradients were not compared with those of the model, if so; ``segments``: what was compared of compiled ones."""

    what: str
    error: float
    seconds: float
    why: str = ""
    segments: str = ""


@dataclass(slots=True, eq=False)
class Proof:
    """Whether a program is to be proved, and what came of it.

    made: gives the program that is proved, once, and the plans of its loops. other: why gradients are not to be plain
    autograd's, if so. cut: whether they are truncated, so that a result may need none. rounding: how far off a value
    may be that loops make. plain: bytes that torch is predicted to hold for one step; spills: whether that is more than
    there is, so that its tape goes to a disk in ``folder``. by_steps: runs the loops in torch, step by step, for the
    gradients where a disk has no room either. compiled: the loops whose segments are, of which the eager
    ones are proved, and these are tried beside. missed: why nothing was compared yet. departed: what the model does
    otherwise than when its program was made. noise: draws what is added to leaves in a run of torch's that says how far
    rounding goes.
    """

    how: str = "never"
    made: Callable[[], tuple[Plans, Run]] | None = None
    where: str = ""
    other: str = ""
    cut: bool = False
    rounding: Rounding = EXACT
    plain: int = 0
    spills: bool = False
    folder: Any = None
    by_steps: Run | None = None
    compiled: Sequence[Built] = ()
    missed: str = ""
    proved: Proved | None = None
    departed: str = ""
    updated: str = ""
    noise: torch.Generator | None = None

    @classmethod
    def of(
        cls,
        built: Sequence[Built],
        options: Options,
        made: Callable[[], tuple[Plans, Run]],
        by_steps: Run | None = None,
        *,
        around: Iterable[fx.Graph] = (),
        speaks: bool | None = None,
    ) -> Proof:
        """That of the recurrences of a graph, with what is ``around`` them. ``speaks``: whether a run of it speaks with
        other processes, which do not prove the same at the same calls; where that is not known, it may as soon as there
        are others."""
        if options.proof == "never" or not built:
            return cls()
        if speaks or (speaks is None and not alone()):
            missed = "it speaks with other processes" if speaks else "there are several processes"
            LOG.info("nothing is proved, as %s", missed)
            return cls(missed=missed)
        budget, plain = parse_budget(options.memory_budget), max(map(_plain_peak, built))
        rounding = rounding_of((each.executable.recurrence for each in built), around)
        free = free_bytes(home_of(built[0].executable.recurrence.examples))
        bounds = [plain if free is None else int(SHARE * free)]
        bounds += [] if budget is None else [budget if isinstance(budget, int) else int(budget * plain)]
        held = max(2 * _plain_peak(each) // math.isqrt(each.executable.recurrence.steps) for each in built)
        return cls(
            how=options.proof,
            made=made,
            where="; ".join(dict.fromkeys(each.executable.recurrence.where for each in built)),
            other=_other_gradients(options, rounding),
            cut=options.truncate is not None,
            rounding=rounding,
            plain=plain,
            spills=plain > min(bounds),
            folder=options.spill_folder,
            by_steps=by_steps if held <= min(bounds) else None,
            compiled=() if options.lowering == "eager" else tuple(built),
            missed="no call was made yet",
        )

    @property
    def due(self) -> bool:
        """Whether the next call is to be proved."""
        return self.how == "always" or (self.how == "first" and self.proved is None)

    @property
    def summary(self) -> str:
        """What was compared with what, how far it is off, and its price; or why nothing was. Empty if nothing is to."""
        if self.proved is None:
            return f"nothing: {self.missed}" if self.missed else ""
        found, whose = self.proved, " of eager segments" if self.proved.segments else ""
        price = f"off by {found.error:.0e} of a largest entry at most, in {found.seconds:.2f} CPU s"
        told = f"{found.what}{whose} are those of torch on the values of a call: {price}"
        without = f"gradients were not compared, as {found.why}" if found.why else ""
        gradients = _BY_STEPS if found.why == _NO_ROOM and found.what == _BOTH else without
        copies = f"gradients are those of {_COPIES}" if self.updated else ""
        return "; ".join(filter(None, (told, gradients, copies, found.segments)))

    @property
    def whole(self) -> bool:
        """Whether all was compared that can be: gradients too, unless they are not to be those of torch."""
        return self.proved is not None and self.proved.why in ("", self.other, _NONE_TAKEN)

    def renew(self, plans: Plans, run: Run, departed: str) -> None:
        """Have a program proved once more, as the model does something else than when it was made."""
        self.how = "first" if self.how == "never" else self.how
        self.made, self.departed, self.missed = lambda: (plans, run), departed, ""

    def prove(self, reference: Callable[[], Seen], program: Callable[[Run], Seen]) -> None:
        """Compare what torch and the program show of a call. Raises ProofError at what differs first. Where both cannot
        be run, as memory does not suffice, the call goes on without a proof, and raises what it raises."""
        try:
            self._prove(reference, program)
        except ProofError:
            raise
        except BudgetError:
            self.leave("eager segments, which are what is proved, do not meet the budget")
        except Exception as error:  # noqa: BLE001  # of runs beside the call
            if is_shortage(error):
                self.leave("memory ran out in the run of the plain model beside it")
            else:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """A run beside the call raised an error."""
        LOG.debug("nothing is proved", exc_info=True)
        self.leave(f"{type(error).__name__}: {error}")

    def leave(self, why: str) -> None:
        """Nothing is proved, at this call or, with ``proof="first"``, at any."""
        self.missed = why
        LOG.info("not proved at %s: %s", self.where, why)
        if self.how == "first":
            self.how, self.made, self.compiled = "never", None, ()

    def _prove(self, reference: Callable[[], Seen], program: Callable[[Run], Seen]) -> None:
        assert self.made is not None, "nothing is due without a program"
        start = time.process_time()
        plans, run = self.made()
        reference = partial(self._with_gradients, reference, program)
        expected, trials = reference(), Trials(plans.built, self.compiled)
        try:
            shown = program(run)
        finally:
            trials.end()
        differences, error = compared(expected, shown, None, self.rounding)
        for _ in range(_TRIES if threading.active_count() > 1 else 0):  # another thread may have drawn meanwhile
            if [each.name for each in differences] != [FOLLOWING]:
                break
            differences, error = compared(reference(), program(run), None, self.rounding)
        if any(each.error is not None for each in differences):
            near = self.without_noise(reference, expected, shown)
            left, error = compared(expected, near, None, self.rounding)
            differences = [each for each in differences if each.name in {other.name for other in left}]
        if differences:
            raise self._error(differences)
        if trials.differs:
            raise ProofError(f"{not_reproduced(trials)} Nothing was changed by this call. {_REMEDY}")
        what, why = _BOTH if expected.gradients else "values", self._why_values()
        self.proved = Proved(what, error, time.process_time() - start, why, trials.summary)
        if self.how == "first":
            self.made, self.compiled = None, ()
        LOG.info("proved at %s: %s, off by %.0e at most, in %.2f CPU s", self.where, what, error, self.proved.seconds)
        if self.updated:
            say_refused(self.updated)

    def _with_gradients(self, reference: Callable[[], Seen], program: Callable[[Run], Seen]) -> Seen:
        """What torch shows; where it refuses to go backward after an update in place, of copies of what it saves; where
        what it saves has no room, with the gradients of the loops, run step by step."""
        try:
            seen = reference()
        except RuntimeError as error:
            if self.updated or not was_updated(error):
                raise
            self.updated = str(error)
            seen = reference()
        if self.by_steps is None or self._why_values() != _NO_ROOM:
            return seen
        try:
            return replace(seen, gradients=program(self.by_steps).gradients)
        except Exception as error:
            if not is_shortage(error):
                raise
            self.by_steps = None
            return seen

    def _error(self, differences: Sequence[Difference]) -> ProofError:
        """What is said where a program does not give what torch gives."""
        others = f" ({len(differences) - 1} more differ)" if len(differences) > 1 else ""
        if self.departed:
            return ProofError(
                f"{OTHERWISE} {self.departed} So the program does not give what torch gives for this call: "
                f"{differences[0]}{others}. Nothing was changed by this call; earlier ones may have come after the "
                "change. Keep what the forward reads in attributes of the model, in its arguments or in globals that "
                "its code names; or compile the model anew after a change."
            )
        return ProofError(
            f"The compiled program does not give what torch gives for this call: {differences[0]}{others}. Its loops "
            f"are at {self.where}. Nothing was changed by this call. This is a defect of reroll, or a pass or operator "
            "of yours that is not what it says: reroll.explain(model, *inputs).save(folder) writes a repro. Use the "
            "plain model until it is mended; proof='never' lets the program run all the same."
        )

    def without_noise(self, reference: Callable[[], Seen], expected: Seen, shown: Seen) -> Seen:
        """What a program shows, without what noise of some roundings explains: a decision of the model (whether a
        neuron fires) may fall the other way, and all that follows from it. Nothing is explained where the model gives
        something else each time."""
        if compared(expected, reference(), None, self.rounding)[0]:
            return shown
        others, self.noise = list[Seen](), torch.Generator().manual_seed(1)
        try:
            others += (reference() for _ in range(NOISES))
        finally:
            self.noise = None
        tensors = spread_of(expected.tensors, (each.tensors for each in others))
        gradients = spread_of(expected.gradients, (each.gradients for each in others))
        values = without_noise(shown.tensors, expected.tensors, tensors)
        return replace(
            shown,
            tensors={name: each for name, each in values.items() if each is not None},
            gradients=without_noise(shown.gradients, expected.gradients, gradients),
        )

    @contextmanager
    def _moving(self, leaves: Collection[Tensor]) -> Iterator[None]:
        """Inside, there is noise on leaves where it is asked for."""
        before = list[tuple[Tensor, Tensor]]()
        try:
            for each in leaves:
                if self.noise is not None and each.layout is torch.strided and 0 not in each.stride():
                    before.append((each.data, each.detach().clone()))
                    each.data.copy_(moved(each.data, self.noise, short=self.rounding.values >= SHORT))
            yield
        finally:
            for data, values in reversed(before):
                data.copy_(values)

    def seen(self, run: Callable[[], Any], leaves: Mapping[Tensor, str], kept: Collection[Tensor] | None) -> Seen:
        """What a run shows, with the gradients of leaves by name. It is torch's where ``kept`` says which tensors are
        there anyway, so that its tape need not hold them."""
        seen, why = Seen(), self._why_values()
        wanted = not why or (why == _NO_ROOM and kept is None and self.by_steps is not None)
        with self._moving(leaves), saved_as_it_is() if kept is None else self._tape(kept, wanted):
            result = run()
            seen.others[FOLLOWING] = following()
            note_result(seen, result, needs=not self.cut)
            if wanted:
                seen.gradients = _gradients(result, leaves)
        return seen

    def _tape(self, kept: Collection[Tensor], wanted: bool) -> Any:
        """A context for torch's run: what it saves is dropped where no gradients are taken, and written to a disk where
        memory does not suffice."""
        if not wanted:
            return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _not_asked)
        if self.spills:
            return _on_disk(self.folder, set() if self.updated else {storage_id(each) for each in kept})
        return saved_as_copies() if self.updated else saved_as_it_is()

    def _why_values(self) -> str:
        """Why gradients cannot be compared; empty if they are plain autograd's, and what torch saves has room."""
        if not torch.is_grad_enabled():
            return _NONE_TAKEN
        room = not self.spills or (self.plain < _SPILLED and free_disk(spill_folder(self.folder)) > 2 * self.plain)
        return self.other or ("" if room else _NO_ROOM)


def _plain_peak(built: Built) -> int:
    """Bytes that torch is predicted to hold of a loop; passes of the user's own have no say in it."""
    return plain_plan(replace(built, demand=replace(built.demand, passes=DEFAULT_PASSES))).prediction.peak


def say_refused(error: str) -> None:
    """Say that torch refuses to go backward after an update in place, and what is compared then."""
    what = error.partition(" Hint:")[0].rstrip(".")
    warn(
        "Plain PyTorch does not go backward through this model, as a value that its backward reads is updated in place "
        f"afterwards ({what}). The gradients of reroll are those of each value as it was when it was read, and were "
        f"compared with those of {_COPIES}. To train the model without reroll, too, read a clone of what is updated."
    )


def not_reproduced(trials: Trials) -> str:
    """What is said of compiled segments that are too far off."""
    return (
        f"The compiled segments do not give what the model's operations give in float64: {trials.differs}. This is a "
        "defect of the compiler or of reroll: reroll.explain(model, *inputs).save(folder) writes a repro."
    )


def _other_gradients(options: Options, rounding: Rounding) -> str:
    """Why the gradients of a program are not plain autograd's; empty if they are."""
    if options.truncate is not None:
        return "gradients are truncated"
    if options.codec not in ("auto", "none"):
        return "gradients are approximate where carries are rounded"
    return "torch's own gradients are rounded to half precision" if rounding.values >= SHORT else ""


def eager(options: Options) -> Options:
    """The options by which eager segments are made, for a proof."""
    return replace(options, lowering="eager", cuda_graphs=False)


def _gradients(result: Any, leaves: Mapping[Tensor, str]) -> dict[str, Tensor | None]:
    """The gradients of leaves by name, for incoming ones that are the same in every run: of all results, and of the
    first alone, where there are several. What the others are made of has none then, and takes other ways."""
    results = [value for _, value in places_of(result) if value.requires_grad]
    if not results or not leaves:
        return dict.fromkeys(leaves.values())
    generator = torch.Generator().manual_seed(0)
    incoming = [torch.randn(each.shape, generator=generator, dtype=_wide(each)).to(each) for each in results]
    found = dict[str, Tensor | None]()
    with _without_hooks(leaves):
        if len(results) > 1:
            first = torch.autograd.grad(results[:1], list(leaves), incoming[:1], retain_graph=True, allow_unused=True)
            found = {
                f"{name} from the first result alone": grad for name, grad in zip(leaves.values(), first, strict=True)
            }
        last = torch.autograd.grad(results, list(leaves), incoming, allow_unused=True)
    return {**dict(zip(leaves.values(), last, strict=True)), **found}


@contextmanager
def _without_hooks(leaves: Collection[Tensor]) -> Iterator[None]:
    """Inside, no hook of the user's on a leaf is called."""
    hooks = [(each._backward_hooks, dict(each._backward_hooks)) for each in leaves if each._backward_hooks]
    try:
        for there, _ in hooks:
            there.clear()
        yield
    finally:
        for there, kept in hooks:
            there.update(kept)


def _wide(value: Tensor) -> torch.dtype:
    return torch.complex64 if value.is_complex() else torch.float32


def shown_by(run: Run, args: Mapping[str, Any], written: Collection[str], proof: Proof, *, plainly: bool) -> Seen:
    """What a graph shows, run on inputs by name, of which it changes the ``written`` ones: here, copies of them.

    ``plainly``: torch runs it, whose tape is the proof's to keep. What a program is said to change may be wrong: of
    small inputs there are copies in any case, and of others it is compared which change.
    """
    written = {*written, *(name for name, each in args.items() if _is_small(each))}
    others = {name: each for name, each in args.items() if name not in written and isinstance(each, Tensor)}
    versions = {name: version_of(each) for name, each in others.items()}
    named = {name: _own_leaf(each, name in written) for name, each in args.items()}
    given = {name: each.clone() if name in written and each.requires_grad else each for name, each in named.items()}
    tensors = {each: name for name, each in named.items() if isinstance(each, Tensor)}
    leaves = {each: name for each, name in tensors.items() if each.requires_grad}
    with random_numbers_kept():
        seen = proof.seen(lambda: tuple(run(*given.values())), leaves, tensors if plainly else None)
    seen.tensors.update({f"afterwards {name}": given[name].detach() for name in args if name in written})
    changed = tuple(name for name, each in others.items() if version_of(each) != versions[name])
    seen.others["inputs that are changed in place"] = changed
    return seen


def _is_small(value: Any) -> bool:
    """Whether a value is a small tensor that may be changed in place."""
    alone = isinstance(value, Tensor) and not value.requires_grad and value.layout is torch.strided
    return alone and value.nbytes <= _SMALL


def _own_leaf(value: Any, written: bool) -> Any:
    """A leaf of the same memory as an input, or of a copy."""
    if not isinstance(value, Tensor):
        return value
    return (value.detach().clone() if written else value.detach()).requires_grad_(value.requires_grad)


def _not_asked(_: None) -> Tensor:
    raise AssertionError("no gradient is taken of what is not kept")


@contextmanager
def _on_disk(folder: Any, kept: Collection[int]) -> Iterator[None]:
    """What autograd saves inside goes to a nameless file, but for what lies in memory that is kept anyway."""
    file, end = SpillFile(spill_folder(folder)), 0

    def pack(value: Tensor) -> Any:
        nonlocal end
        if value.layout is not torch.strided or not value.numel() or storage_id(value) in kept:
            return value, version_of(value)
        start, end = end, end + value.nbytes
        plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
        file.write(start, iter([_bytes(plain)]))
        return start, value.shape, value.dtype, value.device

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed[0], Tensor):
            if version_of(packed[0]) != packed[1]:
                raise RuntimeError("what is saved was modified by an inplace operation")  # as torch says without hooks
            return packed[0]
        start, shape, dtype, device = packed
        value = torch.empty(shape, dtype=dtype)
        file.read(start, iter([_bytes(value)]))
        return value.to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _bytes(value: Tensor) -> memoryview:
    flat = (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)
    return flat.view(torch.uint8).numpy().data
