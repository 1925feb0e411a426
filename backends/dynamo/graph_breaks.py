"""The graphs into which Dynamo cuts one compiled model, and what is said where none of them has a loop.

Dynamo ends a graph where it cannot read on, and begins another one behind. Inside of a Python loop it cannot begin
anew: it gives the whole function up, and this backend never hears of it. So it listens to Dynamo's callbacks, too. Each
model is told about once: at once where a function with a loop is given up in which Dynamo has seen operations already
(others loop over names and settings), else when its first call is over, as until then a graph with a loop may still
come, or the first graph at all.

Private torch API, tried on 2.11 and 2.13: ``InstructionTranslator.current_tx``, which knows the call of
``torch.compile`` that a graph is compiled for; ``callback_handler``, whose callbacks run before Dynamo reads a
function, and while the exception is handled with which it gives one up; ``InstructionTranslatorBase``, which walks
through one and has its graph so far; ``patch`` of its ``config``, for ``allow_rnn``; the function ``compile_wrapper``,
which calls a compiled one, and its list ``cleanups`` of what to call behind it; the variables ``code``, ``compiler_fn``
and ``one_graph`` of the functions that it went through, and ``skip_frame`` and ``real_stack`` of its ``Unsupported``.
"""

from __future__ import annotations

import dis
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import Unsupported
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

from reroll.errors import NoRecurrenceError, warn
from reroll.planning.options import Options

UNRECORDED: ContextVar[bool] = ContextVar("UNRECORDED", default=False)
"""Whether ``reroll.compile`` has Dynamo read a model, as a record does not tell what it does."""
_OURS = frozenset({"torch", "reroll", *sys.stdlib_module_names})
_SHOWN = 3
_KEEPS_LAYERS = torch.__version__ >= "2.13"  # older versions say wrong shapes of their states, or fail
_LAYER = "RNN, GRU, or LSTM"  # in what Dynamo says where it does not take one
_LOOPS = ("FOR_ITER", "JUMP_BACKWARD")
_RAISED = "Observed exception"
"""How Dynamo's report begins that a function raises one."""
_REMEDY = (
    "Take it out of the loop, or out of the function where it stands beside the loop (TORCH_LOGS=graph_breaks shows "
    "each such place)"
)
_RECORDED = "use reroll.compile(model) in place of torch.compile, which may record the loop"
_UNSEEN = (
    "If the model has a loop over time, Dynamo may have broken the graph in it, which TORCH_LOGS=graph_breaks shows"
)
_NO_GRAPH = (
    "reroll was given no graph of the model: Dynamo ended before its first operation, so it runs as plain Python. "
    "TORCH_LOGS=graph_breaks shows where"
)
_WHOLE = (
    "Set torch._dynamo.config.allow_rnn = True, with which torch 2.13 hands such layers over; or use "
    "reroll.compile(model) in place of torch.compile."
)
_SHARDED = (
    "These are the hooks of a block that fully_shard has sharded by itself. reroll.compile(model), after sharding, "
    "rolls such blocks: each gathers its own parameters."
)


@dataclass(eq=False)
class Pieces:
    """The graphs of one compiled model so far: whether one of them has a loop, and where Dynamo ended them and why.

    heard: whether the end of a call is heard. first: what is to be said of the first one without a loop. exception: of
    one that the model raises. how: graphs
    without one are run. unrecorded: whether a record did not tell what the model does.
    """

    graphs: int = 0
    rolled: bool = False
    told: bool = False
    heard: bool = False
    first: str = ""
    exception: str = ""
    how: str = ""
    breaks: dict[str, None] = field(default_factory=dict)
    unrecorded: bool = field(default_factory=UNRECORDED.get)

    def add(self, rolled: bool, ended: str) -> None:
        """Count a graph; ``ended`` says where and why Dynamo ended it, if it did so before the model's end."""
        self.graphs += 1
        self.rolled |= rolled
        self.breaks |= {ended: None} if ended else {}

    def give_up(self, code: CodeType, why: str, operations: int) -> None:
        """Warn, once, that Dynamo reads nothing of a function, if that has a loop and operations before the break."""
        self.breaks[why] = None
        if self.told or (_LAYER not in why and (not operations or not _has_loop(code))):
            return
        self.told = True
        text = (
            f"reroll does not see the loop in {code.co_name} ({code.co_filename}:{code.co_firstlineno}): Dynamo has "
            "given the function up, so it runs as plain Python, and only what it calls may be compiled. What Dynamo "
            f"cannot read is this: {why}. {self._remedy(why)}"
        )
        warn(text)

    def raised(self, code: CodeType, why: str) -> None:
        """Note that Dynamo reads a function no more, as it raised an exception while it was read. That is said where
        the call raises it, too, as soon as that is over: the model may catch it."""
        at = why.removeprefix(_RAISED)
        text = (
            f"The model raised an exception while Dynamo read it{at}, and Dynamo gives a function up for good then: "
            f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) runs as plain Python from now on, and nothing "
            "of it is rolled. Call torch._dynamo.reset() behind such a call, or check arguments before the compiled "
            "model is called."
        )
        self.exception = text
        if not self.heard:
            warn(text)

    def missed(self, reason: str, options: Options) -> None:
        """Say that a graph has no loop, now or when the call is over.

        Raises NoRecurrenceError if the options ask for it.
        """
        text = f"reroll found no recurrence: {reason}."
        if options.truncate is not None:
            raise NoRecurrenceError(
                f"{text} So truncate={options.truncate} cannot be kept. Leave it out; or, where this is a sequence of "
                "one or two steps, give it to the model that is not compiled."
            )
        if options.on_no_recurrence == "error":
            raise NoRecurrenceError(f"{text} Use on_no_recurrence='warn' to compile such graphs as inductor does.")
        self.how = "as the inductor backend does" if options.lowering == "inductor" else "as it is"
        self.first = self.first or f"{text} The graph is run {self.how}. {self._or_recorded(_UNSEEN)}"
        if not self.heard or not (self.breaks or _within()):
            self.told = True
            warn(self.first)

    def over(self) -> None:
        """Warn, once, if no graph of the model has a loop; the call in which they were compiled is over. And that it
        raised, and is read no more."""
        exception, self.exception = self.exception, ""
        if exception and sys.exc_info()[0] is not None:
            warn(exception)
        if self.rolled or self.told or sys.exc_info()[0] is not None:
            return
        self.told = True
        text = (
            self._cut() if self.breaks and self.graphs else self.first if self.graphs else self._or_recorded(_NO_GRAPH)
        )
        warn(text)

    def _remedy(self, why: str) -> str:
        return _SHARDED if "_fully_shard" in why else _WHOLE if _LAYER in why else self._or_recorded(_REMEDY)

    def _or_recorded(self, remedy: str) -> str:
        """A remedy, and that a record may tell more than Dynamo does, unless it did not."""
        return f"{remedy}." if self.unrecorded else f"{remedy}; or {_RECORDED}."

    def _cut(self) -> str:
        shown = list(self.breaks)[:_SHOWN]
        more = f"; and at {len(self.breaks) - _SHOWN} more places" if len(self.breaks) > _SHOWN else ""
        return (
            f"reroll found no recurrence in any of the graphs ({self.graphs} so far) into which Dynamo cut the model. "
            f"It ended one here: {'; '.join(shown)}{more}. A loop with such a place in it is not seen as a loop. Each "
            f"graph is run {self.how}. {self._or_recorded(_REMEDY)}"
        )


