"""One registry of operations: what torch says of itself, whatever an operation is called by, and rules that are right.

Every operation that torch tags as entry by entry is done on all rows at once, and on one row after another as the fused
loop would: values and gradients are equal in float64, with operands of more and of fewer dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from by_hand import called, written
from reroll import operations
from reroll.capture.normal.normal import normalise
from reroll.capture.rows.peel import outer_emitter
from reroll.capture.rows.row_analysis import follow, timed
from reroll.capture.rows.row_rules import Rows
from reroll.graph.effects import mark_random
from reroll.graph.inplace import out_of_place, updated_places
from reroll.graph.private import OperationsSeen, is_overload
from reroll.operations import SPELLINGS, named, of, torchs_arguments

aten = torch.ops.aten
T, B, H = 3, 4, 3  # as many rows as entries: dimensions are followed, never sizes compared
WHOLE = ("bitwise", "gcd", "lcm", "shift", "xor")
NO_RULE = {
    "equal": "it gives one truth value",
    "frexp": "it gives two tensors",
    "max": "of one tensor it is the largest entry of all",
    "min": "of one tensor it is the smallest entry of all",
}


def tagged() -> list[str]:
    """The names of torch's operations that it tags as entry by entry, without updates in place."""
    known = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    names = {name.partition(".")[0] for space, _, name in known if space == "aten"}
    found = {name for name in names if any(torch.Tag.pointwise in each.tags for each in overloads(name))}
    return sorted(name for name in found if not updates(name))


def updates(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.startswith("__"))


def overloads(name: str) -> list[Any]:
    packet: Any = getattr(aten, name, None)
    return [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []


def of_one_tensor(name: str) -> list[Any]:
    """The ways to call an operation that are tagged, without ``out``."""
    found = [each for each in overloads(name) if torch.Tag.pointwise in each.tags]
    ways = {each: each.__name__.partition(".")[2].lower() for each in found}
    return [each for each, way in ways.items() if "out" not in way and way != "grad_input"]


@pytest.mark.parametrize("name", tagged())
def test_what_torch_tags_so_has_the_trait_and_a_rule(name: str) -> None:
    known = named(name)
    if name in NO_RULE:
        assert not known.pointwise, NO_RULE[name]
        return
    assert (known.pointwise, known.rows) == (True, "entries")
    assert not any((known.view, known.reduction, known.product))
    assert {of(each) for each in spellings(name)} == {known}


def spellings(name: str) -> Iterator[Any]:
    """What calls an operation: functions, operators, and the name of a method."""
    yield from of_one_tensor(name)
    for place, own in ((torch, name), (functional, name), (operator, name), (torch.special, name[len("special_") :])):
        function = getattr(place, own, None)
        if callable(function) and own:
            yield function
    if hasattr(Tensor, name):
        yield name


def numbers(overload: Any) -> list[Any]:
    """The arguments of a call: None for a tensor."""
    found: list[Any] = []
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        limit = argument.name in ("min", "max")
        if argument.kwarg_only or (argument.has_default_value() and not limit):
            break
        found.append(None if "Tensor" in kind else 1 if kind == "int" or whole(overload.__name__) else 0.5)
    return found


def whole(name: str) -> bool:
    return any(word in name for word in WHOLE)


def filled(name: str, shape: Sequence[int], number: int) -> Tensor:
    """Operands in float64, or whole numbers, as an operation takes them."""
    values = (torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64) + 2 * number).reshape(shape)
    if whole(name):
        return values.to(torch.int64) % 5 + 1
    made = 0.1 + 0.8 * values.sin().square()
    return made > 0.5 if number == 0 and name.startswith("where") else made.requires_grad_()


BESIDE: dict[str, tuple[tuple[int, ...], int | None]] = {
    "with rows": ((T, B, H), 0),
    "rows from outside": ((T, B, H), None),
    "one row for all": ((B, H), None),
    "fewer dimensions": ((H,), None),
    "a number's": ((), None),
    "one entry for each row": ((T, 1, 1), None),
    "more dimensions": ((2, 1, B, H), None),
    "more dimensions with rows": ((2, T, B, H), 1),
}
"""Shapes of the operands beside one with rows in front: (T, B, H); and where their own rows are."""


def rows(dim: int) -> Rows:
    return Rows(dim, 1, T, 0, 0, T)


def compare(target: Any, given: Sequence[Any], dims: Sequence[int | None]) -> None:
    """What a call gives for all rows at once, beside what the loop would make of each: values and gradients."""
    module = called(target, *given)
    mark_random(module, module.graph)
    inputs = module.graph.find_nodes(op="placeholder")
    found: dict[fx.Node, Rows | str] = {node: rows(at) for node, at in zip(inputs, dims, strict=True) if at is not None}
    all_rows = timed(follow(module.graph, inputs[0], found))
    end: Any = module.graph.output_node().args[0]
    assert end in all_rows, f"{target} has no rule"
    expected, at = end.meta["example_value"], all_rows[end]
    emitter = outer_emitter(module.graph, all_rows)
    with module.graph.inserting_before(module.graph.output_node()):
        made = tuple(emitter.emit(end, r) for r in range(T))
    module.graph.output_node().args = (made,)
    module.recompile()
    tensors = [each for each in given if isinstance(each, Tensor)]
    one_by_one = torch.cat(module(*tensors), at.dim)
    torch.testing.assert_close(one_by_one, expected, equal_nan=True, **ROUNDING[expected.is_floating_point()])
    leaves = [each for each in tensors if each.requires_grad]
    weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    try:
        wanted = torch.autograd.grad(expected, leaves, weight, allow_unused=True)
    except (RuntimeError, NotImplementedError):  # torch has no gradient of it
        return
    found_gradients = torch.autograd.grad(one_by_one, leaves, weight, allow_unused=True)
    torch.testing.assert_close(found_gradients, wanted, equal_nan=True, **ROUNDING[True])


