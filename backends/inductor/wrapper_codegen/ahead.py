"""Halves of segments are compiled ahead of their takeover, by a process of its own, which leaves them in the caches.

Nothing depends on that process: what it has not made by then is made at the takeover. It has the lowest priority, one
of them works at a time, it is given plain data, and ends with the process that began it.

Private torch API, tried on 2.11 and 2.13: ``config.save_config_portable`` (inductor's settings), ``cache_dir``.
"""

from __future__ import annotations

import base64
import fcntl
import json
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reroll.backends.cache.entries import Unkept
from reroll.backends.cache.table import half_read, half_written
from reroll.backends.inductor.event_counts import built
from reroll.backends.inductor.half import compile_half
from reroll.backends.inductor.lower import has_vectors
from reroll.backends.inductor.native_products import register
from reroll.backends.inductor.sizes.family import collecting
from reroll.backends.progress import PATIENCE, tell
from reroll.errors import RerollError
from reroll.graph.private import precisions_as_set, set_precisions
from reroll.segment.ops import OUTER, PRODUCT
from reroll.segment.trace import trace_mode

LOG = logging.getLogger(__name__)
_CODE = "import os; os.nice(19); from reroll.backends.inductor.wrapper_codegen.ahead import main; main()"
_LOOKED = 10  # seconds in which it must get half a core, or a takeover compiles by itself: with the lowest priority, it
#               may get nothing where all cores are busy
_LOOKING = 1.0  # seconds between looks at whether the process that began this one is still there


@dataclass(slots=True, eq=False, weakref_slot=True)
class Ahead:
    """A process that compiles ahead what ``make`` would compile. ``asked``: it was told what that is."""

    make: Callable[[], object]
    process: subprocess.Popen[bytes]
    asked: bool = False

    @classmethod
    def begin(cls, make: Callable[[], object]) -> Ahead:
        """Begin one, which looks first what this machine can do. Raises OSError where none can be."""
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command, pipe = [sys.executable, "-c", _CODE, str(os.getpid())], subprocess.PIPE
        process = subprocess.Popen(  # a group of its own, with its compiler, but the session, in which priorities count
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=found, process_group=0
        )
        ahead = cls(make, process)
        weakref.finalize(ahead, _end, process)  # also at the end of this process
        return ahead

    def ask(self) -> None:
        """Say what is to be compiled, once, as soon as it listens. Nothing is waited for."""
        if self.process.poll() is not None or self.asked or not select.select([self.process.stdout], [], [], 0)[0]:
            return
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(self._job() + b"\n")  # a BrokenPipeError where it was killed
            self.process.stdin.flush()
        except BaseException:  # it would listen for ever
            _end(self.process)
            raise
        self.asked = True

    def _job(self) -> bytes:
        """Halves as plain data. Making them compiles none."""
        with collecting() as halves:
            self.make()
        tables = []
        for graph, backward in halves:
            try:
                tables.append({"half": half_written(graph), "backward": backward})
            except Unkept as reason:
                LOG.debug("a half is not compiled ahead: %s", reason)
        LOG.debug("%d halves are compiled ahead, by process %d", len(tables), self.process.pid)
        return json.dumps({"halves": tables, "settings": base64.b64encode(pickle.dumps(_settings())).decode()}).encode()

    def end(self) -> None:
        """Wait until it has compiled what it was asked for, as long as it goes on, and end it."""
        if self.asked and not self._ends_within(PATIENCE):
            tell("waiting for segments that another process compiles")
            before, now = -math.inf, _used(self.process.pid)
            while now - before >= _LOOKED / 2 and not self._ends_within(_LOOKED):
                before, now = now, _used(self.process.pid)
        _end(self.process)

    def _ends_within(self, seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
            return True
        return False


def _used(group: int) -> float:
    """CPU seconds of a group of processes up to now, with those of its children that have ended; none where the system
    does not say. (Its first process waits while the C++ compiler works.)"""
    found = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its compiler, if it has not ended, and leave nothing of it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # it has not read all
                pipe.close()


def main() -> None:
    """What that process does: compile what it is given on its standard input."""
    _end_with_parent()
    with suppress(RerollError):  # the takeover says that there is no compiler
        has_vectors("inductor", torch.device("cpu"))
    sys.stdout.write("ready")
    sys.stdout.flush()
    job = json.loads(sys.stdin.readline())  # not up to the end, which may be held open by a process that was forked
    _set(pickle.loads(base64.b64decode(job["settings"])))
    register()
    with _alone():
        for each in job["halves"]:
            mode = trace_mode()
            with suppress(Exception):  # the takeover says what cannot be compiled
                half = half_read(each["half"], mode)
                if any(node.target in (PRODUCT, OUTER) for node in half.graph.nodes):
                    built()
                compile_half(half, mode, backward=each["backward"]).unit.settle()


_TORCH: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precisions": (precisions_as_set, set_precisions),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}
"""Settings of torch that code depends on: how each is read and set."""


def _settings() -> tuple[dict[str, Any], dict[str, Any]]:
    """What code depends on beside its graph: settings of torch, and of inductor."""
    config: Any = torch._inductor.config
    return {name: read() for name, (read, _) in _TORCH.items()}, config.save_config_portable()


def _set(settings: tuple[dict[str, Any], dict[str, Any]]) -> None:
    config: Any = torch._inductor.config
    for name, value in settings[0].items():
        _TORCH[name][1](value)
    for name, value in settings[1].items():
        if getattr(config, name) != value:
            setattr(config, name, value)


def _end_with_parent() -> None:
    """End with the process that began this one: not with its thread that did, as Linux would have it."""
    threading.Thread(target=_end_after, args=(int(sys.argv[1]),), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOKING)
    os.killpg(0, signal.SIGKILL)  # with its compiler


@contextmanager
def _alone() -> Iterator[None]:
    """What one process does at a time, of all that use these caches."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with (Path(cache_dir()) / "reroll-ahead.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
