"""What every test starts from: one thread, a fixed seed, nothing compiled."""

from collections.abc import Iterator

import pytest
import torch

from reroll import registry

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Seed torch before a test and drop what it compiled afterwards."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Make float64 the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def rnn_layers() -> Iterator[None]:
    """Let Dynamo capture torch's recurrent layers."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


@pytest.fixture
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes that a test registers are gone after it."""
    registry.lookup("save")
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()