ROUNDING: dict[bool, dict[str, Any]] = {True: {"rtol": 1e-13, "atol": 1e-15}, False: {"rtol": 0, "atol": 0}}
"""Of as many rows at a time as torch computes in another way."""


def operands(name: str, arguments: Sequence[Any], beside: str) -> tuple[list[Any], list[int | None]]:
    """The operands of a call, the first tensor with rows in front, and where the rows of each tensor are."""
    given, dims = list[Any](), list[int | None]()
    for argument in arguments:
        if argument is not None:
            given.append(argument)
            continue
        shape, dim = ((T, B, H), 0) if not dims else BESIDE[beside]
        given.append(filled(name, shape, len(dims)))
        dims.append(dim)
    return given, dims


RULED = [name for name in tagged() if not named(name).random and name not in NO_RULE]


@pytest.mark.parametrize("name", RULED)
def test_rows_one_after_another_are_all_rows(name: str) -> None:
    for overload in of_one_tensor(name):
        arguments = numbers(overload)
        if None not in arguments:
            continue
        others = BESIDE if arguments.count(None) > 1 else ("with rows",)
        for beside in others:
            given, dims = operands(name, arguments, beside)
            if _runs(overload, given):
                compare(overload, given, dims)
            if beside != "with rows" and arguments[:2] == [None, None] and _runs(overload, [given[1], given[0]]):
                compare(overload, [given[1], given[0], *given[2:]], [dims[1], dims[0], *dims[2:]])


def _runs(target: Any, given: Sequence[Any]) -> bool:
    """Whether torch does an operation on these at all, such as one that takes no operands of other shapes."""
    try:
        return isinstance(target(*given), Tensor)
    except (RuntimeError, TypeError):
        return False


@pytest.mark.parametrize("name", RULED)
def test_a_function_and_a_method_have_the_rule_of_the_operator(name: str) -> None:
    for overload in of_one_tensor(name):
        given, dims = operands(name, numbers(overload), "with rows")
        if not dims or not _runs(overload, given):
            continue
        for each in spellings(name):
            if isinstance(each, str):
                runs = isinstance(given[0], Tensor) and overload._schema.arguments[0].name == "self"
            else:
                runs = not is_overload(each) and _runs(each, given)
            if runs:
                compare(each, given, dims)


