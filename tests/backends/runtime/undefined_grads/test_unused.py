"""What a loss does not use of a loop: functions whose backward gives something where nothing comes in, at such steps;
rows beside what is made of all; and what lies before operands on which the loss does not depend."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import reroll
from reroll.backends.runtime import undefined_grads
from reroll.errors import RerollWarning, UnsupportedError

Loss = Callable[[Any], Tensor]


class Aux(torch.autograd.Function):
    """The identity, with an auxiliary loss: the sum of its input, times 0.5."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.5


@torch.library.custom_op("tests_unused::aux", mutates_args=())
def aux(y: Tensor) -> Tensor:
    """The same as an operator of one's own."""
    return y.clone()


aux.register_fake(torch.empty_like)
aux.register_autograd(lambda ctx, grad: grad + 0.5)


class Surrogate(torch.autograd.Function):
    """A spike whose gradient is linear in what comes in."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return (y > 0).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return grad / (1 + y.abs()) ** 2


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {  # Dynamo of torch 2.11 breaks the graph at apply as an attribute
    "Aux": lambda y: Aux.apply(y),  # type: ignore[no-untyped-call]
    "operator": aux,
    "Surrogate": lambda y: Surrogate.apply(y),  # type: ignore[no-untyped-call]
}


class Net(nn.Module):
    """A tanh RNN with a function on its ``place``, the carry or the outputs, that ``gives`` a list, or all stacked."""

    def __init__(self, function: Callable[[Tensor], Tensor], place: str, gives: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.function, self.place, self.gives = function, place, gives

    def forward(self, x_TBI: Tensor) -> Any:
        h_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6), []
        for t in range(x_TBI.shape[0]):
            h_BH = torch.tanh(self.a(x_TBI[t]) + self.b(h_BH))
            if self.place == "carry":
                h_BH = self.function(h_BH)
            out.append(self.function(h_BH) if self.place == "outputs" else h_BH * 2)
        return (out if self.gives == "list" else torch.stack(out)), h_BH


def total(values: Any) -> Tensor:
    """The sum of all there is."""
    return values.sum() if isinstance(values, Tensor) else torch.stack([total(each) for each in values]).sum()


LOSSES: dict[str, Loss] = {
    "all": lambda found: total(found[0]) + total(found[1]),
    "outputs": lambda found: total(found[0]),
    "carry": lambda found: total(found[1]),
    "last": lambda found: total(found[0][-1]),
    "early": lambda found: total(found[0][3]),
    "some": lambda found: total(found[0][3]) + total(found[1]),
}
WRONG = {
    ("outputs", "stacked"): {"carry"},
    ("outputs", "list"): {"carry", "last", "early", "some"},
    ("carry", "stacked"): set[str](),
    ("carry", "list"): {"early"},
}


@pytest.mark.variants(4)
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize(("place", "gives"), WRONG)
@pytest.mark.parametrize(
    "own", ["Aux", *(pytest.param(own, marks=pytest.mark.campaign) for own in ("operator", "Surrogate"))]
)
def test_gradients_are_those_of_eager_or_refused(own: str, place: str, gives: str, way: str) -> None:
    model, x = Net(FUNCTIONS[own], place, gives).double(), torch.randn(20, 3, 4).double()
    options: dict[str, Any] = {"lowering": "eager", "segment": 4}
    backend: Any = torch.compile(model, backend="reroll", options=options)
    run = backend if way == "backend" else reroll.compile(model, **options)
    parameters, wrong = list(model.parameters()), WRONG[place, gives]
    for name, loss in [*LOSSES.items(), *LOSSES.items()]:
        plain = torch.autograd.grad(loss(model(x)), parameters)
        if own != "Surrogate" and name in wrong:
            with pytest.raises(UnsupportedError, match="function of your own"):
                torch.autograd.grad(loss(run(x)), parameters)
            whole = [loss(found) + 0 * LOSSES["all"](found) for found in (run(x), model(x))]
            torch.testing.assert_close(*(torch.autograd.grad(each, parameters) for each in whole))
        else:
            torch.testing.assert_close(torch.autograd.grad(loss(run(x)), parameters), plain)


class Rate(torch.autograd.Function):
    """A spike with a penalty on its rate: nothing is added where there is no spike."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        spike = (y > 0.3).to(y.dtype)
        ctx.save_for_backward(spike)
        return spike

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        spike: Tensor = ctx.saved_tensors[0]
        return grad + 0.1 * spike


