"""torch's own checkpoints around the loops, where torch runs what Dynamo captured as it is.

The operator that Dynamo makes of ``torch.utils.checkpoint`` is meant to be compiled: run as it is, it does not put back
random numbers before it runs its function again, so dropout in it gets wrong gradients (torch 2.11 and 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint


def checkpointed(function: Any, *args: Any, **options: Any) -> Any:
    """``function(*args)`` as torch's checkpoint runs it, random numbers put back unless it was asked not to."""
    plain = all(type(each) in (Tensor, nn.Parameter) for each in args if isinstance(each, Tensor))
    preserve = plain and options.get("preserve_rng_state", True)  # fakes have no random numbers
    return checkpoint(function, *args, **{**options, "preserve_rng_state": preserve, "use_reentrant": False})


def run_by_torch(graph: fx.Graph) -> None:
    """Let the checkpoints of a graph that is run as it is keep their random numbers."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        node.target = checkpointed
