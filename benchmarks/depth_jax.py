"""The networks of ``depth_networks.py`` in JAX, as a process that takes turns with ``depth.py --jax PYTHON``.

    python3 -m venv build/jax && build/jax/bin/pip install jax numpy

``python depth_jax.py FOLDER NETWORK WAY`` reads the inputs and torch's parameters from ``given.npz`` in FOLDER, stacks
the parameters of equal blocks, compiles a training step (loss and gradients) in which a ``lax.scan`` runs over each
stack, and runs it. It leaves the gradients in ``found.npz`` under torch's names, prints a line of JSON, then runs a
step for every line of its input and prints the CPU seconds that it took.

- JAX scan: what the backward reads is kept, as JAX chooses it
- JAX scan, dots: ``jax.checkpoint`` of each block that keeps products with weights alone, by the policy
  ``dots_with_no_batch_dims_saveable`` (what MaxText and T5X call "minimal"). A convolution is no such product: here
  ResNet and U-Net do what they do with full remat
- JAX scan, full remat: ``jax.checkpoint`` of each block that keeps its input alone

Bytes are the temporaries of the compiled program: parameters and gradients are its arguments and results. Products are
float32. Batch norms use the statistics of the batch; the running ones, which no gradient reads, are not computed.
JAX 0.10.2 on a CPU gives convolutions to its fast kernels outside of loops alone. In a scan they and their gradients
take 15 to 30 times as long, in every layout; this one, torch's, is the fastest there.

Shape letters: B batch, S tokens or pixels, C channels, H heads, D channels of a head, X and Y pixels.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parameters = dict[str, Any]
"""Arrays by torch's names; under the name of a stack: the parameters of its blocks, stacked, by their names inside."""
Remat = Callable[..., Any]
"""From a block to one that keeps less for its backward. It takes ``prevent_cse`` as ``jax.checkpoint`` does."""


def kept(block: Callable[..., Any], prevent_cse: bool = True) -> Callable[..., Any]:
    """The block itself."""
    return block


WAYS: Mapping[str, Remat] = {
    "JAX scan": kept,
    "JAX scan, dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "JAX scan, full remat": jax.checkpoint,
}


def through(stack: Parameters, block: Callable[[Parameters, Any], Any], x: Any, remat: Remat) -> Any:
    """``x`` after the blocks of a stack."""

    def one(x: Any, p: Parameters) -> tuple[Any, None]:
        return block(p, x), None

    return lax.scan(remat(one, prevent_cse=False), x, stack)[0]


