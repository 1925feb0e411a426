"""Trainers of other libraries that have a list of their own of torch.compile's backends."""

from __future__ import annotations

import importlib
from typing import Any

from reroll.errors import UnsupportedError

_NAME = "REROLL"


def register_with_accelerate() -> None:
    """Let accelerate take ``reroll`` for the name of a backend, and so the Trainer of transformers:
    ``TrainingArguments(torch_compile=True, torch_compile_backend="reroll")``.

    accelerate looks backends up in an Enum, ``DynamoBackend``, and not in torch's registry. Enums ask ``_missing_`` for
    values that they do not have, which from now on knows this one; what it knew before it knows still. Calling this
    again changes nothing. Raises UnsupportedError where there is no accelerate with such a list.
    """
    try:
        backends: Any = importlib.import_module("accelerate.utils").DynamoBackend
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"accelerate has no list of backends that could take reroll ({error}). Install it, or compile the model "
            'before it is trained: model.compile(backend="reroll").'
        ) from error
    if _NAME in backends:
        return
    found = str.__new__(backends, _NAME)
    found._name_ = found._value_ = _NAME
    before = backends._missing_
    backends._missing_ = classmethod(lambda _, value: found if value == _NAME else before(value))
