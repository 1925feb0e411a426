"""Traces from another process: the same to the last operand, under a key that differs where the trace could."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor
import torch._inductor.decomposition as table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from captured import captured
from networks import RecurrentLIF, spikes
from reroll.backends.cache import settings, traces
from reroll.backends.cache.entries import UNKEPT
from reroll.backends.cache.traces import recall, remember, trace_key, trace_text
from reroll.backends.construct.kernels import prepared
from reroll.recurrence import Recurrence, Slices
from reroll.segment.trace import trace

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
LIBRARY = torch.library.Library("cachetest", "DEF")
LIBRARY.define("twice(Tensor value) -> Tensor")
LIBRARY.define("halve_(Tensor(a!) value) -> Tensor(a!)")
LIBRARY.impl("halve_", lambda value: value.mul_(0.5), "CompositeImplicitAutograd")
LIBRARY.impl("twice", lambda value: value * 2, "CompositeExplicitAutograd")
torch.library.register_fake("cachetest::twice", torch.empty_like, lib=LIBRARY)
torch.library.register_autograd("cachetest::twice", lambda _, grad: grad * 2, lib=LIBRARY)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path))
    UNKEPT.clear()


class Decays(torch.nn.Module):
    """A leaky sum, in ways that differ little."""

    def __init__(self, decay: Any = 0.9, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.decay, self.act = decay, act
        self.weight = torch.nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1:])
        for row in x.unbind():
            h = self.act(h @ self.weight * self.decay + row)
        return h


def leaky(x: Tensor | None = None, **how: Any) -> Recurrence:
    torch.compiler.reset()  # of one function Dynamo compiles eight variants, no more
    found: Recurrence = captured(Decays(**how), torch.randn(12, 3, 4) if x is None else x)
    return found


def key_of(recurrence: Recurrence, steps: int = 4) -> str | None:
    return trace_key(recurrence, steps)


NETWORKS: dict[str, Callable[[], Recurrence]] = {
    "leaky": leaky,
    "LIF": lambda: captured(RecurrentLIF(8, 32, 3).float(), spikes(24, 4, 8).float()),
    "dropout": lambda: captured(Dropped(), torch.randn(12, 3, 4)),
    "pooled": lambda: captured(Pooled(), torch.randn(12, 2, 1, 8, 8)),
    "attention": lambda: captured(Attends(), torch.randn(12, 3, 4)),
}


class Dropped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1:])
        for row in x.unbind():
            h, c = self.cell(torch.nn.functional.dropout(row, 0.5), (h, c))
        return h


class Pooled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 2, 4, 4)
        for frame in x.unbind():
            h = torch.relu(h * 0.5 + torch.nn.functional.max_pool2d(self.conv(frame), 2))
        return h


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 2, 4)
        for row in x.unbind():
            rows = torch.stack([row, h[:, 0]], 1)
            found = torch.nn.functional.scaled_dot_product_attention(rows, h, rows)
            h = torch.sigmoid(self.out(found) + h)
        return h


@pytest.mark.variants(4)
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_read_back_is_the_same(name: str) -> None:
    recurrence = NETWORKS[name]()
    key = key_of(recurrence)
    assert key is not None
    assert recall(key) is None
    made = prepared(recurrence, 4, "inductor")
    found = recall(key)
    assert found is not None, UNKEPT
    assert trace_text(found) == trace_text(made)
    assert (found.facts, found.reaches, found.tangents) == (made.facts, made.reaches, made.tangents)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def float16_by_autocast() -> Iterator[None]:
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)


def attention_by_math() -> Any:
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def unfused() -> Any:
    return inductor.patch(pattern_matcher=False)


OTHERS: dict[str, tuple[Callable[[], Recurrence], Callable[[], AbstractContextManager[Any]], int]] = {
    "a number": (lambda: leaky(decay=0.9000000000000001), nullcontext, 4),
    "a whole number": (lambda: leaky(decay=1), nullcontext, 4),
    "that number with a point": (lambda: leaky(decay=1.0), nullcontext, 4),
    "minus zero": (lambda: leaky(decay=-0.0), nullcontext, 4),
    "zero": (lambda: leaky(decay=0.0), nullcontext, 4),
    "a held tensor": (lambda: leaky(decay=torch.tensor(0.9)), nullcontext, 4),
    "a function": (lambda: leaky(act=torch.sigmoid), nullcontext, 4),
    "a size": (lambda: leaky(torch.randn(12, 2, 4)), nullcontext, 4),
    "a gradient of x": (lambda: leaky(torch.randn(12, 3, 4, requires_grad=True)), nullcontext, 4),
    "a layout": (lambda: leaky(torch.randn(3, 12, 4).transpose(0, 1)), nullcontext, 4),
    "steps": (leaky, nullcontext, 5),
    "determinism": (leaky, deterministic, 4),
    "the default dtype": (leaky, double_by_default, 4),
    "a setting of inductor": (leaky, unfused, 4),
    "a dtype of autocast": (leaky, float16_by_autocast, 4),
    "attention": (leaky, attention_by_math, 4),
    "no gradients": (lambda: replace(leaky(), grad_enabled=False), nullcontext, 4),
    "autocast": (lambda: replace(leaky(), autocast=(("cpu", torch.bfloat16, True, True),)), nullcontext, 4),
    "a way back": (lambda: backwards(leaky()), nullcontext, 4),
}


def backwards(recurrence: Recurrence) -> Recurrence:
    (x,) = recurrence.xs
    assert isinstance(x, Slices)
    return replace(recurrence, xs=(replace(x, start=11, stride=-1),))


def test_keys_are_equal_for_equal_segments() -> None:
    assert key_of(leaky()) == key_of(leaky()) is not None
    longer = replace(leaky(torch.randn(20, 3, 4)), any_length=True)
    assert key_of(longer) == key_of(replace(leaky(), any_length=True)), "the length of the sequence does not matter"


def test_keys_differ_where_traces_could() -> None:
    found = {"leaky": key_of(leaky())}
    for name, (make, setting, steps) in OTHERS.items():
        with setting():
            found[name] = key_of(make(), steps)
    assert None not in found.values(), UNKEPT
    assert len(set(found.values())) == len(found)


def halved(value: Tensor) -> Tensor:
    """What an operator of the user's makes of a copy, in place."""
    return torch.ops.cachetest.halve_.default(value * 1.0)  # type: ignore[no-any-return]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def allowed(value: Tensor) -> Tensor:
    """A function that Dynamo does not look into."""
    return value * 0.5


