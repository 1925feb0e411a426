"""Runs of a model that are only looked at: all is afterwards as it was, its arguments, its state, random numbers."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from reroll.backends.construct.stages.proof import Proof
from reroll.backends.construct.stages.seen import Seen
from reroll.backends.dynamo.entry import ON_META
from reroll.backends.front.calls.arguments import Call, has_history
from reroll.backends.front.calls.interrupts import interrupted_once
from reroll.backends.front.python_state.outside import lent
from reroll.backends.front.python_state.state import Change, State
from reroll.backends.processes.wrappers import in_silence
from reroll.backends.runtime.randomness import random_numbers_kept
from reroll.errors import UnsupportedError
from reroll.graph.lines import line_that_changes
from reroll.graph.nested import tensors_of
from reroll.graph.private import applied_functions, parametrized_anew, parametrized_once, version_of

NOT_AN_OPERAND = "convert all Tensors to FakeTensors"
"""In what torch says where code that is traced reads a tensor of its own."""


class UpdatedError(UnsupportedError):
    """The model changes a parameter in place."""


def refuse_sparse(model: Callable[..., Any], call: Call) -> State:
    """What a call can reach. Raises UnsupportedError if a sparse tensor is among it, or one without values."""
    state = State.of(model, call.args, call.kwargs, parameters=False, values=False)
    if any(value.layout is not torch.strided for value, _, _ in state.tensors):
        raise UnsupportedError(
            "reroll.compile: the model holds or is given a sparse tensor, which Dynamo does not read and a record of "
            "its operations does not tell. Use a dense one (to_dense()), or the plain model."
        )
    if any(value.is_meta for value, _, _ in state.tensors):
        raise UnsupportedError(f"reroll.compile: {ON_META}")
    return state


def line_that_leaves(model: Callable[..., Any], call: Call, wanted: Callable[[Change], bool]) -> str:
    """The line of the user's code that changes something which can be reached from a model."""
    with isolated_run(model, call, parameters=True) as state:
        return line_that_changes(lambda: any(map(wanted, state.changes())), partial(call.run, model))


@contextmanager
def isolated_run(
    model: Callable[..., Any],
    call: Call,
    *,
    parameters: bool,
    ran: Sequence[types.FunctionType] = (),
) -> Iterator[State]:
    """Put back what the model changes; ``ran``: functions of which is known that they run in it.

    Raises UnsupportedError if it changes a parameter, takes from an iterator that its code names, or speaks with other
    processes.
    """
    with interrupted_once() as interrupts:
        state = State.of(model, call.args, call.kwargs, parameters=parameters, ran=ran)
        modes = torch.is_grad_enabled(), torch.get_default_dtype()
        try:
            with random_numbers_kept(), in_silence(), parametrized_anew(), lent(state.iterators):
                try:
                    yield state
                finally:
                    interrupts.waits = True
            if state.changed_parameter():
                raise UpdatedError(
                    "reroll.compile: the model changes a parameter in place in its forward. Use "
                    "torch.compile(backend='reroll') for it."
                )
            if modes != (torch.is_grad_enabled(), torch.get_default_dtype()):
                raise UpdatedError(
                    "reroll.compile: the model leaves another mode of gradients, or another default dtype, than it was "
                    "called under. Set them around what needs them (with torch.no_grad():), or where it is called."
                )
        finally:
            state.restore()
            torch.set_grad_enabled(modes[0])
            torch.set_default_dtype(modes[1])


def shown_by(
    model: Callable[..., Any],
    call: Call,
    proof: Proof,
    run: Callable[[Callable[..., Any]], Any],
    *,
    plainly: bool = False,
    apart: Mapping[int, torch.Tensor],
    ran: Sequence[types.FunctionType] = (),
) -> Seen:
    """What a call shows: its result, gradients for the proof's incoming ones, and what it leaves changed. ``apart``:
    the leaves that stand behind arguments, by the identity of these. ``ran``: functions that run in the model. In the
    plain run, which ends no turn, checkpoints of torch's that are reentrant run at once, as they give no gradients of
    chosen leaves."""
    at_once = applied_functions(lambda _, inner, args, kwargs: inner(*args, **kwargs)) if plainly else nullcontext()
    with isolated_run(model, call, parameters=False, ran=ran) as state, at_once:
        reached = [*(value for value, _, _ in state.tensors), *tensors_of((call.args, call.kwargs))]
        reached = [apart.get(id(value), value) for value in reached]
        leaves = {value: name for name, value in named_tensors(model, reached) if value.requires_grad and value.is_leaf}
        seen = proof.seen(lambda: run(model), leaves, reached if plainly else None)
        note_state(seen, state, leaves)
    return seen


def holds_history(model: Callable[..., Any]) -> bool:
    """Whether a model holds a tensor whose gradient would go on to what it was made of, or torch holds one for it."""
    return parametrized_once() or any(
        has_history(value) for value, _, _ in State.of(model, parameters=False, values=False).tensors
    )


def named_tensors(model: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a call reaches, each once: parameters by their names, others by their numbers."""
    named = {id(value): name for name, value in model.named_parameters()} if isinstance(model, torch.nn.Module) else {}
    for number, value in enumerate({id(each): each for each in tensors}.values()):
        yield named.get(id(value), f"tensor {number}"), value


def note_state(seen: Seen, state: State, leaves: Mapping[torch.Tensor, str]) -> None:
    """Tensors that can be reached from the model and its inputs, and what the call made of attributes."""
    for number, (value, version, kept) in enumerate(state.tensors):
        if kept is not None and not (isinstance(value, torch.nn.Parameter) and version_of(value) == version):
            seen.tensors[f"afterwards {leaves.get(value, f'tensor {number}')}"] = value.detach().clone()
    for name, value, *_ in state.changes():
        if isinstance(value, torch.Tensor):
            seen.tensors[f"attribute {name}"] = value.detach().clone()
        elif isinstance(value, bool | int | float | str | type(None)):
            seen.others[f"attribute {name}"] = value