class Leaky(nn.Module):
    """Integrates slowly, so that it is silent at first."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(4, 6), function

    def forward(self, x_TBI: Tensor) -> Any:
        v_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6), []
        for t in range(x_TBI.shape[0]):
            v_BH = 0.9 * v_BH + 0.05 * self.a(x_TBI[t]).abs()
            out.append(self.function(v_BH))
        return out, v_BH


@pytest.mark.parametrize(("function", "dtype"), [(Rate, torch.float64), (Aux, torch.bfloat16), (Aux, torch.float16)])
def test_what_is_added_later_or_is_little_is_found(function: Any, dtype: torch.dtype) -> None:
    model, x = Leaky(function.apply).to(dtype), torch.randn(30, 3, 4).to(dtype)
    run = reroll.compile(model, lowering="eager", segment=4)
    out, v_BH = run(x)
    with pytest.raises(UnsupportedError, match="function of your own"):
        (total(out[20]) + total(v_BH)).backward()


class Two(nn.Module):
    """A second loop reads the outputs of the first in another order, so that they are not fused."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.c = Net(function, "outputs", "list"), nn.Linear(6, 6)

    def forward(self, x_TBI: Tensor) -> Any:
        out, _ = self.first(x_TBI)
        v_BH, found = torch.zeros_like(out[0]), []
        for t in range(len(out)):
            v_BH = torch.tanh(out[len(out) - 1 - t] + self.c(v_BH))
            found.append(v_BH * 2)
        return found


@pytest.mark.parametrize("own", ["Aux", "Surrogate"])
def test_what_a_second_loop_does_not_use(own: str) -> None:
    model, x = Two(FUNCTIONS[own]).double(), torch.randn(20, 3, 4).double()
    run, parameters = reroll.compile(model, lowering="eager", segment=4), list(model.parameters())
    for last in (20, 4):
        plain = torch.autograd.grad(total(model(x)[:last]), parameters)
        if own == "Aux" and last == 4:
            with pytest.raises(UnsupportedError, match="function of your own"):
                torch.autograd.grad(total(run(x)[:last]), parameters)
        else:
            torch.testing.assert_close(torch.autograd.grad(total(run(x)[:last]), parameters), plain)


def test_random_numbers_of_a_checkpoint_are_no_difference() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 6)

        def forward(self, x_TBI: Tensor) -> Any:
            h_BH, out = x_TBI.new_zeros(x_TBI.shape[1], 6), []
            for t in range(x_TBI.shape[0]):
                h_BH = checkpoint(self.step, x_TBI[t], h_BH, use_reentrant=False)
                out.append(h_BH)
            return out, h_BH

        def step(self, x_BI: Tensor, h_BH: Tensor) -> Tensor:
            made: Tensor = Surrogate.apply(torch.dropout(self.a(x_BI) + h_BH, 0.3, True))  # type: ignore[no-untyped-call]
            return made

    model, x = Dropped().double(), torch.randn(20, 3, 4).double()
    run: Any = torch.compile(model, backend="reroll", options={"lowering": "eager", "segment": 4})
    for loss in LOSSES.values():
        loss(run(x)).backward()


def test_rows_along_another_dimension_stay_so() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(Surrogate.apply, "outputs", "stacked")

        def forward(self, x_TBI: Tensor) -> Any:
            return torch.unbind(self.net(x_TBI)[0], 1), torch.unbind(self.net(x_TBI)[0], 0)

    model, x = Last().double(), torch.randn(20, 3, 4).double()
    run: Any = torch.compile(model, backend="reroll", options={"lowering": "eager", "segment": 4})
    for found, plain in zip(run(x), model(x), strict=True):
        torch.testing.assert_close(found, plain)


