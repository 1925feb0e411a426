"""The statements of inductor's wrapper are read: those of known forms, and foreign ones."""

from __future__ import annotations

import warnings

import pytest

from captured import captured
from networks import RecurrentLIF, spikes
from reroll.backends.construct.build import build
from reroll.backends.inductor.half import Code
from reroll.backends.inductor.wrapper_codegen import wrapper
from reroll.backends.inductor.wrapper_codegen.chains import chained
from reroll.backends.inductor.wrapper_codegen.wrapper import (
    Allocated,
    Called,
    Checked,
    Deleted,
    Moved,
    Nothing,
    RawLine,
    View,
    Viewed,
    body_of,
    wrapper_peak,
)
from reroll.errors import RerollWarning
from reroll.planning.options import Options

VIEW = View("buf0", "(8, 4)", "(1, 8)", 16)
FORMS = {
    "primals_1, primals_2 = args": None,
    "args.clear()": None,
    "": Nothing(),
    "# Topologically Sorted Source Nodes: [mm]": Nothing(),
    "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)  # alias": Allocated(
        "buf0", "cpu", "(4, 8)", "(8, 1)", "float32"
    ),
    "buf0 = empty_strided_cpu((s0, 8), (8, 1), torch.float32)": None,
    "buf1 = reinterpret_tensor(buf0, (8, 4), (1, 8), 16); del buf0  # reuse": Viewed("buf1", VIEW, "buf0"),
    "buf1 = buf0; del buf0  # reuse": Moved("buf1", "buf0", "buf0"),
    "buf1 = buf0": Moved("buf1", "buf0", None),
    "del buf0, buf1": Deleted(("buf0", "buf1")),
    "assert_size_stride(buf2, (4, ), (1, ), 'torch.ops.aten.mm.default')": Checked(
        "size_stride", "buf2", "(4, ), (1, )", "aten.mm.default"
    ),
    "assert_size_stride(primals_1, (4, ), (1, ))": Checked("size_stride", "primals_1", "(4, ), (1, )", None),
    "assert_alignment(buf2, 16, 'torch.ops.aten.mm.default')": Checked("alignment", "buf2", "16", "aten.mm.default"),
    "cpp_fused_0(buf1, reinterpret_tensor(buf0, (8, 4), (1, 8), 16))": Called("cpp_fused_0", ("buf1", VIEW)),
    "cpp_fused_0(buf1, s0 + 1)": None,
    "buf3 = torch.ops.aten.sort.default(buf2)": RawLine(),
    "buf4 = buf3[0]": RawLine(),
    "extern_kernels.mm(buf0, buf1, out=buf2)": None,
    "return (buf4, )": None,
}


def source(indent: str, *lines: str) -> str:
    return "".join([f"head\n{indent}def call(self, args):\n", *(f"{indent}    {each}\n" for each in lines), "tail\n"])


@pytest.mark.parametrize("indent", ["", "    "])
def test_every_form_is_read(indent: str) -> None:
    text = source(indent, *FORMS)
    body = body_of(text)
    assert body is not None
    assert [each.form for each in body.statements] == [*FORMS.values()]
    assert [each.line for each in body.statements] == [*FORMS]
    assert body.indent == f"{indent}    "
    assert text[body.head : body.start] == f"{indent}def call(self, args):\n"
    assert text[body.end :] == "tail\n"


def test_what_is_nested_or_has_no_end_is_told_apart() -> None:
    nested = body_of(source("", "with torch.cuda._DeviceGuard(0):", "    del buf0", "return ()"))
    assert nested is not None
    assert nested.indent is None
    assert nested.statements[1].form == Deleted(("buf0",))
    assert body_of(source("", "del buf0")) is None
    assert body_of("def partition_0(args):\n    return ()\n" + source("", "return ()")) is None
    assert body_of("nothing") is None


@pytest.mark.inductor
def test_the_code_of_a_real_segment_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that writes otherwise this fails; users are told by a warning."""
    monkeypatch.setattr(wrapper, "_TOLD", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RerollWarning)
        built = build(captured(RecurrentLIF(8, 32, 3), spikes(20, 4, 8)), Options.of({}))
    segment = built.executable.compiled.segments[built.choice.segment]
    for code in (segment.forward, segment.backward):
        assert isinstance(code, Code)
        body = body_of(code.source)
        assert body is not None
        assert any(isinstance(each.form, Called) and each.form.kernel.startswith("chain_") for each in body.statements)


def test_what_a_call_of_torch_reads_is_there_until_its_results_are() -> None:
    operation = "torch.ops.aten.sort.default"
    text = source(
        "",
        "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)",
        f"buf1 = {operation}(buf0)",
        "del buf0",
        "buf2 = buf1[0]",
        f"assert_size_stride(buf2, (4, 8), (8, 1), '{operation}')",
        "buf3 = buf1[1]",
        f"assert_size_stride(buf3, (4, 8), (8, 1), '{operation}')",
        "del buf1",
        "buf4 = empty_strided_cpu((4, 8), (8, 1), torch.float32)",
        "return (buf2, buf3, buf4, )",
    )
    sizes, held = {"aten.sort.default": 4}, 3 * 128
    assert wrapper_peak(text, [], sizes) == held
    assert wrapper_peak(text, [], sizes, {("aten.sort.default", (4, 8)): 1_000}) == held + 1_000


@pytest.mark.parametrize("change", [("def call(", "def other("), ("buf0 = empty_strided_cpu", "buf0 = made_otherwise")])
def test_another_form_is_told_once(change: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_TOLD", set())
    text = source("", "buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)", "return (buf0, )")
    assert wrapper_peak(text, [], {}) == 128
    with pytest.warns(RerollWarning, match=r"has a form that reroll does not know.*predicted peaks"):
        assert wrapper_peak(text.replace(*change), [], {}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrapper_peak(text.replace(*change), [], {}) is None


def test_kernels_without_a_body_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "_TOLD", set())
    code = 'extern "C" void kernel(const float* a)'
    kernel = f"cpp_fused_0 = async_compile.cpp_pybinding(['const float*'], r'''{code}''')\n"
    with pytest.warns(RerollWarning, match="called one by one"):
        assert chained(kernel + "def other(args):\n    return ()\n") == kernel + "def other(args):\n    return ()\n"
