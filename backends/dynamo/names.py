"""Torch's registry of backends, asked by several threads at once.

Torch looks a name up, loads what it stands for, and then registers that; a second thread that looked the name up
meanwhile fails with "duplicate name". Here what is registered already may be registered again.

Private torch API, tried on 2.11 and 2.13: ``_dynamo.backends.registry``, whose functions read its ``_COMPILER_FNS``
behind the import of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._dynamo.backends import registry

Backend = Callable[..., Any]


class _Names(dict[str, Backend]):
    """Backends by name, of which one does not count as taken by itself."""

    def __init__(self, known: dict[str, Backend], backend: Backend, asked: Callable[[], None]) -> None:
        super().__init__(known)
        self.backend, self.asked = backend, asked

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and self[str(name)] is not self.backend

    def __getitem__(self, name: str) -> Backend:
        found = super().__getitem__(name)
        if found is self.backend:
            self.asked()
        return found

    def __setitem__(self, name: str, backend: Backend) -> None:
        if self.get(name, backend) is not backend:
            raise AssertionError(f"duplicate name: {name}")  # as torch does
        super().__setitem__(name, backend)


def register_once(backend: Backend, asked: Callable[[], None]) -> None:
    """Let torch register a backend any number of times under one name. Other backends are registered as ever.

    asked: called whenever the backend is looked up, which ``torch.compile`` does.
    """
    registry._COMPILER_FNS = _Names(registry._COMPILER_FNS, backend, asked)
