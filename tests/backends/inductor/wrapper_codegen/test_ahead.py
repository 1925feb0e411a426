"""Another process compiles ahead what will take over; nothing depends on it."""

from __future__ import annotations

import gc
import inspect
import json
import linecache
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder, cpu_vec_isa

import reroll
from halves import run_by_torch
from reroll.backends.construct.stages import takeover
from reroll.backends.construct.stages.takeover import CALL
from reroll.backends.inductor import lower
from reroll.backends.inductor.sizes import family
from reroll.backends.inductor.wrapper_codegen import ahead
from reroll.backends.inductor.wrapper_codegen.ahead import Ahead
from reroll.errors import CompilerMissingError, RerollWarning


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled segments take over as soon as they may, and are compiled ahead from the second training call on."""
    monkeypatch.setattr(takeover, "COMPILING", 0.0)
    monkeypatch.setattr(takeover, "_AHEAD", (2, 0.0))


class Decaying(nn.Module):
    """A recurrence of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(5, 5)

    def forward(self, x_TBI: Tensor) -> Tensor:
        h_BI = torch.zeros_like(x_TBI[0])
        for t in range(x_TBI.shape[0]):
            h_BI = 0.9 * h_BI + torch.tanh(self.back(h_BI) + x_TBI[t])
        return h_BI


def trained(calls: int, pause: float = 0.0) -> list[Tensor]:
    """The results of some training calls."""
    torch.manual_seed(0)
    model, found = Decaying(), []
    run = reroll.compile(model, start="eager")
    for _ in range(calls):
        found.append(run(torch.randn(11, 3, 5)))
        found[-1].sum().backward()
        time.sleep(pause)
    return found


def note_what_begins(monkeypatch: pytest.MonkeyPatch) -> list[Ahead]:
    """The processes that are begun from here on."""
    begun: list[Ahead] = []
    begin = Ahead.begin

    def noted(make: Any) -> Ahead:
        begun.append(begin(make))
        return begun[-1]

    monkeypatch.setattr(Ahead, "begin", noted)
    return begun


def forget_vectors() -> None:
    """Torch probes what vectors there are anew: another test may have kept it from building the probes."""
    for cached in (
        cpu_vec_isa.valid_vec_isa_list,
        *(type(each).__bool__ for each in cpu_vec_isa.supported_vec_isa_list),
    ):
        getattr(cached, "cache_clear", lambda: None)()


@pytest.mark.inductor
def test_what_takes_over_is_found_in_the_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No kernel is written or built by this process, and the values are those that it would have made."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_CODE", ahead._CODE.replace("os.nice(19)", "0"))  # else it gets no turn beside others
    forget_vectors()
    family.forget()
    begun = note_what_begins(monkeypatch)
    monkeypatch.setattr(takeover, "CALL", 1 << 30)
    torch.manual_seed(0)
    model = Decaying()
    run, x_TBI = reroll.compile(model, start="eager"), torch.randn(11, 3, 5)
    run(x_TBI)
    run(x_TBI)
    while not begun[0].asked and begun[0].process.poll() is None:
        time.sleep(0.1)
        run(x_TBI)
    monkeypatch.setattr(takeover, "CALL", only_program(run).takeover.spent.calls + 1)
    counters.clear()
    with mock.patch.object(cpp_builder, "run_compile_cmd", side_effect=AssertionError("nothing is compiled")):
        y_BI = run(x_TBI)
    assert begun[0].process.returncode == 0
    found = counters["inductor"]
    assert found["fxgraph_cache_hit"]
    assert not found["fxgraph_cache_miss"], "it has another key there"
    assert not only_program(run).takeover.lasting, "eager segments are held no longer"
    torch.testing.assert_close(y_BI, model(x_TBI))


def only_program(run: Any) -> Any:
    """The program of a compiled model."""
    (recording,) = run.reroll_caller.at_length.recorded.recordings.values()
    return recording.run


