"""From a recurrence to an executable: trace and compile segments, choose a schedule, build and check the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from reroll.backends.disk import DiskTier
from reroll.backends.executable import Executable
from reroll.backends.host import HostTier
from reroll.backends.lowering import Segment, Traced, lower, trace
from reroll.backends.storage import Tier
from reroll.context import Context
from reroll.options import Options
from reroll.passes import DEFAULT_PASSES
from reroll.plan import Choice, choose, segment_length
from reroll.program import Program, store_all
from reroll.recurrence import Recurrence
from reroll.registry import pass_names, run, run_on_step
from reroll.schedule import Interval
from reroll.sparsity import Fact
from reroll.tally import Sizes, Tally
from reroll.verifier import verify


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An executable, and everything that led to it."""

    executable: Executable
    choice: Choice
    context: Context
    sizes: Sizes
    tally: Tally
    options: Options

    @property
    def program(self) -> Program:
        """The rewritten training program."""
        return self.executable.program


def build(recurrence: Recurrence, options: Options) -> Built:
    """Compile a recurrence as the options say."""
    passes = DEFAULT_PASSES if options.passes is None else pass_names(options.passes)
    length = segment_length(recurrence.steps, options)
    context = Context(store_all_root(recurrence, length), recurrence, codec=options.codec)
    recurrence = replace(recurrence, step=run_on_step(passes, recurrence.step, context))
    traced = {k: trace(recurrence, k, decompose=options.lowering == "inductor") for k in _lengths(recurrence, length)}
    facts = traced[length].facts() if options.codec == "auto" else ()
    segments = {k: lower(each, options.lowering, options.codec) for k, each in traced.items()}
    sizes = _sizes(traced[length], segments, facts, length)
    context = replace(context, recurrence=recurrence, facts=facts)

    def program_of(choice: Choice) -> Program:
        return run(passes, store_all(choice.steps, choice.segment), replace(context, root=choice.root))

    device = recurrence.examples[0].device.type
    choice = choose(
        recurrence.steps,
        length,
        options,
        device,
        sizes.of_carry(tuple(fact.codec for fact in facts)),
        max(sizes.of_tape(0, length) // length, 1),
        lambda candidate: verify(program_of(candidate), sizes=sizes).local_peak,
    )
    program = program_of(choice)
    tally = verify(program, sizes=sizes)
    executable = Executable.of(recurrence, program, segments, _tiers(program, tally, options), options.verify)
    return Built(executable, choice, replace(context, root=choice.root), sizes, tally, options)


def store_all_root(recurrence: Recurrence, segment: int) -> Interval:
    """The tree of plain BPTT, which stands until a schedule is chosen."""
    return Choice("store_all", recurrence.steps, segment, 1, 1, "local").root


def _lengths(recurrence: Recurrence, length: int) -> tuple[int, ...]:
    rest = recurrence.steps % length
    return (length, rest) if rest else (length,)


def _sizes(traced: Traced, segments: Mapping[int, Segment], facts: tuple[Fact, ...], length: int) -> Sizes:
    """Bytes of carries and tapes, as they are kept."""
    carries = traced.results[: traced.carries]
    plain = sum(value.numel() * value.element_size() for value in carries)

    def packed(codec: tuple[str, ...]) -> int:
        if not codec:
            return plain
        return sum(expected_nbytes(value, name) for value, name in zip(carries, codec, strict=True))

    def taped(start: int, stop: int) -> int:
        whole, rest = divmod(stop - start, length)
        short = segments[rest].saved_nbytes if rest in segments else 0
        return whole * segments[length].saved_nbytes + short

    return Sizes(carry=plain, packed=packed, taped=taped)


def expected_nbytes(value: Tensor, codec: str) -> int:
    """Bytes that a tensor is expected to take: what its codec promises, or its own size where that depends on data."""
    bits = {"bits": 1, "two": 1, "small": 8 * min(value.element_size(), 2)}.get(codec)
    return value.nbytes if bits is None else -(-value.numel() * bits // 8)


def _tiers(program: Program, tally: Tally, options: Options) -> dict[str, Tier]:
    names = {name for name in tally.tier_peaks if name not in ("local", "remote")}
    made: dict[str, Tier] = {}
    if "disk" in names:
        made["disk"] = DiskTier(options.spill_folder)
    if "host" in names:
        made["host"] = HostTier()
    return made
