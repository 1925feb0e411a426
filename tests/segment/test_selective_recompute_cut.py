"""What a thin tape keeps, for small steps, and that its backward gives what the other one gives.

What is kept is given by the operation that made it. ``x`` is a carry, so keeping it takes bytes; ``w`` stays alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from reroll.graph.editing import ancestors
from reroll.graph.memory import origin
from reroll.segment.cut.partition import decided_by, partition
from reroll.segment.cut.policy import NO_POLICY
from reroll.segment.cut.selective_recompute import Thin, thinner

B, H = 4, 8
Step = Callable[[Tensor, Tensor], Tensor]


def inputs() -> list[Tensor]:
    x = torch.linspace(-2, 2, B * H).reshape(B, H).sin().double()
    return [x, torch.linspace(-1, 1, H * H).reshape(H, H).cos().double()]


def halves(step: Step) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a step, all saved that its backward reads."""

    def run(primals: list[Tensor], tangents: list[Tensor]) -> tuple[Tensor, ...]:
        result = step(*primals)
        return (result, *torch.autograd.grad(result, primals, tangents))

    torch.manual_seed(0)
    primals = [each.requires_grad_() for each in inputs()]
    joint = make_fx(run, tracing_mode="fake")(primals, [torch.ones(B, H, dtype=torch.float64)])
    joint.graph.eliminate_dead_code()
    cut = partition(joint, 1, {1}, NO_POLICY, pack=False)
    return cut.forward, cut.backward


def gelus(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x @ w) @ w.t()


def relus(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.relu(x @ w) @ w.t())


def compared(x: Tensor, w: Tensor) -> Tensor:
    u, v = x @ w, x @ w.t()
    return torch.maximum(u * u, v * v)


def dropped(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.tanh(x @ w), 0.5) @ w.t()


def attending(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = ((x @ each).view(1, 1, B, H) for each in (w, w.t(), w * 2))
    return F.scaled_dot_product_attention(q, k, v).view(B, H) @ w


def normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(torch.tanh(x @ w) @ w.t(), (H,))


KEPT: dict[str, tuple[Step, set[str]]] = {
    "products are repeated": (gelus, {"x"}),
    "attention stays": (attending, {"x", "aten._scaled_dot_product_flash_attention_for_cpu"}),
    "random numbers stay": (dropped, {"x", "aten.div_"}),
    "norms are repeated": (normed, {"x"}),
}


def kept(step: Step, forward: fx.GraphModule, thin: Thin) -> set[str]:
    """What made the values of a thin tape that do not stay alive anyway."""
    operands = forward.graph.find_nodes(op="placeholder")
    results: Any = forward.graph.output_node().args[0]
    saved = list(results[1:])
    nodes = [origin((saved + [operands[number] for number in thin.more])[number]) for number in thin.keeps]
    makers = [node.all_input_nodes[0] if "getitem" in str(node.target) else node for node in nodes]
    named = dict(zip(operands, ("x", "w"), strict=True))
    return {named.get(node) or str(getattr(node.target, "overloadpacket", "")) for node in makers} - {"w"}


def assert_same_gradients(forward: fx.GraphModule, backward: fx.GraphModule, thin: Thin) -> None:
    given, tangent = inputs(), torch.linspace(1, 2, B * H).reshape(B, H).double()
    torch.manual_seed(5)
    saved = list(forward(*given)[1:])
    assert len(saved) == thin.whole
    whole = backward(*saved, tangent)
    more = [given[number] for number in thin.more]
    found = thin.backward(*((saved + more)[number] for number in thin.keeps), tangent)
    assert all(map(torch.equal, found, whole))


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    step, expected = KEPT[name]
    forward, backward = halves(step)
    thin = thinner(forward, backward, 1, range(1, 2))
    assert thin is not None
    assert kept(step, forward, thin) == expected
    assert thin.work > 0
    assert_same_gradients(forward, backward, thin)


@pytest.mark.parametrize("step", [relus, compared], ids=["relu", "maximum"])
def test_nothing_is_made_twice_by_which_the_backward_decides(step: Step) -> None:
    """All that a threshold or a comparison reads is as the forward made it."""
    forward, backward = halves(step)
    thin = thinner(forward, backward, 1, range(1, 2))
    if thin is not None:
        assert_same_gradients(forward, backward, thin)
        targets = {str(node.target) for node in thin.backward.graph.nodes}
        assert not any("relu" in target or "maximum" in target for target in targets)
        decided = ancestors(source for node in thin.backward.graph.nodes for source in decided_by(node))
        assert not any("aten.mm" in str(node.target) for node in decided)


def rounded(x: Tensor, w: Tensor) -> Tensor:
    return torch.copysign((x @ w).detach(), (x @ w).sin()) * (x @ w) @ w.t()


def lossy(x: Tensor, w: Tensor) -> Tensor:
    return F.huber_loss(x @ w, (x @ w.t()).tanh(), reduction="none", delta=0.1) @ w.t()


def cut_off(x: Tensor, w: Tensor) -> Tensor:
    return torch.logit(torch.sigmoid(x @ w), 0.2) @ w.t()


@torch.library.custom_op("thin_tapes::slope", mutates_args=())
def slope(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a function of the user's, which nobody looks into."""
    return torch.where(x > 0, grad, 0.1 * grad)


@slope.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(grad)


class Leaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.55

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        found: Tensor = slope(grads[0], ctx.saved_tensors[0])
        return found


def owned(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = Leaky.apply((x @ w).tanh() * (x @ w.t()))  # type: ignore[no-untyped-call]
    return torch.tanh(found @ w)


DECIDES = {"copysign": rounded, "huber_loss_backward": lossy, "logit_backward": cut_off, "slope": owned}


@pytest.mark.parametrize("name", DECIDES)
def test_no_product_is_repeated_for_what_a_gradient_decides_by(name: str) -> None:
    forward, backward = halves(DECIDES[name])
    deciding = [node for node in backward.graph.nodes if name in str(node.target)]
    assert deciding
    thin = thinner(forward, backward, 1, range(1, 2))
    if thin is None:
        return
    assert_same_gradients(forward, backward, thin)
    for node in (node for node in thin.backward.graph.nodes if name in str(node.target)):
        operands = node.all_input_nodes[1:] if name.endswith("_backward") or name == "slope" else node.all_input_nodes
        assert not any("mm" in str(each.target) for each in ancestors(operands))


def test_a_view_keeps_all_that_it_is_a_view_of() -> None:
    """Half of a product decides, the other half could be made again: nothing would be freed."""

    def gated(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x @ torch.cat([w, w], 1)).chunk(2, -1)
        return (F.leaky_relu(a) * b) @ w

    assert thinner(*halves(gated), 1, range(1, 2)) is None


def test_a_tape_that_would_hardly_be_thinner_stays_whole() -> None:
    def pointwise(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x) @ w

    assert thinner(*halves(pointwise), 1, range(1, 2)) is None
