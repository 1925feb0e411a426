"""Networks of ``epoch.py`` in JAX: the same calls, in a process of its own (``epoch.py --jax PYTHON``).

    python3 -m venv build/jax && build/jax/bin/pip install jax equinox numpy

``python epoch_jax.py FOLDER NETWORK`` reads the plan of calls (``plan.json``), the parameters and the inputs of both
sizes of the batch (``given.npz``). A training call is the loss, its gradients and a step of SGD in one jitted function,
an evaluation is the jitted network. It prints the seconds of each call as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import depth_jax
import jax
import jax.numpy as jnp
import numpy as np
from depth_jax import Parameters, inside
from jax import lax
from speed_jax import Step, gru, lstm, recurrent

GATES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def scanned(step: Step, p: Parameters, sizes: tuple[int, ...], x_TBI: Any) -> Any:
    """The last tensor of the state after each step, from zeros on."""
    state = tuple(jnp.zeros((x_TBI.shape[1], size)) for size in sizes)

    def one(carry: Any, x_BI: Any) -> tuple[Any, Any]:
        after = step(p, carry, x_BI)
        return after, after[-1]

    return lax.scan(one, state, x_TBI)[1]


def cell(p: Parameters, prefix: str, layer: int) -> Parameters:
    """A layer of ``nn.LSTM`` or ``nn.GRU`` as the cell that the steps read."""
    return {f"cell.{gate}": p[f"{prefix}.{gate}_l{layer}"] for gate in GATES}


def d2r(p: Parameters, x_TBI: Any) -> Any:
    """The summed readout."""
    neurons, outputs = p["wr.weight"].shape[0], p["wo.bias"].shape[0]
    return scanned(recurrent, p, (neurons, neurons, outputs), x_TBI)[-1]


def long_short(p: Parameters, x_TBI: Any) -> Any:
    """The last hidden state of ``nn.LSTM``."""
    neurons = p["layer.weight_hh_l0"].shape[1]
    return scanned(lstm, cell(p, "layer", 0), (neurons, neurons), x_TBI)[-1]


def language(p: Parameters, x_TB: Any, target_TB: Any) -> Any:
    """The loss of ``LanguageModel`` with two layers."""
    p = inside(p, "network")
    x_TBI = p["table.weight"][x_TB]
    for layer in range(2):
        x_TBI = scanned(gru, cell(p, "rnn", layer), (p[f"rnn.weight_hh_l{layer}"].shape[1],), x_TBI)
    return depth_jax.loss_of(x_TBI @ p["readout.weight"].T + p["readout.bias"], target_TB)


def gpt(p: Parameters, text_BS: Any, wanted_BS: Any) -> Any:
    """The loss of a GPT of 12 blocks."""
    stacks = depth_jax.NETWORKS["GPT"].stacks(12)
    p = depth_jax.stacked(inside(p, "network"), stacks)
    return depth_jax.loss_of(depth_jax.gpt(p, text_BS, depth_jax.kept), wanted_BS)


NETWORKS: dict[str, Callable[..., Any]] = {"D2r": d2r, "LSTM": long_short, "language model": language, "GPT": gpt}


def clocks() -> tuple[float, float]:
    """Now, by the clock and in CPU seconds."""
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Run the plan."""
    jax.config.update("jax_default_matmul_precision", "highest")
    folder, network = Path(sys.argv[1]), NETWORKS[sys.argv[2]]
    told = json.loads((folder / "plan.json").read_text())
    with np.load(folder / "given.npz") as file:
        given = {name: jnp.asarray(file[name]) for name in file.files}
    p = inside(given, "value")
    batches = [tuple(inside(given, f"input.{size}").values()) for size in ("smaller", "whole")]

    def loss(p: Parameters, *inputs: Any) -> Any:
        found = network(p, *inputs)
        return found if found.ndim == 0 else (found**2).mean()

    @jax.jit  # type: ignore[untyped-decorator, unused-ignore]
    def train(p: Parameters, *inputs: Any) -> tuple[Any, Parameters]:
        value, grads = jax.value_and_grad(loss)(p, *inputs)
        return value, jax.tree.map(lambda a, grad: a - told["rate"] * grad, p, grads)

    evaluate, seconds, first = jax.jit(network), [], clocks()
    for epoch in told["epochs"]:
        seconds.append(list[Any]())
        for whole, training in epoch:
            begin = clocks()
            if training:
                value, p = jax.block_until_ready(train(p, *batches[whole]))
            else:
                jax.block_until_ready(evaluate(p, *batches[whole]))
            seconds[-1].append([round(now - then, 5) for now, then in zip(clocks(), begin, strict=True)])
    print(json.dumps({"calls_s": seconds, "cpu_s": clocks()[1] - first[1], "loss": float(value)}))


if __name__ == "__main__":
    main()
