"""What a model holds, call after call: what stays is compared and not walked, and must be the same as a new walk."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reroll.backends.front.python_state.state import State
from reroll.backends.front.python_state.state_cache import Reach


class Memory:
    """An object that a model may hold."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Stateful(nn.Module):
    """A model that holds values in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.inner = nn.Linear(4, 40), nn.ModuleList([nn.Linear(40, 40), nn.Identity()])
        self.register_buffer("mask", torch.ones(40, 40))
        self.h: Any = None
        self.states: list[Any] = [torch.zeros(300), 1]
        self.table: dict[str, Any] = {"a": torch.zeros(2)}
        self.memory, self.pair = Memory(torch.zeros(300)), (torch.zeros(300), 2)
        self.samples = np.zeros(9)

    def forward(self, x: Tensor) -> Tensor:
        return x


def values_of(model: Stateful, rng: random.Random) -> Any:
    """A value, new or held elsewhere already."""
    fresh = (
        *(torch.zeros(300), torch.zeros(3), torch.zeros(20, 40, requires_grad=True) * 2, nn.Parameter(torch.ones(40))),
        *(1.5, "text", None, np.zeros(3), Memory(torch.zeros(300)), [torch.zeros(300)], (torch.zeros(300),)),
        *(nn.Linear(2, 2), model.h, model.mask, model.memory, model.states, model.pair, model.cell.weight),
    )
    value = rng.choice(fresh)
    if isinstance(value, Tensor) and rng.random() < 0.1:
        value.label = rng.choice(["a", torch.zeros(300)])  # type: ignore[attr-defined]
    return value


def put(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, whatever it was."""
    if hasattr(module, name):
        delattr(module, name)
    setattr(module, name, value)


def changed(model: Stateful, rng: random.Random) -> None:
    """Change a thing that the model holds, most often its state."""
    value = values_of(model, rng)
    tensor = torch.zeros(rng.choice([300, 301])) if rng.random() < 0.7 else model.states[0]
    choices: list[Callable[[], Any]] = [
        *[lambda: put(model, "h", torch.zeros(300))] * 6,
        *[lambda: setattr(model, "mask", torch.ones(40, 40))] * 3,
        lambda: put(model, "h", value),
        lambda: setattr(model.memory, "value", value),
        lambda: model.states.__setitem__(0, value),
        lambda: model.states.__setitem__(0, tensor),
        lambda: model.table.__setitem__(rng.choice("abc"), value),
        lambda: setattr(model, "pair", (value, 3)),
        lambda: put(model, "h", model.pair[0]),
        lambda: model.samples.__setitem__(rng.randrange(9), rng.random()),
        lambda: put(model.inner[1], "held", value),
        lambda: put(model.inner[1], "other", tensor),
        lambda: setattr(model.cell, "bias", None if rng.random() < 0.3 else nn.Parameter(torch.ones(40))),
        lambda: model.cell.weight.requires_grad_(not model.cell.weight.requires_grad),
        lambda: model.train(not model.training),
    ]
    rng.choice(choices)()


@pytest.mark.variants(4)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_compared_is_what_a_new_walk_finds(seed: int) -> None:
    rng, model, reach = random.Random(seed), Stateful(), Reach()
    for _ in range(250):
        for _ in range(rng.choice([0, 1, 1, 2])):
            changed(model, rng)
        given = (rng.choice([torch.zeros(3), model.h, model.states, [torch.zeros(5)]]),)
        found, key = reach.noted(model, given, {})
        fresh, expected = Reach().noted(model, given, {})
        assert key == expected
        assert all(a[0] is b[0] for a, b in zip(found.tensors, fresh.tensors, strict=True))
        assert [*map(id, found.owners)] == [*map(id, fresh.owners)] or found.owners == fresh.owners


def walks_of(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The roots of walks from now on, one for a model's own part."""
    walks, walk = list[Any](), State.walk

    def counted(state: State, roots: Any, *args: Any) -> None:
        roots = [*roots]
        walks.extend(each for each in roots if isinstance(each, nn.Module))
        walk(state, roots, *args)

    monkeypatch.setattr(State, "walk", counted)
    return walks


def test_a_state_that_is_new_at_each_call_is_no_reason_to_walk_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reach, keys = Stateful(), Reach(), list[Any]()
    model.h = torch.zeros(300)
    walks = walks_of(monkeypatch)
    for _ in range(6):
        model.h, model.mask = model.h + model.cell.bias.sum(), torch.ones(40, 40)
        keys.append(reach.noted(model, (torch.zeros(3),), {})[1])
    assert len(walks) == 2  # what is large is kept from the second call on
    assert keys[2] == keys[3] == keys[5]
    model.h = torch.zeros(301)
    assert reach.noted(model, (torch.zeros(3),), {})[1] != keys[-1]
    assert len(walks) == 2


@pytest.mark.parametrize("hold", ["module", "list", "object", "tuple"])
def test_a_state_of_a_call_before_is_not_kept(hold: str) -> None:
    model, reach, gone = Stateful(), Reach(), list[weakref.ref[Tensor]]()
    for _ in range(5):
        value = model.cell(torch.zeros(20, 4))
        gone.append(weakref.ref(value))
        if hold == "module":
            model.h = value
        elif hold == "list":
            model.states = [value]
        elif hold == "object":
            model.memory = Memory(value)
        else:
            model.pair = (value, 1)
        reach.noted(model, (value,), {})
        del value
        gc.collect()
        assert [each() is None for each in gone[:-1]] == [True] * (len(gone) - 1)


def test_a_module_of_torch_jit_is_held_like_others() -> None:
    model, reach = Stateful(), Reach()
    model.memory = Memory(torch.jit.script(nn.Linear(2, 2)))
    for _ in range(3):
        model.h = torch.zeros(300)
        key = reach.noted(model, (), {})[1]
    assert key == Reach().noted(model, (), {})[1]
