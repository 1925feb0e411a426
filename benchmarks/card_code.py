"""Whether inductor writes Triton code for segments on a card, found out on a machine without one.

    PYTHON benchmarks/card_code.py NETWORK    # one of card.py's; PYTHON has a CUDA build of torch, and no driver

Segments are captured and cut on the CPU; then the tensors of each half are said to lie on an H100, and inductor is let
write its code, up to where Triton would load it. That finds what only a card's code paths refuse: the first run on a
card failed at one of them for every spiking network. Kernels are neither built nor run. Tried on torch 2.11 (CUDA 13).

Written into torch, for this process: ``torch.cuda``'s questions about the device, ``init_gpu_context`` of fake tensors,
``has_triton`` and ``triton_hash_with_backend`` of inductor.
"""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace
from typing import Any

import torch
from card_points import NETWORKS, Point, small
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import reroll
from reroll.backends.inductor import lower

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=85 * 10**9,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)
LOADING = "libcuda"  # what Triton misses where all code is written
CARD = torch.device("cuda", 0)


def say_that_there_is_a_card() -> None:
    """From here on, in this process; Dynamo would try to use it, so only once it has read the model."""
    import torch._inductor.codegen.triton as written
    import torch._inductor.scheduler as scheduler
    import torch._subclasses.fake_tensor as fake

    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": H100,
        "_get_device_properties": H100,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
        "memory_allocated": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for place, name, value in (
        (fake, "init_gpu_context", lambda _: None),
        (scheduler, "has_triton", lambda *_: True),
        (written, "triton_hash_with_backend", lambda: ""),
    ):
        setattr(place, name, value)


def told_to_lie_there(half: fx.GraphModule, mode: Any) -> None:
    """The same graph, of tensors on the card; numbers stay on the computer."""
    inputs = half.graph.find_nodes(op="placeholder")
    for node in half.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CARD}
    with mode:
        for node in inputs:
            like = node.meta["val"]
            if like.dim():
                node.meta["val"] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=CARD)
    FakeTensorProp(half, mode).propagate_dont_convert_inputs(*(node.meta["val"] for node in inputs))


def written(point: Point) -> dict[str, str]:
    """For each half of the segments of a network: nothing, or what inductor failed with."""
    found: dict[str, str] = {}
    compiled = vars(lower)["compiled"]

    def on_card(half: fx.GraphModule, mode: Any, *, backward: bool) -> Any:
        say_that_there_is_a_card()
        told_to_lie_there(half, mode)
        try:
            compiled(half, mode, backward=backward)
        except Exception as error:  # noqa: BLE001  # whatever it fails with is what was found
            said = "" if LOADING in str(error) else f"{type(error).__name__}: {error}"
            found[f"{'backward' if backward else 'forward'} {len(found) // 2}"] = said[:500]
        return None

    vars(lower)["compiled"] = on_card
    try:
        model = NETWORKS[point.network][0](point.neurons)
        reroll.compile(model, start="compiled", schedule="store_all")(point.inputs_on(torch.device("cpu")))
    except TypeError:
        return found  # a half that is None cannot be called: all of them were tried
    finally:
        vars(lower)["compiled"] = compiled
    raise AssertionError("the model ran")


def main(given: list[str]) -> int:
    """One network: a process in which a card was told of reads no further model. The number of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=list(NETWORKS))
    found = written(small(Point(parser.parse_args(given).network, 768, 2, 64, (), 0)))
    for half, said in found.items():
        print(f"{half}: {said or 'written'}")
    return sum(map(bool, found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
