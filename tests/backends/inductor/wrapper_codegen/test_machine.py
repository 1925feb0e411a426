"""What does not depend on a model is made once for a machine and a user, and compared before it is used."""

from __future__ import annotations

import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import codecache, config, cpp_builder, cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings
from torch._inductor.exc import CppCompileError

from reroll.backends.cache.entries import USES
from reroll.backends.inductor.native_products import vectors
from reroll.backends.inductor.wrapper_codegen import machine
from reroll.backends.inductor.wrapper_codegen.machine import EVERY_MODEL, kept, load, made_once, probed
from reroll.errors import RerollWarning

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of reroll's, another of inductor's, and a process that has looked at neither."""
    monkeypatch.setenv("REROLL_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(machine, "_CHECKED", set())
    monkeypatch.setattr(machine, "compiler", lambda: "a compiler")
    machine._USES.clear()
    USES.clear()
    yield tmp_path / "kept"
    USES.clear()


class Isa:
    def build_arch_flags(self) -> str:
        return "march=any"


def damage(folder: Path) -> None:
    """Another byte at the end of each entry."""
    for each in (folder / machine.KIND).iterdir():
        each.write_bytes(each.read_bytes()[:-1] + b"?")


@pytest.fixture
def fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_vec_isa, "_get_isa_dry_compile_fingerprint", lambda flags: f"a compiler {flags}")


@pytest.mark.usefixtures("fingerprint")
def test_a_probe_that_succeeded_is_not_repeated() -> None:
    probe = mock.Mock(return_value=True)
    assert [probed(probe)(Isa(), "code") for _ in range(3)] == [True] * 3
    assert probe.call_count == 1
    assert probed(probe)(Isa(), "other code")
    assert probe.call_count == 2


@pytest.mark.usefixtures("fingerprint")
def test_that_a_probe_failed_is_kept_nowhere() -> None:
    """It is asked twice, as a busy machine fails some; and again in the next process."""
    probe = mock.Mock(side_effect=[False, False, False, True])
    assert [probed(probe)(Isa(), "code") for _ in range(3)] == [False, True, True]
    assert probe.call_count == 4


@pytest.mark.usefixtures("fingerprint")
@pytest.mark.parametrize("other", ["processor", "compiler"])
def test_another_machine_is_probed_anew(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = mock.Mock(return_value=True)
    probed(probe)(Isa(), "code")
    monkeypatch.setattr(machine, other, lambda: "another")
    probed(probe)(Isa(), "code")
    assert probe.call_count == 2


@pytest.mark.usefixtures("fingerprint")
def test_a_broken_entry_is_no_answer(folder: Path) -> None:
    probe = mock.Mock(return_value=True)
    probed(probe)(Isa(), "code")
    damage(folder)
    with pytest.warns(RerollWarning, match="made anew"):
        probed(probe)(Isa(), "code")
    assert probe.call_count == 2


@pytest.mark.usefixtures("fingerprint")
def test_where_nothing_can_be_kept_everything_is_made(folder: Path) -> None:
    folder.write_text("no folder")
    probe = mock.Mock(return_value=True)
    with pytest.warns(RerollWarning, match="Nothing can be kept") as told:
        assert all(probed(probe)(Isa(), "code") for _ in range(2))
    assert probe.call_count == 2
    assert len(told) == 1


def test_weaker_instructions_are_probed_where_a_user_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = cpu_vec_isa.VecAVX512(), cpu_vec_isa.VecAVX2()
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [wide, narrow])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with mock.patch.object(cpu_vec_isa.VecAVX512, "__bool__", return_value=True):
        assert machine._has_wider(narrow)
        assert not machine._has_wider(wide)
        with config.patch({"cpp.simdlen": 256}):
            assert not machine._has_wider(narrow)
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        assert not machine._has_wider(narrow)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    with mock.patch.object(cpu_vec_isa.VecAVX512, "__bool__", return_value=False):
        assert not machine._has_wider(narrow)


@pytest.mark.filterwarnings("always")
def test_that_no_vectors_are_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where there are some, and the user has not asked for that."""
    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", lambda: cpu_vec_isa.invalid_vec_isa)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with pytest.warns(RerollWarning, match="without vector instructions.*avx2"):
        assert not vectors()
    with warnings.catch_warnings(record=True) as told:
        with config.patch({"cpp.simdlen": 1}):
            assert not vectors()
        monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", list)
        assert not vectors()
    assert not told


