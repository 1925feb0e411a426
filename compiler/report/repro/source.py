"""A graph as Python code: functions that anybody can run and step through, without torch.fx.

A custom function (``autograd.Function``), which a graph holds as two graphs, is written as the class that it was, and
the branches of ``torch.cond`` as functions. What code cannot say is refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from reroll.errors import UnsupportedError
from reroll.graph.names import names_of

_FREED = re.compile(r";  (?:\w+ = )+None(?=\s*$)")
_NOISE = re.compile(r"_?(?:fn_)?closure_\d+_cell_contents_|modules_|parameters_|buffers_")
_OPERATIONS = ("aten", "prims", "prim", "reroll")
_PACKAGES = ("torch", "math", "operator", "_operator", "builtins", "reroll")
_KNOWN = {
    "torch": "import torch",
    "device": "from torch import device",
    "inf": "from math import inf",
    "nan": "from math import nan",
    "NoneType": "from types import NoneType",
}


def short(name: str) -> str:
    """A name of Dynamo's as a person would say it: ``l_self_modules_cell_parameters_weight_ih_`` is
    ``cell_weight_ih``."""
    found = re.sub(r"^(x_)?l_(?:self_|fn_)?", r"\1", name, flags=re.IGNORECASE)
    found = _NOISE.sub("", found).strip("_")
    return found if found.isidentifier() else f"value_{found}"


def value_of(node: fx.Node) -> Any:
    """The example of a node, in a step or in a half; None without one."""
    return node.meta.get("example_value", node.meta.get("val"))


class Source:
    """Collects the text of functions and classes, in the order in which a file needs them, and its imports."""

    def __init__(self) -> None:
        self.imports = dict.fromkeys(("import torch", "from torch import nn", "import reroll"))
        self.definitions: list[str] = []
        self._classes = 0

    def function(self, module: fx.GraphModule, name: str, about: str) -> list[str]:
        """Add a function of a graph's inputs; gives the names of its arguments. Raises UnsupportedError."""
        arguments, body = self._written(module)
        text = [f"def {name}({', '.join(arguments)}):", f'    """{about}"""', *body]
        self.definitions.append("\n".join(text))
        return arguments

    def _written(self, module: fx.GraphModule, *, inside_function: bool = False) -> tuple[list[str], list[str]]:
        """The arguments of a graph, and its lines."""
        graph, env = fx.Graph(), dict[fx.Node, Any]()
        inputs = module.graph.find_nodes(op="placeholder")
        for node in inputs:
            env[node] = _placeholder(graph, short(node.name))
            env[node].meta = node.meta
        for node in module.graph.find_nodes(op="get_attr"):
            named = self._attribute(module, node)
            env[node] = None if named is None else _placeholder(graph, named)
        for node in module.graph.nodes:
            if node not in env and not (inside_function and _sets_grad_mode(node)):
                env[node] = self._copied(module, graph, node, env)
        return [env[node].name for node in inputs], self._lines(graph)

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> str | None:
        """The name that stands for what a graph holds; None for the two graphs of a custom function."""
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, Tensor):
            raise UnsupportedError(f"The step holds a tensor of its own, {node.target}, whose values are not written.")
        if any(_operation(user) == "autograd_function_apply" for user in node.users):
            return None
        if not isinstance(value, fx.GraphModule) or not all(_operation(user) == "cond" for user in node.users):
            users = ", ".join(map(_operation, node.users))
            raise UnsupportedError(f"The step calls {users} with a function of its own, which is not written as code.")
        name = f"branch_{len(self.definitions)}"
        self.function(value, name, "A branch.")
        return name

    def _copied(self, module: fx.GraphModule, graph: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        if _operation(node) == "autograd_function_apply":
            forward, backward, *args = node.args
            halves = (getattr(module, str(each.target)) for each in (forward, backward) if isinstance(each, fx.Node))
            name = self._function_class(*halves, marked=node.kwargs)
            made = graph.call_method("apply", (_placeholder(graph, name), *fx.map_arg(tuple(args), env.get)))
        else:
            made = graph.node_copy(node, lambda each: env[each])
            made.type = None
        if _sets_grad_mode(node):
            made.target = torch.set_grad_enabled
        elif _operation(node) == "cond":
            made.target = torch.cond
        made.meta = dict(node.meta)
        return made

    def _function_class(self, forward: fx.GraphModule, backward: fx.GraphModule, *, marked: Any) -> str:
        """Add a custom function as a class; gives its name."""
        name = f"Function{self._classes}"
        self._classes += 1
        arguments, lines = self._written(forward, inside_function=True)
        results, saved = forward.graph.output_node().args[0]  # type: ignore[misc]
        single, watched = not isinstance(results, tuple | list), list(marked["saved_for_backward_idx"])
        rest = [number for number in range(len(saved)) if number not in watched]  # type: ignore[arg-type]
        text = [f"class {name}(torch.autograd.Function):", '    """A custom function of the model\'s."""', ""]
        text += ["    @staticmethod", f"    def forward(ctx, {', '.join(arguments)}):"]
        text += _indented([*lines[:-1], lines[-1].replace("return ", "results, saved = ", 1)])
        text += [f"        ctx.save_for_backward({', '.join(f'saved[{n}]' for n in watched)})"]
        text += [f"        ctx.rest = [{', '.join(f'saved[{n}]' for n in rest)}]"] if rest else []
        for mark, key in (("mark_dirty", "dirty_idx"), ("mark_non_differentiable", "non_differentiable_idx")):
            numbers = ["results" if single else f"results[{n}]" for n in marked.get(key) or ()]
            text += [f"        ctx.{mark}({', '.join(numbers)})"] if numbers else []
        text += ["        return results", "", "    @staticmethod"]
        names, lines = self._written(backward, inside_function=True)
        grads = len(names) - len(saved)  # type: ignore[arg-type]
        text += [f"    def backward(ctx, {', '.join(names[:grads])}):"]
        for number, each in enumerate(names[grads:]):
            held = f"rest[{rest.index(number)}]" if number in rest else f"saved_tensors[{watched.index(number)}]"
            text += [f"        {each} = ctx.{held}"]
        self.definitions.append("\n".join([*text, *_indented(lines)]))
        return name

    def _lines(self, graph: fx.Graph) -> list[str]:
        """The body of a function, with the shape of each value behind its line."""
        code = graph.python_code("self")
        text = _functional(graph, code.src[code.src.index("def forward(") :])
        _refuse_foreign(text)
        if "torch.ops.reroll." in text:
            self.imports["import reroll.backends.dynamo  # defines torch.ops.reroll"] = None
        for name, value in code.globals.items():
            if re.search(rf"\b{name}\b", text):
                self.imports[_import(name, value)] = None
        nodes, lines, indent = {node.name: node for node in graph.nodes}, list[str](), "    "
        for line in (_FREED.sub("", each).strip() for each in text.split("\n")[1:]):
            node = nodes.get(line.partition(" = ")[0])
            if node is not None and _operation(node) == "_enter_autocast":
                lines.append(f"{indent}with torch.autocast({', '.join(map(repr, node.args))}):")
                indent += "    "
            elif node is not None and _operation(node) == "_exit_autocast":
                lines += [f"{indent}pass"] if lines[-1].endswith(":") else []
                indent = indent[4:]
            elif line:
                lines += [f"{indent}{each}" for each in (f"{line}{_shape(node)}", *_named(node))]
        return lines


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """A node that is written as this name, or as one like it that is free."""
    node = graph.create_node("placeholder", name, name=name)
    node.target = node.name
    return node


def _operation(node: fx.Node) -> str:
    """What a node calls, by its plain name."""
    return str(getattr(node.target, "__name__", node.target))


def _sets_grad_mode(node: fx.Node) -> bool:
    return node.op == "call_function" and _operation(node) == "_set_grad_enabled"


def _named(node: fx.Node | None) -> Iterator[str]:
    """The lines that give a value the names that the user gave it."""
    if node is not None:
        yield from (f"{node.name} = reroll.name({node.name}, {each!r})" for each in names_of(node))


def _shape(node: fx.Node | None) -> str:
    value = None if node is None else value_of(node)
    return f"  # {dtype_of(value)} {tuple(value.shape)}" if isinstance(value, Tensor) else ""


def dtype_of(value: Tensor) -> str:
    """The dtype of a tensor without the name of torch."""
    return str(value.dtype).removeprefix("torch.")


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _functional(graph: fx.Graph, text: str) -> str:
    """The same with functions by the names under which people know them."""
    known = {_operation(node) for node in graph.nodes if getattr(functional, _operation(node), None) is node.target}

    def name(found: re.Match[str]) -> str:
        return f"torch.nn.functional.{found[1]}" if found[1] in known else found[0]

    return re.sub(r"torch\._C\._nn\.(\w+)", name, text)


def _refuse_foreign(text: str) -> None:
    """Raise UnsupportedError for calls of what another machine may not have."""
    for space, name in re.findall(r"torch\.ops\.(\w+)\.(\w+)", text):
        if space not in _OPERATIONS:
            raise UnsupportedError(f"The step calls torch.ops.{space}.{name}, an operation that code cannot define.")
    if "self." in text:
        raise UnsupportedError("The step calls a module that torch.compile left whole, which is not written as code.")


def _import(name: str, value: Any) -> str:
    """The line that imports what code calls by a name. Raises UnsupportedError for what is the user's."""
    if name in _KNOWN:
        return _KNOWN[name]
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if (
        str(module).partition(".")[0] not in _PACKAGES
        or getattr(sys.modules.get(str(module)), qualified, None) != value
    ):
        raise UnsupportedError(
            f"The step calls {qualified or name} of {module or 'the model'}, which the graph holds as it is and not as "
            "operations, so its code is not written. Send the model's code with the report."
        )
    return f"from {module} import {qualified} as {name}"
