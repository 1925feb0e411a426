"""The networks of ``speed.py`` in JAX, as a process that takes turns with it: ``speed.py --jax PYTHON``.

    python3 -m venv build/jax && build/jax/bin/pip install jax equinox numpy

``python speed_jax.py FILE NETWORK CLOCK [WAY ...]`` reads inputs, parameters and their expected gradients from FILE
(numpy's npz), and compiles: ``lax.scan``; nested remat, which keeps the carries of segments of about sqrt(T) steps and
runs each again; and equinox's checkpointed loop with 8 checkpoints (or only the ways named). It prints a line of JSON
for each, then runs the one that is named on a line of its input and prints the seconds that this took, of CPU time or
on the wall (CLOCK: ``cpu``, ``wall``). Bytes are the temporaries of the compiled program. Products are float32
throughout, as torch's are. What cannot be compiled or run says so in its line, as ``error``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parameters = dict[str, Any]
State = tuple[Any, ...]
Step = Callable[[Parameters, State, Any], State]


@jax.custom_vjp  # type: ignore[untyped-decorator, unused-ignore]
def spike(u: Any) -> Any:
    """1 where u is above 0; the surrogate gradient is 1 / (1 + (pi u)^2)."""
    return (u > 0).astype(u.dtype)


spike.defvjp(lambda u: (spike(u), u), lambda u, grad: (grad / (1 + (jnp.pi * u) ** 2),))


def linear(p: Parameters, name: str, x: Any) -> Any:
    """A layer of ``nn.Linear``."""
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def fired(v: Any, current: Any) -> tuple[Any, Any]:
    """Potentials and spikes of leaky neurons after one more step."""
    v = 0.9 * v + current
    z = spike(v - 1.0)
    return v - z, z


def recurrent(p: Parameters, state: State, x: Any) -> State:
    """Network D."""
    v, z, total = state
    v = 0.9 * v * (1 - z) + linear(p, "wi", x) + linear(p, "wr", z)
    z = spike(v - 1.0)
    return v, z, total + linear(p, "wo", z)


def feed_forward(p: Parameters, state: State, x: Any) -> State:
    """LIF layers, one after another."""
    u, v, total = state
    u, y = fired(u, linear(p, "first", x))
    v, z = fired(v, linear(p, "second", y))
    return u, v, 0.9 * total + linear(p, "third", z)


def single(p: Parameters, state: State, x: Any) -> State:
    """One layer of leaky neurons, and how often each has fired."""
    v, total = state
    v, z = fired(v, linear(p, "layer", x))
    return v, total + z


def convolution(p: Parameters, name: str, x: Any) -> Any:
    """A layer of ``nn.Conv2d`` with kernels of 3 by 3 and padding."""
    y = lax.conv_general_dilated(x, p[f"{name}.weight"], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return y + p[f"{name}.bias"][:, None, None]


def pooled(x: Any) -> Any:
    """Means over 2 by 2 pixels."""
    batch, channels, rows, columns = x.shape
    return x.reshape(batch, channels, rows // 2, 2, columns // 2, 2).mean((3, 5))


def convolutional(p: Parameters, state: State, x: Any) -> State:
    """Two spiking convolutions with pooling."""
    u, v, total = state
    u, y = fired(u, convolution(p, "first", x))
    v, z = fired(v, convolution(p, "second", pooled(y)))
    return u, v, 0.9 * total + linear(p, "out", pooled(z).reshape(z.shape[0], -1))


def lstm(p: Parameters, state: State, x: Any) -> State:
    """``nn.LSTMCell``."""
    c, h = state
    gates = x @ p["cell.weight_ih"].T + p["cell.bias_ih"] + h @ p["cell.weight_hh"].T + p["cell.bias_hh"]
    i, f, g, o = jnp.split(gates, 4, axis=1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def gru(p: Parameters, state: State, x: Any) -> State:
    """``nn.GRUCell``."""
    (h,) = state
    r, z, n = jnp.split(x @ p["cell.weight_ih"].T + p["cell.bias_ih"], 3, axis=1)
    s, y, m = jnp.split(h @ p["cell.weight_hh"].T + p["cell.bias_hh"], 3, axis=1)
    r, z = jax.nn.sigmoid(r + s), jax.nn.sigmoid(z + y)
    return ((1 - z) * jnp.tanh(n + r * m) + z * h,)


def tanh_rnn(p: Parameters, state: State, x: Any) -> State:
    """A tanh RNN."""
    return (jnp.tanh(linear(p, "wi", x) + linear(p, "wr", state[0])),)


STEPS: dict[str, Step] = {
    "Recurrent": recurrent,
    "FeedForward": feed_forward,
    "Single": single,
    "Convolutional": convolutional,
    "LSTMCell": lstm,
    "GRUCell": gru,
    "Tanh": tanh_rnn,
}


def contenders(step: Step, initial: State) -> dict[str, Callable[[Parameters, Any], Any]]:
    """Losses, whose gradients are to be found in different ways."""

    def scanned(p: Parameters, state: State, x: Any) -> Any:
        return lax.scan(lambda carry, each: (step(p, carry, each), None), state, x)[0]

    def nested(p: Parameters, x: Any) -> Any:
        steps = x.shape[0]
        length = min((k for k in range(1, steps + 1) if steps % k == 0), key=lambda k: abs(k - math.sqrt(steps)))
        segment = jax.checkpoint(scanned, prevent_cse=False)
        parts = x.reshape(steps // length, length, *x.shape[1:])
        return lax.scan(lambda carry, part: (segment(p, carry, part), None), initial, parts)[0]

    def binomial(p: Parameters, x: Any) -> Any:
        def one(carry: State, each: Any) -> tuple[State, None]:
            return step(p, carry, each), None

        return eqxi.scan(one, initial, x, kind="checkpointed", checkpoints=8)[0]

    ways = {
        "JAX lax.scan": lambda p, x: scanned(p, initial, x),
        "JAX nested remat": nested,
        "equinox, 8 checkpoints": binomial,
    }
    return {name: partial(loss_of, way) for name, way in ways.items()}


def loss_of(way: Callable[[Parameters, Any], Any], p: Parameters, x: Any) -> Any:
    """The mean square of the last tensor of the last state."""
    return (way(p, x)[-1] ** 2).mean()


def told(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is found out, or why it is not."""
    begin = time.perf_counter()
    try:
        found = run()
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    return {"first_step_wall_s": time.perf_counter() - begin, **found}


