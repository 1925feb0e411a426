"""Training programs and halves of segments as text, one line a node, and read back from it.

The text is Python, so that nothing in it needs to be learnt. A program starts from ``carry``; the parts that it plays
are functions in front of it, and a comment says what is known of the tensors of the carry::

    advance_0to2 = advance(carry, 0, 2)
    return grad

Values of a half say their dtype and shape, and its operands what they are, ``carry``, ``per_step`` or ``constant``, if
anything. A node that a pass made is called after its operation::

    w: f32[3, 4] = constant
    y: f32[2, 4] = aten.mm.default(x, w)
    return y
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from reroll.graph.editing import call
from reroll.graph.private import is_overload
from reroll.program.program import INSTRUCTIONS, Program

DTYPES = {"f32": torch.float32, "bool": torch.bool}
MARKS = ("carry", "per_step", "constant")
BY_NAME = {instruction.__name__: instruction for instruction in INSTRUCTIONS}


def program_of(text: str, steps: int) -> Program:
    """The program of a text that has no parts, in segments of one step."""
    graph = fx.Graph()
    nodes = {"carry": graph.placeholder("carry")}
    for line in ast.parse(text).body:
        match line:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Call(func=ast.Name(instruction)) as made):
                operands = _operands(made, nodes)
                nodes[name] = graph.create_node("call_function", BY_NAME[instruction], *operands, name=name)
            case ast.Return(ast.Name(name)):
                graph.output(nodes[name])
            case _:
                raise SyntaxError(f"no line of a program: {ast.unparse(line)}")
    return Program(graph, steps, 1)


def half_of(text: str) -> fx.GraphModule:
    """The half of a text; its nodes have values, those of its operands drawn at random."""
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for line in ast.parse(text).body:
        match line:
            case ast.AnnAssign(ast.Name(name), kind, ast.Call(func=target) as made):
                args, kwargs = _operands(made, nodes)
                nodes[name] = call(graph, attrgetter(ast.unparse(target))(torch.ops), *args, **kwargs)
            case ast.AnnAssign(ast.Name(name), kind, mark):
                nodes[name] = graph.placeholder(name)
                nodes[name].meta["val"] = _drawn(kind)
                if isinstance(mark, ast.Name):
                    number = sum("carry" in node.meta for node in nodes.values())
                    nodes[name].meta[mark.id] = {"carry": number, "per_step": True, "constant": name}[mark.id]
            case ast.Return(ast.expr() as results):
                names = results.elts if isinstance(results, ast.Tuple) else [results]
                graph.output([_value(each, nodes) for each in names])
            case _:
                raise SyntaxError(f"no line of a half: {ast.unparse(line)}")
    for name, node in nodes.items():
        node.meta["text"] = name
    return fx.GraphModule(torch.nn.Module(), graph)


def program_text(program: Program) -> str:
    """The text of a program."""
    lines = []
    for name, part in program.parts.items():
        lines += [f"def {name}(carry, grad):", *(f"    {line}" for line in _instructions(part.graph)), ""]
    if program.facts:
        lines.append(f"# carry: {'; '.join(fact.describe() for fact in program.facts)}")
    return "\n".join([*lines, *_instructions(program.graph)]) + "\n"


def half_text(half: fx.GraphModule) -> str:
    """The text of a half."""
    return "\n".join(_values(half.graph)) + "\n"


def _instructions(graph: fx.Graph) -> Iterator[str]:
    names = {node: node.name for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {_spelled(node.args[0], names)}"
        elif node.op != "placeholder":
            yield f"{node.name} = {_called(node, names)}"


def _values(graph: fx.Graph) -> Iterator[str]:
    names = _names(graph)
    for node in graph.nodes:
        if node.op == "output":
            yield f"return {', '.join(_spelled(each, names) for each in node.args[0])}"
            continue
        marks = [mark for mark in MARKS if mark in node.meta]
        made = marks if node.op == "placeholder" else [_called(node, names)]
        yield " = ".join([f"{names[node]}: {_kind(node.meta['val'])}", *made])


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """The names of a text; of other nodes their operations', numbered where there are several of a kind."""
    names, seen = dict[fx.Node, str](), Counter[str]()
    for node in graph.nodes:
        if "text" in node.meta:
            names[node] = node.meta["text"]
        elif node.op != "output":
            target: Any = node.target
            kind = target.overloadpacket.__name__
            names[node] = f"{kind}_{seen[kind]}" if seen[kind] else kind
            seen[kind] += 1
    return names


def _called(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    target: Any = node.target
    operands = [_spelled(arg, names) for arg in node.args]
    operands += [f"{key}={_spelled(value, names)}" for key, value in node.kwargs.items()]
    return f"{target if is_overload(target) else target.__name__}({', '.join(operands)})"


def _spelled(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if not isinstance(value, list | tuple):
        return repr(value)
    inner = ", ".join(_spelled(each, names) for each in value)
    if isinstance(value, list):
        return f"[{inner}]"
    return f"({inner},)" if len(value) == 1 else f"({inner})"


def _kind(value: Tensor) -> str:
    short = {dtype: name for name, dtype in DTYPES.items()}
    return f"{short[value.dtype]}{list(value.shape)}"


def _drawn(kind: ast.expr) -> Tensor:
    """A value of a kind such as ``f32[2, 3]``."""
    match kind:
        case ast.Subscript(ast.Name(dtype), sizes):
            shape = ast.literal_eval(sizes)
            return torch.randn(shape if isinstance(shape, tuple) else (shape,)).to(DTYPES[dtype])
        case _:
            raise SyntaxError(f"no dtype with a shape: {ast.unparse(kind)}")


def _operands(made: ast.Call, nodes: Mapping[str, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kwargs = {str(keyword.arg): _value(keyword.value, nodes) for keyword in made.keywords}
    return tuple(_value(arg, nodes) for arg in made.args), kwargs


def _value(written: ast.expr, nodes: Mapping[str, fx.Node]) -> Any:
    """An operand: a node, several, something of torch such as a dtype, or a literal."""
    match written:
        case ast.Name(name):
            return nodes[name]
        case ast.Tuple(items):
            return tuple(_value(item, nodes) for item in items)
        case ast.List(items):
            return [_value(item, nodes) for item in items]
        case ast.Attribute(ast.Name("torch"), attribute):
            return getattr(torch, attribute)
        case _:
            return ast.literal_eval(written)
