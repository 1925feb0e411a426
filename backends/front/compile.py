"""``reroll.compile``: a model compiled, which is rolled at the length of each of its calls."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar, Unpack, overload

from torch import Tensor, nn

from reroll.backends.dynamo.entry import read
from reroll.backends.front.calls.compile_lock import turn
from reroll.backends.front.full.caller import Caller
from reroll.backends.front.modules import CompiledModule, ShardedModule, refuse_no_scalar, with_loss
from reroll.backends.processes.sharded import sharded_inside
from reroll.backends.processes.wrappers import alone, collective_wrapper, forward_of, speaks_inside
from reroll.errors import NoRecurrenceError, OptionError, UnsupportedError, warn
from reroll.planning.options import Options, OptionsDict

M = TypeVar("M", bound=Callable[..., Any])  # a module, a function or a method
R = TypeVar("R")
Loss = Callable[[Any, Any], Any]  # of what the model gives, and of a target
_Make = Callable[[Callable[..., Any]], Any]  # of a model: what calls it
_UNNEEDED = (
    "reroll.compile: time_dim and steps have no effect any more, and will go. Loops are found in what the model does "
    "at each call. Leave them out."
)


class WithLoss(Protocol):
    """What a model with a loss behind it is compiled to: the model's arguments and a target give one number."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, target: Any, **kwargs: Any) -> Tensor:
        """The loss."""