def _within() -> bool:
    """Whether Dynamo reads a function that the compiled one calls, by itself: code of others runs between them."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_wrapper(frame):
        if not _is_torchs(frame):
            return True
        frame = frame.f_back
    return False


def _is_wrapper(frame: FrameType) -> bool:
    """Whether this is what calls a compiled function."""
    return frame.f_code.co_name == "compile_wrapper" and _is_torchs(frame)


def _is_torchs(frame: FrameType) -> bool:
    """Whether code of torch's, of this project's or of Python's runs in a frame."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS


def _has_loop(code: CodeType) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = any(each.opname.startswith(_LOOPS) for each in dis.get_instructions(code))
    return own or any(each.co_name.startswith("<") and _has_loop(each) for each in inner)


_PIECES: WeakKeyDictionary[Any, Pieces] = WeakKeyDictionary()


def pieces() -> Pieces:
    """Those of the model that Dynamo is compiling; of nobody's where it is not Dynamo that asks."""
    try:
        asked = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return Pieces()
    return _PIECES.setdefault(asked, Pieces())


def listen() -> None:
    """Hear when Dynamo begins to read a function, and when it ends or gives it up."""
    if _hear not in callback_handler.end_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_hear)


_keeping: list[Any] = []
"""The context in which Dynamo keeps torch's layers over time whole; empty while it reads for other backends."""


def _begin(_: object) -> None:
    """Have Dynamo keep ``nn.LSTM`` and its kin whole while it reads for this backend, which has loops for them."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "compiler_fn" not in frame.f_locals:
        frame = frame.f_back
    asked = None if frame is None else frame.f_locals["compiler_fn"]
    if getattr(asked, "compiler_name", "") != "reroll":
        return
    _hear_the_end(frame, _PIECES.setdefault(asked, Pieces()))
    if _KEEPS_LAYERS:
        _keeping.append(torch._dynamo.config.patch(allow_rnn=True))
        _keeping[-1].__enter__()


def _hear_the_end(frame: FrameType | None, model: Pieces) -> None:
    """Hear when the call is over within which a frame runs."""
    while frame is not None and not _is_wrapper(frame):
        frame = frame.f_back
    ends = None if frame is None else frame.f_locals.get("cleanups")
    model.heard = ends is not None
    if ends is not None and model.over not in ends:
        ends.append(model.over)


def _hear(_: object) -> None:
    while _keeping:
        _keeping.pop().__exit__(None, None, None)
    error = sys.exc_info()[1]
    raised = str(error).startswith(_RAISED)
    if not isinstance(error, Unsupported) or not (raised or getattr(error, "skip_frame", False)):
        return
    seen: dict[str, Any] = {}
    operations = 0
    trace = error.__traceback__
    while trace is not None:
        seen = {**trace.tb_frame.f_locals, **seen}
        operations = max(operations, _operations(trace.tb_frame.f_locals.get("self")))
        trace = trace.tb_next
    asked, code = seen.get("compiler_fn"), seen.get("code")
    if getattr(asked, "compiler_name", "") == "reroll" and isinstance(code, CodeType) and not seen.get("one_graph"):
        why = broken(str(error), getattr(error, "real_stack", None))
        model = _PIECES.setdefault(asked, Pieces())
        if raised:
            model.raised(code, why)
        else:
            model.give_up(code, why, operations)


def _operations(walker: object) -> int:
    """How many operations Dynamo has seen, if this walks through a function for it."""
    if not isinstance(walker, InstructionTranslatorBase):
        return 0
    return sum(node.op.startswith("call") for node in walker.output.graph.nodes)


def broken(reason: str, stack: Any) -> str:
    """Why and where Dynamo ended a graph, in a line."""
    at = f" at {stack[-1].filename}:{stack[-1].lineno}" if stack else ""
    return reason.strip().partition("\n")[0] + at
