"""What every test starts from: one thread, a fixed seed, nothing compiled."""

from collections.abc import Iterator

import pytest
import torch

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
