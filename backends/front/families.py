"""The programs of one pattern, for every number of steps, out of the same compiled segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor, fx, nn

from reroll.backends.construct.kernels import Kernels, Results, check_policy, suited
from reroll.backends.construct.lent import kernels_for
from reroll.backends.construct.replan import Plans
from reroll.backends.construct.share import KernelsOf, compile_usual, fitting_all
from reroll.backends.construct.stages.proof import Proof, eager
from reroll.backends.construct.stages.takeover import Takeover, is_aside
from reroll.backends.dynamo.around import bytes_around
from reroll.backends.dynamo.entry import Graph, assemble, keep_apart, staged
from reroll.backends.dynamo.plain import continued, say_more
from reroll.backends.front.observe import Observed
from reroll.backends.inductor.sizes.family import sampling
from reroll.backends.runtime.node import Idle
from reroll.capture.capture import capture
from reroll.capture.fusion.fuse import fuse
from reroll.capture.lengths.align import align
from reroll.capture.lengths.instantiate import Instance, instantiate
from reroll.capture.lengths.pattern import Pattern
from reroll.errors import warn
from reroll.graph.fakes import fake_of, new_fake_mode
from reroll.planning.options import Options
from reroll.planning.segments import SegmentLengths, lengths_of, segment_length
from reroll.planning.truncation import detach_behind
from reroll.program.memory import Around
from reroll.recurrence import Numbers, Recurrence

_KERNELS = 64
_LIKE = "programs of the same segments were at other lengths"
LENGTHS = 1_024
"""Of these the programs are kept, and that the model was checked at them."""


class Family:
    """What the traces of a model at the lengths of a pattern say of it at every length; the last one is run by Dynamo.

    Raises LengthError where they give no template.
    """

    def __init__(self, pattern: Pattern, modules: Sequence[fx.GraphModule], options: Options) -> None:
        self.pattern, self.modules, self.takeover = pattern, tuple(modules), Takeover.of(options)
        iterations = options.truncate is not None
        found = [fuse(capture(each, maps=True, iterations=iterations)) for each in modules]
        self.template, self.notes = align(pattern.lengths, modules, found), found[-1].notes
        check_policy(found[-1].recurrences, self.options)
        self.kernels: OrderedDict[Any, Kernels] = OrderedDict()
        self.said = False
        self.segments = SegmentLengths()
        self.called, self.proofs = 0, dict[tuple[str, int], Proof]()
        self.programs: OrderedDict[Observed, tuple[Graph, tuple[int | None, ...]]] = OrderedDict()

    @property
    def options(self) -> Options:
        """How the user has it compiled."""
        return self.takeover.options

    def program(
        self, observed: Observed, operands: Sequence[Any], sequences: Mapping[int, Tensor]
    ) -> tuple[Graph, tuple[int | None, ...]]:
        """The compiled graph at the length of a call, and what its outputs stand for.

        sequences: what the operands that are tokens stand for, by their identity.
        """
        if observed not in self.programs or self.takeover.due:
            self._say_sized()
            instance = self._instance(observed, operands, sequences)
            tokens = sum(each.nbytes for each in operands if id(each) in sequences)
            if not self.takeover.compiled:
                self.takeover.prepare = partial(self._prepare, instance.recurrences)
            stage, present = self.takeover.compiled, self.programs.get(observed, (None, ()))[0]
            graph = staged(self.takeover, partial(self._compiled, instance, tokens), present)
            if self.takeover.compiled and (not self.programs or not stage):
                say_more(graph.more_than_plain())  # of what runs from now on
            if self.takeover.compiled != stage:
                self._forget_eager()
            self.programs[observed] = graph, instance.outputs
            forget(self.programs, LENGTHS)
        self.programs.move_to_end(observed)
        return self.programs[observed]

    def _forget_eager(self) -> None:
        """Hold no eager segments, nor programs of them, where compiled ones run."""
        self.programs.clear()
        for key in [key for key, kernels in self.kernels.items() if kernels.context.lowering == "eager"]:
            del self.kernels[key]

    def sample(self, observed: Observed, operands: Sequence[Any], sequences: Mapping[int, Tensor]) -> None:
        """Note the sizes of a call, for code that serves any: what is compiled for other sizes has them as symbols."""
        recurrences = self._instance(observed, operands, sequences).recurrences
        with sampling():
            self._compile_usual(recurrences)

    def _compile_usual(self, recurrences: Sequence[Recurrence]) -> None:
        """Compile segments of the usual length of some loops."""
        loops = (self.segments.fixed(*found, self.options) for found in enumerate(recurrences))
        compile_usual(loops, self.options, len(self.template.loops))

    def _prepare(self, recurrences: Sequence[Recurrence]) -> None:
        """Make what is to be compiled ahead, after which all is as it was: whether it is asked for is a matter of
        time."""
        with self.segments.kept():
            self._compile_usual(recurrences)

    def _instance(self, observed: Observed, operands: Sequence[Any], sequences: Mapping[int, Tensor]) -> Instance:
        instance = instantiate(self.template, observed.check)
        keep_apart(instance.outer, self.modules[-1].graph)
        detach_behind(instance.outer, instance.recurrences, self.options.truncate)
        _show_sizes(instance, operands, sequences)
        return instance

    def _say_sized(self) -> None:
        """Warn at the second length, once, that each is made by itself."""
        sized = [loop.recurrence.where for loop in self.template.loops if loop.sized]
        if not sized or len(self.programs) != 1 or self.said:
            return
        self.said = True
        text = (
            f"Every step of the loop at {sized[0]} reads a value that is as large as the sequence is long, so each new "
            f"length takes seconds: its segments are traced anew, and compiled where no earlier code serves. Pad "
            f"sequences to a few lengths; the last {LENGTHS} are kept. If the value has no dimension of time, say in "
            "time_dim which operands have one."
        )
        warn(text)

    def _compiled(self, instance: Instance, tokens: int, options: Options, *, told: bool = True) -> Graph:
        modules = dict[str, nn.Module]()
        kernels, running = list[KernelsOf](), list[Recurrence]()
        for at, each in enumerate(instance.recurrences):
            recurrence = self.segments.fixed(at, each, options)
            if recurrence.steps == 0:
                one = replace(recurrence, steps=1)
                length = segment_length(one, options)
                modules[recurrence.name] = Idle(recurrence, self._kernels(at, one, length, options).traced.results)
                continue
            kernels.append(partial(self._kernels, at, recurrence))
            running.append(recurrence)

        def held(results: Mapping[str, Results]) -> Mapping[str, Around]:
            standing = {**modules, **{name: nn.Identity() for name in results}}
            return bytes_around(assemble(self.modules[-1], instance.outer, standing), results, tokens)

        plans = Plans(fitting_all(kernels, running, options, held), told=told)
        module = assemble(self.modules[-1], instance.outer, modules | plans.modules)

        @cache
        def proved() -> tuple[Plans, Callable[..., Any]]:
            if options.lowering == "eager":
                return plans, module
            apart = self._compiled(instance, tokens, replace(eager(options), proof="never"), told=False)
            return apart.plans, apart.run

        plain = cache(partial(continued, self.pattern.lengths, self.modules, instance.length))
        proof = Proof.of(plans.built, options, proved, speaks=False)  # a run that does is refused
        return Graph(module, module, plans, "", "", self.notes, tokens, plain, proof)

    def proves(self, graph: Graph) -> bool:
        """Whether a program is proved at its first call, which begins: each with a segment that was not, and of the
        others the second, the fourth, the eighth, as sequences may be of as many lengths as there are."""
        proof = graph.proof
        if is_aside() or not proof.due:
            return False
        if proof.how == "always":
            return True
        self.called += 1
        segments = {(each.name, length) for each in graph.built for length in each.executable.compiled.segments}
        fresh = {each for each in segments if each not in self.proofs or self.proofs[each].proved is None}
        if not fresh and self.called & (self.called - 1):
            proof.how, proof.missed = "never", _LIKE
            return False
        self.proofs |= dict.fromkeys(fresh, proof)
        return True

    def _kernels(self, at: int, recurrence: Recurrence, length: int, way: Options) -> Kernels:
        """Segments of a loop of which most have a length, and of such shorter ones as its steps leave, by the passes of
        some options; those that were compiled for another number of steps, where they do."""
        loops = len(self.template.loops)
        return suited(partial(self._known, at, recurrence, length, loops), recurrence.steps, way, loops)

    def _known(self, at: int, recurrence: Recurrence, length: int, loops: int, way: Options) -> Kernels:
        lengths = lengths_of(recurrence, length, way)
        numbers = tuple(x.dtype for x in recurrence.xs if isinstance(x, Numbers))
        made = way.lowering, way.passes, way.replay
        kind = at, length, made, numbers, tuple(each.shape for each in recurrence.examples)
        key = next((key for key in self.kernels if key[0] == kind and set(lengths) <= set(key[1])), (kind, lengths))
        if key not in self.kernels:
            self.kernels[key] = kernels_for(recurrence, way, lengths, loops)
            forget(self.kernels, _KERNELS)
        self.kernels.move_to_end(key)
        return self.kernels[key]


def forget(cache: OrderedDict[Any, Any], most: int) -> None:
    """Keep no more than the last ones."""
    if len(cache) > most:
        cache.popitem(last=False)


def _show_sizes(instance: Instance, operands: Sequence[Any], sequences: Mapping[int, Tensor]) -> None:
    """Give the inputs of the outer graph examples of this length."""
    mode = new_fake_mode()
    for node, operand in zip(instance.outer.find_nodes(op="placeholder"), operands, strict=True):
        value = sequences.get(id(operand))
        if value is not None:
            node.meta["example_value"] = fake_of(mode, value)
