"""Values by name: those of reroll, those that users register, and plug-ins, loaded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from reroll.errors import RerollError, nearest


class Named(Protocol):
    """A frozen value that says what it is called."""

    @property
    def name(self) -> str:
        """What it is asked for by."""


T = TypeVar("T", bound=Named)


@dataclass(slots=True, eq=False)
class Registry(Generic[T]):
    """Values of one ``kind``, which is what messages call one, in the order in which they were registered.

    ``error`` is raised for a name that is taken, and for a plug-in that cannot be had; ``unknown``, by default the
    same, for a name that nothing has. ``group``: the entry points of installed packages that are plug-ins; ``adopt``
    registers what such a one names, where its import did not.
    """

    kind: str
    error: type[RerollError]
    unknown: type[RerollError] | None = None
    group: str = ""
    adopt: Callable[[str, Any], object] | None = None
    _values: dict[str, tuple[T, str]] = field(default_factory=dict)  # each with its origin
    _points: dict[str, EntryPoint] | None = None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._values

    def add(self, value: T, source: object) -> None:
        """Register a value; ``source``: the function or class that it is made of, by which it is known again.

        Raises ``error`` for a name that is taken, except in ``__main__``, where a notebook may run a cell again.
        """
        origin = f"{getattr(source, '__module__', '?')}:{getattr(source, '__qualname__', repr(source))}"
        _, taken = self._values.get(value.name, (None, ""))
        if taken and not (taken == origin and origin.startswith("__main__:")):
            raise self.error(f"{self._called(value.name, origin)} is taken by {taken}. Choose another name.")
        self._values[value.name] = value, origin

    def names(self) -> tuple[str, ...]:
        """All names that are known, those of plug-ins last."""
        return tuple(dict.fromkeys((*self._values, *self._plugins())))

    def values(self) -> tuple[T, ...]:
        """All that is known, plug-ins loaded. Raises ``error`` where one cannot be."""
        return tuple(map(self.find, self.names()))

    def find(self, name: str) -> T:
        """The value of that name; a plug-in is loaded now. Raises ``unknown``, naming the nearest valid name."""
        point = self._plugins().get(name) if self.group and isinstance(name, str) else None
        if point and name not in self._values:
            self._load(point)
        if name not in self:
            raise (self.unknown or self.error)(f"There is no {self.kind} {name!r}. {nearest(str(name), self.names())}")
        value, origin = self._values[name]
        if point and point.value != origin:
            raise self.error(f"{self._called(name, origin)} is taken by the entry point {point.value}.")
        return value

    def origin(self, name: str) -> str:
        """The module and the name of what a value is made of."""
        return self._values[name][1]

    def _called(self, name: str, origin: str) -> str:
        """The beginning of a sentence on a name."""
        return f"{self.kind.capitalize()} name {name!r} of {origin}"

    def _plugins(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, not loaded yet; looked for once."""
        if self._points is None:
            found: dict[str, EntryPoint] = {}
            for point in entry_points(group=self.group) if self.group else ():
                taken = found.setdefault(point.name, point)
                if taken.value != point.value:
                    raise self.error(
                        f"{self.kind.capitalize()} name {point.name!r} is declared by two installed packages, as "
                        f"{taken.value} and as {point.value}. Uninstall one of them."
                    )
            self._points = found
        return self._points

    def _load(self, point: EntryPoint) -> None:
        """Import a plug-in; the import may register it, else it is adopted."""
        called = f"{self.kind.capitalize()} {point.name!r} of the entry point {point.value}"
        try:
            target = point.load()
        except Exception as error:
            raise self.error(f"{called} cannot be imported: {error}") from error
        if point.name not in self._values and self.adopt:
            self.adopt(point.name, target)
