"""The statements of inductor's wrapper are read: those of known forms, and foreign ones."""

from __future__ import annotations

import pytest

from reroll.backends.inductor.wrapper import (
    Allocated,
    Called,
    Checked,
    Deleted,
    Given,
    Moved,
    Nothing,
    View,
    Viewed,
    body_of,
)

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
    "buf3 = torch.ops.aten.sort.default(buf2)": Given(),
    "buf4 = buf3[0]": Given(),
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
