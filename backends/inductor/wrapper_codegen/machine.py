"""What inductor needs whatever the model is: made once for a machine and a user, kept beside reroll's traces.

Torch makes it anew for each folder of its caches: a program for each set of vector instructions, which it builds and
loads in a process of its own (17 CPU s where there are four sets); a precompiled header (10 CPU s and 155 MB, in the
system's temporary folder); and our event kernels. Each is found by the processor's name and flags, the compiler, the
flags, and the versions of torch and Python, and has a digest that is compared before it is used.

That a set of instructions is missing is never kept: a probe may have failed because the machine was busy.

Private torch API, tried on 2.13 and read in 2.11: ``VecISA`` with ``_get_isa_dry_compile_fingerprint`` (its compiler
and flags), ``x86_isa_checker`` and ``supported_vec_isa_list`` (which sets there are, the widest first), ``config.cpp``,
``_precompile_header`` with ``_HEADER_DIR`` and ``_HEADER_LOCK_DIR`` of ``codecache``, ``CppCompileError``,
``CppPythonBindingsCodeCache`` with its ``cache``, ``CppBuilder.build`` with ``_target_file``, ``_output`` and
``_sources_args`` (what is built from what), ``get_cpp_compiler`` and ``get_compiler_version_info``, ``FileLock``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from reroll.backends.cache.entries import MOST_NBYTES, find, ignore, keep
from reroll.backends.cache.folder import cache_folder, own_folder
from reroll.errors import warn

KIND = "machine"
"""Of entries."""
EVERY_MODEL = "// reroll: the same for every model\n"
"""How a source begins whose binary is kept here."""

_HEADERS = "headers-"  # folders, one for each machine that has used this one
_USES: Counter[str] = Counter()
_PATIENCE = 600.0  # seconds until a lock of another process counts as forgotten, as torch has it
_INCLUDED = re.compile(r"-include \S+ ")
_CHECKED: set[Path] = set()  # headers, by this process


@cache
def processor() -> str:
    """What tells one kind of processor from another: its name and flags."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return " ".join([platform.machine(), *dict.fromkeys(told)])


def compiler() -> str:
    """What the C++ compiler says of itself."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler

    return str(get_compiler_version_info(get_cpp_compiler()))


def machine() -> str:
    """All that compiled code depends on beside its text and its flags."""
    return repr((processor(), compiler(), torch.__version__, torch.version.git_version, sys.version_info[:3]))


def _headers() -> str:
    """The folder for the headers of this machine."""
    return _HEADERS + hashlib.sha256(machine().encode()).hexdigest()[:16]


class Kept(NamedTuple):
    """What is kept for machines: bytes of headers for this one, and for ``others`` that have used this folder."""

    folder: Path
    headers: int
    others: int


def kept() -> Kept:
    """What there is."""
    sizes = Counter[bool]()
    for each in cache_folder().glob(f"{_HEADERS}*/*.[gp]ch"):
        with suppress(OSError):  # another process may remove it
            sizes[each.parent.name == _headers()] += each.stat().st_size
    return Kept(cache_folder(), sizes[True], sizes[False])


@contextmanager
def made_once() -> Iterator[None]:
    """Inside, this thread takes what is kept for this machine, and keeps what it makes for it. One thread at a time."""
    from torch._inductor import codecache
    from torch._inductor.cpu_vec_isa import VecISA

    _build_whole()
    if hasattr(VecISA.check_build, "__wrapped__"):
        yield
        return
    patched = mock.patch.object
    with (
        patched(VecISA, "check_build", probed(VecISA.check_build)),
        patched(codecache, "_precompile_header", _precompiled(codecache._precompile_header)),
    ):
        yield


def probed(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    """A probe that is not repeated where it succeeded before, and is where it did not: a busy machine fails some."""

    @wraps(check_build)
    def probe(isa: Any, code: str) -> bool:
        from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint

        flags = _get_isa_dry_compile_fingerprint(isa.build_arch_flags())
        key = f"vectors {machine()} {flags} {code}"
        if find(KIND, key, _USES) is not None or _has_wider(isa):
            return True
        found = check_build(isa, code) or check_build(isa, code)
        if found:
            keep(KIND, key, b"built and loaded", _USES)
        return found

    return probe


def able() -> list[str]:
    """The sets of vector instructions of this processor, where torch takes the widest: the user asks for no other."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import x86_isa_checker

    asked = config.cpp.simdlen is not None or config.cpp.vec_isa_ok is not None or os.getenv("ATEN_CPU_CAPABILITY")
    return [] if asked else x86_isa_checker()


def _has_wider(isa: Any) -> bool:
    """Whether there is a wider set of instructions, so that torch uses these nowhere."""
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list

    if isa not in supported_vec_isa_list or not (sets := able()):
        return False
    wider = supported_vec_isa_list[: supported_vec_isa_list.index(isa)]
    return any(all(each in sets for each in str(other).split()) and bool(other) for other in wider)


