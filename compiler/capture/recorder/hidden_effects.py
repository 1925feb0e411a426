"""What a record could not tell, seen while a model runs: sizes and numbers out of values, and changes from aside.

Operations whose result has a size that depends on values (``nonzero``, a mask as an index) show it to Python unseen.
Some updates never come to a ``TorchFunctionMode`` (``set_``, an assignment to ``.real``), and neither does what sets
the state of the random numbers. They are found by their traces: the versions and memory of tensors, and the state.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reroll.capture.recorder.events import History
from reroll.graph.private import Watching, is_of_users, storage_id, unseen, version_of


def silently(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function gives, of which nobody is told that its code runs, nor what it calls."""
    before = sys.getprofile()
    if not callable(before):
        return run(*args, **kwargs)
    sys.setprofile(None)
    try:
        return run(*args, **kwargs)
    finally:
        sys.setprofile(before)


@contextmanager
def noted(by: Any) -> Iterator[None]:
    """Inside, somebody is told again which code runs, if there is one."""
    if by is None:
        yield
        return
    before = sys.getprofile()
    sys.setprofile(by)
    try:
        yield
    finally:
        sys.setprofile(before)


_SIZED, _SHOWING = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output


class SizeWatch(Watching):
    """Calls ``refuse`` where an operation inside makes sizes or numbers out of values, while ``watching`` says so."""

    def __init__(self, watching: Callable[[], bool], refuse: Callable[[str], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watching, self.refuse = watching, refuse

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.watching() and (_SHOWING in _tags(func) or _makes_sizes(func, args)):
            self.refuse(f"the sizes of what {func} gives, or numbers that it reads, depend on values")
        return func(*args, **(kwargs or {}))


def _makes_sizes(func: Any, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return _SIZED in _tags(func)


def _tags(func: Any) -> Any:
    return getattr(func, "tags", ())  # operators that run a function have none


class PlainRun(TorchFunctionMode):
    """Around a run that is only looked at, for what code runs: that of users' operators is not noted, as a graph calls
    them as a whole. Autograd's history is cut short."""

    def __init__(self) -> None:
        super().__init__()
        self.history = History()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = silently(func, *args, **kwargs) if is_of_users(func) else func(*args, **kwargs)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.requires_grad and _is_made(value, func, args, kwargs):
                silently(self.history.made, value, weakref.ref(value))
        return result


def _is_made(value: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation has made what it gives: that is no operand, nor what a property of one shows."""
    shown = getattr(func, "__name__", "") == "__get__" and not value._is_view()
    return not shown and not any(each is value for each in (*args, *kwargs.values()))


_FEW = 1024


class Alive(dict[int, Any]):
    """What is known of tensors, by their identity: tuples that begin with a weak reference. It does not grow with a
    run, as those that are gone are left out whenever there are twice as many entries as were left the last time."""

    most = _FEW
    put = dict.__setitem__
    """Sets an entry; ``prune`` follows."""

    def __setitem__(self, key: int, value: tuple[Any, ...]) -> None:
        self.put(key, value)
        self.prune()

    def prune(self) -> None:
        """Leave out what is gone, if there is much."""
        if len(self) > self.most:
            for each in [each for each, (known, *_) in self.items() if known() is None]:
                del self[each]
            self.most = max(2 * len(self), _FEW)


class Versions:
    """The versions and memory of tensors as a record knows them, to find what changed them unseen."""

    def __init__(self) -> None:
        self.known, self.sharing, self.most = Alive(), dict[int, dict[int, weakref.ref[Tensor]]](), _FEW

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors as they are now."""
        for value in tensors:
            if value.layout == torch.strided:
                known, memory = weakref.ref(value), storage_id(value)
                self.known[id(value)] = known, version_of(value), (memory, value.storage_offset())
                self.sharing.setdefault(memory, {})[id(value)] = known
        self.prune()

    def prune(self) -> None:
        """Leave out memory of which no tensor is left, if there is much."""
        if len(self.sharing) > self.most:
            held = {memory for known, _, (memory, _) in self.known.values() if known() is not None}
            self.sharing = {memory: found for memory, found in self.sharing.items() if memory in held}
            self.most = max(2 * len(self.sharing), _FEW)

    def updated(self, memory: Iterable[int]) -> list[Tensor]:
        """Note all tensors of some memory anew, as a recorded operation has updated it; those that there are."""
        found = [known() for each in memory for known in self.sharing.get(each, {}).values()]
        alive = [value for value in found if value is not None]
        self.note(alive)
        return alive

    def is_changed(self, value: Tensor) -> bool:
        """Whether a tensor was changed since it was noted last."""
        known, version, memory = self.known.get(id(value), (lambda: None, 0, None))
        if known() is not value:
            return False
        return bool(version_of(value) != version or memory != (storage_id(value), value.storage_offset()))


class States:
    """The states of torch's random numbers as a record knows them."""

    def __init__(self) -> None:
        self.known = _states()

    def note(self) -> None:
        """Note them as they are now, after an operation that draws."""
        self.known = _states()

    @property
    def are_changed(self) -> bool:
        """Whether something but a recorded operation has changed them."""
        with unseen():
            return any(not torch.equal(one, other) for one, other in zip(self.known, _states(), strict=False))


def _states() -> list[Tensor]:
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cards]