class Headers:
    """What torch does for a header, without a compiler: it looks where ``_HEADER_DIR`` says."""

    def __init__(self) -> None:
        self.made = 0
        self.lock = threading.Lock()

    def __call__(self, header: str, command: str) -> str:
        path = Path(codecache._HEADER_DIR) / f"{command}.h"
        path.touch()
        if not (compiled := Path(f"{path}.gch")).exists():
            with self.lock:
                self.made += 1
            time.sleep(0.05)  # as another process would have it
            compiled.write_bytes(b"compiled " + header.encode() * 100)
        return str(path)

    def ask(self) -> str | None:
        """As the next process would."""
        machine._CHECKED.clear()
        return machine._precompiled(self)("a header", "flags")


def test_a_header_is_made_once_for_a_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = Headers()
    paths = {headers.ask() for _ in range(3)}
    assert headers.made == 1
    assert all(Path(path or "").is_relative_to(folder) for path in paths)
    assert (kept().headers > 0, kept().others) == (True, 0)
    monkeypatch.setattr(machine, "processor", lambda: "another")
    assert (kept().headers, kept().others > 0) == (0, True), "a folder that was copied is noticed"
    assert headers.ask() not in paths
    assert headers.made == 2


def test_a_header_that_is_not_as_it_was_is_made_again() -> None:
    headers = Headers()
    path = Path(f"{headers.ask()}.gch")
    whole = path.read_bytes()
    for broken in (whole[:-5], b"", whole[:-1] + b"?"):
        path.write_bytes(broken)
        with pytest.warns(RerollWarning, match="made anew"):
            assert f"{headers.ask()}.gch" == str(path)
        assert path.read_bytes() == whole
    assert headers.made == 4


def test_a_folder_may_be_removed_at_any_time(folder: Path) -> None:
    """Torch remembers in each process which headers it has made."""
    headers = Headers()
    unfinished = folder / machine._headers() / "a.h.gch.1-2"
    unfinished.parent.mkdir(parents=True, mode=0o700)
    unfinished.touch()
    remembered: Any = cache(headers)
    made = machine._precompiled(remembered)
    path = Path(made("a header", "flags") or "")
    assert not unfinished.exists(), "a compiler was killed"
    shutil.rmtree(folder)
    assert made("a header", "flags") == str(path)
    assert path.exists()
    assert headers.made == 2


def test_a_header_that_cannot_be_made_is_done_without() -> None:
    fails = CppCompileError(["g++"], "x.h:1: fatal error: No space left on device\nterminated")
    tries = mock.Mock(side_effect=fails)
    with pytest.warns(RerollWarning, match="No space left on device") as told:
        assert [machine._precompiled(tries)("a header", "flags") for _ in range(3)] == [None] * 3
    assert len(told) == tries.call_count == 1, "each try takes seconds"


def test_where_no_folder_can_be_made_torch_keeps_headers(folder: Path, tmp_path: Path) -> None:
    folder.write_text("no folder")
    with mock.patch.object(codecache, "_HEADER_DIR", str(tmp_path)):
        path = Headers().ask()
    assert path is not None
    assert Path(path).parent == tmp_path


def test_several_at_once_make_one_header() -> None:
    headers = Headers()
    asked = [threading.Thread(target=headers.ask) for _ in range(8)]
    for each in asked:
        each.start()
    for each in asked:
        each.join()
    assert headers.made == 1


def test_headers_that_were_used_long_ago_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = Headers()
    headers.ask()
    monkeypatch.setattr(machine, "processor", lambda: "another")
    monkeypatch.setattr(machine, "MOST_NBYTES", kept().others)
    headers.ask()
    assert (kept().headers > 0, kept().others) == (True, 0)


