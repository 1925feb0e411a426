"""Objects that raise, or lie, when they are looked at: a walk over what a model holds goes on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import reroll
from reroll.backends.front.python_state.state import State
from reroll.backends.front.python_state.state_cache import Reach


def refusing(*names: str, kind: Any = object) -> Any:
    """An object whose methods of some names raise."""

    def refuse(*_: Any) -> Any:
        raise RuntimeError("not for you")

    return type("Refusing", (kind,), dict.fromkeys(names, refuse))


def answering(name: str, answer: Any) -> Any:
    """An object with a property, which gives or raises an answer."""

    def give(_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Answering", (), {name: property(give)})()


class Proxy:
    """Stands for another object, and says that it is one."""

    __slots__ = ("_inside",)

    def __init__(self, inside: Any) -> None:
        object.__setattr__(self, "_inside", inside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("frozen")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._inside)


def of_no_module(module: Any) -> Any:
    return type("Odd", (), {"__module__": module})


ODD = {
    "attributes": lambda: refusing("__getattr__")(),
    "all attributes": lambda: refusing("__getattribute__")(),
    "equality": lambda: refusing("__eq__")(),
    "hash": lambda: refusing("__hash__")(),
    "truth": lambda: refusing("__bool__", "__len__")(),
    "text": lambda: refusing("__repr__", kind=str)("a"),
    "list": lambda: refusing("__iter__", "__copy__", kind=list)([1]),
    "set": lambda: refusing("__iter__", kind=set)({1}),
    "dict": lambda: refusing("__iter__", "items", "values", "keys", kind=dict)(a=1),
    "class": lambda: answering("__class__", RuntimeError("unbound")),
    "says dict": lambda: answering("__class__", dict),
    "says tensor": lambda: answering("__class__", torch.Tensor),
    "says module": lambda: answering("__class__", nn.Module),
    "dict raises": lambda: answering("__dict__", RuntimeError("none")),
    "dict is a number": lambda: answering("__dict__", 3),
    "proxy of a list": lambda: Proxy([1, 2]),
    "proxy of a dict": lambda: Proxy({"a": 1}),
    "proxy of a tensor": lambda: Proxy(torch.ones(2)),
    "mock": lambda: mock.Mock(),
    "mock of a dict": lambda: mock.Mock(spec=dict),
    "module is no text": lambda: of_no_module(3)(),
    "no module": lambda: of_no_module(None)(),
    "class without a module": lambda: of_no_module(property(id)),
    "array of tensors": lambda: np.array([torch.ones(3), None], dtype=object),
}


class Holding(nn.Module):
    """Holds an object, itself and in a list and a dict."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 4)
        self.__dict__.update(odd=odd, several=[odd], named={"odd": odd})

    def forward(self, x_TBI: torch.Tensor) -> torch.Tensor:
        h = x_TBI.new_zeros(x_TBI.shape[1], 4)
        for t in range(x_TBI.shape[0]):
            h = self.cell(x_TBI[t], h)
        return h


@pytest.mark.parametrize("kind", ODD)
def test_odd_objects_are_walked_over(kind: str) -> None:
    made: Any = ODD[kind]
    model, reach = Holding(made()), Reach()
    state = State.of(model, parameters=False)
    assert not [*state.changes()]
    state.restore()
    keys = [reach.noted(model, (torch.ones(2),), {})[1] for _ in range(3)]
    assert keys[0] == keys[1] == keys[2]
    vars(model)["several"].append(1)
    assert reach.noted(model, (torch.ones(2),), {})[1] != keys[0]
    assert [*state.changes()]


@pytest.mark.parametrize("kind", ["class without a module", "all attributes", "proxy of a dict"])
def test_a_model_that_holds_one_is_compiled(kind: str) -> None:
    made: Any = ODD[kind]
    model, x_TBI = Holding(made()), torch.randn(12, 3, 2)
    torch.testing.assert_close(reroll.compile(model, lowering="eager")(x_TBI), model(x_TBI))
