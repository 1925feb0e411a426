"""What a model reads changes between calls, in every way and place: results and gradients are eager's, or a refusal.

A record of the model's operations serves every call, so the key of what was reached is all that tells calls apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import reroll
from held_kinds import KINDS, PLACES, SILENT, Kind, combined, combined_in_place
from held_values import IN_PLACE, VALUES
from reroll.errors import RerollError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED = {
    *("hook, backward", "hook, all backward", "asked, autocast", "mode, autocast", "method of a class"),
    *("patched, operator of tensors", "patched, builtin"),
}
"""What cannot be recorded, or leaves no recurrence."""
PROMISED = {"asked, logging", "asked, root logging", "asked, modules"}
"""What is not seen: docs/limits.md."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo is not asked."""

    def refuse(*_: Any) -> Any:
        raise UnsupportedError("This is read by Dynamo.")

    monkeypatch.setattr("reroll.backends.front.full.caller.read", lambda *_: refuse)


def shown(run: Any, net: Any, steps: int) -> list[Tensor | None]:
    """What a call gives, and its gradients."""
    torch.manual_seed(steps)
    x = torch.randn(
        steps, 3, 4, dtype=next(net.parameters()).dtype, requires_grad=not torch.is_inference_mode_enabled()
    )
    net.zero_grad()
    y = run(x)
    found = [y.detach().clone()]
    if not y.requires_grad:
        return found
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64)
    (y.double().flatten() * weights).sum().backward()
    return [*found, x.grad, *(None if each.grad is None else each.grad.clone() for each in net.parameters())]


def alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    """Whether both are the same but for rounding; a gradient of zeros is none."""
    return len(one) == len(other) and all(map(close, one, other))


def close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        there = one if other is None else other
        return there is None or not there.any()
    return one.dtype == other.dtype and torch.allclose(one, other, TOLERANCES[one.dtype], TOLERANCES[one.dtype] / 10)


def compare(kind: Kind, *, shows: bool, refused: bool) -> None:
    """Compare before a change, after it, and when it is changed back; at lengths that came before, and at new ones."""
    changes = kind()
    net = next(changes)
    run, plain = reroll.compile(net, lowering="eager", proof="never"), []
    try:
        for phase in range(3):
            for steps in (9,) if phase == 0 else (9, 13):
                expected = shown(net, net, steps)
                plain += [expected] if steps == 9 else []
                try:
                    found = shown(run, net, steps)
                except RerollError:
                    assert refused, f"refused after {phase} changes"
                    continue
                assert alike(found, expected), f"wrong at {steps} steps after {phase} changes"
            next(changes, None)
    finally:
        for _ in changes:  # if it failed before it was changed back
            pass
    assert not shows or not alike(plain[0], plain[1])


def named(names: Iterator[str] | list[str]) -> list[Any]:
    """Kinds by their names; those that nobody sees must be wrong."""
    unseen = pytest.mark.xfail(strict=True, raises=AssertionError)
    return [pytest.param(each, marks=[unseen] if each in PROMISED else []) for each in names]


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", named([each for each in KINDS if each.startswith("library")]))
def test_settings_of_an_installed_library_are_seen(name: str) -> None:
    compare(KINDS[name], shows=True, refused=False)


@pytest.mark.variants(6)
@pytest.mark.parametrize("name", named([each for each in KINDS if not each.startswith("library")]))
def test_modules_modes_hooks_and_patches_are_seen(name: str) -> None:
    compare(KINDS[name], shows=name not in SILENT, refused=name in REFUSED)


PAIRS = [
    (place, value) for at, place in enumerate(PLACES) for number, value in enumerate(VALUES) if (at + number) % 6 == 0
]


@pytest.mark.variants(4)
@pytest.mark.parametrize(("place", "value"), PAIRS)
def test_another_value_is_seen_at_every_place(place: str, value: str) -> None:
    compare(combined(place, value), shows=True, refused=value == "generator")


@pytest.mark.variants(3)
@pytest.mark.parametrize("value", IN_PLACE)
@pytest.mark.parametrize("place", [*PLACES][::6])
def test_what_changes_in_its_place_is_seen(place: str, value: str) -> None:
    if value not in ("logger", "decimal context"):  # docs/limits.md
        compare(combined_in_place(place, value), shows=True, refused=False)
