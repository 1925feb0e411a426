"""When products are replayed: what the planner weighs, what reroll does then, and what explain says of rewrites."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import reroll
from networks import RecurrentLIF, spikes
from reroll.backends.construct import build
from reroll.planning.choose import ALONE
from reroll.planning.options import Options
from reroll.planning.replaying import Replaying
from reroll.report.rewrites import Rewrite

SPIKING = Replaying(segment=6, carry=34_000, kept=202_752, replayed=38_912, beside=1_000_000, work=1.23)
WHOLE = 1_000_000 + 167 * 202_752  # of 1,000 steps


def pays(steps: int = 1_000, loops: int = 1, found: Replaying = SPIKING, **options: Any) -> bool:
    return found.pays(steps, Options(**options), loops)


def test_without_a_budget_it_pays_where_it_halves_the_memory() -> None:
    assert pays()
    assert not pays(6), "gradients and packed weights are most of it"
    assert pays(6, found=replace(SPIKING, beside=100_000))


def test_it_always_pays_where_it_takes_next_to_no_time() -> None:
    cheap = replace(SPIKING, work=1.04)
    assert pays(6, found=cheap)
    assert pays(found=cheap, memory_budget=10 * WHOLE)


def test_under_a_budget_what_fits_and_runs_less_is_kept() -> None:
    assert not pays(memory_budget=WHOLE)
    assert not pays(memory_budget=int(0.9 * WHOLE)), "a tenth of the steps is run again in less time"
    assert pays(memory_budget=WHOLE // 3)
    found = [pays(memory_budget=nbytes) for nbytes in range(500_000, WHOLE, 500_000)]
    assert found == sorted(found, reverse=True), "with more memory it never pays again"


def test_other_budgets() -> None:
    assert pays(memory_budget=0.5)
    assert pays(6, memory_budget="auto"), "plans follow the memory that is free, segments do not"
    assert pays(memory_budget=int(0.9 * WHOLE), schedule="store_all"), "which runs no step again"
    assert pays(memory_budget=WHOLE, loops=4), "of which each gets a part"


def trained(run: Any, network: torch.nn.Module, x: Tensor) -> list[Tensor]:
    network.zero_grad(set_to_none=True)
    run(x).pow(2).sum().backward()
    return [each.grad for each in network.parameters() if each.grad is not None]


def replayed(fast: Any, x: Tensor) -> list[Rewrite]:
    return [each for each in reroll.explain(fast, x).loops[0].rewrites if each.name == "replay"]


@pytest.mark.parametrize(("steps", "options"), [((8, 100, 8), {}), ((100, 101), {"memory_budget": 10**7})])
def test_each_number_of_steps_has_what_pays_for_it(steps: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = RecurrentLIF(16, 64, 3).double()
    fast = reroll.compile(network, **options)
    for length in steps:
        x = spikes(length, 8, 16).double()
        found = trained(fast, network, x)
        for actual, expected in zip(found, trained(network, network, x), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-12)
        (told,) = replayed(fast, x)
        assert told.used == (not options and length == 100)
        assert told.held < 0
        assert told.work is not None
        assert told.work > 1


def test_what_was_left_out_comes_where_nothing_fits_without() -> None:
    built, tried = object(), list[Any]()

    def fastest(_: Any, __: Any, options: Options, ___: Any) -> Any:
        tried.append(options.replay)
        if options.replay != "auto":
            return built
        raise reroll.BudgetError("too little")

    kernels, recurrence = mock.Mock(replay=False, replaying=SPIKING), mock.Mock()
    with mock.patch.multiple(build, _fastest=fastest, segment_lengths=lambda *_: [8]):
        assert build._fitting(lambda *_: kernels, recurrence, Options(), ALONE) is built
        assert tried == ["auto", True]
        kernels.replay = True
        with pytest.raises(reroll.BudgetError, match="too little"):
            build._fitting(lambda *_: kernels, recurrence, Options(), ALONE)


class TwoDirections(torch.nn.Module):
    """A layer of spikes, and another that reads them backwards, so that they are two loops."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.back = RecurrentLIF(16, 64, 16, mean=False), RecurrentLIF(16, 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.back(self.ahead(x).flip(0))
        return read


def test_loops_that_share_a_budget_replay_where_nothing_fits_without() -> None:
    network, x = TwoDirections().double(), spikes(65, 8, 16).double()
    options: dict[str, Any] = {"lowering": "eager", "schedule": "store_all"}
    with pytest.raises(reroll.BudgetError) as refusal:
        trained(reroll.compile(network, memory_budget=1, replay=True, **options), network, x)
    fast = reroll.compile(network, memory_budget=refusal.value.nbytes, **options)
    with mock.patch.object(Replaying, "pays", return_value=False):
        found = trained(fast, network, x)
    pairs = zip(found, trained(network, network, x), strict=True)
    assert all(torch.allclose(actual, expected, rtol=1e-9, atol=1e-12) for actual, expected in pairs)
    assert all(rewrite.used for rewrite in replayed(fast, x))


def test_a_rewrite_says_what_it_changes() -> None:
    assert Rewrite("split-biases", 0, 1.0).describe() == "split-biases: no more held, no more work"
    told = Rewrite("replay", -2048, 1.234, used=False, each="each tape").describe()
    assert told == "replay, not used: 2 KiB less held in each tape, 1.23 times the work"
    told = Rewrite("event-products", 4096, None, (12, 14)).describe()
    assert told == "event-products: 12 operations of a segment become 14, 4 KiB more held"


def test_explain_says_what_rewrites_hold() -> None:
    network, x = RecurrentLIF(16, 64, 3), spikes(40, 8, 16)
    report = reroll.explain(reroll.compile(network), x)
    found = {each.name: each for each in report.loops[0].rewrites}
    assert found["merge-gradients"].calls is not None
    assert found["merge-gradients"].calls[1] < found["merge-gradients"].calls[0]
    assert found["pack-weights"].held > 0
    assert {each["name"] for each in report.to_json()["recurrences"][0]["rewrites"]} == set(found)
    assert found["merge-gradients"].describe() in " ".join(str(report).replace("│", " ").split())
