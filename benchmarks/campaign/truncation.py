"""Random programs with ``truncate=k``, compared with themselves where they detach what they carry every k steps."""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from judge import SHORT, TOLERANCE, Verdict, Way, first_line, loaded, outcome
from programs import Program
from torch.utils._pytree import tree_leaves

_JUDGED = itertools.count()


def judge_truncated(program: Program, way: Way) -> Verdict:
    """What becomes of the gradients of a program."""
    every = random.Random(f"truncate of {program.seed}").choice((1, 2, 3, 4))
    cut = detaching(program, every)
    if cut is None:
        return Verdict("invalid", "what is a state is not plain from the text")
    torch._dynamo.reset()
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        nets = []
        for each in (cut, program):
            torch.manual_seed(program.seed)
            module = loaded(each.source(), Path(folder) / f"truncated{program.seed}_{next(_JUDGED)}.py")
            nets.append(module.Net())
            args, kwargs = module.inputs()
        try:
            expected = gradients(nets[0], nets[0], args, kwargs)
        except Exception as error:  # the program is none  # noqa: BLE001
            return Verdict("invalid", first_line(error))
        tolerance = SHORT if "float()" in program.source() else TOLERANCE
        compiled = replace(way, options=(*way.options, ("truncate", every))).compiled(nets[1])
        return outcome(lambda: [*differences(gradients(compiled, nets[1], args, kwargs), expected, tolerance)])


def detaching(program: Program, every: int) -> Program | None:
    """The program with all states detached before steps k, 2 k, ...; None where it is not plain which these are.

    What is added up and read by nobody is none, nor is what stays as it is, or is an entry of a sequence.
    """
    text = "\n".join(program.step)
    names = sorted({name for line in program.before for name in re.findall(r"^(c\d+) =", line)})
    hidden = re.search(r"out\d+\[|^c(\d+) = (c\1|m\d+)$", text, flags=re.MULTILINE)
    if hidden or "for " in " ".join(program.after) or any(".c" in line or '["c' in line for line in program.step):
        return None
    sets = {name: len(re.findall(rf"^\s*{name} =", text, flags=re.MULTILINE)) for name in names}
    if any(count > 1 for count in sets.values()):
        return None
    states = [name for name in names if sets[name] and not _is_sum(name, text)]
    if not states:
        return None
    cut = (f"if n_ and n_ % {every} == 0:", *(f"    {name} = {name}.detach()" for name in states), "n_ += 1")
    return replace(program, before=(*program.before, "n_ = 0"), step=(*cut, *program.step))


def _is_sum(name: str, text: str) -> bool:
    return len(re.findall(rf"\b{name}\b", text)) == 2 and bool(re.search(rf"^{name} = {name} \+ ", text, re.MULTILINE))


def gradients(model: Callable[..., Any], owner: torch.nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Of a loss that weights every entry of all results in another way; zeros where there is none."""
    torch.manual_seed(0)
    found = tree_leaves(model(*args, **kwargs))
    results = [each for each in found if isinstance(each, torch.Tensor) and each.requires_grad]
    loss = sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sin().sum() for each in results)
    leaves = [each for each in (*tree_leaves((args, kwargs)), *owner.parameters()) if isinstance(each, torch.Tensor)]
    leaves = [each for each in leaves if each.requires_grad]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


def differences(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> Iterator[str]:
    """What is off by more than a part of the largest entry."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))
        if error > tolerance:
            yield f"gradient {number} is off by {error:.1e}"
