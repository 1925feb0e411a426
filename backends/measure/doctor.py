"""``python -m reroll doctor``: what this machine has for reroll, whether a tiny network trains, and else what to do."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from reroll.backends.cache.info import cache_info
from reroll.backends.dynamo.entry import dynamo_is_off
from reroll.backends.front.compile import compile as compiled
from reroll.backends.inductor.lower import has_vectors
from reroll.backends.inductor.wrapper_codegen.machine import kept
from reroll.backends.inductor.wrapper_codegen.threads import cores
from reroll.backends.measure.check import check
from reroll.backends.tiers.available import free_disk, free_memory, total_memory
from reroll.errors import CompilerMissingError
from reroll.words.units import nbytes_text

_TORCH = ((2, 11), (2, 14))  # from, and below
_LEAST = 2**30  # bytes of memory and disk below which training hardly gets anywhere


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what was ``found``, and what ``todo`` where it is wrong; empty where it is not."""

    name: str
    found: str
    todo: str = ""

    def __str__(self) -> str:
        mark = "WRONG" if self.todo else "ok"
        return f"{mark:6}{self.name}: {self.found}" + (f"\n      {self.todo}" if self.todo else "")


def doctor() -> tuple[Finding, ...]:
    """Look at versions, compiler, cores and threads, memory, disk and caches, and train a tiny network both ways."""
    looks = (_versions, _switch, _compiler, _threads, _memory, _disk, _caches, _machine, _devices)
    findings = [found for look in looks for found in look()]
    tests = ["eager"] if any(each.name == "compiler" and each.todo for each in findings) else ["eager", "inductor"]
    return (*findings, *map(self_test, tests))


def _versions() -> Iterator[Finding]:
    yield Finding("system", f"{platform.platform()}, Python {platform.python_version()}")
    for name in ("reroll", "torch", "numpy", "networkx", "sympy", "rich"):
        try:
            found = version(name)
        except PackageNotFoundError:
            todo = "" if name == "reroll" else f"Install it: pip install {name}."
            yield Finding(name, "not installed by pip" if name == "reroll" else "missing", todo)
            continue
        yield Finding(name, found, _torch_todo(found) if name == "torch" else "")


def _torch_todo(found: str) -> str:
    """What to do about a version of torch that was not tried."""
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    return "" if _TORCH[0] <= numbers < _TORCH[1] else "reroll needs torch 2.11 to 2.13: pip install torch==2.13.0."


def _switch() -> Iterator[Finding]:
    if dynamo_is_off():
        todo = "reroll does nothing then. Unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE."
        yield Finding("torch.compile", "switched off: models run as they are, and so do the self-tests", todo)


def _compiler() -> Iterator[Finding]:
    try:
        vectors = has_vectors("inductor", torch.device("cpu"))
    except CompilerMissingError as error:
        yield Finding("compiler", "no C++ compiler", str(error))
        return
    yield Finding("compiler", f"a C++ compiler, {'with' if vectors else 'without'} vectors for kernels of reroll's own")


def _threads() -> Iterator[Finding]:
    threads, most = torch.get_num_threads(), cores()
    many = threads > most
    todo = f"More threads than cores slow eager PyTorch down: torch.set_num_threads({most}), or OMP_NUM_THREADS={most}."
    yield Finding("threads", f"{threads} of torch, on {most} cores", todo if many else "")


def _memory() -> Iterator[Finding]:
    free, total = free_memory(), total_memory()
    texts = ["unknown" if nbytes is None else nbytes_text(nbytes) for nbytes in (free, total)]
    todo = "Close other programs, or raise the limit (ulimit -v, control groups): training needs more."
    yield Finding("memory", f"{texts[0]} free of {texts[1]}", todo if free is not None and free < _LEAST else "")


def _disk() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    todo = "Carries are moved there: free some of it, or name another folder by the option spill_folder."
    yield _folder("disk", folder, f"{nbytes_text(free_disk(folder))} free in {folder}", todo)


def _caches() -> Iterator[Finding]:
    info = cache_info()
    held = f"{info.folder} has {info.entries:,} traced segments of {nbytes_text(info.nbytes)}"
    yield _folder("traces", info.folder, held, "Name a folder that may be written to: REROLL_CACHE_DIR.")
    todo = "Name a folder that may be written to: TORCHINDUCTOR_CACHE_DIR."
    yield _folder("compiled code", info.compiled, str(info.compiled), todo)


def _machine() -> Iterator[Finding]:
    """What was made for this machine, and what for others that have used the same folder: it does not serve here."""
    there = kept()
    found = f"for this processor, compiler and torch {nbytes_text(there.headers)} of compiled headers"
    if there.others:
        found += f"; for others {nbytes_text(there.others)}, which serve nothing here"
    yield Finding("made once", f"{found}, in {there.folder}")


def _folder(name: str, folder: Path, found: str, todo: str) -> Finding:
    """A folder, which is wrong if it is full, or nobody may write there; of one that is not there yet its parent."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        return Finding(name, f"{found}, but {there} is a file", todo)
    if not os.access(there, os.W_OK):
        return Finding(name, f"{found}, where this user may not write", todo)
    free = free_disk(there)
    return Finding(name, found, f"Only {nbytes_text(free)} are free. {todo}" if free < _LEAST else "")


def _devices() -> Iterator[Finding]:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    yield Finding("GPUs", ", ".join(names) or "none: training runs on the CPU")


class _Network(nn.Module):
    """A tanh RNN cell, read out at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.taken, self.back, self.read = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x_TBI: Tensor) -> Tensor:
        state_BH = x_TBI.new_zeros(x_TBI.shape[1], 8)
        rows = []
        for t in range(x_TBI.shape[0]):
            state_BH = torch.tanh(self.taken(x_TBI[t]) + self.back(state_BH))
            rows.append(self.read(state_BH))
        return torch.stack(rows)


def self_test(name: str, compile_it: Callable[..., object] = compiled) -> Finding:
    """Train a tiny recurrent network once by a lowering, and compare with eager PyTorch."""
    report = "Report it, with the output of this command: github.com has a form under New issue."
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network, x_TBI = _Network(), torch.randn(24, 4, 3)
            small = compile_it(network, lowering=name, schedule="standard", segment=2)
            found = check(small, x_TBI, measure=False)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what this looks for
        return Finding(f"self-test, {name}", f"{type(error).__name__}: {error}"[:500], report)
    return Finding(f"self-test, {name}", f"gradients {found}", "" if found.equal else report)


__all__ = ["Finding", "doctor", "self_test"]
