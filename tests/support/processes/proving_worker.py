"""One of the processes of ``test_proofs.py``: they train a model together, and a proof may find a fault in some.

Arguments: where to write to, the name of a case, and the ranks in which its fault is switched on. What a process ends
with is written as JSON: the class of an error and its text, or what differs from eager training; what was warned of,
and what was proved.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import reroll
from networks import RecurrentLIF
from reroll.backends.construct.stages import takeover
from reroll.backends.construct.stages.proof import Proof
from reroll.backends.inductor import lower
from reroll.backends.runtime.executable import Executable
from speaking import Speaking

WIDTH = 6
CALLS = 12
PROVED: list[str] = []


def run(model: nn.Module, **options: Any) -> Any:
    """The model through the backend."""
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(model, backend="reroll", options={"segment": 2, **options})


def network() -> nn.Module:
    """A recurrent spiking network."""
    torch.manual_seed(1)
    return RecurrentLIF(WIDTH, 8, 3)


def speaking() -> nn.Module:
    """A loop whose steps speak."""
    torch.manual_seed(1)
    return Speaking()


def batch(steps: int, number: int) -> Tensor:
    """A batch of this process."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.rand(steps, 4, WIDTH, generator=generator)


def trained(
    made: Callable[[], nn.Module],
    around: Callable[[nn.Module], Any],
    lengths: Sequence[int],
    compiled: Callable[[nn.Module], Any] | None = None,
) -> list[str]:
    """What differs from eager training of the same processes."""
    texts = []
    model, twin = made(), made()
    fast, eager = around((compiled or run_of)(model)), around(twin)
    for number, steps in enumerate(lengths):
        for each, call in ((model, fast), (twin, eager)):
            each.zero_grad()
            call(batch(steps, number)).square().mean().backward()
        for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert one.grad is not None, name
            assert other.grad is not None, name
            gap = float((one.grad - other.grad).abs().max())
            texts += [f"call {number}: {name}: {gap:.1e}"] if gap > 1e-9 else []
    return texts


def run_of(model: nn.Module) -> Any:
    """By the options of the case."""
    return run(model, **OPTIONS)


OPTIONS: dict[str, Any] = {"lowering": "eager"}


def lose_a_gradient() -> None:
    """No gradient passes back over the fourth step."""
    passed_on = Executable.passed_on

    def lost(self: Executable, grads: list[Tensor | None], start: int) -> Any:
        return [None] * len(grads) if start == 4 else passed_on(self, grads, start)

    Executable.passed_on = lost  # type: ignore[method-assign]


def compile_wrongly() -> None:
    """Compiled forwards give a value that is a little off."""
    inductor = lower._inductor

    def wrong(graph: Any, traced: Any, *, backward: bool) -> Any:
        half = inductor(graph, traced, backward=backward)
        if backward:
            return half

        def call(inputs: list[Any]) -> list[Any]:
            first, *rest = half(inputs)
            return [first * 1.001, *rest]

        return call

    lower._inductor = wrong


def soon(**options: Any) -> None:
    """Compiled segments take over at the ninth call."""
    takeover.COMPILING = 0.0
    OPTIONS.update({"lowering": "inductor", "start": "eager", **options})


def same(_: int) -> tuple[int, ...]:
    return (9,) * CALLS


def others(rank: int) -> tuple[int, ...]:
    """Lengths of which one process meets new ones where the other does not."""
    return (9, 9, 13, 13, 9, 11) if rank else (9, 12, 9, 9, 17, 9)


def proved_lengths() -> list[str]:
    return trained(network, DistributedDataParallel, others(dist.get_rank()))


def any_length(model: nn.Module) -> Any:
    """The model for every number of steps."""
    return reroll.compile(model, segment=2, lowering="eager")


def proved_at_any_length() -> list[str]:
    return trained(network, DistributedDataParallel, others(dist.get_rank()), any_length)


def taken_over() -> list[str]:
    soon()
    return trained(network, DistributedDataParallel, same(0))


def spoken() -> list[str]:
    soon()
    return trained(speaking, lambda model: model, same(0))


def spoken_at_once() -> list[str]:
    soon(start="compiled")
    return trained(speaking, lambda model: model, same(0)[:2])


CASES: dict[str, tuple[Callable[[], list[str]], Callable[[], None]]] = {
    "proofs at other calls": (proved_lengths, lose_a_gradient),
    "proofs for every length": (proved_at_any_length, lose_a_gradient),
    "compiled segments that take over": (taken_over, compile_wrongly),
    "speaking steps that take over": (spoken, compile_wrongly),
    "compiled speaking steps": (spoken_at_once, compile_wrongly),
}


def note_proofs() -> None:
    """Note what is proved."""
    prove = Proof.prove

    def noting(self: Proof, *args: Any) -> None:
        prove(self, *args)
        PROVED.append(self.summary)

    Proof.prove = noting  # type: ignore[method-assign, assignment]


def main() -> None:
    """Train, and write what came of it."""
    out, name, ranks = sys.argv[1], sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    note_proofs()
    case, fault = CASES[name]
    if str(dist.get_rank()) in ranks:
        fault()
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found["differs"] = case()
        except Exception as error:  # noqa: BLE001  # whatever it ends with
            found["error"] = f"{type(error).__name__}: {error}"
    found["warned"] = [str(each.message) for each in said if issubclass(each.category, reroll.RerollWarning)]
    found["proved"] = PROVED
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    sys.exit("error" in found)


if __name__ == "__main__":
    main()
