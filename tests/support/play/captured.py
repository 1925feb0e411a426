"""The recurrence that Dynamo and the capture find in a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reroll.capture.capture import capture


def captured(model: nn.Module, *inputs: Tensor) -> Any:
    found: list[Any] = []

    def backend(gm: Any, _: Any) -> Any:
        found.append(capture(gm).recurrences[0])
        return gm.forward

    torch.compile(model, backend=backend)(*inputs)
    return found[0]