@overload
def compile(  # noqa: A001  # type: ignore[overload-overlap]
    model: functools.partial[R],
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[..., R]: ...


@overload
def compile(  # noqa: A001
    model: M,
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> M: ...


@overload
def compile(  # noqa: A001
    model: Callable[..., Any],
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: Loss,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> WithLoss: ...


@overload
def compile(  # noqa: A001
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: None = None,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[[M], M]: ...


@overload
def compile(  # noqa: A001
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: Loss,
    dynamic: bool = False,
    **options: Unpack[OptionsDict],
) -> Callable[[Callable[..., Any]], WithLoss]: ...


def compile(  # noqa: A001  # as torch.compile
    model: Any = None,
    *,
    time_dim: Any = None,
    steps: Any = None,
    loss: Loss | None = None,
    dynamic: bool = False,
    **options: Any,
) -> Any:
    """Compile a model with a loop over time, or with blocks over depth, in it; also a decorator.

    model: a module, function or method. A module gives a module with the same parameters, a function a function.
    time_dim, steps: where time is. They have no effect any more (DeprecationWarning), and will go.
    loss: a function of what the model gives and of a target, such as ``torch.nn.functional.mse_loss``, which returns
    one number. What comes back is a function then, ``compiled(*arguments, target=...)``, of that number. Where the loss
    is a sum or mean over time, each step adds its part, so neither what the model gives nor its gradient is held for
    all steps, and a budget covers the loss. The same goes for a loss within a model or function of yours.
    dynamic: whether other sizes, such as other batch sizes, will come: the model is looked at once more, at about half
    of the first batch, so that the first segments are compiled for any size. Without it the second size is compiled so.
    On a GPU each size is compiled by itself.
    options: those of ``reroll.Options``.

    The first call of each shape, and so of each length, records what the model does in it, while Python runs it, and
    rolls the loops over time in that record, or else equal blocks over depth. Nothing is inferred: a step may do
    anything with its number and with theirs. Steps that repeat are followed and not written down; of others 100,000
    operations at most. What was traced, compiled and proved at other lengths is taken where it is the same. Where a
    record cannot tell what the model does (it prints, reads files, reads the values of tensors, or speaks with other
    processes), this is ``torch.compile(model, backend="reroll", options=options)``.

    After a call that looks at the model it is as if it had not been run: attributes, buffers and random numbers are put
    back. At every call the arguments, what can be reached from the model, what its code names, and torch's modes are
    compared, and the model is recorded anew where they differ, such as for another batch size, dtype or mode of
    training. The clock and what no Python object shows must stay the same; a proof that finds that they do not says so.
    Calls in several threads wait for one another while a model is looked at or compiled, not while it runs.

    Values may be asked whether they are true: the answers are compared at every call, a RerollWarning says so, and from
    the first other answer on Dynamo reads the model.
    """
    asked = Options.of(options)
    if time_dim is not None or steps is not None:
        warnings.warn(_UNNEEDED, DeprecationWarning, stacklevel=2)
    how = {"dynamic": dynamic, **options}
    if model is None:
        return lambda target: compile(target, loss=loss, **how)
    if loss is not None:
        return _with_loss(model, loss, how)
    _refuse_what_is_no_model(model)
    _warn_of_generators(model, asked)
    if isinstance(model, nn.Module) and speaks_inside(model):
        _refuse_dynamic(dynamic)
        return _by_backend(model, options)
    make: _Make = partial(Caller, options=options, dynamic=dynamic)
    if isinstance(model, nn.Module):
        return RecordedModule(model, make)
    caller = make(model)

    @functools.wraps(model)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return caller(*args, **kwargs)

    compiled.reroll_caller = caller  # type: ignore[attr-defined]
    return compiled


def _refuse_what_is_no_model(model: Any) -> None:
    """Raise OptionError for a class, which torch.compile would change, and with it every instance there is; and for
    what is compiled already."""
    if not callable(model):
        raise OptionError(f"reroll.compile was given {type(model).__name__}, which cannot be called.")
    if hasattr(model, "reroll_caller"):
        raise OptionError(
            "reroll.compile was given a model that it has compiled already. Give the plain model to it, once, with all "
            "options. It is compiled._orig_mod of a module, and compiled.__wrapped__ of a function."
        )
    if isinstance(model, type):
        raise OptionError(
            f"reroll.compile was given the class {model.__name__}, which is no model yet. Compile an instance, "
            f"reroll.compile({model.__name__}(...)), or put the decorator on its forward."
        )


def _warn_of_generators(model: Callable[..., Any], options: Options) -> None:
    """Say that the steps of a generator are its caller's. Raises NoRecurrenceError if the options ask for it."""
    run = model.forward if isinstance(model, nn.Module) else model
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(run) for is_kind in kinds):
        text = (
            f"reroll.compile was given {getattr(run, '__qualname__', run)}, which is a generator or a coroutine: its "
            "caller decides when it goes on, so there is no loop to roll, and it runs as it is. Return a list in place "
            "of values that are yielded one by one."
        )
        if options.on_no_recurrence == "error":
            raise NoRecurrenceError(text)
        warn(text)


def _refuse_dynamic(dynamic: Any) -> None:
    if dynamic:
        raise OptionError(
            f"reroll.compile: dynamic={dynamic!r} is not for models that several processes train together. Leave it "
            "out: each size is compiled when it comes."
        )


def _with_loss(model: Any, loss: Any, how: Mapping[str, Any]) -> Any:
    """A model with a loss behind it, as a function of both."""
    for each, name in ((model, "model"), (loss, "loss")):
        if not callable(each):
            raise OptionError(f"reroll.compile was given {type(each).__name__} as {name}, which cannot be called.")
    compiled = compile(with_loss(model, loss), **how)

    @functools.wraps(compiled)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if "target" not in kwargs:
            raise OptionError(
                "reroll.compile with loss= takes the target by name, behind the model's arguments: "
                "compiled(x, target=...)."
            )
        value = compiled(*args, **kwargs)
        refuse_no_scalar(value)
        return value

    return checked


def _by_backend(model: Any, options: Mapping[str, Any]) -> Any:
    """A model that several processes train together, by the backend; Dynamo's own decorators and errors."""
    if sharded_inside(model):
        return ShardedModule(model, options)
    return read(model, options)


class RecordedModule(CompiledModule):
    """A module that is compiled. Attributes are those of the module that it was made from."""

    def __init__(self, module: nn.Module, make: _Make) -> None:
        super().__init__(module)
        self._set_caller(make)

    def _set_caller(self, make: _Make) -> None:
        inside = collective_wrapper(self._orig_mod)
        model = self._orig_mod if inside is None else inside.forward
        object.__setattr__(self, "_inside", inside)
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "reroll_caller", make(model))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. Raises UnsupportedError if it was sharded since it was compiled."""
        if not alone() and collective_wrapper(self._orig_mod) is not self._inside:
            raise UnsupportedError(
                f"{type(self._orig_mod).__name__} was sharded after it was given to reroll.compile, which compiled "
                "what it was before. Use fully_shard first, and reroll.compile then."
            )
        if self._inside is None:
            return self.reroll_caller(*args, **kwargs)
        with turn(), forward_of(self._inside, self.reroll_caller):
            return self._orig_mod(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["reroll_caller"], state["_inside"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_caller(state["_make"])
