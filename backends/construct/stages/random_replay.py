"""The random numbers of compiled segments, once more for torch's own operations.

Compiled code takes a seed from torch's generator for each operation that draws, and makes of it a number for each entry
by Philox: ten rounds on the number of the entry (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, doi:10.1145/2063384.2063405). Some operations draw from torch's generator itself. ``Noting`` sees what a run
takes from there, ``Drawing`` gives the same numbers to operations in another run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reroll.backends.construct.stages.seen import moved
from reroll.errors import UnsupportedError
from reroll.graph.private import Watching, is_overload
from reroll.segment.joint.graph import decompositions

aten = torch.ops.aten
_WORD = 0xFFFFFFFF
_FACTORS, _KEYS, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
_SIGMAS = 6


@dataclass(slots=True)
class RandomRecord:
    """What a run took from torch's generator, in order: seeds, and what operations gave that drew from it. ``unlike``:
    which operation has numbers of another distribution than torch's own, if one has."""

    seeds: list[int] = field(default_factory=list)
    others: list[tuple[str, Any]] = field(default_factory=list)
    unlike: str = ""


class Noting(Watching):
    """Notes what is drawn inside."""

    def __init__(self, drawn: RandomRecord) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs := kwargs or {}))
        if func is aten.randint.low_out and args[0] == torch.iinfo(torch.int64).min:
            self.drawn.seeds += found.tolist()
        elif _draws(func, kwargs):
            self.drawn.others.append((_name(func), _mask_or_copy(func, found)))
        return found


class Drawing(Watching):
    """Operations inside draw what was ``drawn``, all of it until ``end``. ``noise``: draws some roundings that are
    added to it. Raises UnsupportedError where something else is drawn."""

    def __init__(self, drawn: RandomRecord, noise: torch.Generator | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn, self.noise = drawn, noise
        self.seeds, self.others = iter(drawn.seeds), iter(drawn.others)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, kwargs):
            return func(*args, **kwargs)
        like, made = func(*args, **kwargs), _MADE.get(func)
        parts = _parts().get(func) if self.drawn.seeds else None
        if self.drawn.seeds and made is not None:
            found = made(next(self.seeds, None), *args).reshape(like.shape).to(like.dtype)
            return self._compared(func, found if self.noise is None else moved(found, self.noise).to(like.dtype), like)
        if parts is None:
            return self._noted(func, args, like)
        with self:
            found = parts(*args, **kwargs)
        return self._compared(func, found, like)

    def end(self) -> None:
        """All was drawn. Raises UnsupportedError if not."""
        if next(self.seeds, None) is not None or next(self.others, None) is not None:
            raise _other_numbers()

    def _noted(self, func: Any, args: Any, like: Any) -> Any:
        name, found = next(self.others, ("", None))
        if name != _name(func):
            raise _other_numbers()
        if func is not aten.native_dropout.default:
            return like.copy_(found)
        value, rate, *_ = args
        return value * found * (1 / (1 - rate) if rate < 1 else 0.0), found

    def _compared(self, func: Any, found: Any, like: Any) -> Any:
        """What is found; noted if it is not distributed as torch's own."""
        mine, torchs = (_mask_or_copy(func, each) for each in (found, like))
        if not self.drawn.unlike and not _as_often(mine, torchs):
            self.drawn.unlike = _name(func)
        return found


def _draws(func: Any, kwargs: Any) -> bool:
    """Whether an operation draws from torch's generator."""
    seeded = is_overload(func) and torch.Tag.nondeterministic_seeded in func.tags and func.namespace == "aten"
    return bool(seeded and kwargs.get("generator") is None)


def _name(func: Any) -> str:
    """What an operation is called, whether or not it draws in place."""
    name: str = func.overloadpacket.__name__
    return name.removesuffix("_")


def _mask_or_copy(func: Any, found: Any) -> Any:
    """What is random of a result."""
    return found[1].clone() if func is aten.native_dropout.default else found.clone()


def _other_numbers() -> UnsupportedError:
    return UnsupportedError("compiled code draws other random numbers than the model's operations")


@cache
def _parts() -> Any:
    """What compiled code does in place of an operation, by parts."""
    return decompositions()


def _as_often(mine: Tensor, torchs: Tensor) -> bool:
    """Whether numbers could be of one distribution, by their means and those of their squares."""
    pairs = [tuple(each.to(torch.float64).flatten() ** power for each in (mine, torchs)) for power in (1, 2)]
    return all(_near(*pair) for pair in pairs if pair[0].numel())


def _near(mine: Tensor, torchs: Tensor) -> bool:
    off = abs(float(mine.mean() - torchs.mean()))
    most = _SIGMAS * float(torch.cat([mine, torchs]).std(correction=0)) * (2 / mine.numel()) ** 0.5
    return not off > most  # nor where NaN are among them


def _words(seed: int | None, count: int) -> list[Any]:
    """Four words for each entry, by Philox."""
    if seed is None:
        raise _other_numbers()
    words, keys = (
        [np.arange(count, dtype=np.uint64), *(np.zeros(count, np.uint64) for _ in range(3))],
        [seed & _WORD, 0],
    )
    for _ in range(_ROUNDS):
        first, second = (word * np.uint64(factor) for word, factor in zip(words[::2], _FACTORS, strict=True))
        high, other = (each >> np.uint64(32) for each in (second, first))
        low, last = (each & np.uint64(_WORD) for each in (second, first))
        words = [high ^ words[1] ^ np.uint64(keys[0]), low, other ^ words[3] ^ np.uint64(keys[1]), last]
        keys = [(key + step) & _WORD for key, step in zip(keys, _KEYS, strict=True)]
    return words


def _uniform(word: Any) -> Any:
    return (word & np.uint64(0x7FFFFFFF)).astype(np.float32) * np.float32(4.6566127342e-10)


def _count(size: Any) -> int:
    return int(np.prod(size, dtype=np.int64))


def _rand(seed: int | None, size: Any, *_: Any) -> Tensor:
    return torch.from_numpy(_uniform(_words(seed, _count(size))[0]))


def _randn(seed: int | None, size: Any, *_: Any) -> Tensor:
    """By Box and Muller."""
    first, second = (1 - _uniform(word) for word in _words(seed, _count(size))[:2])
    return torch.from_numpy(np.sqrt(-2.0 * np.log(first).astype(np.float64)) * np.cos(2 * np.pi * second)).float()


def _randint(seed: int | None, low: int, high: int, size: Any, *_: Any) -> Tensor:
    first, second = _words(seed, _count(size))[:2]
    found = (first | second << np.uint64(32)) % np.uint64(high - low)
    return torch.from_numpy(found.astype(np.int64)) + low


_MADE: dict[Any, Callable[..., Tensor]] = {
    aten.rand.default: _rand,
    aten.randn.default: _randn,
    aten.randint.low: _randint,
}
