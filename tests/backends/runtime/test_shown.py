"""Hooks, ``retain_grad()`` and ``torch.autograd.grad`` on last states of which other results are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.backends.runtime import shown
from reroll.backends.runtime.node import RecurrenceModule
from reroll.errors import RerollWarning, UnsupportedError

T, B, H = 7, 2, 3


class Loop(nn.Module):
    """A cell whose states and what is read out of them are given in one of the ``GIVEN`` ways, with the last states."""

    def __init__(self, given: str) -> None:
        super().__init__()
        self.given = given
        self.cell, self.rnn, self.out = nn.LSTMCell(H, H), nn.RNNCell(H, H), nn.Linear(H, 2)

    def forward(self, x_TBH: Tensor) -> Any:
        h_BH, c_BH = (x_TBH.new_zeros(B, H) for _ in range(2))
        states, read = [], []
        for t in range(x_TBH.shape[0]):
            if self.given in ("simple", "batch first", "joined", "no other"):
                h_BH = self.rnn(x_TBH[t], h_BH)
            elif self.given == "random":
                h_BH = torch.tanh(self.rnn(x_TBH[t], functional.dropout(h_BH, 0.3)))
            else:
                h_BH, c_BH = self.cell(x_TBH[t], (h_BH, c_BH))
            states.append(h_BH)
            read.append(self.out(functional.dropout(h_BH, 0.5) if self.given == "random" else h_BH))
        return GIVEN[self.given](states, read, h_BH, c_BH)


GIVEN: dict[str, Callable[..., Any]] = {
    "simple": lambda states, read, h, c: (torch.stack(states), h),
    "batch first": lambda states, read, h, c: (torch.stack(states, 1), h),
    "joined": lambda states, read, h, c: (torch.cat(states), states[-1]),
    "no other": lambda states, read, h, c: (torch.stack(states), h.unsqueeze(0), h.detach()),
    "cell": lambda states, read, h, c: (torch.stack(states), h, c),
    "cell alone": lambda states, read, h, c: (h, c),
    "readouts": lambda states, read, h, c: (torch.stack(read), torch.stack(states[::2]), c, h),
    "loss": lambda states, read, h, c: ((torch.stack(states) ** 2).mean(), h, c),
    "random": lambda states, read, h, c: (torch.stack(read), h),
    "last row": lambda states, read, h, c: (torch.stack(read), torch.stack(states)[-1], c),
}


def compiled(model: nn.Module, door: str, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"lowering": "eager", "segment": 2, **options}
    if door == "reroll.compile":
        front: Callable[..., Any] = reroll.compile(model, **options)
        return front
    run: Callable[..., Any] = torch.compile(model, backend="reroll", options=options)
    return run


def loss_of(results: tuple[Tensor, ...], *without: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    terms = [(each * torch.rand(each.shape, generator=generator) + each**2).sum() for each in results]
    return torch.stack([term for n, term in enumerate(terms) if n not in without]).sum()


Seen = list[Tensor | None]


def hooked(results: tuple[Tensor, ...], leaves: list[Tensor], *without: int) -> Seen:
    seen: Seen = [None] * len(results)

    def hook(number: int) -> Callable[[Tensor], Tensor]:
        def clipped(grad: Tensor) -> Tensor:
            seen[number] = grad.clone()
            return grad.clamp(-0.4, 0.5)

        return clipped

    for number, each in enumerate(results):
        if each.requires_grad:
            each.register_hook(hook(number))
    loss = loss_of(results, *without)
    del results, each
    loss.backward()
    return seen


def retained(results: tuple[Tensor, ...], leaves: list[Tensor], *without: int) -> Seen:
    for each in results:
        if each.requires_grad:
            each.retain_grad()
    loss_of(results, *without).backward()
    return [each.grad for each in results]


def twice(results: tuple[Tensor, ...], leaves: list[Tensor], *without: int) -> Seen:
    if results[1].requires_grad:
        results[1].retain_grad()
    loss = loss_of(results, *without)
    torch.autograd.grad(loss, [results[0]], retain_graph=True, allow_unused=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return [results[1].grad]


def named(results: tuple[Tensor, ...], leaves: list[Tensor], *without: int) -> Seen:
    loss = loss_of(results, *without)
    wanted = [each for each in results if each.requires_grad]
    found: Seen = []
    for each in ([wanted[-1]], [*wanted, *leaves], leaves):
        found += torch.autograd.grad(loss, each, retain_graph=True, allow_unused=True)
    loss.backward()
    return found


def changed(results: tuple[Tensor, ...], leaves: list[Tensor], *without: int) -> Seen:
    if results[1].requires_grad:
        results[1].register_hook(lambda grad: 2 * grad)
    results[0].mul_(2)
    loss_of(results, *without).backward()
    return [results[0].detach()]


WAYS = (hooked, retained, twice, named, changed)


def found_by(run: Callable[..., Any], model: nn.Module, way: Callable[..., Seen], *without: int) -> Seen:
    """What is seen of the results, the gradients of all leaves, the next random number."""
    torch.manual_seed(3)
    x_TBH = torch.randn(T, B, H, requires_grad=True)
    model.zero_grad()
    leaves = [x_TBH, *model.parameters()]
    seen = way(run(x_TBH), leaves, *without)
    return [*seen, *(each.grad for each in leaves), torch.rand(())]


def agree(found: Seen, expected: Seen) -> bool:
    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, 0, 1e-12))

    return all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.variants(6)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("door", ["reroll.compile", "torch.compile"])
def test_gradients_of_last_states_are_whole(door: str, given: str, double_precision: None) -> None:
    torch.manual_seed(0)
    model = Loop(given)
    run = compiled(model, door)
    for way in WAYS:
        for without in ((), (0,), (1,)):
            expected = found_by(model, model, way, *without)
            assert agree(found_by(run, model, way, *without), expected), (way.__name__, without)


MUTANTS: dict[str, Callable[..., Any]] = {
    "nothing is handed": lambda self, number, grad, *_: {},
    "nothing is noted": lambda self, number, grad, *_: {0: grad[-1]},
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_state_without_its_share_is_noticed(
    mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, double_precision: None
) -> None:
    torch.manual_seed(0)
    model = Loop("simple")
    run = compiled(model, "torch.compile")
    expected = found_by(model, model, retained)
    assert agree(found_by(run, model, retained), expected)
    monkeypatch.setattr(shown.Shares, "of", mutant)
    assert not agree(found_by(run, model, retained), expected)


def test_shares_are_made_only_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nobody has asked")

    model = Loop("cell")
    run = compiled(model, "torch.compile")
    results = run(torch.randn(T, B, H))
    results[1].register_hook(lambda grad: grad * 2).remove()
    monkeypatch.setattr(shown.Shares, "of", never)
    loss_of(results).backward()
    assert all(each.grad is not None for each in model.cell.parameters())


def test_results_are_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Loop("cell")
    run = compiled(model, "torch.compile")
    x_TBH = torch.randn(T, B, H)
    results = run(x_TBH)
    monkeypatch.setattr(RecurrenceModule, "_joined", lambda _, results, __: results)
    for a, b in zip(results, run(x_TBH), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert (a.is_leaf, a._is_view(), a._version) == (b.is_leaf, b._is_view(), b._version)
    assert len({each.untyped_storage().data_ptr() for each in results}) == 3
    with torch.no_grad():
        assert not any(each.requires_grad for each in run(x_TBH))


@pytest.mark.parametrize("backward", [False, True])
def test_results_are_freed_without_a_collector(backward: bool) -> None:
    model = Loop("cell")
    run = compiled(model, "torch.compile")
    loss_of(run(torch.randn(T, B, H)))
    gc.collect()
    gc.disable()
    try:
        results = run(torch.randn(T, B, H))
        gone = [weakref.ref(each.untyped_storage()) for each in results]
        for each in results:
            each.retain_grad()
        if backward:
            loss_of(results).backward()
        del results, each
        assert not any(each() for each in gone)
    finally:
        gc.enable()


EARLIER: dict[str, tuple[Callable[..., Any], bool]] = {  # whether a gradient is that of eager
    "a state beside the stack": (lambda states, read, h, c: (torch.stack(states), states[3]), False),
    "all states": (lambda states, read, h, c: [*states], False),
    "readouts beside their stack": (lambda states, read, h, c: (torch.stack(read), read[2]), False),
    "all readouts, and the last states": (lambda states, read, h, c: [*read, c, h], True),
    "all readouts": (lambda states, read, h, c: read, True),
    "rows of the stack": (lambda states, *_: (lambda rows: (rows, rows[3], states[-1]))(torch.stack(states)), True),
}


@pytest.mark.parametrize("given", EARLIER)
@pytest.mark.parametrize("door", ["reroll.compile", "torch.compile"])
def test_earlier_states_that_are_looked_at_are_right_or_refused(
    door: str, given: str, monkeypatch: pytest.MonkeyPatch, double_precision: None
) -> None:
    torch.manual_seed(0)
    give, right = EARLIER[given]
    monkeypatch.setitem(GIVEN, "earlier", give)
    model = Loop("earlier")
    run = compiled(model, door)
    for way in (hooked, retained, named) if right else (retained,):
        if right:
            for without in ((),) if way is hooked else ((), (T - 1,), (0,)):
                assert agree(found_by(run, model, way, *without), found_by(model, model, way, *without))
            continue
        with pytest.raises(UnsupportedError, match="row t of a tensor of zeros"):
            found_by(run, model, way)

    def stack(results: tuple[Tensor, ...], leaves: list[Tensor]) -> Seen:
        results[0].retain_grad()
        loss_of(results).backward()
        return [results[0].grad]

    if given.endswith("stack"):
        assert agree(found_by(run, model, stack), found_by(model, model, stack))


def test_zeros_have_the_gradients_of_earlier_states(double_precision: None) -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(H, H)

        def forward(self, x_TBH: Tensor, zeros_TBH: Tensor) -> tuple[Tensor, list[Tensor]]:
            h_BH, states = x_TBH.new_zeros(B, H), []
            for t in range(x_TBH.shape[0]):
                h_BH = self.cell(x_TBH[t], h_BH) + zeros_TBH[t]
                states.append(h_BH)
            return torch.stack(states), states

    torch.manual_seed(0)
    model, x_TBH, zeros_TBH = Open(), torch.randn(T, B, H), torch.zeros(T, B, H, requires_grad=True)
    stacked_TBH, states = model(x_TBH, torch.zeros(T, B, H))
    for each in states:
        each.retain_grad()
    loss_of((stacked_TBH, states[3])).backward()
    stacked_TBH, mine = compiled(model, "torch.compile")(x_TBH, zeros_TBH)
    loss_of((stacked_TBH, mine[3])).backward()
    assert zeros_TBH.grad is not None
    assert agree([*zeros_TBH.grad], [each.grad for each in states])


def test_a_checkpoint_around_a_call_unpacks_what_it_saves_once(double_precision: None) -> None:
    torch.manual_seed(0)
    model, found = Loop("cell"), list[Seen]()
    for run in (model, compiled(model, "reroll.compile")):

        def inside(x_TBH: Tensor, run: Callable[..., Any] = run) -> Any:
            states, _, c_BH = run(x_TBH)
            c_BH.register_hook(lambda grad: 2 * grad)
            return states, c_BH

        x_TBH = torch.ones(T, B, H, requires_grad=True)
        model.zero_grad()
        states, c_BH = checkpoint(inside, x_TBH, use_reentrant=False)
        (states.sum() + c_BH.square().sum()).backward()
        found.append([x_TBH.grad, *(each.grad for each in model.parameters())])
    assert agree(*found)


def test_second_derivatives_of_a_share_that_torch_makes_are_refused(double_precision: None) -> None:
    torch.manual_seed(0)
    model = Loop("cell alone")
    h_BH, c_BH = compiled(model, "torch.compile")(torch.randn(T, B, H))
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        torch.autograd.grad(loss_of((h_BH, c_BH)), [c_BH], create_graph=True)


@pytest.mark.inductor
def test_by_inductor_but_where_it_draws_other_numbers() -> None:
    torch.manual_seed(0)
    model = Loop("cell")
    run = compiled(model, "torch.compile", lowering="inductor", segment=3)
    for way in (hooked, named):
        pairs = zip(found_by(run, model, way), found_by(model, model, way), strict=True)
        assert all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs if a is not None and b is not None)
    model = Loop("random")
    run = compiled(model, "torch.compile", lowering="inductor", segment=3)
    read_TBO, h_BH = run(torch.randn(T, B, H))
    with pytest.warns(RerollWarning, match="all is right"):
        torch.autograd.grad(loss_of((read_TBO, h_BH)), list(model.out.parameters()), retain_graph=True)
    with pytest.raises(UnsupportedError, match="lowering='eager'"):
        torch.autograd.grad(loss_of((read_TBO, h_BH)), [h_BH], retain_graph=True)
    loss_of((read_TBO, h_BH)).backward(retain_graph=True)
    h_BH.retain_grad()
    with pytest.raises(UnsupportedError, match="lowering='eager'"):
        loss_of((read_TBO, h_BH)).backward()
