"""Every network of the zoo is re-rolled into the recurrences it is known to have, and equals eager autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reroll
from agreement import compare, sizes
from networks_zoo import SIZE, Net, Network, load
from reroll.errors import RerollWarning

ZOO = load()
REGULAR = ("plain_rnn", "lstm_cell", "lif", "batch_norm", "dropout", "out_rows", "mutates_input")
DOUBLE = {"schedule": "double", "chunk": 4, "slots": 2, "remote": "disk"}


pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def _what_dynamo_captures(request: pytest.FixtureRequest) -> None:
    if torch.__version__ < "2.13" and "snntorch" in request.node.name:
        pytest.skip("Dynamo of torch 2.11 and 2.12 breaks the graph at ``mem == None``")


def check(network: Network, steps: int, **options: Any) -> tuple[tuple[int, int], ...]:
    tolerance = 3e-2 if "autocast" in network.forward.__name__ else 1e-12
    model, inputs = Net(network), network.inputs(steps)
    different, made = compare(
        model, inputs, leaf=network.leaf, calls=network.calls, tolerance=tolerance, verify=True, **options
    )
    assert not different
    return sizes(made)


@pytest.mark.parametrize("name", ZOO)
def test_network(name: str) -> None:
    assert check(ZOO[name], ZOO[name].steps, schedule="standard") == ZOO[name].found


@pytest.mark.variants(4)
@pytest.mark.parametrize(("steps", "options"), [(5, {"schedule": "standard", "segment": 4}), (13, DOUBLE)])
@pytest.mark.parametrize("name", REGULAR)
def test_other_lengths(name: str, steps: int, options: dict[str, Any]) -> None:
    ((usual, carries),) = ZOO[name].found
    assert check(ZOO[name], steps, **options) == ((usual + steps - ZOO[name].steps, carries),)


@pytest.mark.parametrize("name", ["lstm_cell", "out_rows", "delays", "dropout", "batch_norm", "mutates_input"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short(name: str, steps: int) -> None:
    check(ZOO[name], steps, schedule="standard")


def test_other_batch_sizes_are_compiled_anew() -> None:
    model = Net(ZOO["lif"])
    run = torch.compile(model, backend="reroll", fullgraph=True, options={"lowering": "eager"})
    for batch in (2, 5, 3, 5, 1):
        x = torch.randn(6, batch, SIZE)
        assert torch.equal(run(x), model(x))


def test_numbers_that_change_between_calls() -> None:
    def network(s: Net, x: Tensor, leak: float) -> Tensor:
        h = x.new_zeros(x.shape[1], SIZE)
        for t in range(x.shape[0]):
            h = torch.tanh(leak * h + s.l(x[t]))
        return h

    model = Net(Network(network, (), lambda _: (), True, 1, 9))
    run = torch.compile(model, backend="reroll", fullgraph=True, options={"lowering": "eager"})
    x = torch.randn(6, 2, SIZE)
    for leak in (0.5, 0.7, 0.9):
        torch.testing.assert_close(run(x, leak), model(x, leak), rtol=1e-12, atol=1e-12)


def test_the_step_reads_as_the_code_does() -> None:
    _, made = compare(Net(ZOO["plain_rnn"]), ZOO["plain_rnn"].inputs(9))
    (recurrence,) = made[0].recurrences
    calls = [getattr(node.target, "__name__", "") for node in recurrence.step.graph.nodes if node.op.startswith("call")]
    assert calls == ["linear", "linear", "add", "tanh"]
    assert "zoo_cells.py" in recurrence.where
    assert recurrence.where in recurrence.describe()


def test_random_branches_are_left_to_torch() -> None:
    """Torch's own backward of ``cond`` draws other numbers than its forward did."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(3, 4)
            for t in range(x.shape[0]):
                branches = (lambda a: nn.functional.dropout(a, 0.3), lambda a: a * torch.rand_like(a))
                h = torch.tanh(self.cell(x[t]) + torch.cond(x[t].sum() > 0, *branches, (h,)))
            return h

    torch.manual_seed(0)
    model = torch.compile(Branching(), backend="reroll", options={"lowering": "eager"})
    with pytest.warns(RerollWarning, match=r"torch\.cond draws random numbers, at File .* torch\.where"):
        reroll.check(model, torch.randn(9, 3, 4, dtype=torch.float64), strict=True, measure=False)