def own_rule() -> AbstractContextManager[Any]:
    return mock.patch.dict(table.decompositions, {torch.ops.aten.tanh.default: lambda value: value})


def own_pass() -> Any:
    return inductor.patch(joint_custom_pre_pass=lambda graph: None)


class AMode(TorchDispatchMode):
    """A mode of a user's, which may change any operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def own_method() -> Any:
    return mock.patch.object(torch.Tensor, "relu", lambda value: value * 0.5, create=True)


def wrapped_function() -> Any:
    """A function that says that it is torch's."""

    @functools.wraps(torch.nn.functional.normalize)
    def normalize(value: Tensor) -> Tensor:
        return value

    return mock.patch.object(torch.nn.functional, "normalize", normalize)


def alike_rule() -> Any:
    """Of a module whose name only begins as torch's."""
    space: dict[str, Any] = {"__name__": "torchlab.rules"}
    exec("def rule(value): return value", space)
    return mock.patch.dict(table.decompositions, {torch.ops.aten.tanh.default: space["rule"]})


def own_kernel() -> Any:
    kernels = torch.ops.aten.tanh.default.py_kernels
    return mock.patch.dict(kernels, {torch._C.DispatchKey.AutogradCPU: lambda value: value})


def own_pattern() -> Any:
    joint = __import__("torch._inductor.fx_passes.joint_graph", fromlist=["patterns"])
    entry = mock.Mock(handler=lambda match: None, extra_check=None)
    return mock.patch.dict(joint.patterns.patterns, {"tanh": [entry]})


