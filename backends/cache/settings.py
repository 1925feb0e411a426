"""What tracing depends on beside the step: versions, our own sources, the machine, settings of torch.

Private torch API, tried on 2.11 and 2.13: ``config`` of ``torch._inductor`` and of ``torch._functorch`` (their settings
as they are, and ``force_disable_caches``), ``_impls`` of ``torch.library`` (what Python code gave to operators).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import platform
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from reroll.backends.cache.entries import Unkept

_PASSES = ("joint_custom_pre_pass", "joint_custom_post_pass")
_PACKAGES = ("reroll", "reroll.backends", "reroll.passes")
_TABLES = (("torch._decomp", "decomposition_table"), ("torch._inductor.decomposition", "decompositions"))
_ABOVE = ("Autograd", "Composite", "Functionalize", "ADInplaceOrView")  # dispatch keys that tracing sees


def settings(devices: Iterable[torch.device]) -> str:
    """A text that differs where the same step could be traced otherwise. Raises Unkept where none can tell that."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    if inductor.force_disable_caches:
        raise Unkept("torch's caches are switched off")
    passes = [name for name in _PASSES if getattr(inductor, name, None) is not None]
    if passes:
        raise Unkept(f"torch._inductor.config.{passes[0]} is set")
    _refuse_rules()
    kinds = sorted({device.type for device in devices})
    parts = {
        "reroll": _sources(),
        "torch": (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip),
        "python": sys.version_info[:3],
        "machine": (platform.machine(), torch.backends.cpu.get_cpu_capability()),
        "cards": [_card() for kind in kinds if kind == "cuda"],
        "flags": _flags(),
        "inductor": _stable(inductor.save_config_portable()),
        "functorch": _stable(functorch.save_config_portable()),
    }
    return repr(parts)


@functools.cache
def _sources() -> str:
    """A digest of the sources of this package."""
    digest = hashlib.sha256()
    places = [place for name in _PACKAGES for place in importlib.import_module(name).__path__]
    files = {
        Path(at, name).resolve()
        for place in places
        for at, _, names in os.walk(place, followlinks=True)
        for name in names
    }
    for path in sorted(path for path in files if path.suffix == ".py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _card() -> tuple[Any, ...]:
    cuda = torch.backends.cuda
    return (
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.version(),
    )


def _flags() -> tuple[Any, ...]:
    backends: Any = torch.backends
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_flush_denormal() if hasattr(torch, "get_flush_denormal") else None,
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
        backends.mkldnn.is_available() and backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
        backends.opt_einsum.is_available() and (backends.opt_einsum.enabled, backends.opt_einsum.strategy),
    )


def _stable(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings whose text is the same in every process. Raises Unkept for one that is a function or an object."""
    told = [(name, repr(value)) for name, value in sorted(found.items())]
    strange = [name for name, value in told if " at 0x" in value]
    if strange:
        raise Unkept(f"the setting {strange[0]} of torch is an object")
    return told


def _refuse_rules() -> None:
    """Raise Unkept where a decomposition or a gradient of one of torch's operators is not torch's own."""
    tables = [getattr(sys.modules.get(module), name, {}) for module, name in _TABLES]
    for target, rule in chain.from_iterable(table.items() for table in tables):
        if not str(getattr(getattr(rule, "func", rule), "__module__", "")).startswith("torch"):
            raise Unkept(f"the decomposition of {target} is not torch's own")
    for name in torch.library._impls:
        namespace, _, rest = name.partition("/")
        if namespace == "aten" and rest.rpartition("/")[2].startswith(_ABOVE):
            raise Unkept(f"{name} is not torch's own")
