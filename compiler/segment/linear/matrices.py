"""k steps of a linear carry as products of matrices.

With ``S_{t+1} = a_t S_t + k_t v_t^T`` and ``A_{t,j} = a_{j+1} ... a_{t-1}``, what is read before step t is

    ``q_t^T S_t = (a_0 ... a_{t-1} q_t)^T S_0 + sum_{j<t} A_{t,j} (q_t^T k_j) v_j^T``

so of k steps ``Y = (Q K^T * A) V + a Q S_0``: one state is read and one written, not k of each, and the states between
are neither made nor kept for the backward. Decays are multiplied, never divided by. What is infinite or not a number in
one step shows in all steps that are done together, as ``A`` has zeros for those before it.
Source: the chunkwise form of linear attention, Hua et al., Transformer Quality in Linear Time, ICML 2022, section 3.2;
with decays Sun et al., Retentive Network, 2023, equation 7, and Dao and Gu, Transformers are SSMs, ICML 2024.

Shape letters: N batch, T and J steps, D rows, E columns of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from operator import mul
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from reroll.graph.layouts import Order, inverse, is_plain
from reroll.segment.linear.cores import Core
from reroll.segment.linear.forms import Factor, Factors, Form

Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Decays:
    """``between``: (N, T, J), what becomes before step t of what was written in step j, 0 where j is not before t.
    ``since``: (N, T, 1), what becomes of the first state. The last row of each is behind the last step."""

    between: Tensor
    since: Tensor

    @classmethod
    def of(cls, decay_NT: Tensor) -> Decays:
        """Those of steps of which each has a decay of its own."""
        steps = decay_NT.shape[1]
        later = decay_NT.new_ones(steps, steps + 1).tril(0)  # column 0 is the first state, behind it what is written
        factors = decay_NT[:, :, None] * later + (1 - later)
        made = F.pad(_multiplied_up(factors), (0, 0, 1, 0), value=1.0)
        before = decay_NT.new_ones(steps + 1, steps).tril(-1)
        return cls(made[:, :, 1:] * before, made[:, :, :1])

    @classmethod
    def none(cls, state: Tensor, steps: int) -> Decays:
        """Those of steps that forget nothing."""
        return cls(state.new_ones(1, steps + 1, steps).tril(-1), state.new_ones(1, steps + 1, 1))


def _multiplied_up(factors_NTJ: Tensor) -> Tensor:
    """In row t the product of the rows up to t, in log2(T) products (Hillis and Steele, Data Parallel Algorithms, CACM
    1986), of which, other than of ``cumprod``, the gradient does not divide."""
    found, reach = factors_NTJ, 1
    while reach < factors_NTJ.shape[1]:
        found = found * F.pad(found[:, :-reach], (0, 0, reach, 0), value=1.0)
        reach *= 2
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some steps of a core: its state before the first one, and the values of each step that it reads. ``made``: its
    factors so far."""

    core: Core
    state: Tensor
    steps: Sequence[Values]
    made: dict[Factor, Any] = field(default_factory=dict)

    def run(self) -> tuple[Tensor, list[Sequence[Tensor]]]:
        """The state behind the last step, and of each readout what it gives in each step."""
        update = self.core.update
        state_NDE, k_NTD, v_NTE = self._matrix(self.state), self._rows(update.write or ()), self._columns(update.write)
        decays = self._decays(update.state)
        kept_NDE = torch.bmm((k_NTD * decays.between[:, -1, :, None]).mT, v_NTE)
        last_NDE = state_NDE * decays.since[:, -1:] + kept_NDE
        read = list[Sequence[Tensor]]()
        for node, form in self.core.readouts.items():
            over = self._over_rows if form.summed == self.core.row else self._over_columns
            made = self._shaped(over(form, decays, state_NDE, k_NTD, v_NTE), form)
            read.append([_laid_out(each, self.core.orders[node]) for each in made])
        return self._state(last_NDE), read

    def _over_rows(self, form: Form, decays: Decays, state_NDE: Tensor, k_NTD: Tensor, v_NTE: Tensor) -> Tensor:
        q_NTD = self._rows(form.state)
        p_NTJ = torch.bmm(q_NTD, k_NTD.mT) * decays.between[:, :-1]
        y_NTE = torch.bmm(p_NTJ, v_NTE) + torch.bmm(q_NTD, state_NDE) * decays.since[:, :-1]
        if form.write is None:
            return y_NTE
        return y_NTE + self._rows(form.write).sum(-1, keepdim=True) * self._columns(form.write)

    def _over_columns(self, form: Form, decays: Decays, state_NDE: Tensor, k_NTD: Tensor, v_NTE: Tensor) -> Tensor:
        r_NTE = self._columns(form.state)
        p_NTJ = torch.bmm(r_NTE, v_NTE.mT) * decays.between[:, :-1]
        y_NTD = torch.bmm(p_NTJ, k_NTD) + torch.bmm(r_NTE, state_NDE.mT) * decays.since[:, :-1]
        if any(self.core.column not in each.has for each in form.state):
            y_NTD = y_NTD * self._rows(form.state)
        if form.write is None:
            return y_NTD
        return y_NTD + self._rows(form.write) * self._columns(form.write).sum(-1, keepdim=True)

    def _decays(self, factors: Factors) -> Decays:
        if not factors:
            return Decays.none(self.state, len(self.steps))
        varied = set(self._batch) if any(each.has for each in factors) else set[int]()
        return Decays.of(self._product(factors, varied).reshape(-1, len(self.steps)))

    def _rows(self, factors: Factors) -> Tensor:
        """(N, T, D): the product of those of factors that do not vary over columns."""
        made = self._product(
            [each for each in factors if self.core.column not in each.has], self._but(self.core.column)
        )
        return made.reshape(-1, len(self.steps), self.core.sizes[self.core.row])

    def _columns(self, factors: Factors | None) -> Tensor:
        """(N, T, E): the product of those that do."""
        own = [each for each in factors or () if self.core.column in each.has]
        return self._product(own, self._but(self.core.row)).reshape(
            -1, len(self.steps), self.core.sizes[self.core.column]
        )

    def _product(self, factors: Sequence[Factor], varied: set[int]) -> Tensor:
        """The product of factors in all steps, over the dimensions over which it is to vary: the batch, T, the last."""
        sizes = self.core.sizes
        shape = [size if at in varied else 1 for at, size in enumerate(sizes)]
        found = reduce(mul, [self._in_all(each) for each in factors]) if factors else 1.0
        made = found if isinstance(found, Tensor) else self.state.new_full((), found)
        made = made.expand(len(self.steps), *shape)
        return made.permute([*(1 + at for at in self._batch), 0, 1 + self.core.row, 1 + self.core.column])

    def _in_all(self, factor: Factor) -> Any:
        """A factor in all steps, made once: so its gradients of all uses are added up before they go to the steps."""
        if factor not in self.made:
            self.made[factor] = factor.value(self._source_matrix(factor.source), self.core.sizes)
        return self.made[factor]

    def _source_matrix(self, source: fx.Node | float) -> Any:
        """What a source is in all steps, in the type of the state; once where it is the same in all."""
        given = [values[source] for values in self.steps] if isinstance(source, fx.Node) else [source]
        if not isinstance(given[0], Tensor):
            return given[0]
        same = all(each is given[0] for each in given)
        return (given[0][None] if same else torch.stack(given)).to(self.state.dtype)

    @property
    def _batch(self) -> list[int]:
        return sorted(self._but(self.core.row) - {self.core.column})

    def _but(self, dim: int) -> set[int]:
        """All dimensions but one."""
        return set(range(len(self.core.sizes))) - {dim}

    def _matrix(self, state: Tensor) -> Tensor:
        turned = _permuted(state, [*self._batch, self.core.row, self.core.column])
        return turned.reshape(-1, *turned.shape[-2:])

    def _state(self, state_NDE: Tensor) -> Tensor:
        order = [*self._batch, self.core.row, self.core.column]
        whole = state_NDE.reshape([self.core.sizes[at] for at in order])
        return _permuted(whole, inverse(order))

    def _shaped(self, y: Tensor, form: Form) -> Sequence[Tensor]:
        """What a readout gives, (N, T, D or E), in each step, laid out as its value there."""
        sizes, batch = self.core.sizes, self._batch
        left = [*batch, self.core.column if form.summed == self.core.row else self.core.row]
        order = [at for group in form.axes for at in group]
        order += [at for at in left if at not in order]  # of one entry, which views may have left out
        whole = y.reshape([*(sizes[at] for at in batch), len(self.steps), sizes[left[-1]]])
        places = [batch.index(at) if at in batch else len(batch) + 1 for at in order]
        turned = _permuted(whole, [len(batch), *places])
        return turned.reshape(-1, *(prod(sizes[at] for at in group) for group in form.axes)).unbind(0)


def _laid_out(value: Tensor, order: Order) -> Tensor:
    """A value without gaps whose dimensions lie in an order."""
    return _permuted(_permuted(value, order).contiguous(), inverse(order))


def _permuted(value: Tensor, order: Sequence[int]) -> Tensor:
    return value if is_plain(tuple(order)) else value.permute(*order)
