"""The torch.compile backend named ``reroll``.

Dynamo hands over the graph before autograd. Its recurrences are taken out, compiled and put back as modules; what is
around them runs as it was written. Private torch API: ``torch._inductor.compile_fx`` for graphs without a recurrence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from reroll.backends.build import Built, build
from reroll.backends.rolled import Rolled
from reroll.capture import Capture, capture
from reroll.errors import NoRecurrenceError, OptionError, RerollWarning
from reroll.options import Options

Compiled = Callable[..., Any]


def reroll(
    gm: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile Dynamo's graph: ``torch.compile(model, backend="reroll", options={...})``; see ``reroll.Options``."""
    if mode is not None:
        raise OptionError(f"mode={mode!r} is not an option of reroll. Use options={{...}}: see reroll.Options.")
    parsed = Options.of(options)
    found = capture(gm)
    if not found.recurrences:
        return _without_recurrence(gm, example_inputs, parsed, found.reason)
    built = [build(recurrence, parsed) for recurrence in found.recurrences]
    return assemble(gm, found, built)


def assemble(gm: fx.GraphModule, found: Capture, built: Sequence[Built]) -> fx.GraphModule:
    """The outer graph with its recurrences as modules."""
    root = nn.Module()
    for name in {str(node.target) for node in found.outer.find_nodes(op="get_attr")}:
        _set_attribute(root, name, _attribute(gm, name))
    for recurrence, each in zip(found.recurrences, built, strict=True):
        root.add_module(recurrence.name, Rolled(each.executable))
    return fx.GraphModule(root, found.outer)


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _set_attribute(root: nn.Module, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    setattr(root, last, value)


def _without_recurrence(
    gm: fx.GraphModule, example_inputs: Sequence[Tensor], options: Options, reason: str
) -> Compiled:
    text = f"reroll found no recurrence: {reason}."
    if options.on_no_recurrence == "error":
        raise NoRecurrenceError(f"{text} Use on_no_recurrence='warn' to compile such graphs as inductor does.")
    how = "as the inductor backend does" if options.lowering == "inductor" else "as it is"
    warnings.warn(f"{text} The graph is run {how}.", RerollWarning, stacklevel=2)
    if options.lowering == "eager":
        return gm.forward
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(example_inputs))  # type: ignore[no-any-return]
