"""Calls that become one call do what they did: random wrappers, run as they are and rewritten, without a compiler."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reroll.backends.inductor.wrapper_codegen.chains import chained

KERNELS = """
make = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
#include <cmath>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{ make }
''')
mix = async_compile.cpp_pybinding(['float*', 'const float*'], r'''
#include <cmath>
extern "C"  void  kernel(float* in_out_ptr0, const float* in_ptr0)
{ mix }
''')
counted = async_compile.cpp_pybinding(['float*', 'const int64_t'], r'''
extern "C" void kernel(float* in_out_ptr0, const int64_t ks0)
{ counted }
''')
scaled = async_compile.cpp_pybinding(['float*', 'const double'], r'''
extern "C" void kernel(float* in_out_ptr0, const double scale)
{ scaled }
''')

async_compile.wait(globals())
del async_compile
"""
SIZE = 6  # elements that a kernel works on
CALL = re.compile(r"part(\d+)::run\((.*)\);")
NUMBER = r"(\d+|numbers\[\d+\])"
OPERAND = re.compile(
    rf"\(\w[\w ]*\*\)\((?:p(?P<root>\d+)|\(workspace \+ (?P<place>{NUMBER})\))\) \+ (?P<offset>{NUMBER})"
    rf"|(?P<number>{NUMBER})"
)
OPERATIONS: dict[str, Callable[..., Any]] = {
    "make": lambda a, out: out.copy_(torch.sin(a) + 1.5),
    "mix": lambda out, a: out.mul_(0.5).add_(torch.cos(a)),
    "counted": lambda out, count: out.add_(count),
    "scaled": lambda out, scale: out.mul_(scale),
}


def flat(value: Tensor, offset: int) -> Tensor:
    return value.as_strided((SIZE,), (1,), value.storage_offset() + offset)


def pybinding(types: list[str], source: str) -> Callable[..., None]:
    """What a kernel, or a chain, does, read off its source."""
    names = re.findall(r"^\{ (\w+) \}$", source, re.MULTILINE)
    calls = CALL.findall(source)
    if not calls:
        return lambda *args: OPERATIONS[names[0]](*(flat(a, 0) if isinstance(a, Tensor) else a for a in args))

    tabled = types[-1] == "const int64_t*"

    def chain(*args: Tensor) -> None:
        assert len(args) == len(types)
        table: list[int] = args[-1].tolist() if tabled else []
        workspace = args[-2 if tabled else -1]

        def number(text: str) -> int:
            return int(text) if text.isdigit() else table[int(text[len("numbers[") : -1])]

        for kernel, given in calls:
            operands = list[Tensor | int]()
            for match in OPERAND.finditer(given):
                if match["number"]:
                    operands.append(number(match["number"]))
                    continue
                place = number(match["place"]) if match["place"] else None
                assert place is None or (workspace.dtype == torch.uint8 and place % 64 == 0)
                where = args[int(match["root"])] if place is None else workspace[place:].view(torch.float32)
                operands.append(flat(where, number(match["offset"])))
            OPERATIONS[names[int(kernel)]](*operands)

    return chain


def run(source: str, values: list[Tensor]) -> list[Tensor]:
    """Run a wrapper; memory that is allocated holds no numbers."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype).fill_(255 if dtype is torch.uint8 else float("nan"))

    names: dict[str, Any] = {
        "torch": torch,
        "empty_strided_cpu": empty,
        "reinterpret_tensor": lambda t, size, stride, at: t.as_strided(size, stride, t.storage_offset() + at),
        "assert_size_stride": lambda t, size, stride: (_ for _ in ()).throw(AssertionError)
        if t.shape != size
        else None,
        "foreign": lambda t: t * 3.0,
        "async_compile": SimpleNamespace(cpp_pybinding=pybinding, wait=lambda names: None),
    }
    exec(source, names)
    results: list[Tensor] = names["call"]([value.clone() for value in values])
    return results


class Wrapper:
    """A random wrapper, as inductor would write it."""

    def __init__(self, seed: int) -> None:
        self.random, self.lines, self.count = random.Random(seed), list[str](), 0
        self.sizes: dict[str, tuple[int, ...]] = {f"arg{i}": (3, SIZE) for i in range(3)}
        self.owned: list[str] = []
        for _ in range(self.random.randint(3, 30)):
            step = self.random.choice([self.make, self.make, self.mix, self.mix, self.view, self.move, self.drop])
            (step if self.random.random() > 0.08 else self.foreign)()
        kept = self.random.sample(sorted(self.sizes), min(3, len(self.sizes)))
        self.lines.append(f"return ({', '.join(kept)}, )")

    def fresh(self) -> str:
        self.count += 1
        return f"buf{self.count}"

    def any(self) -> str:
        return self.random.choice(sorted(self.sizes))

    def operand(self, name: str) -> str:
        """All of a tensor that is a kernel's, or a part of it."""
        if self.sizes[name] == (SIZE,) and self.random.random() < 0.5:
            return name
        at = SIZE * self.random.randrange(self.sizes[name][0]) if len(self.sizes[name]) == 2 else 0
        return f"reinterpret_tensor({name}, ({SIZE}, ), (1, ), {at})"

    def make(self) -> None:
        source, name, rows = self.operand(self.any()), self.fresh(), self.random.choice([1, 1, 2])
        self.lines.append(f"{name} = empty_strided_cpu(({rows}, {SIZE}), ({SIZE}, 1), torch.float32)")
        self.sizes[name] = (rows, SIZE)
        self.owned.append(name)
        for row in range(rows):
            self.lines.append(f"make({source}, reinterpret_tensor({name}, ({SIZE}, ), (1, ), {row * SIZE}))")

    def mix(self) -> None:
        self.lines.append("# Topologically Sorted Source Nodes: []")
        self.lines.append(f"mix({self.operand(self.any())}, {self.operand(self.any())})")

    def view(self) -> None:
        source, name = self.any(), self.fresh()
        whole = self.operand(source)
        self.lines.append(
            f"{name} = {whole}  # alias"
            if "(" in whole
            else f"{name} = reinterpret_tensor({source}, ({SIZE}, ), (1, ), 0)"
        )
        self.sizes[name] = (SIZE,)

    def move(self) -> None:
        if self.owned:
            old, name = self.owned.pop(self.random.randrange(len(self.owned))), self.fresh()
            self.sizes[name] = self.sizes.pop(old)
            self.lines.append(f"{name} = {old}; del {old}  # reuse")
            self.owned.append(name)

    def drop(self) -> None:
        if len(self.sizes) > 4:
            name = self.any()
            self.lines.append(f"del {name}")
            self.owned = [each for each in self.owned if each != name]
            del self.sizes[name]

    def foreign(self) -> None:
        name, source = self.fresh(), self.any()
        kind = self.random.choice(["foreign", "assert", "counted", "scaled"])
        if kind == "foreign":
            self.lines.append(f"{name} = foreign({source})")
            self.sizes[name] = self.sizes[source]
        elif kind == "assert":
            self.lines.append(f"assert_size_stride(arg0, (3, {SIZE}), ({SIZE}, 1))" if "arg0" in self.sizes else "")
        else:
            self.lines.append(f"{kind}({source}, 3)")

    def __str__(self) -> str:
        body = "".join(f"    {line}\n" for line in ["arg0, arg1, arg2 = args", "args.clear()", *self.lines])
        return f"{KERNELS}\ndef call(args):\n{body}\ntail = 1\n"


@pytest.mark.parametrize("shared", [False, True])
def test_random_wrappers_give_the_same_bits(shared: bool) -> None:
    values = [torch.randn(3, SIZE) for _ in range(3)]
    rewritten = 0
    for seed in range(400):
        source = str(Wrapper(seed))
        made = chained(source, shared=shared)
        rewritten += made != source
        for found, expected in zip(run(made, values), run(source, values), strict=True):
            assert torch.equal(found, expected), (seed, source, made)
    assert rewritten > 300


def test_buffers_that_do_not_meet_share_memory() -> None:
    lines = ["a, = args", "args.clear()"]
    for at in range(6):
        lines += [
            f"buf{at} = empty_strided_cpu((64, ), (1, ), torch.float32)",
            f"make({f'buf{at - 1}' if at else 'a'}, buf{at})",
        ]
        lines += [f"del buf{at - 1}"] if at else []
    body = "".join(f"    {line}\n" for line in [*lines, "return (buf5, )"])
    made = chained(f"{KERNELS}\ndef call(args):\n{body}")
    assert "buf_chain0 = empty_strided_cpu((512, ), (1, ), torch.uint8)" in made
    assert made.count("buf5 = empty_strided_cpu") == made.count("empty_strided_cpu") - 1 == 1
    assert "mix = async_compile" not in made
    assert made.count("\nmake = async_compile") == 0


def test_what_serves_several_sizes_has_the_same_definitions() -> None:
    """Only the numbers in tables differ, so nothing is built for another size."""

    def made(rows: int) -> str:
        lines = ["a, = args", f"buf0 = empty_strided_cpu(({rows}, 6), (6, 1), torch.float32)", "make(a, buf0)"]
        lines += [f"counted(buf0, {rows})", f"buf1 = empty_strided_cpu(({rows}, 6), (6, 1), torch.float32)"]
        lines += [f"make(reinterpret_tensor(buf0, (6, ), (1, ), {6 * rows - 6}), buf1)", "del buf0", "return (buf1, )"]
        body = "".join(f"    {line}\n" for line in lines)
        return chained(f"{KERNELS}\ndef call(args):\n{body}", shared=True)

    small, large = (re.findall(r"chain_0 = .*?'''\)", made(rows), re.DOTALL) for rows in (3, 24))
    assert small == large
    assert len(small) == 1
    assert "torch.tensor([0, 0, 0, 0, 3, 12, 0], dtype=torch.int64, device='cpu')" in made(3)


@pytest.mark.parametrize(
    "body",
    [
        "    a, = args\n    make(a, a)\n    return (a, )\n",  # one call
        "    a, = args\n    scaled(a, 3)\n    scaled(a, 3)\n    return (a, )\n",  # with a number that is not whole
        "    a, = args\n    with torch.no_grad():\n        make(a, a)\n        make(a, a)\n    return (a, )\n",
        "    a, = args\n    make(a, a)\n    make(a, s0 + 1)\n    return (a, )\n",
    ],
)
def test_other_wrappers_stay_as_they_are(body: str) -> None:
    source = f"{KERNELS}\ndef call(args):\n{body}"
    assert chained(source) == source
