"""Empty and fake tensors like others: shapes and layouts for values that are not there.

Private torch API, tried on 2.11 and 2.13: ``FakeTensor``, which is made without an operation (``Fakes``; ``_is_param``
makes a parameter of it), and ``FakeTensorMode``; ``TracingContext`` and ``tracing`` (torch takes the mode of Dynamo's
tensors while that traces, unless it is told another one); ``_DisableTorchDispatch``, under which modes do not see
operations; ``StorageWeakRef``, by which a memory's identity (``_cdata``) is no other one's even once it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from reroll.graph.private import saved_as_it_is, storage_id, unseen


def fake_like(
    value: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int, bases: dict[Any, torch.Tensor]
) -> torch.Tensor:
    """A fake tensor of a layout, in the original's mode, so that it goes with parameters, which stay as they are.

    ``bases`` holds the memory of each storage, by the original's identity.
    """
    key, width = storage_id(value), value.element_size()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else offset
    nbytes = (last + 1) * width
    mode = value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode()
    with mode, torch.no_grad():
        whole = -(-nbytes // 16) * 16
        base = bases.setdefault(key, torch.empty(whole, dtype=torch.uint8, device=value.device))
        if base.untyped_storage().nbytes() < nbytes:
            base.untyped_storage().resize_(whole)
        flat = torch.as_strided(base, (nbytes,), (1,), 0).view(value.dtype)
        found = torch.as_strided(flat, size, stride, offset)
    found.requires_grad_(value.requires_grad)
    if value.requires_grad and not is_leaf(value):
        with mode, torch.enable_grad():
            return found.view_as(found)
    return found


def has_one_memory(value: torch.Tensor) -> bool:
    """Whether a tensor, or the one that a fake one stands for, has one memory of its own, with strides."""
    return type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and value.layout == torch.strided


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as bytes, as ``fake_like`` holds it."""
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode(), torch.no_grad():
        entries = value.untyped_storage().nbytes() // value.element_size()
        return value.detach().as_strided((entries,), (1,), 0).view(torch.uint8)


def is_leaf(value: torch.Tensor) -> bool:
    """Whether a value has no history. Of a view that was made under ``no_grad``, and whose memory was updated since,
    torch does not say it."""
    try:
        return value.is_leaf
    except RuntimeError:
        return False


class Fakes:
    """Fake tensors in place of tensors: of the same layout, sharing memory where these do, and without a history.

    Each is made in 10 us, a tenth of what torch takes. Identities of the tensors' memory stay apart while this is held.
    """

    def __init__(self) -> None:
        self.mode = new_fake_mode()
        self._memory = dict[int, tuple[StorageWeakRef, torch.UntypedStorage]]()

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor."""
        with unseen():
            storage, number = value.untyped_storage(), storage_id(value)
            if number not in self._memory:
                made = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
                self._memory[number] = StorageWeakRef(storage), made
            fake = self._laid_out(value, self._memory[number][1], int(value.storage_offset()))
        if isinstance(value, torch.nn.Parameter):
            fake._is_param = True  # which makes it one, as isinstance says
        return fake.requires_grad_() if value.requires_grad else fake

    def _laid_out(self, like: torch.Tensor, memory: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """A fake tensor like another one, in a memory."""
        flat = torch.empty(0, dtype=like.dtype, device="meta").set_(memory, offset, like.shape, like.stride())
        made: torch.Tensor = FakeTensor(self.mode, flat, like.device)
        return made

    def adopt(self, value: torch.Tensor, fake: torch.Tensor) -> bool:
        """Let a fake tensor stand for a tensor; whether it could, as nothing else stands for the tensor's memory."""
        with unseen():
            number, storage = storage_id(value), fake.untyped_storage()
            known = self._memory.setdefault(number, (StorageWeakRef(value.untyped_storage()), storage))
            return bool(known[1]._cdata == storage._cdata)

    def again(self, fake: torch.Tensor, beside: torch.Tensor | None = None, offset: int = 0) -> torch.Tensor:
        """Another fake tensor like one, in memory of its own, or ``offset`` entries into that of another one."""
        with unseen():
            if beside is None:
                beside = torch.empty(fake.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
                offset = int(fake.storage_offset())
            found = self._laid_out(fake, beside.untyped_storage(), offset)
        return found.requires_grad_() if fake.requires_grad else found


def new_fake_mode() -> FakeTensorMode:
    """A mode of its own for fake tensors."""
    return FakeTensorMode()


@contextmanager
def outside_dynamo(mode: FakeTensorMode) -> Iterator[None]:
    """Let torch know of this mode alone, as if Dynamo traced nothing around, and nobody had hooks on what autograd
    saves: those of torch.utils.checkpoint run the model again."""
    with tracing(TracingContext(mode)), saved_as_it_is():
        yield


def fake_of(mode: FakeTensorMode, value: Any) -> Any:
    """A fake tensor of a mode that is laid out as a tensor, and needs a gradient if it does; what is none as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        made = laid_out_like(value)
    return made.requires_grad_(value.requires_grad)


def laid_out_like(value: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the sizes, strides, dtype and device of another; it needs no gradient."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def resized(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty contiguous tensor of a shape, of the dtype and device of another; it needs a gradient if that does."""
    return value.new_empty(shape).requires_grad_(value.requires_grad)


def contiguous(value: torch.Tensor) -> torch.Tensor:
    """An example of the same values in contiguous memory; itself where it is."""
    return value if value.is_contiguous() else resized(value, value.shape)
