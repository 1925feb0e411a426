"""Modules that are called in place of the user's, whose attributes are the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from reroll.backends.dynamo.entry import dynamo_is_off, hooks_inside, read
from reroll.backends.front.calls.compile_lock import turn
from reroll.backends.processes.sharded import gathering
from reroll.errors import OptionError, UnsupportedError
from reroll.graph.private import compiled_in_place, hooks_of_all_modules

_TARGET = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY)
_VARIADIC = inspect.Parameter.VAR_KEYWORD


class CompiledModule(nn.Module):
    """A module around another one. Attributes are those of the module that it was made from."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. Hooks of all modules see the user's module alone, where this one has no hooks."""
        own = (self._forward_pre_hooks, self._forward_hooks, self._backward_pre_hooks, self._backward_hooks)
        if any(own) or not hooks_of_all_modules() or compiled_in_place(self):
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the mode of the module."""
        self._orig_mod.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("_orig_mod", "training", "__class__") or name in self.__dict__
        if own or "_orig_mod" not in self._modules:
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)


def with_loss(model: Callable[..., Any], loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A function of a model's arguments and of ``target``, by keyword: ``loss(model(...), target)``."""

    def run(*args: Any, target: Any, **kwargs: Any) -> Any:
        return loss(model(*args, **kwargs), target)

    try:
        own = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return run
    if "target" in own.parameters:
        raise OptionError(
            "reroll.compile with loss= hands the argument `target` to the loss, but the model has a parameter of that "
            "name. Compile a function of both: reroll.compile(lambda x, target: loss(model(x, ...), target), ...)."
        )
    given = [*own.parameters.values()]
    given.insert(len(given) - (given[-1:] != [] and given[-1].kind is _VARIADIC), _TARGET)
    run.__signature__ = own.replace(parameters=given)  # type: ignore[attr-defined]
    run.__wrapped__ = model  # type: ignore[attr-defined]
    run.__name__ = getattr(model, "__name__", type(model).__name__)
    return run


def refuse_no_scalar(value: Any) -> None:
    """Raise UnsupportedError for what no backward can begin with."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise UnsupportedError(
            f"The function that reroll.compile was given as loss= returned {found}, not one number. Let it return the "
            "sum or the mean; what else you need beside it, return from a function of your own that you compile."
        )


class ShardedModule(CompiledModule):
    """A module whose blocks ``fully_shard`` has sharded one by one, over depth: each gathers its own parameters."""

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._set_run(dict(options))

    def _set_run(self, options: dict[str, Any]) -> None:
        with hooks_inside(), gathering(self._orig_mod):
            run = read(self._orig_mod, options)
        object.__setattr__(self, "_options", options)
        object.__setattr__(self, "reroll_run", run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result. Raises UnsupportedError for what is sharded in a way that is not followed."""
        if dynamo_is_off():
            return self._orig_mod(*args, **kwargs)
        with turn(), gathering(self._orig_mod):
            return self.reroll_run(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["reroll_run"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._set_run(state["_options"])
