"""Custom functions of the user's (``autograd.Function``) in a graph that torch runs as it is.

Dynamo hands them over as ``autograd_function_apply``, for which torch makes a class at every call, and what the
function saves is held by that class. A class refers to itself, so it stays, with a part of the batch, until Python
collects. Here one class serves all, and its context holds what was saved.

Private torch API, tried on 2.11 and 2.13: ``torch.ops.higher_order.autograd_function_apply`` with its arguments (a
forward that gives results and saved values, a backward that takes gradients and saved values, and which results and
saved values are marked).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx


def applied(forward: Callable[..., Any], backward: Callable[..., Any], *args: Any, **marked: Any) -> Any:
    """What torch's ``autograd_function_apply`` gives."""
    run: Any = _Applied.apply
    return run(forward, backward, marked, *args)


def without_classes(graph: fx.Graph) -> None:
    """Have the custom functions of a graph applied by ``applied``."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        node.target = applied


class _Applied(torch.autograd.Function):
    """Runs a forward and a backward. Tensors that the user's function saved are watched for changes in place."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, marked: dict[str, Any], *args: Any) -> Any:
        results, saved = forward(*args)
        ctx.user_backward, watched = backward, set(marked["saved_for_backward_idx"])
        ctx.saved = [None if number in watched else value for number, value in enumerate(saved)]
        ctx.watched = sorted(watched)
        ctx.save_for_backward(*(saved[number] for number in ctx.watched))
        if dirty := _picked(results, marked.get("dirty_idx", ())):
            ctx.mark_dirty(*dirty)
        if fixed := _picked(results, marked["non_differentiable_idx"]):
            ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = list(ctx.saved)
        for number, value in zip(ctx.watched, ctx.saved_tensors, strict=True):
            saved[number] = value
        found = ctx.user_backward(*gradients, *saved)
        return (None, None, None, *(found if isinstance(found, tuple | list) else (found,)))


def _picked(results: Any, numbers: Sequence[int]) -> list[Tensor]:
    given = results if isinstance(results, tuple | list) else (results,)
    return [each for number, each in enumerate(given) if number in numbers]