class Builder:
    """A build of torch's: from a source to a file, by ``compile``."""

    def __init__(self, source: Path, target: Path) -> None:
        self._sources_args, self._target_file, self._output = str(source), str(target), f"-shared -o {target}"

    def get_command_line(self) -> str:
        return f"g++ -include some.h {self._sources_args} {self._output}"


def compile_to(builder: Any, content: bytes) -> None:
    assert builder._output.endswith(builder._target_file)
    Path(builder._target_file).write_bytes(content)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """What torch builds with, so to speak; and what it becomes."""
    compiler = mock.Mock(side_effect=lambda builder: compile_to(builder, b"binary"))
    monkeypatch.setattr(cpp_builder.CppBuilder, "build", lambda builder: compiler(builder))
    machine._build_whole.__wrapped__()
    return compiler


def test_a_compiler_that_fails_leaves_nothing(build: mock.Mock, tmp_path: Path) -> None:
    """Half of a file would be taken for a whole one ever after."""

    def fail(builder: Any) -> None:
        compile_to(builder, b"half")
        raise CppCompileError(["g++"], "no space left")

    source, target = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("int a;")
    build.side_effect = fail
    builder: Any = Builder(source, target)
    with pytest.raises(CppCompileError):
        cpp_builder.CppBuilder.build(builder)
    assert [each.name for each in tmp_path.iterdir()] == ["a.cpp"]
    assert (builder._target_file, builder._output) == (str(target), f"-shared -o {target}")
    build.side_effect = lambda builder: compile_to(builder, b"binary")
    cpp_builder.CppBuilder.build(builder)
    assert target.read_bytes() == b"binary"


@pytest.mark.parametrize(("text", "times"), [(EVERY_MODEL, 1), ("", 2)])
def test_what_is_the_same_for_every_model_is_built_once(
    build: mock.Mock, tmp_path: Path, text: str, times: int
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.cpp").write_text(f"{text}int a;")
        builder: Any = Builder(tmp_path / f"{name}.cpp", tmp_path / f"{name}.so")
        cpp_builder.CppBuilder.build(builder)
        assert (tmp_path / f"{name}.so").read_bytes() == b"binary"
    assert build.call_count == times


def test_what_was_built_is_compared_before_it_is_used(
    build: mock.Mock, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text(f"{EVERY_MODEL}int a;")
    builder: Any = Builder(source, tmp_path / "a.so")
    cpp_builder.CppBuilder.build(builder)
    damage(folder)
    with pytest.warns(RerollWarning, match="made anew"):
        cpp_builder.CppBuilder.build(builder)
    cpp_builder.CppBuilder.build(builder)
    assert build.call_count == 2
    monkeypatch.setattr(machine, "processor", lambda: "another")
    cpp_builder.CppBuilder.build(builder)
    assert build.call_count == 3


def test_where_there_is_nothing_to_build_no_header_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    header, built, calls = mock.Mock(return_value="a.h"), set[str](), []

    def load_async(source: str, _: str, submit_fn: Any) -> Any:
        codecache._precompile_header("a header", "flags")
        if source not in built and submit_fn is not None:
            submit_fn(None)
        return lambda: calls.append(source)

    monkeypatch.setattr(codecache, "_precompile_header", header)
    monkeypatch.setattr(Bindings, "load_async", load_async)
    load("a unit")()
    assert header.call_count == 1
    built.add("a unit")
    load("a unit")()
    assert header.call_count == 1
    assert calls == ["a unit"] * 2


@needs_compiler
def test_this_machine_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    told = machine.machine()
    assert torch.__version__ in told
    assert repr(machine.processor()) in told
    assert len(machine.compiler()) > 10
    assert repr(machine.compiler()) in told
    with made_once(), made_once():
        probe: Any = cpu_vec_isa.VecISA.check_build
        assert not hasattr(probe.__wrapped__, "__wrapped__"), "a probe that fails is not repeated over and over"
