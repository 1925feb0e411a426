"""Dynamo's walk over an unrolled loop takes most of a test's time, so tests of one network share it.

Torch keeps what it traced of a frame for equal backends, under guards. ``BACKEND`` is one for all options: it
keeps the graphs that Dynamo gave it, and compiles each by the backend ``reroll`` for every ``Shared`` model that comes
to it. Tests share walks in files that use the fixture ``shared_walks``; elsewhere torch forgets them after each test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx

from reroll.backends.dynamo import reroll
from reroll.errors import RerollError

Run = Callable[..., Any]


class Backend:
    """What Dynamo is given in place of "reroll"; ``chosen`` is the model that is called now."""

    chosen: Shared

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Run:
        def run(*args: Any) -> Any:
            made = self.chosen.made
            if run not in made:
                made[run] = reroll(gm, inputs, options=self.chosen.options)
            return made[run](*args)

        with suppress(RerollError):  # raised when it runs, so that Dynamo keeps its walk
            self.chosen.made[run] = reroll(gm, inputs, options=self.chosen.options)
        return run

    def __deepcopy__(self, _: Any) -> Backend:
        return self  # Lightning, once it is imported, copies all that torch.compile is given


BACKEND = Backend()


class Shared:
    """A model compiled with options, whose graphs Dynamo need not trace again."""

    def __init__(self, model: Run, options: Mapping[str, Any], *, fullgraph: bool = True) -> None:
        self.options, self.made = dict(options), dict[Run, Run]()
        self.run: Run = torch.compile(model, backend=BACKEND, fullgraph=fullgraph)
        self._torchdynamo_orig_callable = model  # by this ``reroll.explain`` knows a compiled model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        BACKEND.chosen = self
        return self.run(*args, **kwargs)


@contextmanager
def kept() -> Iterator[None]:
    """Torch keeps all walks inside, and sizes are not made symbols because others were seen before."""
    settings = {"recompile_limit": 256, "accumulated_recompile_limit": 4096, "automatic_dynamic_shapes": False}
    with torch._dynamo.config.patch(settings):
        yield
    torch.compiler.reset()