def linear(p: Parameters, name: str, x: Any) -> Any:
    """A layer of ``nn.Linear``. A transposed weight would be kept for the backward beside the weight."""
    y = lax.dot_general(x, p[f"{name}.weight"], (((x.ndim - 1,), (1,)), ((), ())))
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def normal(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    """Of mean 0 and variance 1 over some axes."""
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def norm(p: Parameters, name: str, x: Any, epsilon: float = 1e-5) -> Any:
    """A layer of ``nn.LayerNorm``."""
    return normal(x, (-1,), epsilon) * p[f"{name}.weight"] + p[f"{name}.bias"]


def batch_norm(p: Parameters, name: str, x_BCXY: Any) -> Any:
    """A layer of ``nn.BatchNorm2d``."""
    return normal(x_BCXY, (0, 2, 3), 1e-5) * p[f"{name}.weight"][:, None, None] + p[f"{name}.bias"][:, None, None]


def rms_norm(p: Parameters, name: str, x: Any) -> Any:
    """LLaMA's norm."""
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p[f"{name}.weight"]


def convolution(p: Parameters, x_BCXY: Any, stride: int = 1, around: int = 0) -> Any:
    """``nn.Conv2d``."""
    y = lax.conv_general_dilated(x_BCXY, p["weight"], (stride, stride), ((around, around), (around, around)))
    return y + p["bias"][:, None, None] if "bias" in p else y


def gelu(x: Any) -> Any:
    """With the error function, as torch's."""
    return jax.nn.gelu(x, approximate=False)


def attention(query_BSC: Any, key_BSC: Any, value_BSC: Any, heads: int, causal: bool = False) -> Any:
    """Of heads that lie side by side in C."""
    split = (*query_BSC.shape[:2], heads, query_BSC.shape[2] // heads)
    query, key, value = (each.reshape(split) for each in (query_BSC, key_BSC, value_BSC))
    return jax.nn.dot_product_attention(query, key, value, is_causal=causal).reshape(query_BSC.shape)


def block(p: Parameters, x_BSC: Any, heads: int, causal: bool) -> Any:
    """``Block``, of GPT and ViT."""
    query, key, value = jnp.split(linear(p, "qkv", norm(p, "norm1", x_BSC)), 3, -1)
    x_BSC = x_BSC + linear(p, "back", attention(query, key, value, heads, causal))
    return x_BSC + linear(p, "down", gelu(linear(p, "up", norm(p, "norm2", x_BSC))))


def gpt(p: Parameters, text_BS: Any, remat: Remat) -> Any:
    """Logits of ``GPT``."""
    x_BSC = p["embedding.weight"][text_BS] + p["places.weight"][: text_BS.shape[1]]
    x_BSC = through(p["blocks"], partial(block, heads=4, causal=True), x_BSC, remat)
    return linear(p, "head", norm(p, "norm", x_BSC))


def patches(p: Parameters, x_BCXY: Any) -> Any:
    """Tokens of 4 by 4 pixels, (B, S, C)."""
    y_BCXY = convolution(inside(p, "patches"), x_BCXY, stride=4)
    return y_BCXY.reshape(*y_BCXY.shape[:2], -1).transpose(0, 2, 1)


def vit(p: Parameters, x_BCXY: Any, remat: Remat) -> Any:
    """Logits of ``ViT``."""
    x_BSC = patches(p, x_BCXY)
    first = jnp.broadcast_to(p["first"], (x_BSC.shape[0], 1, x_BSC.shape[2]))
    x_BSC = jnp.concatenate([first, x_BSC], 1) + p["places"]
    x_BSC = through(p["blocks"], partial(block, heads=3, causal=False), x_BSC, remat)
    return linear(p, "head", norm(p, "norm", x_BSC)[:, 0])


def mixing(p: Parameters, x_BSC: Any) -> Any:
    """``Mixing``."""
    y_BCS = norm(p, "norm1", x_BSC).transpose(0, 2, 1)
    x_BSC = x_BSC + linear(p, "down1", gelu(linear(p, "up1", y_BCS))).transpose(0, 2, 1)
    return x_BSC + linear(p, "down2", gelu(linear(p, "up2", norm(p, "norm2", x_BSC))))


def mixer(p: Parameters, x_BCXY: Any, remat: Remat) -> Any:
    """Logits of ``Mixer``."""
    return linear(p, "head", through(p["blocks"], mixing, patches(p, x_BCXY), remat).mean(1))


def residual(p: Parameters, x_BCXY: Any, stride: int = 1) -> Any:
    """``Residual``."""
    y_BCXY = jax.nn.relu(batch_norm(p, "norm1", convolution(inside(p, "conv1"), x_BCXY, stride, around=1)))
    y_BCXY = batch_norm(p, "norm2", convolution(inside(p, "conv2"), y_BCXY, around=1))
    past_BCXY = convolution(inside(p, "past"), x_BCXY, stride) if "past.weight" in p else x_BCXY
    return jax.nn.relu(past_BCXY + y_BCXY)


def resnet(p: Parameters, x_BCXY: Any, remat: Remat) -> Any:
    """Logits of ``ResNet``: a scan for each of three stages, and the blocks between two stages."""
    x_BCXY = convolution(inside(p, "stages.0"), x_BCXY, around=1)
    blocks = p["stage 0"]["conv1.weight"].shape[0]
    for stage in range(3):
        if stage:
            between = inside(p, f"stages.{1 + stage * blocks}")
            x_BCXY = remat(partial(residual, stride=2))(between, x_BCXY)
        x_BCXY = through(p[f"stage {stage}"], residual, x_BCXY, remat)
    return linear(p, "head", x_BCXY.mean((2, 3)))


def unet(p: Parameters, x_BCXY: Any, remat: Remat) -> Any:
    """The image of ``UNet``. ``up`` and ``join`` are stacked in the order of ``down``: the scan up runs backwards."""

    def down(x_BCXY: Any, q: Parameters) -> tuple[Any, Any]:
        y_BCXY = residual(q, x_BCXY)
        return y_BCXY, y_BCXY

    def up(x_BCXY: Any, each: tuple[Parameters, Parameters, Any]) -> tuple[Any, None]:
        q, join, skipped_BCXY = each
        return residual(q, convolution(join, jnp.concatenate([x_BCXY, skipped_BCXY], 1))), None

    x_BCXY = convolution(inside(p, "first"), x_BCXY, around=1)
    x_BCXY, skipped = lax.scan(remat(down, prevent_cse=False), x_BCXY, p["down"])
    on_the_way_up = p["up"], p["join"], skipped
    x_BCXY, _ = lax.scan(remat(up, prevent_cse=False), x_BCXY, on_the_way_up, reverse=True)
    return convolution(inside(p, "last"), x_BCXY, around=1)


def bert_layer(p: Parameters, x_BSC: Any) -> Any:
    """``BertLayer`` of transformers, without dropout."""
    query, key, value = (linear(p, f"attention.self.{name}", x_BSC) for name in ("query", "key", "value"))
    seen_BSC = linear(p, "attention.output.dense", attention(query, key, value, heads=4))
    x_BSC = norm(p, "attention.output.LayerNorm", x_BSC + seen_BSC, 1e-12)
    y_BSC = linear(p, "output.dense", gelu(linear(p, "intermediate.dense", x_BSC)))
    return norm(p, "output.LayerNorm", x_BSC + y_BSC, 1e-12)


def bert(p: Parameters, text_BS: Any, remat: Remat) -> Any:
    """Logits of ``BertForMaskedLM``. The embedding is the last layer too; it does not learn word 0, padding."""
    table = "model.bert.embeddings"
    words = p[f"{table}.word_embeddings.weight"]
    learnt = words.at[0].set(lax.stop_gradient(words[0]))
    x_BSC = learnt[text_BS] + p[f"{table}.token_type_embeddings.weight"][0]
    x_BSC = x_BSC + p[f"{table}.position_embeddings.weight"][: text_BS.shape[1]]
    x_BSC = through(p["layers"], bert_layer, norm(p, f"{table}.LayerNorm", x_BSC, 1e-12), remat)
    head = "model.cls.predictions"
    y_BSC = norm(p, f"{head}.transform.LayerNorm", gelu(linear(p, f"{head}.transform.dense", x_BSC)), 1e-12)
    return y_BSC @ words.T + p[f"{head}.bias"]


def turned(x_BSC: Any, heads: int) -> Any:
    """LLaMA's rotary embedding of queries or keys."""
    x_BSHD = x_BSC.reshape(*x_BSC.shape[:2], heads, -1)
    size = x_BSHD.shape[3]
    angles_SD = jnp.outer(jnp.arange(x_BSC.shape[1]), jnp.tile(1e4 ** (-jnp.arange(0, size, 2) / size), 2))
    x, y = jnp.split(x_BSHD, 2, 3)
    cos, sin = jnp.cos(angles_SD)[:, None], jnp.sin(angles_SD)[:, None]
    return (x_BSHD * cos + jnp.concatenate([-y, x], 3) * sin).reshape(x_BSC.shape)


def llama_layer(p: Parameters, x_BSC: Any) -> Any:
    """``LlamaDecoderLayer`` of transformers."""
    y_BSC = rms_norm(p, "input_layernorm", x_BSC)
    query, key, value = (linear(p, f"self_attn.{name}_proj", y_BSC) for name in "qkv")
    seen_BSC = attention(turned(query, 4), turned(key, 4), value, heads=4, causal=True)
    x_BSC = x_BSC + linear(p, "self_attn.o_proj", seen_BSC)
    y_BSC = rms_norm(p, "post_attention_layernorm", x_BSC)
    gated = jax.nn.silu(linear(p, "mlp.gate_proj", y_BSC)) * linear(p, "mlp.up_proj", y_BSC)
    return x_BSC + linear(p, "mlp.down_proj", gated)


def llama(p: Parameters, text_BS: Any, remat: Remat) -> Any:
    """Logits of ``LlamaForCausalLM``."""
    x_BSC = through(p["layers"], llama_layer, p["model.model.embed_tokens.weight"][text_BS], remat)
    return linear(p, "model.lm_head", rms_norm(p, "model.model.norm", x_BSC))


Stacks = dict[str, list[str]]
"""The modules of torch whose parameters are stacked, in their order, by the name of the stack."""


def stacks_of(prefix: str) -> Callable[[int], Stacks]:
    """One stack, of all modules of a list; named by the last part of the list's name."""
    return lambda blocks: {prefix.rsplit(".", 1)[-1]: [f"{prefix}.{number}" for number in range(blocks)]}


def resnet_stacks(blocks: int) -> Stacks:
    """Three stages; those after the first begin with a block of their own."""
    firsts = (1, 2 + blocks, 2 + 2 * blocks)
    ends = (1 + blocks, 1 + 2 * blocks, 1 + 3 * blocks)
    return {
        f"stage {stage}": [f"stages.{number}" for number in range(first, end)]
        for stage, (first, end) in enumerate(zip(firsts, ends, strict=True))
    }


def unet_stacks(blocks: int) -> Stacks:
    """The way down, and the way up from its last block to its first."""
    down, up = range(blocks), range(blocks - 1, -1, -1)
    numbers = {"down": down, "join": up, "up": up}
    return {name: [f"{name}.{number}" for number in each] for name, each in numbers.items()}


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and its stacks by its number of blocks."""

    network: Callable[[Parameters, Any, Remat], Any]
    stacks: Callable[[int], Stacks]


NETWORKS: Mapping[str, Case] = {
    "GPT": Case(gpt, stacks_of("blocks")),
    "BERT": Case(bert, lambda blocks: {"layers": stacks_of("model.bert.encoder.layer")(blocks)["layer"]}),
    "LLaMA": Case(llama, stacks_of("model.model.layers")),
    "ViT": Case(vit, stacks_of("blocks")),
    "ResNet": Case(resnet, resnet_stacks),
    "U-Net": Case(unet, unet_stacks),
    "MLP-Mixer": Case(mixer, stacks_of("blocks")),
}


def loss_of(found: Any, wanted: Any) -> Any:
    """Cross entropy with classes, else the mean square."""
    if jnp.issubdtype(wanted.dtype, jnp.floating):
        return ((found - wanted) ** 2).mean()
    return -jnp.take_along_axis(jax.nn.log_softmax(found), wanted[..., None], -1).mean()


def inside(p: Parameters, prefix: str) -> Parameters:
    """The parameters of one module, by their names in it."""
    return {name.removeprefix(f"{prefix}."): a for name, a in p.items() if name.startswith(f"{prefix}.")}


def stacked(p: Parameters, stacks: Stacks) -> Parameters:
    """From torch's names to stacks, beside what is in none."""
    blocks = {name: [inside(p, prefix) for prefix in prefixes] for name, prefixes in stacks.items()}
    of_blocks = tuple(f"{prefix}." for prefixes in stacks.values() for prefix in prefixes)
    rest = {name: a for name, a in p.items() if not name.startswith(of_blocks)}
    return rest | {name: jax.tree.map(lambda *each: jnp.stack(each), *those) for name, those in blocks.items()}


def unstacked(p: Parameters, stacks: Stacks) -> Parameters:
    """From stacks to torch's names."""
    rest = {name: a for name, a in p.items() if name not in stacks}
    return rest | {
        f"{prefix}.{name}": a[number]
        for stack, prefixes in stacks.items()
        for number, prefix in enumerate(prefixes)
        for name, a in p[stack].items()
    }


def main() -> None:
    """Compile, say what it takes, and serve."""
    folder, (kind, blocks), way = Path(sys.argv[1]), sys.argv[2].rsplit(" ", 1), sys.argv[3]
    case = NETWORKS[kind]
    stacks = case.stacks(int(blocks))
    jax.config.update("jax_default_matmul_precision", "highest")
    with np.load(folder / "given.npz") as file:
        given = {name: jnp.asarray(file[name]) for name in file.files}
    x, wanted = given.pop("x"), given.pop("wanted")
    p = stacked(inside(given, "value"), stacks)

    def loss(p: Parameters, x: Any, wanted: Any) -> Any:
        return loss_of(case.network(p, x, WAYS[way]), wanted)

    begin = time.process_time()
    step = jax.jit(jax.value_and_grad(loss)).lower(p, x, wanted).compile()
    _, found = jax.block_until_ready(step(p, x, wanted))
    told = {"first_s": time.process_time() - begin, "peak": step.memory_analysis().temp_size_in_bytes}
    np.savez(folder / "found.npz", **unstacked(jax.tree.map(np.asarray, found), stacks))
    print(json.dumps(told | {"jax": jax.__version__}), flush=True)
    for _ in sys.stdin:
        begin = time.process_time()
        jax.block_until_ready(step(p, x, wanted))
        print(time.process_time() - begin, flush=True)


if __name__ == "__main__":
    main()