@pytest.mark.parametrize(("gets", "ended"), [(1.0, 0), (0.0, -9)])
def test_a_process_is_waited_for_as_long_as_it_works(gets: float, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``gets``: the cores that it gets."""
    monkeypatch.setattr(ahead, "PATIENCE", 0.1)
    monkeypatch.setattr(ahead, "_LOOKED", 0.1)
    monkeypatch.setattr(ahead, "_used", lambda _: gets * time.monotonic())
    monkeypatch.setattr(ahead, "_CODE", f"import time; time.sleep({99 - 97 * gets})")
    begun = Ahead.begin(lambda: None)
    begun.asked = True
    begun.end()
    assert begun.process.returncode == ended


def test_what_the_compiler_of_a_process_uses_counts() -> None:
    begins = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    process = subprocess.Popen([sys.executable, "-c", begins], process_group=0)
    try:
        time.sleep(2.0)
        before = ahead._used(process.pid)
        time.sleep(2.0)
        assert ahead._used(process.pid) > before > 0.0
    finally:
        os.killpg(process.pid, 9)
        process.wait()


FAILS = "raise SystemExit(3)", "raise OSError(28, 'No space left on device')", "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("code", [*FAILS, "while True: pass"])
def test_a_process_that_does_not_compile_changes_nothing(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at once, finds a full disk, is killed, or never listens."""
    monkeypatch.setattr(ahead, "_CODE", code)
    monkeypatch.setattr(lower, "_inductor", run_by_torch)
    begin = mock.patch.object(Ahead, "begin", side_effect=Ahead.begin)
    with begin as begun:
        found = trained(CALL + 1, pause=0.01)
    assert begun.call_count == 1
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))
    assert all(map(torch.equal, found, trained(CALL + 1)))


def test_where_inductor_cannot_write_eager_segments_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, with what to do."""
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))
    monkeypatch.setattr(lower, "_inductor", mock.Mock(side_effect=OSError(30, "Read-only file system", "/cache/ab")))
    with pytest.warns(RerollWarning, match="go on with eager.*/cache/ab.*Set TORCHINDUCTOR_CACHE_DIR") as told:
        found = trained(CALL + 2)
    assert len([each for each in told if "go on" in str(each.message)]) == 1
    monkeypatch.setattr(takeover, "COMPILING", 1e9)
    assert all(map(torch.equal, found, trained(CALL + 2)))


def test_it_has_the_lowest_priority_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its imports alone take seconds; and priorities count inside of a session."""
    asked = "import os; print(os.nice(0), os.getsid(0), os.getpgid(0), flush=True); raise SystemExit; "
    first, nice, _ = ahead._CODE.split("; ", 2)
    monkeypatch.setattr(ahead, "_CODE", f"{first}; {nice}; {asked}")
    begun = Ahead.begin(lambda: None)
    process = begun.process
    assert process.stdout is not None
    assert process.stdout.read().split() == [b"19", str(os.getsid(0)).encode(), str(process.pid).encode()]


def test_it_ends_with_what_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_CODE", "import time; time.sleep(600)")
    begun = Ahead.begin(lambda: None)
    process = begun.process
    del begun
    gc.collect()
    assert process.wait(20) != 0


STAYS = """
import os, subprocess, sys, time
from reroll.backends.inductor.wrapper_codegen.ahead import _end_with_parent
_end_with_parent()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_began_it_not_with_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler ends, too; and so it does where that process had ended before it looked."""
    monkeypatch.setattr(ahead, "_CODE", STAYS)
    with mock.patch.object(os, "getpid", return_value=1 << 30):
        late = Ahead.begin(lambda: None)
    here, there = Pipe()

    def begin() -> None:
        process = Ahead.begin(lambda: None).process
        assert process.stdout is not None
        there.send([process.pid, int(process.stdout.readline())])

    def live_on() -> None:
        keep = mock.patch("weakref.finalize")
        with keep:
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        time.sleep(600)

    parent = get_context("fork").Process(target=live_on)
    parent.start()
    try:
        assert here.poll(120)
        found = here.recv()
        time.sleep(1)
        assert all(map(lives, found))
    finally:
        parent.kill()
        parent.join()
    end = time.monotonic() + 60
    while any(map(lives, found)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(lives, found))
    assert late.process.wait(60) != 0


def test_one_works_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all processes that use these caches, as under torchrun; one that is killed keeps nobody waiting."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    here, there = Pipe()

    def work(name: str) -> None:
        with ahead._alone():
            there.send(name)
            time.sleep(600)

    workers = {name: get_context("fork").Process(target=work, args=(name,)) for name in ("a", "b")}
    for each in workers.values():
        each.start()
    try:
        assert here.poll(60)
        first = here.recv()
        assert not here.poll(1)
        workers.pop(first).kill()
        assert here.poll(60)
        assert here.recv() in workers
    finally:
        for each in workers.values():
            each.kill()