def load(source: str, submit: Callable[..., Any] | None = None) -> Callable[[], Any]:
    """Build a translation unit, if that was not done before; the function that is given loads it as a module. Where
    there is nothing to build no header is looked at. ``submit``: begins to build, beside what else is done."""
    from torch._inductor import codecache
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    missing: list[Any] = []
    without = mock.patch.object(codecache, "_precompile_header", return_value=None)
    with mock.patch.object(Bindings, "cache", {}), without:
        loaded: Callable[[], Any] = Bindings.load_async(source, "cpu", submit_fn=missing.append)
    if not missing:
        return loaded
    built: Callable[[], Any] = Bindings.load_async(source, "cpu", submit_fn=submit)
    return built


def _precompiled(make: Callable[..., str]) -> Callable[..., str | None]:
    """A header's path, in the folder of this machine; none where it can not be made, as on a full disk."""
    thread = threading.get_ident()

    def precompiled(header: str, command: str, **options: Any) -> str | None:
        from torch._inductor.exc import CppCompileError

        if threading.get_ident() != thread:
            return make(header, command, **options)
        if _USES["headerless"]:
            return None
        try:
            return _made_here(make, header, command, **options)
        except (CppCompileError, OSError, IndexError) as error:  # torch indexes what a command has printed
            _tell_of_missing(error)
            return None

    return precompiled


def _tell_of_missing(error: Exception) -> None:
    """Say why kernels take longer to compile: in this process no header is tried again."""
    _USES["headerless"] += 1
    why = next((line for line in str(error).splitlines() if "error: " in line), str(error))
    warn(f"No header can be precompiled, so each segment takes some seconds longer to compile: {why}")


def _made_here(make: Callable[..., str], header: str, command: str, **options: Any) -> str:
    """A header that is as it was when it was made, and else is made again."""
    from torch._inductor import codecache
    from torch.utils._filelock import FileLock

    with ExitStack() as inside:
        try:
            inside.enter_context(own_folder(_headers(), make=True))
        except OSError:  # what else is kept says that nothing can be
            return make(header, command, **options)
        folder = cache_folder().absolute() / _headers()
        inside.enter_context(FileLock(str(folder / "lock"), timeout=_PATIENCE))
        inside.enter_context(mock.patch.object(codecache, "_HEADER_DIR", str(folder)))
        inside.enter_context(mock.patch.object(codecache, "_HEADER_LOCK_DIR", str(folder / "locks")))
        for each in folder.glob("*.[gp]ch.*"):  # of a compiler that was killed
            each.unlink()
        before, anew = set(folder.iterdir()), getattr(make, "__wrapped__", make)  # torch remembers its calls
        path = make(header, command, **options)
        if not Path(path).exists():  # the folder was removed since
            path = anew(header, command, **options)
        for compiled in folder.glob(f"{Path(path).name}.[gp]ch"):
            if compiled in before and not _is_as_made(compiled):
                ignore(KIND, _key_of(compiled), f"does not tell what is in {compiled}", _USES)
                compiled.unlink()
                before.discard(compiled)
                anew(header, command, **options)
            if compiled not in before:
                keep(KIND, _key_of(compiled), _digest(compiled), _USES)
            _CHECKED.add(compiled)
        _make_room()
    return path


def _key_of(compiled: Path) -> str:
    return f"header {compiled}"


def _digest(compiled: Path) -> bytes:
    with compiled.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().encode()


def _is_as_made(compiled: Path) -> bool:
    """Whether a header is what was made. Each process looks once."""
    os.utime(compiled)
    return compiled in _CHECKED or find(KIND, _key_of(compiled), _USES) == _digest(compiled)


def _make_room() -> None:
    """Remove the headers that were used longest ago, until the rest is small enough. Compilers do without."""
    with suppress(OSError):  # another process may do the same
        found = [(each.stat(), each) for each in cache_folder().glob(f"{_HEADERS}*/*.[gp]ch")]
        total = sum(status.st_size for status, _ in found)
        for status, each in sorted(found, key=lambda header: header[0].st_mtime)[:-1]:
            if total > MOST_NBYTES:
                each.unlink()
                total -= status.st_size


@cache
def _build_whole() -> None:
    """From here on no compiler leaves half of a file under the name of a whole one, where it is killed or the disk is
    full: torch would take it for whole ever after. It stays: plain ``torch.compile`` gains, too."""
    from torch._inductor.cpp_builder import CppBuilder

    build: Any = CppBuilder.build

    def whole(self: Any) -> None:
        target, output = self._target_file, self._output
        unfinished = f"{target}.{os.getpid()}-{threading.get_ident()}"
        self._target_file, self._output = unfinished, output.replace(target, unfinished)
        try:
            _built(self, build)
            Path(unfinished).replace(target)
        finally:
            self._target_file, self._output = target, output
            with suppress(OSError):  # it has its name
                Path(unfinished).unlink()

    CppBuilder.build = whole  # type: ignore[method-assign]


def _built(builder: Any, build: Callable[[Any], None]) -> None:
    """Build a file, or take what is kept of it."""
    source, made = Path(builder._sources_args), Path(builder._target_file)
    text = source.read_text("utf-8") if source.suffix == ".cpp" and source.is_file() else ""
    if not text.startswith(EVERY_MODEL):
        build(builder)
        return
    command = _INCLUDED.sub("", builder.get_command_line()).replace(str(source), "").replace(str(made), "")
    key = f"built {machine()} {command} {text}"
    if (found := find(KIND, key, _USES)) is not None:
        made.write_bytes(found)
        return
    build(builder)
    keep(KIND, key, made.read_bytes(), _USES)