def test_a_graph_that_is_kept_is_looked_at_each_time() -> None:
    model, x = Net(Aux.apply, "outputs", "list").double(), torch.randn(20, 3, 4).double()
    out, _ = reroll.compile(model, lowering="eager", segment=4)(x)
    total(out).backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="function of your own"):
        total(out[5]).backward(retain_graph=True)
    expected = torch.autograd.grad(total(model(x)[0]), list(model.parameters()))
    found = torch.autograd.grad(total(out), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_where_it_cannot_be_looked_at_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no step today\nat all")

    model, x = Net(Surrogate.apply, "outputs", "stacked").double(), torch.randn(20, 3, 4).double()
    plain = torch.autograd.grad(total(model(x)), list(model.parameters()))
    run = reroll.compile(model, lowering="eager", segment=4)
    monkeypatch.setattr(undefined_grads, "look", fail)
    with pytest.warns(RerollWarning, match=r"cannot be run by itself \(no step today\)"):
        found = torch.autograd.grad(total(run(x)), list(model.parameters()))
    torch.testing.assert_close(found, plain)


class BlocksThenSteps(nn.Module):
    """Blocks over depth, whose last result a loop over time reads row by row, beside something that no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
        self.norm, self.last = nn.BatchNorm1d(4), torch.zeros(())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, h, seen = self.blocks(x), x.new_zeros(3, 4), []
        for t in reversed(range(x.shape[0])):
            self.last = (self.norm(x[t]) * 0.3).detach()
            h = torch.tanh(h + torch.sin(y[t]))
            seen.append(h)
        return h, torch.stack(seen[::2])


def test_rows_of_a_last_carry_are_no_rows_of_steps() -> None:
    torch.manual_seed(0)
    model, x = BlocksThenSteps().double(), torch.randn(9, 3, 4, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"lowering": "eager", "schedule": "standard", "segment": 2}
    reroll.check(torch.compile(model, backend="reroll", options=options), x, strict=True, measure=False)


class Layers(nn.Module):
    """Layers with weights of their own, of whose states some are given beside what is made of all."""

    def __init__(self, given: Callable[[list[Tensor]], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.given = given
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4) * 0.4) for _ in range(8))

    def forward(self, x_TBH: Tensor) -> tuple[Tensor, ...]:
        h_BH, states = x_TBH[0], []
        for x_BH, weight in zip(x_TBH, self.weights, strict=True):
            h_BH = torch.tanh(h_BH @ weight + x_BH)
            states.append(h_BH)
        return self.given(states)


def read_by_a_loop(states: list[Tensor]) -> tuple[Tensor, ...]:
    """The first four states go through a second loop."""
    k_BH, read = torch.zeros_like(states[0]), []
    for state in states:
        k_BH = torch.tanh(0.5 * k_BH + state)
        read.append(k_BH)
    return torch.stack(states).sum(), read[3], states[1]


def read_twice(states: list[Tensor]) -> tuple[Tensor, ...]:
    """The first states go through a second loop, forward and backward at once."""
    k_BH = torch.zeros_like(states[0])
    for t in range(5):
        k_BH = torch.tanh(0.5 * k_BH + states[t] * states[4 - t])
    return torch.stack(states).sum(), k_BH, states[1]


PARTS: dict[str, Callable[[list[Tensor]], tuple[Tensor, ...]]] = {
    "a sum and a row": lambda states: (torch.stack(states).sum(), states[2].sum()),
    "a stack and rows": lambda states: (torch.stack(states), states[2], states[4]),
    "joined and rows": lambda states: (torch.cat(states, 1).tanh(), states[2], states[4]),
    "read by a loop": read_by_a_loop,
    "read twice": read_twice,
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.inductor)])
@pytest.mark.parametrize("parts", PARTS)
def test_rows_beside_what_is_made_of_all(parts: str, lowering: str) -> None:
    """A row says which steps it uses; that says nothing of the others, where all are used as a whole."""
    model, x_TBH = Layers(PARTS[parts]), torch.randn(8, 3, 4, requires_grad=True)
    run = torch.compile(model, backend="reroll", options={"lowering": lowering})
    count = len(model(x_TBH))
    for used in [*itertools.combinations(range(count), 1), *itertools.combinations(range(count), 2), range(count)]:
        found = []
        for each in (model, run):
            results = each(x_TBH)
            loss = sum(results[number].square().sum() for number in used)
            found.append(torch.autograd.grad(loss, [*model.parameters(), x_TBH], allow_unused=True))
        for mine, plain in zip(found[1], found[0], strict=True):
            assert (mine is None) == (plain is None)
            if plain is not None:
                torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10)


T, B, H = 9, 2, 3


def hooked(value: Tensor) -> Tensor:
    """The same value, with a hook."""
    value = value * 1.0
    if value.requires_grad:
        value.register_hook(lambda grad: grad + 0.5)
    return value


class Heads(nn.Module):
    """Two states of one loop, of which the second depends on one weight alone, and a second loop on the first."""

    def __init__(self, before: Callable[[Tensor], Tensor], place: str) -> None:
        super().__init__()
        self.before, self.place = before, place
        self.first, self.w, self.v = (nn.Parameter(torch.rand(*size) * 0.4) for size in ((H,), (H, H), (H,)))

    def at(self, place: str, value: Tensor) -> Tensor:
        return self.before(value) if place == self.place else value

    def forward(self, x_TBH: Tensor) -> tuple[Tensor, ...]:
        h_BH = self.at("state", self.first.expand(B, H))
        w_HH, x_TBH = self.at("weight", self.w), self.at("sequence", x_TBH)
        k_BH, hs, ks, ls = x_TBH.new_zeros(B, H), [], [], []
        for t in range(x_TBH.shape[0]):
            h_BH = torch.tanh(h_BH @ w_HH + x_TBH[t])
            k_BH = 0.5 * k_BH + self.v
            hs.append(h_BH)
            ks.append(k_BH)
        between_TBH, l_BH = self.at("between", torch.stack(hs)), x_TBH.new_zeros(B, H)
        m_BH = x_TBH.new_zeros(B, H)
        for t in range(x_TBH.shape[0]):
            l_BH = torch.tanh(0.3 * l_BH + between_TBH[t])
            m_BH = m_BH * 0.9 + self.v
            ls.append(m_BH)
        return torch.stack(hs), torch.stack(ks), l_BH, torch.stack(ls)


def gradients(model: nn.Module, run: Callable[..., Any], used: tuple[int, ...], leaf_hook: bool = False) -> list[Any]:
    """Of a loss of some results: for all parameters and the input; None, too."""
    torch.manual_seed(1)
    x_TBH = torch.randn(T, B, H, requires_grad=True)
    handles = [each.register_hook(lambda grad: 2 * grad) for each in (*model.parameters(), x_TBH) if leaf_hook]
    results = run(x_TBH)
    sum(results[number].square().sum() for number in used).backward()
    found = [each.grad for each in (*model.parameters(), x_TBH)]
    for each in (*handles,):
        each.remove()
    model.zero_grad()
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    """Equal gradients, None where there is none."""
    for mine, plain in zip(found, expected, strict=True):
        assert (mine is None) == (plain is None)
        if plain is not None:
            torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def both(door: str, model: nn.Module, **how: Any) -> Callable[..., Any]:
    how = {"lowering": "eager", **how}
    if door == "front":
        run: Callable[..., Any] = reroll.compile(model, **how)
        return run
    return torch.compile(model, backend="reroll", options=how)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("place", ["state", "weight", "sequence", "between", "none"])
@pytest.mark.parametrize("before", [Aux.apply, hooked])
@pytest.mark.parametrize("door", ["front", "backend"])
def test_what_a_loss_does_not_depend_on_is_not_run(door: str, before: Any, place: str) -> None:
    """Neither a function of the user's, nor a hook, on a value before the loop or on a leaf."""
    model = Heads(before, place)
    run = both(door, model)
    for used in ((1,), (3,), (2,), (0, 1, 2, 3)):
        for leaf_hook in (False, True):
            same(gradients(model, run, used, leaf_hook), gradients(model, model, used, leaf_hook))


@pytest.mark.usefixtures("double_precision")
def test_gradients_of_some_values_alone() -> None:
    """``torch.autograd.grad`` names an operand to which the loop's own node does not lead, alone and beside others,
    twice of a graph that is kept."""
    model = Heads(Aux.apply, "state")
    run = both("front", model)
    x_TBH = torch.randn(T, B, H, requires_grad=True)
    leaves = {"first": model.first, "w": model.w, "v": model.v, "x": x_TBH}
    for names in (("v",), ("first",), ("w", "x"), ("first", "v"), tuple(leaves)):
        for used in ((0,), (0, 1), (1, 2, 3)):
            found: list[Any] = []
            for each in (model, run):
                results = each(x_TBH)
                loss = sum(results[number].square().sum() for number in used)
                asked = [leaves[name] for name in names]
                for keep in (True, False):
                    found += torch.autograd.grad(loss, asked, retain_graph=keep, allow_unused=True)
            same(found[len(found) // 2 :], found[: len(found) // 2])


class Delayed(nn.Module):
    """A delay of two steps: each of the first states reaches other results than the other."""

    def forward(self, x_TBH: Tensor, a_BH: Tensor, b_BH: Tensor) -> tuple[Tensor, Tensor]:
        for t in range(x_TBH.shape[0]):
            a_BH, b_BH = torch.tanh(0.5 * b_BH + x_TBH[t] * 0), a_BH
        return a_BH, b_BH


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["store_all", "standard"])
def test_states_that_take_turns(schedule: str, segment: int) -> None:
    model = Delayed()
    run = reroll.compile(model, lowering="eager", schedule=schedule, segment=segment)
    for steps in (8, 9):
        for used in ((0,), (1,), (0, 1)):
            found = []
            for each in (model, run):
                torch.manual_seed(2)
                x_TBH, a_BH, b_BH = (torch.randn(*size, requires_grad=True) for size in ((steps, B, H), (B, H), (B, H)))
                given = [Aux.apply(value) for value in (a_BH, b_BH)]  # type: ignore[no-untyped-call]
                results = each(x_TBH, *given)
                sum(results[number].sum() for number in used).backward()
                found.append([x_TBH.grad, a_BH.grad, b_BH.grad])
            same(found[1], found[0])


@pytest.mark.usefixtures("double_precision")
def test_a_state_that_is_looked_at_and_a_checkpoint() -> None:
    """Hooks on results, and a graph that is made again in the backward."""
    model = Heads(hooked, "state")
    run = both("front", model)
    seen = []
    for each in (model, run):
        for again in (False, True):
            torch.manual_seed(3)
            x_TBH, shown = torch.randn(T, B, H, requires_grad=True), list[Tensor]()
            results = checkpoint(each, x_TBH, use_reentrant=False) if again else each(x_TBH)
            results[1].register_hook(shown.append)
            (results[1].sum() + results[3].square().sum()).backward()
            seen.append([*shown, *(parameter.grad for parameter in model.parameters()), x_TBH.grad])
            model.zero_grad()
    same(seen[2], seen[0])
    same(seen[3], seen[1])


@pytest.mark.usefixtures("double_precision")
def test_an_operand_that_is_changed_before_the_backward_is_refused() -> None:
    model = Heads(Aux.apply, "state")
    results = both("front", model)(torch.randn(T, B, H))
    with torch.no_grad():
        model.v.mul_(2)
        model.w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[1].sum().backward()


@pytest.mark.usefixtures("double_precision")
def test_hooks_on_parameters_that_a_loss_does_not_reach_are_not_called() -> None:
    """Neither on those of later layers, nor on what these are made of."""

    class Scaled(Layers):
        def forward(self, x_TBH: Tensor) -> tuple[Tensor, ...]:
            h_BH, states = x_TBH[0], []
            for x_BH, weight in zip(x_TBH, [0.5 * each for each in self.weights], strict=True):
                h_BH = torch.tanh(h_BH @ weight + x_BH)
                states.append(h_BH)
            return self.given(states)

    for made in (Layers, Scaled):
        model, seen = made(PARTS["a sum and a row"]), list[int]()
        handles = [each.register_hook(partial(doubled, seen, number)) for number, each in enumerate(model.weights)]
        run, x_TBH = torch.compile(model, backend="reroll", options={"lowering": "eager"}), torch.randn(8, 3, 4)
        run(x_TBH)  # the first call is proved
        found = []
        for each in (model, run):
            seen.clear()
            each(x_TBH)[1].backward()
            found.append(([weight.grad for weight in model.weights], sorted(seen)))
            model.zero_grad()
        same(found[1][0], found[0][0])
        assert found[0][1] == found[1][1] == [0, 1, 2]
        handles[0].remove()
        seen.clear()
        run(x_TBH)[0].backward()
        assert sorted(seen) == [*range(1, 8)]
        torch.compiler.reset()


def doubled(seen: list[int], number: int, grad: Tensor) -> Tensor:
    """A hook that notes its call."""
    seen.append(number)
    return 2 * grad


def turns(x_TBH: Tensor, u_BH: Tensor, v_H: Tensor) -> list[Tensor]:
    """Rows of which two lists read the same two states, in turn."""
    (a_BH, b_BH), h_BH, rows = (u_BH * 0.5, u_BH * 0.3), v_H.expand(*u_BH.shape), []
    for t, x_BH in enumerate(x_TBH):
        a_BH, b_BH, h_BH = b_BH, a_BH, h_BH * 0.5
        rows.append((x_BH + 0.2 * a_BH) * (0.5 if t % 3 == 0 else 1))
    return [*rows, h_BH]


def read_before(x_TBH: Tensor, u_BH: Tensor, v_H: Tensor) -> list[Tensor]:
    """Rows of which the first does not depend on what the others do."""
    h_BH, rows = torch.zeros_like(u_BH), []
    for x_BH in x_TBH:
        rows.append(x_BH.sin() + h_BH)
        h_BH = torch.tanh(h_BH * v_H + x_BH * v_H + u_BH)
    return [*rows, h_BH]


def at_times(x_TBH: Tensor, u_BH: Tensor, v_H: Tensor) -> list[Tensor]:
    """Rows that are made without gradients at every other step."""
    h_BH, rows = torch.zeros_like(u_BH), []
    for t, x_BH in enumerate(x_TBH):
        with torch.set_grad_enabled(t % 2 == 0):
            read_BH = torch.tanh(x_BH * v_H)
        h_BH = 0.5 * h_BH + read_BH
        rows.append(h_BH + u_BH)
    return [*rows, h_BH]


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("door", ["backend", "compile"])
@pytest.mark.parametrize("body", [turns, read_before, at_times])
def test_each_row_by_itself_has_the_gradients_of_eager(body: Callable[..., list[Tensor]], door: str) -> None:
    """And none where eager gives none."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v_H = nn.Parameter(torch.rand(4))

        def forward(self, x_TBH: Tensor, u_BH: Tensor) -> list[Tensor]:
            return body(x_TBH, u_BH, self.v_H)

    net, x_TBH, u_BH = Net(), torch.randn(13, 3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    options: dict[str, Any] = {"lowering": "eager", "segment": 1, "proof": "never"}
    backend: Callable[..., Any] = torch.compile(net, backend="reroll", options=options)
    run = backend if door == "backend" else reroll.compile(net, **options)
    for eager, rolled in zip(net(x_TBH, u_BH), run(x_TBH, u_BH), strict=True):
        grads = [
            torch.autograd.grad(each.sin().sum(), [x_TBH, u_BH, net.v_H], retain_graph=True, allow_unused=True)
            for each in (eager, rolled)
        ]
        same(list(grads[1]), list(grads[0]))