@pytest.mark.parametrize("name", [name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")])
def test_an_update_in_place_has_the_rule_of_the_operation_on_copies(name: str) -> None:
    known = named(name)
    if not known.pointwise or known.random or known.name in ("detach", "dropout"):
        return
    x, y, z = (filled(name, (T, B, H), number) for number in range(3))
    done = 0
    for more in ((), (0.5,), (2,), (0.1, 0.5), (y,), (y[0],), (y[:, :1], z[0]), (y, 0.5), (y > 0.5,), (y > 0.5, 2)):
        if _runs(lambda *given: getattr(given[0].clone(), name)(*given[1:]), (x, *more)):
            tensors = [each for each in more if isinstance(each, Tensor)]
            dims = [0, *(0 if each.dim() == 3 else None for each in tensors)]
            compare(out_of_place, (f"method:{name}", (0,), ((),), x, *more), dims)
            done += 1
    assert done


ITS_OWN = ("pos", "ilshift", "irshift")
"""Of which torch sees nothing, as ``+x`` is x itself, or something of their own."""
SPELLED = [(other, name) for other, name in SPELLINGS.items() if other not in ITS_OWN]


@pytest.mark.parametrize(("other", "name"), SPELLED)
def test_another_name_is_the_same_operation(other: str, name: str) -> None:
    """Both run the same operators of torch, wherever they are called."""
    found = 0
    for place in (torch, functional, operator, torch.special, Tensor):
        own: Any = next((each for at in (torch, functional, operator, aten) if (each := getattr(at, name, None))), None)
        for spelled in (other, f"{other}_", f"__{other}__", f"special_{other}"):
            function = getattr(place, spelled, None)
            both = [(_ran(function, given), _ran(own, given)) for given in _given(name) if function]
            ran = next(((one, two) for one, two in both if one and two), None)
            if ran:
                assert ran[0] == ran[1]
                found += 1
    assert found


def _given(name: str) -> Iterator[tuple[Any, ...]]:
    x, y = filled(name, (4, 4), 1).detach(), filled(name, (4, 4), 2).detach()
    yield from ((x, y), (x, 2), (x,), (x, 0.1, 0.2), ([x, y],), (x, 0, 1), (x[0], y[0]), (x > 0.5, y > 0.5), (x > 0.5,))
    yield from ((x.to(torch.int64), 2),)


def _ran(function: Callable[..., Any], given: Sequence[Any]) -> list[str]:
    """The operators that a call runs; none where it fails."""
    seen = list[Any]()
    copies = [each.clone() if isinstance(each, Tensor) else each for each in given]
    try:
        with OperationsSeen(seen):
            function(*copies)
    except (RuntimeError, TypeError):
        return []
    return [each.overloadpacket.__name__.strip("_") for each in seen]


LISTS = {
    **operations._FLAGS,
    **{f"{trait}: {kind}": names for trait, kinds in operations._KINDS.items() for kind, names in kinds.items()},
}
PLACES = (aten, torch.ops.prims, torch.ops.reroll, torch, functional, Tensor, operator)
UNSAID = ("_unsafe_view", "getitem")
"""Of which no schema says that they view; but they give entries of their operand alone."""


@pytest.mark.parametrize("trait", LISTS)
def test_what_is_listed_is_there_by_its_own_name_and_once(trait: str) -> None:
    names = LISTS[trait].split()
    assert len(names) == len(set(names))
    assert [name for name in names if named(name).name != name] == []
    spelled = {name: (name, f"{name}_backward") for name in names}
    missing = [name for name in names if not any(hasattr(at, each) for at in PLACES for each in spelled[name])]
    assert missing == []


@pytest.mark.parametrize("trait", operations._KINDS)
def test_an_operation_is_of_one_kind(trait: str) -> None:
    names = [name for names in operations._KINDS[trait].values() for name in names.split()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", [name for names in operations._KINDS["view"].values() for name in names.split()])
def test_a_view_is_one_by_its_schema(name: str) -> None:
    assert (name in UNSAID) != any(each.is_view for each in overloads(name))


def test_the_lists_are_of_torchs_operations_alone() -> None:
    """Whatever a user calls by one of their names is another thing."""

    def add(one: Tensor, other: Tensor) -> Tensor:
        return one

    with torch.library._scoped_library("reroll_tests", "FRAGMENT") as library:
        library.define("mul(Tensor x) -> Tensor")
        foreign = torch.ops.reroll_tests.mul.default
        assert of(add) == of(foreign) == named("")
    assert not named("").random


IN_PLACE = [
    *(each for each in vars(operator).values() if callable(each) and each.__name__.startswith("i")),
    *(name for name in dir(Tensor) if name.startswith("__i")),
]


@pytest.mark.parametrize("target", IN_PLACE, ids=str)
def test_what_python_updates_in_place_is_known_to_do_so(target: Any) -> None:
    """``x <<= 1`` was taken for another value than x."""
    x, shown = torch.arange(6), torch.arange(6) + 1
    try:
        same = (getattr(x, target) if isinstance(target, str) else lambda other: target(x, other))(shown) is x
    except (TypeError, RuntimeError, AttributeError):
        same = target in (operator.itruediv, "__itruediv__")  # of floating-point numbers alone
    graph = fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["example_value"] = x
    kind = "call_method" if isinstance(target, str) else "call_function"
    assert updated_places(graph.create_node(kind, target, (operand, 2))) == ((0,) if same else ())


NUMPYS: dict[str, Callable[[Any], Any]] = {
    "unbind": lambda x: x.unbind(axis=1)[3].tanh() + x.unbind(axis=1)[1],
    "chunk": lambda x: x.chunk(4, axis=1)[3].tanh() + x.chunk(4, axis=1)[1],
    "stack": lambda x: torch.stack([x.sin(), x.cos()], axis=2),  # type: ignore[call-arg]  # as numpy
    "sum": lambda x: x.sum(axis=1, keepdims=True),
    "select": lambda x: torch.select(x, dim=1, index=3) + torch.select(x, index=2, dim=1),
    "narrow": lambda x: x.narrow(1, start=3, length=1),
    "cumsum_": lambda x: x.sin().cumsum_(axis=1),
}


@pytest.mark.parametrize("name", NUMPYS)
def test_arguments_by_numpys_names_have_torchs_in_the_normal_form(name: str) -> None:
    """With as many rows as columns: dimension 0 was read in place of 1."""
    x = filled(name, (4, 4, 3), 0).detach()
    module = written(NUMPYS[name], x)
    normal = normalise(module, module.graph)
    assert not any({"axis", "keepdims"} & node.kwargs.keys() for node in normal.nodes)
    torch.testing.assert_close(fx.GraphModule(module, normal)(x), NUMPYS[name](x))


def test_an_axis_that_torch_itself_names_so_stays() -> None:
    known = of(torch.fake_quantize_per_channel_affine)
    assert torchs_arguments(known, ["axis"]) == {}
    assert torchs_arguments(of("sum"), ["axis", "keepdims", "dtype"]) == {"axis": "dim", "keepdims": "keepdim"}
    assert torchs_arguments(of("unbind"), ["dim"]) == {}
