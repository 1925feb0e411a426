"""Functions are the same if they do the same: told apart by code, defaults, cells and what they read."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from reroll.capture.recorder.identity import fingerprint

SLOPE = 1.0


def sloped(grad: Tensor, *, scale: float = 1.0) -> Tensor:
    return grad * scale * SLOPE


def test_functions_of_one_code_are_told_apart_by_what_they_read() -> None:
    def fingerprint_in(read: dict[str, float], scale: float = 1.0) -> Any:
        function = types.FunctionType(sloped.__code__, read)
        function.__kwdefaults__ = {"scale": scale}
        return fingerprint(function)

    read = {"SLOPE": 1.0}
    first = fingerprint_in(read)
    assert first == fingerprint_in(read)
    assert first != fingerprint_in(dict(read)), "other globals"
    assert first != fingerprint_in(read, scale=2.0)
    read["SLOPE"] = 2.0
    assert first != fingerprint_in(read)


def test_functions_that_hold_themselves_are_told_apart() -> None:
    def made(slope: float) -> Any:
        class Slope(torch.autograd.Function):
            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                return grad * slope * (Slope is not None)

        return Slope

    assert fingerprint(made(1.0)) == fingerprint(made(1.0)) != fingerprint(made(2.0))