def no_caches() -> Any:
    return inductor.patch(force_disable_caches=True)


def a_gradient_of_theirs() -> AbstractContextManager[Any]:
    return mock.patch.object(torch.library, "_impls", torch.library._impls | {"aten/tanh/AutogradCPU"})


UNKEPT_ONES: dict[str, tuple[Callable[[], Recurrence], Callable[[], AbstractContextManager[Any]], str]] = {
    "an update in place": (lambda: leaky(act=halved), nullcontext, "halve_.* is an operator of the user's"),
    "a function": (lambda: leaky(act=allowed), nullcontext, "allowed is a function of the user's"),
    "a mode": (leaky, AMode, "AMode is on"),
    "a method": (leaky, own_method, "torch.Tensor.relu is not torch's"),
    "a wrapper": (leaky, wrapped_function, "torch.nn.functional.normalize is not torch's"),
    "a rule of torchlab's": (leaky, alike_rule, "decomposition of aten.tanh"),
    "a kernel": (lambda: leaky(act=torch.ops.aten.tanh.default), own_kernel, "a kernel of aten.tanh"),
    "a pattern": (leaky, own_pattern, "a pattern of inductor's"),
    "an operator": (lambda: leaky(act=lambda value: torch.ops.cachetest.twice(value)), nullcontext, "twice.*user's"),
    "a rule": (leaky, own_rule, "decomposition of aten.tanh"),
    "a pass": (leaky, own_pass, "joint_custom_pre_pass is set"),
    "a gradient": (leaky, a_gradient_of_theirs, "aten/tanh/AutogradCPU is not torch's"),
    "nothing": (leaky, no_caches, "switched off"),
}


@pytest.mark.parametrize("name", UNKEPT_ONES)
def test_what_no_text_tells_is_not_kept(name: str) -> None:
    make, setting, why = UNKEPT_ONES[name]
    recurrence = make()
    with setting():
        assert key_of(recurrence) is None
    (reason,) = UNKEPT
    assert re.search(why, reason)


def test_a_trace_that_reads_back_as_another_one_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recurrence = leaky()
    key, made = key_of(recurrence), trace(recurrence, 4, decompose=True)
    assert key is not None
    monkeypatch.setattr(traces, "read_back", lambda *_: replace(made, carries=2))
    remember(key, made)
    assert list(UNKEPT) == ["a trace that was read back is another one"]
    assert not list(tmp_path.iterdir())


TRAINING = """
import sys
import torch
import reroll
torch.manual_seed(0)
torch.set_num_threads(1)
cell, x = torch.nn.GRUCell(4, 8), torch.randn(40, 3, 4)
def model(x):
    h = x.new_zeros(3, 8)
    for row in x.unbind():
        h = cell(row, h)
    return h
expected = torch.autograd.grad(model(x).sum(), list(cell.parameters()))
found = torch.autograd.grad(reroll.compile(model, start="compiled")(x).sum(), list(cell.parameters()))
torch.testing.assert_close(found, expected)
info = reroll.cache_info()
print(info.found, info.missing, info.kept, info.ignored, info.entries, str(info.folder) == sys.argv[1])
"""


@pytest.mark.inductor
@needs_compiler
def test_the_next_process_takes_the_traces_of_the_first(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        command = [sys.executable, "-W", "error::reroll.RerollWarning", "-c", TRAINING, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    (found, missing, kept, ignored, held, right), again = said
    assert (found, ignored, right) == ("0", "0", "True")
    assert missing == kept == held != "0"
    assert again == [kept, "0", "0", "0", held, "True"]


def test_the_key_changes_with_our_own_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(leaky())
    monkeypatch.setattr(settings, "_sources", lambda: "others")
    assert key_of(leaky()) != before
