"""The graph of a model, written down while Python really runs it.

A ``TorchFunctionMode`` sees every operation and writes it as Dynamo writes it: a placeholder for each tensor from
outside, then calls, with the tensors that were made as examples. It sees no Python: what the model decided while it ran
stays decided. So whatever shows Python the values of a tensor is refused, and so is a tensor of which nobody saw where
it came from. Two things are allowed. Values of tensors that are made of constants, sizes and numbers alone are the same
at every call; what is made of them is compared in the run that checks a length (``events.Recorder``). And any tensor
may be asked whether it is true: the graph gives it beside its results, to be compared with the answer at every call.
"""

from __future__ import annotations

import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from reroll.capture.folded import UNFOLD, is_row
from reroll.capture.recorder.dependence import Dependence
from reroll.capture.recorder.events import SCAN, History, noted_for_backward, step_by_step
from reroll.capture.recorder.follow import Follower
from reroll.capture.recorder.function_nodes import Forward, application, filled, fresh_leaf
from reroll.capture.recorder.hidden_effects import Alive, SizeWatch, States, Versions, noted, silently
from reroll.capture.recorder.identity import Same, holds_tensors, may_change_unseen
from reroll.capture.recorder.packing import Packing
from reroll.capture.recorder.repeats import Event, Repeats, flat, look_of
from reroll.capture.recorder.spelling import METADATA, Spelled, spelled
from reroll.errors import CaptureError
from reroll.graph.effects import draws, example
from reroll.graph.fakes import Fakes
from reroll.graph.inplace import STATISTICS, updated_places
from reroll.graph.inplace import operand as operand_at
from reroll.graph.lines import CHECKPOINTED, is_checkpointed, user_line, user_trace
from reroll.graph.nested import leaves_of, tensors_of
from reroll.graph.private import (
    another_of,
    any_autocast,
    applied_functions,
    is_higher_order,
    is_of_users,
    map_aggregate,
    set_grad_enabled,
    storage_id,
    version_of,
)

_NUMBERS = (int, float, bool, str, complex, type(None), type(...))
_LITERALS = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAKERS = ("zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones", "new_empty", "new_full")
_NUMBERS_OF = (Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__, Tensor.__index__)
_NEEDS_GRADIENT = Tensor.requires_grad
_MOST = 100_000
_RETURNED = tuple(each for each in vars(torch.return_types).values() if isinstance(each, type))
NOTED = "noted"
"""What the application of an ``autograd.Function`` has in ``meta``: what its forward leaves for the backward, in words,
but for tensors."""
_REFUSED = ("detach_", "set_", "resize_", "resize_as_", "as_strided_", "register_hook", "retain_grad", "backward")


class Unrecordable(CaptureError):
    """A model does something that a record of its operations does not tell."""


class TooManyError(Unrecordable):
    """A model does more operations than a record holds."""