def test_a_model_of_a_notebook_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ``__main__`` has no file, and nothing of it can be imported by another process."""
    monkeypatch.setattr(ahead, "_CODE", "import sys; print('ready', flush=True); print(sys.stdin.readline())")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    family.forget()
    cell: dict[str, Any] = {"__name__": "__main__"}
    source = inspect.getsource(Decaying)
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(source), None, source.splitlines(keepends=True), "<cell 1>"))
    exec(compile(source, "<cell 1>", "exec"), {"nn": nn, "torch": torch, "Tensor": Tensor}, cell)
    begun = note_what_begins(monkeypatch)
    monkeypatch.setattr(takeover, "CALL", 1 << 30)
    run = reroll.compile(cell["Decaying"](), start="eager")
    while not (begun and begun[0].asked):
        run(torch.randn(11, 3, 5)).sum().backward()
    assert begun[0].process.stdout is not None
    told = json.loads(begun[0].process.stdout.read().splitlines()[1])
    assert len(told["halves"]) >= 2
    assert not begun[0].process.wait(60)


def lives(process: int) -> bool:
    """Whether a process runs; one that has ended may still have its number."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_was_forked_does_not_keep_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the other end of what the process reads, as a worker of a DataLoader does."""
    code = "import sys, json; print('ready', flush=True); json.loads(sys.stdin.readline())"
    monkeypatch.setattr(ahead, "_CODE", code)
    begun = Ahead.begin(lambda: None)
    worker = get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    try:
        while not begun.asked:
            begun.ask()
        assert begun.process.wait(60) == 0
        begun.end()
        assert begun.process.stdout is not None
        assert begun.process.stdout.closed
    finally:
        worker.kill()


def test_what_is_asked_for_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long segments are at the takeover does not depend on whether another process listened before."""
    monkeypatch.setattr(takeover, "_AHEAD", (1 << 30, 0.0))
    run: Any = reroll.compile(Decaying(), start="eager")
    run(torch.randn(5, 7, 5)).sum().backward()
    only, (others,) = only_program(run), run.reroll_caller.at_length.others.values()
    before, made = dict(others.lengths.known), [*family.FAMILIES]
    with family.collecting() as halves:
        only.takeover.prepare()
    assert halves
    assert others.lengths.known == before
    assert [*family.FAMILIES] == made


def test_what_cannot_be_said_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where halves cannot be made, as without a compiler, the process is not left listening."""
    monkeypatch.setattr(ahead, "_CODE", "import sys; print('ready', flush=True); sys.stdin.readline()")
    begun = Ahead.begin(mock.Mock(side_effect=CompilerMissingError("no compiler here")))
    while begun.process.poll() is None:
        with suppress(CompilerMissingError):
            begun.ask()
    assert not begun.asked
    begun.ask()
    begun.end()


TRAINS = """
import hashlib
import torch
from torch import nn
import reroll
from reroll.backends.construct.stages import takeover

takeover.COMPILING, takeover._AHEAD = 0.5, (2, 0.05)
if {alone}:
    takeover._AHEAD = 1 << 30, 0.0
torch.manual_seed(0)
torch.set_num_threads(1)
cell, drop = nn.LSTMCell(12, 24), nn.Dropout(0.2)

def model(x_TBI):
    h_BH = c_BH = x_TBI.new_zeros(x_TBI.shape[1], 24)
    for x_BI in x_TBI:
        h_BH, c_BH = cell(drop(x_BI), (h_BH, c_BH))
    return h_BH

run, optimizer, found = reroll.compile(model), torch.optim.Adam(cell.parameters()), hashlib.sha1()
for step in range(60):
    loss = run(torch.randn(40, 8 if step % 7 else 5, 12)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found.update(loss.detach().numpy().tobytes())
    for each in cell.parameters():
        found.update(each.detach().numpy().tobytes())
print(any(each.run.takeover.took_over for each in run.reroll_caller.at_length.recorded.recordings.values()))
print(found.hexdigest())
"""


@pytest.mark.campaign
@pytest.mark.inductor
def test_two_runs_of_a_script_give_the_same_bits(tmp_path: Path) -> None:
    """With cold caches, with what that left, and cold again without another process; batches of two sizes, dropout."""
    found = list[list[str]]()
    for caches, alone in (("a", False), ("a", False), ("b", True)):
        where = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / caches), "REROLL_CACHE_DIR": str(tmp_path / caches)}
        command = [sys.executable, "-c", TRAINS.format(alone=alone)]
        done = subprocess.run(command, env={**os.environ, **where}, check=True, capture_output=True, text=True)
        found.append(done.stdout.splitlines())
    assert found[0][0] == "True", "compiled segments have taken over"
    assert found[0] == found[1] == found[2]
