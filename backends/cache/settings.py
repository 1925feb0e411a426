"""What tracing depends on beside the step: versions, our own sources, the machine, settings of torch.

Private torch API, tried on 2.11 and 2.13: ``config`` of ``torch._inductor`` and of ``torch._functorch`` (their settings
as they are, and ``force_disable_caches``), ``_get_sdp_priority_order``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from reroll.backends.cache.entries import Unkept
from reroll.backends.cache.patches import refuse_changed_torch
from reroll.graph.private import autocast_dtypes, precisions

_PASSES = ("joint_custom_pre_pass", "joint_custom_post_pass")
_PACKAGES = ("reroll", "reroll.backends", "reroll.passes")


def settings(devices: Iterable[torch.device]) -> str:
    """A text that differs where the same step could be traced otherwise. Raises Unkept where none can tell that."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    if inductor.force_disable_caches:
        raise Unkept("torch's caches are switched off")
    passes = [name for name in _PASSES if getattr(inductor, name, None) is not None]
    if passes:
        raise Unkept(f"torch._inductor.config.{passes[0]} is set")
    refuse_changed_torch()
    kinds = sorted({device.type for device in devices})
    parts = {
        "reroll": _sources(),
        "torch": (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip),
        "python": sys.version_info[:3],
        "machine": (platform.machine(), torch.backends.cpu.get_cpu_capability()),
        "cards": [_card() for kind in kinds if kind == "cuda"],
        "flags": flags(),
        "inductor": _stable(inductor.save_config_portable()),
        "functorch": _stable(functorch.save_config_portable()),
    }
    return repr(parts)


def _sources() -> str:
    """A digest of the sources of this package. Raises Unkept where they cannot be read."""
    try:
        return _digest()
    except OSError as error:
        raise Unkept(f"the sources of reroll cannot be read ({error.strerror})") from error


def _unread(error: OSError) -> None:
    raise error


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    places = [place for name in _PACKAGES for place in importlib.import_module(name).__path__]
    files = {
        Path(at, name).resolve()
        for place in places
        for at, _, names in os.walk(place, onerror=_unread, followlinks=True)
        for name in names
    }
    for path in sorted(path for path in files if path.suffix == ".py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _card() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    named = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return (*named, cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.version())


def flags() -> tuple[Any, ...]:
    """Settings of torch that its Python code reads while a step is traced."""
    backends: Any = torch.backends
    kinds = ("cpu", "cuda")
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        precisions(),
        (autocast_dtypes(), [torch.get_autocast_dtype(kind) for kind in kinds], torch.is_autocast_cache_enabled()),
        backends.mkldnn.is_available() and backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
        backends.opt_einsum.is_available() and (backends.opt_einsum.enabled, backends.opt_einsum.strategy),
        [getattr(backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")],
        (backends.cuda.fp16_bf16_reduction_math_sdp_allowed(), torch._C._get_sdp_priority_order()),
    )


def _stable(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings whose text is the same in every process. Raises Unkept for one that is a function or an object."""
    told = [(name, repr(value)) for name, value in sorted(found.items())]
    strange = [name for name, value in told if " at 0x" in value]
    if strange:
        raise Unkept(f"the setting {strange[0]} of torch is an object")
    return told