class GraphRecorder(TorchFunctionMode):
    """Writes the operations that run under it into ``graph``.

    outside: all tensors that may be read without having been made here, with ``names`` by their identity. functions:
    what stands in a graph for the application of each ``autograd.Function``, the same in every graph of a model. folds:
    whether runs that repeat are left out (``repeats``).
    """

    def __init__(
        self,
        outside: Sequence[Tensor],
        functions: dict[Any, Callable[..., Any]],
        names: Mapping[int, str] | None = None,
        *,
        folds: bool = False,
    ) -> None:
        super().__init__()
        self.graph, self.functions = fx.Graph(), functions
        self.known = Alive()
        self.fakes = Fakes()
        self.repeats = Repeats(self.graph, self.fakes, folds=folds)
        self.repeats.copied = self._copied
        self.dependence = Dependence()
        self.numbers = dict[fx.Node, int]()
        self.packing = Packing(self)
        self.versions, self.states = Versions(), States()
        self.history = History(self.versions.note)
        self.asked = dict[tuple[str, bool], list[fx.Node]]()
        self.zeroed, self.cleared, self.cut = dict[int, fx.Node](), list[int](), set[Any]()
        self.inference = torch.is_inference_mode_enabled()
        self.calling = self.writing = self.settled = False
        self.refusal: Unrecordable | None = None
        self.forward: Forward | None = None
        self.follower = Follower(self)
        self.noting: Any = None  # who is told which code of the model runs
        for index, value in enumerate(outside):
            node = _input_of(self.graph, (names or {}).get(id(value), f"outside_{index}"))
            self._show(node, value)
            if value.requires_grad and not value.is_leaf:
                node.meta["example_value"] = another_of(node.meta["example_value"])
            self.know(value, node)
            self.history.keep(value)
        self.inputs = list(self.graph.nodes)
        self.memory = {storage_id(value) for value in outside if value.layout == torch.strided}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside. Raises Unrecordable, also if the model has caught it. That is not held afterwards:
        its frames hold tensors, and what torch saves for these holds the recorder."""
        watch = SizeWatch(lambda: self.calling and not self.settled, self.refuse)
        profile: Any = sys.getprofile()
        self.noting = profile if callable(profile) else None
        self.states.note()
        no_tape = torch.autograd.graph.saved_tensors_hooks(lambda _: None, self._no_backward)
        try:
            # A stance is set where it is made: nothing may come between that and its end.
            with applied_functions(self._apply), no_tape, torch.compiler.set_stance("force_eager"), watch, self:
                yield
            if self.refusal is not None:
                raise self.refusal
        finally:
            self.refusal = None
        self.check_states()

    def finish(self, results: Sequence[Any]) -> tuple[fx.GraphModule, list[int], dict[int, int]]:
        """The graph that gives ``results``, which of the tensors from outside it reads, in order, and the values of
        those that are sizes in it. ``cleared`` says which of them are to be zeroed and cut off their history, and
        ``asked`` what the truth is of all entries of each of the further results, with the line that asks for it.
        """
        self.repeats.end()
        given = self.operand(tuple(results))
        # A row that is updated, or lies in what is, is what it was only where it stands.
        updated = any(self.dependence.memory.get(row) in self.dependence.updated for row in self.repeats.rows())
        if updated or self.repeats.nested:
            self.repeats.unfold()
            given = self.operand(tuple(results))
        if self.zeroed:
            self.refuse("a state of an earlier call is zeroed, and not cut off its history by detach_()")
        sizes = {index: self.numbers[node] for index, node in enumerate(self.inputs) if node in self.numbers}
        self.graph.output((*given, *map(self._stacked, self.asked.values())))
        read = [index for index, node in enumerate(self.inputs) if node.users]
        for node in self.inputs:
            if not node.users:
                self.graph.erase_node(node)
        module = fx.GraphModule(nn.Module(), self.graph)
        if self.repeats.loops:
            module.meta[UNFOLD] = self.repeats.unfold
        return module, read, sizes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        noting = sys.getprofile()
        if not callable(noting):
            return self._operation(func, args, kwargs or {})
        sys.setprofile(None)  # as silently() does, which would be called for each operation
        try:
            return self._operation(func, args, kwargs or {})
        finally:
            sys.setprofile(noting)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.writing:
            return func(*args, **kwargs)
        if func is SCAN:
            with self, noted(self.noting):
                return step_by_step(*args)
        if self.calling:
            return self._inside(Spelled("call_function", func, args, kwargs))
        if func in METADATA:
            result = func(*args, **kwargs)
            return result if not isinstance(result, Tensor) else self.refuse(f"{func} gave a tensor")
        if self.repeats.loop is not None:
            expected, result = self.follower.follow(func, args, kwargs, func)
            if expected:
                return result
            if result is not NotImplemented:
                return self._written(func, args, kwargs, lambda: result)
        for special in (self.packing.result, self._about_values):
            found = special(func, args, kwargs)
            if found is not NotImplemented:
                self.repeats.barrier()
                return found
        return self._written(func, args, kwargs)

    def _noted(self, func: Any) -> AbstractContextManager[None]:
        """The Python code that an operation is made of is noted while it runs, but for that of operators of users'."""
        return noted(self.noting) if isinstance(func, FunctionType | type) else nullcontext()

    def _place_if_same(self, value: Tensor) -> int:
        """The place of a tensor that was not changed unseen; -1 for any other."""
        return -1 if self.versions.is_changed(value) else self._place_of(value)

    def _no_backward(self, _: None) -> Any:
        self.refuse("the model takes a gradient in its forward")

    def ask(self, what: str, answer: bool, node: fx.Node) -> None:
        """Note that the truth of a value is asked for at the present line of the user's."""
        self.asked.setdefault((f"{user_line()} {what}".rstrip(), answer), []).append(node)

    def noted(self, node: fx.Node, value: Any) -> fx.Node:
        """Note what a node gives, and where it is from."""
        node.meta["stack_trace"] = user_trace()
        self._show(node, value)
        self.dependence.note(node, ())
        if isinstance(value, Tensor):
            self.know(value, node)
        return node

    def know(self, value: Tensor, node: fx.Node) -> None:
        """Note that a node gives a tensor."""
        self.known[id(value)] = weakref.ref(value), self.repeats.place(node)
        self.versions.note([value])

    def _node_of(self, value: Tensor) -> fx.Node | None:
        """The node that gives a tensor."""
        place = self._place_of(value)
        if place < 0:
            return None
        node = self.repeats.node(place)
        if node not in self.dependence.memory:  # of a run that was not written down
            shown = None if is_row(node) else example(node)
            if shown is not None and value.layout == torch.strided and self.fakes.adopt(value, shown):
                self.dependence.memory[node] = storage_id(value)
            else:
                self._show(node, value)
        return node

    def _place_of(self, value: Tensor) -> int:
        """The place of the node that gives a tensor; -1 where there is none."""
        known, place = self.known.get(id(value), (lambda: None, -1))
        return place if known() is value else -1

    def _copied(self, like: fx.Node, made: fx.Node) -> None:
        """Note that a node does what another one does, a run or more later."""
        for known in (self.dependence.constant, self.dependence.chance):
            if like in known:
                known.add(made)

    def _show(self, node: fx.Node, value: Any, shown: Any = None) -> None:
        """Note what a node gives, as an example without values: what nobody holds is gone."""
        node.meta["example_value"] = map_aggregate(value, self._example) if shown is None else shown
        if isinstance(value, Tensor) and value.layout == torch.strided:
            self.dependence.memory[node] = storage_id(value)

    def _example(self, value: Any) -> Any:
        plain = isinstance(value, Tensor) and value.layout == torch.strided
        return self.fakes(value) if plain else value

    def check_states(self) -> None:
        """Refuse random numbers that were drawn or set unseen."""
        if self.states.are_changed:
            self.refuse("the state of torch's random numbers is set, or they are drawn unseen")

    def _about_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of what reads or changes a value's history or shows its values; NotImplemented of all else."""
        name = getattr(func, "__name__", "")
        if name in ("zero_", "detach_") and not kwargs and self._clears(name, args[0]):
            return args[0]
        if name == "requires_grad_" or (name == "__set__" and func.__self__ is _NEEDS_GRADIENT):
            return self._set_gradient(args[0], all((*args[1:], *kwargs.values())))
        if func is Tensor.__bool__:
            return self._answer(args[0])
        if func in _NUMBERS_OF and self.operand(args[0]) in self.dependence.constant:
            return func(*args)
        return NotImplemented

    def _written(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any] | None = None
    ) -> Any:
        """The result of an operation that is written down, by ``run`` where it has run already. Raises Unrecordable for
        one that cannot be."""
        call, name = Spelled("call_function", func, args, kwargs), getattr(func, "__name__", "")
        module = getattr(func, "__module__", None) or ""
        if name in _REFUSED or is_higher_order(func) or module.startswith("torch.autograd"):
            self.refuse(f"{name or func} cannot be recorded")
        if name in _MAKERS:
            call = self._made(func, args, kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            call = Spelled("call_function", func, (args[0], self._index(args[1]), *args[2:]), kwargs)
        written = spelled(call.target, call.args, call.kwargs)
        if written is not None:
            return self._call(written, run or call.run, seen=self._seen(func, args, kwargs))
        return self.refuse(f"{getattr(func, '__self__', func)} cannot be recorded")

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spelled:
        """A call that makes a tensor of given sizes, without tensors that Python would have to read."""
        args, kwargs = self._sizes(args), {key: self._sizes(value) for key, value in kwargs.items()}
        tensors = any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))
        return Spelled("call_function", filled if func is torch.full and tensors else func, args, kwargs)

    def _index(self, value: Any) -> Any:
        """An index with whole numbers that are tensors as numbers, which Python would have to read."""
        if isinstance(value, tuple):
            return tuple(map(self._index, value))
        if not isinstance(value, Tensor) or value.dim() or value.dtype in (torch.bool, torch.uint8):
            return value
        if self.operand(value) not in self.dependence.constant:
            self.refuse("a row is picked by a number that the model computes; pick it with torch.index_select")
        return int(value)

    def _sizes(self, value: Any) -> Any:
        """Operands of what makes a tensor, with whole numbers that are tensors as numbers: they are sizes."""
        if isinstance(value, tuple | list):
            return type(value)(map(self._sizes, value)) if type(value) in (tuple, list) else value
        if not isinstance(value, Tensor) or value.dim() or value.dtype not in (torch.int64, torch.int32):
            return value
        node, number = self.operand(value), int(value)
        if node.op == "placeholder" and storage_id(value) not in self.dependence.updated:
            self.numbers[node] = number
        elif node not in self.dependence.constant:
            self.refuse("a size depends on values that the model computes")
        return number

    def _stacked(self, nodes: Sequence[fx.Node]) -> fx.Node:
        made = self.graph.call_function(torch.stack, (list(nodes),))
        example = torch.empty(len(nodes), dtype=torch.bool, device=nodes[0].meta["example_value"].device)
        made.meta |= {"stack_trace": nodes[-1].meta["stack_trace"], "example_value": self.fakes(example)}
        return made

    def _inside(self, call: Spelled) -> Any:
        """An operation of the forward of an ``autograd.Function``, which a graph applies as a whole."""
        if draws(getattr(call.target, "__name__", "")):
            self.refuse("an autograd.Function draws random numbers")
        result = call.run()
        if self.forward is not None:
            self.forward.note(call.target, call.args, call.kwargs, result)
        made = isinstance(result, Tensor | tuple | list) or result is None or result is NotImplemented
        if not made and call.target not in METADATA:
            self.refuse("an autograd.Function reads the values of a tensor")
        return result

    def _set_gradient(self, value: Tensor, needs: bool) -> Tensor:
        """Record that a value that the model made needs a gradient from now on, as a leaf of its own."""
        if value.requires_grad is needs:
            return value
        before = self._node_of(value)
        if not needs or before is None or before.op == "placeholder" or value._is_view():
            self.refuse("requires_grad of a value that is no fresh one is set")
        assert before is not None
        self._show(before, value.detach())
        self._rename(value, self.graph.call_function(fresh_leaf, (before,)))
        self._show(self._renamed(value), value.requires_grad_())
        return value

    def _clears(self, name: str, value: Tensor) -> bool:
        """Record that a value is cut off its history, or the state of an earlier call zeroed, to be cut off next."""
        node = self.operand(value)
        if name == "detach_" and id(value) in self.zeroed:
            self.cleared.append(self.inputs.index(self.zeroed.pop(id(value))))
        elif name == "detach_" and not value.requires_grad:
            return True
        elif name == "detach_" and node.op != "placeholder" and not value._is_view():
            self._rename(value, self.graph.call_method("detach", (node,)))
        elif name == "zero_" and node.op == "placeholder" and not value.is_leaf and self._is_unread(node, value):
            self.zeroed[id(value)] = node
            self.cut.add(storage_id(value))
            self._rename(value, self.graph.call_function(torch.zeros_like, (node,)))
        else:
            return False
        with torch.no_grad():
            getattr(value, name)()
        self._updated({storage_id(value)})
        self._show(self._renamed(value), value.detach())
        return True

    def _updated(self, memory: set[int]) -> None:
        """Note that a recorded operation has updated some memory, after which what lies there may need gradients."""
        for value in self.versions.updated(memory):
            node = self._node_of(value)
            shown = None if node is None else node.meta.get("example_value")
            if node is not None and isinstance(shown, Tensor) and shown.requires_grad is not value.requires_grad:
                self._show(node, value)

    def _is_unread(self, node: fx.Node, value: Tensor) -> bool:
        """Whether nothing that was recorded reads the memory of a tensor from outside."""
        held = [each for each in self.inputs if self.dependence.memory.get(each) == storage_id(value)]
        return held == [node] and not node.users and not value._is_view()

    def _rename(self, value: Tensor, node: fx.Node) -> None:
        node.meta["stack_trace"] = user_trace()
        self.known[id(value)] = weakref.ref(value), self.repeats.place(node)

    def _renamed(self, value: Tensor) -> fx.Node:
        return self.repeats.placed[self.known[id(value)][1]]

    def _answer(self, value: Tensor) -> bool:
        """What Python is shown of a value that is asked for its truth; the graph gives the value, for it to be shown
        the same at every call. Of constants it always is.
        """
        node = self.operand(value)
        if node in self.dependence.chance:
            self.refuse("the model branches on random numbers alone")
        self.calling = self.settled = True
        try:
            answer, truth = bool(value), value
            if node not in self.dependence.constant:
                for method, *operands in (("ne", 0), ("reshape", ())):
                    node, truth = self.graph.call_method(method, (node, *operands)), getattr(truth, method)(*operands)
                    node.meta["stack_trace"] = user_trace()
                    self._show(node, truth.detach())
                self.ask("", answer, node)
        finally:
            self.calling = False
        return answer

    def _apply(self, function: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calling:
            return inner(*args, **kwargs)
        return silently(self._applied, function, inner, args, kwargs)

    def _applied(self, function: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ran: Any = NotImplemented
        if self.repeats.loop is not None:
            expected, ran = self.follower.follow(function, args, kwargs, inner)
            if expected:
                return ran
        objects = {place: value for place, value in enumerate(args) if _is_object(value)}
        same = function, tuple((place, Same(value)) for place, value in objects.items())
        if any(holds_tensors(value) for value in objects.values()):
            self.refuse(f"{function.__name__} is applied to an object that holds tensors")
        if any(map(may_change_unseen, objects.values())):
            self.refuse(f"{function.__name__} is applied to an object whose values cannot be compared between calls")
        target = self.functions.setdefault(same, application(function, objects))

        rest = tuple(value for place, value in enumerate(args) if place not in objects)
        forward = Forward(rest, self.fakes)

        def run() -> Any:
            if ran is not NotImplemented:
                forward.whole = False
                return ran
            self.writing, self.forward = False, forward
            try:
                return inner(*args, **kwargs)
            finally:
                self.writing, self.forward = True, None

        self.writing = True
        try:
            seen = None if objects else self._seen(function, args, kwargs)
            return self._call(Spelled("call_function", target, rest, kwargs), run, forward, seen)
        finally:
            self.writing = False

    def _seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Event | None:
        """An operation as Python gave it, by which it is known again; None for one that another record would do
        otherwise."""
        if not self.repeats.folds:
            return None
        kinds, leaves = list[Any](), list[Any]()
        flat((args, kwargs), kinds, leaves)
        tensors = [value for value in leaves[1:] if isinstance(value, Tensor)]
        numbers = getattr(func, "__name__", "") in _MAKERS or func in (Tensor.__getitem__, Tensor.__setitem__)
        if numbers and any(not value.dim() for value in tensors[func is Tensor.__getitem__ :]):
            return None
        places = [self._place_if_same(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Event(func, tuple(kinds), places)

    def _call(
        self, call: Spelled, run: Callable[[], Any], forward: Forward | None = None, seen: Event | None = None
    ) -> Any:
        """Write one operation down, and run it; with the forward of a function with a gradient of its own."""
        if any_autocast() or torch.is_inference_mode_enabled() is not self.inference:
            self.refuse("autocast and inference mode cannot be recorded")
        if len(self.graph.nodes) > _MOST:
            self.refuse(f"the model does more than {_MOST:,} operations, too many for a record of all", TooManyError)
        node = self.graph.create_node(call.op, call.target, self.operand(call.args), self.operand(call.kwargs))
        node.meta["stack_trace"] = user_trace()
        if is_checkpointed():
            node.meta[CHECKPOINTED] = True
        updated = [operand_at(node, place) for place in updated_places(node)]
        self._check_updates(updated, node)
        self.check_states()
        operands = list({id(each): each for each in tensors_of((call.args, call.kwargs))}.values())
        result = self._run(node, call, run, operands, {self.dependence.memory[leaf] for leaf in updated})
        names = isinstance(result, torch.device | torch.dtype) and not operands  # a device or type that no tensor has
        if names or result is NotImplemented:  # the latter of comparisons with what is no tensor
            self.graph.erase_node(node)
            return result
        if forward is not None:
            node.meta |= {"forward": forward.ended(result), NOTED: _in_words(noted_for_backward(result))}
        drawn = draws(getattr(node.target, "__name__", str(node.target)))
        self.dependence.note(node, updated, drawn or forward is not None)
        place = self.repeats.place(node)
        if result is not None or not (updated or call.target is set_grad_enabled):
            self._bind(result, node)
        known = () if seen is None else seen.at(map(self.repeats.place, updated))
        if seen is None or len(known) < len(updated) or is_of_users(call.target):
            self.repeats.barrier()
        else:
            size = self.repeats.count - place
            self._note(replace(seen, place=place, size=size, draws=drawn, writes=known), node, result)
        return result

    def _run(
        self, node: fx.Node, call: Spelled, run: Callable[[], Any], operands: Sequence[Tensor], memory: set[Any]
    ) -> Any:
        """What an operation gives that updates some ``memory`` in place, and nothing else."""
        before = [(value, version_of(value)) for value in operands if not value.is_inference()]
        self.calling, self.settled = True, self.dependence.constant.issuperset(node.all_input_nodes)
        try:
            with self._noted(call.target):
                result = run()
        except BaseException:
            self.graph.erase_node(node)
            raise
        finally:
            self.calling = False
        for value, version in before:
            if version_of(value) != version and storage_id(value) not in memory:
                self.refuse(f"{node.target} updates an operand in place, which cannot be seen from outside")
        self.states.note()
        self._updated(memory)
        return result

    def _note(self, event: Event, node: fx.Node, result: Any) -> None:
        """Note an operation that was written down, and what it gave."""
        values = tensors_of(result)
        places = map(self._place_of, values)
        fresh = tuple(place if place >= event.place else -1 for place in places)
        looks = tuple(map(look_of, values))
        self.repeats.note(replace(event, looks=looks, fresh=fresh, key=self.repeats.key(event, node, looks)))

    def _bind(self, result: Any, node: fx.Node, shown: Any = None) -> None:
        """Remember what a node gave, with an example of it if there is one. A tensor that is known already stays what
        it was."""
        if isinstance(result, Tensor):
            if result.layout != torch.strided or type(result) not in (Tensor, nn.Parameter):
                self.refuse(f"{type(result).__name__} ({result.layout}) is no plain tensor")
            self._show(node, result, shown)
            if self._node_of(result) is None:
                self.know(result, node)
            self.versions.note([result])
            if self.repeats.folds:
                self.history.made(result, self.known[id(result)][0])
        elif isinstance(result, tuple | list):
            self._show(node, tuple(result))
            for index, item in enumerate(result):
                if item is not None:
                    picked = self.graph.call_function(operator.getitem, (node, index))
                    self.repeats.place(picked)
                    picked.meta["stack_trace"] = node.meta["stack_trace"]
                    self.dependence.note(picked, ())
                    self._bind(item, picked, node.meta["example_value"][index])
        else:
            self.refuse(f"{node.target} shows Python the values of a tensor ({type(result).__name__})")

    def _check_updates(self, updated: Sequence[fx.Node], node: fx.Node) -> None:
        """Values from outside may be updated, but autograd's record of them stays as it is."""
        memory = {self.dependence.memory[leaf] for leaf in updated}
        if not memory.isdisjoint(self.cut):
            self.refuse("a state of an earlier call is zeroed, and updated in place after that")
        outside = not memory.isdisjoint(self.memory)
        tensors = [each for each in map(example, node.all_input_nodes) if each is not None]
        if not outside or node.target in STATISTICS or not torch.is_grad_enabled():
            return
        if any(value.requires_grad for value in tensors):
            self.refuse("a tensor of the model's or an argument is updated in place with gradients")

    def operand(self, value: Any) -> Any:
        """An operand as a graph has it. Raises Unrecordable."""
        if isinstance(value, Tensor):
            if self.packing.holds(value):
                self.refuse("what a packed sequence holds is read by other than torch's layers over time")
            node = self._node_of(value)
            if node is None:
                self.refuse("a tensor is used that no recorded operation made, and no attribute or argument holds")
            if self.versions.is_changed(value):
                self.refuse("a tensor is changed in a way that torch shows nobody (set_, an assignment to a part)")
            return node
        if isinstance(value, slice):
            return slice(*(self.operand(each) for each in (value.start, value.stop, value.step)))
        if isinstance(value, tuple | list):
            items = [self.operand(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Mapping):
            return {key: self.operand(item) for key, item in value.items()}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, complex) and _is_written_otherwise(value):
            self.refuse("a complex number has a part that Python's text of it does not tell (-0.0, inf or nan)")
        return (
            _exact(value)
            if isinstance(value, _LITERALS)
            else self.refuse(f"{type(value).__name__} is no plain operand")
        )

    def refuse(self, reason: str, kind: type[Unrecordable] = Unrecordable) -> Any:
        """Raise Unrecordable, or a kind of it."""
        self.refusal = kind(f"{user_line()}: {reason}.")
        raise self.refusal


def _input_of(graph: fx.Graph, name: str) -> fx.Node:
    """A placeholder that can be a parameter of ``forward``: fx makes names legal and unique, but writes targets."""
    node = graph.placeholder("self_" if name == "self" else name)
    node.target = node.name
    return node


def _in_words(value: Any) -> list[str]:
    """The leaves of a value in words, but for tensors."""
    return [repr(leaf) if isinstance(leaf, _LITERALS) else type(leaf).__name__ for leaf in leaves_of(value)]


def _is_object(value: Any) -> bool:
    """Whether an operand is none that a graph may hold: it would be a plain tuple, list or dict there."""
    if isinstance(value, (tuple, list, Mapping)):
        return type(value) not in (tuple, list, dict, torch.Size) and not isinstance(value, _RETURNED)
    return not isinstance(value, (Tensor, slice, np.generic, *_LITERALS))


def _exact(value: Any) -> Any:
    """A number or a text of Python's own class: the text of a graph shows what another class writes."""
    if type(value) in _LITERALS or isinstance(value, Enum):
        return value
    plain: Any = next((each for each in (str, int, float, complex) if isinstance(value, each)), None)
    return value if plain is None else plain.__str__(value) if plain is str else plain.__pos__(value)


def _is_written_otherwise(value: complex) -> bool:
    parts = value.real, value.imag
    return any(not math.isfinite(part) or (part == 0 and math.copysign(1, part) < 0) for part in parts)
