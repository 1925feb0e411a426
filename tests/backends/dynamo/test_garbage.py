"""Full collections wait while something is compiled, and not longer."""

import gc
from collections.abc import Iterator

import pytest
import torch

import reroll
from reroll.backends.dynamo.garbage import Collections


@pytest.fixture(autouse=True)
def _usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_put_back_behind_the_last_compilation() -> None:
    found, seen = Collections(), []
    with found:
        seen.append(gc.get_threshold())
        with found:
            pass
        seen.append(gc.get_threshold())
    assert seen == [(700, 10, 200)] * 2
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(700, 10, 1_000), (0, 0, 0)])
def test_what_the_user_set_is_not_set_back(own: tuple[int, int, int]) -> None:
    with Collections():
        gc.set_threshold(*own)
    assert gc.get_threshold() == own


def test_collections_that_wait_longer_go_on_waiting() -> None:
    gc.set_threshold(700, 10, 1_000)
    with Collections():
        assert gc.get_threshold() == (700, 10, 1_000)


@pytest.mark.parametrize("door", ["compile", "backend"])
def test_a_compiled_model_leaves_the_threshold(door: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(3)
        for row in x.unbind():
            h = torch.tanh(h + row)
        return h

    how = {"lowering": "eager"}
    compiled = (
        reroll.compile(model, time_dim=0, **how)
        if door == "compile"
        else torch.compile(model, backend="reroll", options=how)
    )
    x = torch.randn(20, 3, requires_grad=True)
    for _ in range(2):
        compiled(x).sum().backward()
        assert gc.get_threshold() == (700, 10, 10)


def test_an_error_puts_it_back() -> None:
    compiled = torch.compile(lambda x: x.cumsum(0), backend="reroll", options={"schedule": "nonsense"})
    with pytest.raises(reroll.OptionError):
        compiled(torch.randn(4))
    assert gc.get_threshold() == (700, 10, 10)