def main() -> None:
    """Compile, say what it takes, and serve."""
    jax.config.update("jax_default_matmul_precision", "highest")
    clock = time.perf_counter if sys.argv[3] == "wall" else time.process_time
    with np.load(sys.argv[1]) as file:
        arrays = {name: jnp.asarray(file[name]) for name in file.files}
    x = arrays.pop("x")
    parameters = {name.removeprefix("value."): a for name, a in arrays.items() if name.startswith("value.")}
    initial = tuple(arrays[f"state.{number}"] for number in range(sum(name.startswith("state.") for name in arrays)))
    compiled = {}

    def first(name: str, loss: Callable[..., Any]) -> dict[str, Any]:
        compiled[name] = jax.jit(jax.grad(loss)).lower(parameters, x).compile()
        found = jax.block_until_ready(compiled[name](parameters, x))
        errors = [abs(found[each] - arrays[f"grad.{each}"]).max() / abs(arrays[f"grad.{each}"]).max() for each in found]
        nbytes = compiled[name].memory_analysis().temp_size_in_bytes
        return {"relative_error": float(max(errors)), "local_peak_bytes": nbytes}

    ways = contenders(STEPS[sys.argv[2]], initial)
    for name, loss in ((name, ways[name]) for name in sys.argv[4:] or ways):
        found = told(partial(first, name, loss))
        print(json.dumps({"name": name, "jax": jax.__version__, "device": str(x.device), **found}), flush=True)
    print(flush=True)
    for line in sys.stdin:
        begin = clock()
        jax.block_until_ready(compiled[line.strip()](parameters, x))
        print(clock() - begin, flush=True)


if __name__ == "__main__":
    main()
