"""Several threads that are the first to ask for the backend, all at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.backends import registry

from reroll.backends.dynamo import reroll

AT_ONCE = """
import threading
from importlib.metadata import EntryPoint
import torch
from torch._dynamo.backends import registry

threads, load = 4, EntryPoint.load
loaded, errors = threading.Barrier(threads), []

def load_together(point):
    found = load(point)
    if point.name == "reroll":
        loaded.wait(60)
    return found

EntryPoint.load = load_together

def look_up():
    try:
        assert registry.lookup_backend("reroll").__name__ == "reroll"
    except BaseException as error:
        errors.append(error)

registry._lazy_import()
together = [threading.Thread(target=look_up) for _ in range(threads)]
for each in together:
    each.start()
for each in together:
    each.join()
assert not errors, errors
"""


def test_the_first_calls_of_several_threads() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_other_backends_are_registered_as_ever() -> None:
    assert torch._dynamo.lookup_backend("reroll") is reroll
    assert registry.register_backend(compiler_fn=reroll, name="reroll") is reroll
    with pytest.raises(AssertionError, match="duplicate name: reroll"):
        registry.register_backend(compiler_fn=lambda gm, _: gm.forward, name="reroll")

    @registry.register_backend(name="reroll_test_backend")
    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        return gm.forward

    assert "reroll_test_backend" in torch._dynamo.list_backends()
    with pytest.raises(AssertionError, match="duplicate name"):
        registry.register_backend(backend, name="reroll_test_backend")
