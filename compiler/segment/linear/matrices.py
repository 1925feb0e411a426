"""k steps of a linear carry as products of matrices.

With ``S_{t+1} = a_t S_t + k_t v_t^T`` and ``A_{t,j} = a_{j+1} ... a_{t-1}``, what is read before step t is

    ``q_t^T S_t = (A_{t,-1} q_t)^T S_0 + sum_{j<t} (q_t^T A_{t,j} k_j) v_j^T``

so of k steps ``Y = (Q K^T * A) V + (Q A_0) S_0``: one state is read and one written, not k of each, and the states
between are neither made nor kept for the backward. Decays are multiplied, never divided by, so nothing overflows that
did not. Source: the chunkwise form of linear attention, Hua et al., Transformer Quality in Linear Time, ICML 2022
(FLASH), with decays as in Yang et al., Gated Linear Attention, ICML 2024, section 4.

Shape letters: N batch, T and J steps, D rows, E columns of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor, fx

from reroll.segment.linear.cores import Core
from reroll.segment.linear.forms import Factor, Factors, Form

Values = dict[fx.Node, Any]


@dataclass(frozen=True, slots=True)
class Decays:
    """``between``: (N, T, J, D or 1), what becomes before step t of what was written in step j, 0 where j is not before
    t. ``since``: (N, T, D or 1), what becomes of the first state. The last row of each is behind the last step."""

    between: Tensor
    since: Tensor

    @classmethod
    def none(cls, state: Tensor, steps: int) -> Decays:
        """Those of steps that forget nothing."""
        between = state.new_ones(steps + 1, steps).tril(-1)
        return cls(between[None, :, :, None], state.new_ones(1, steps + 1, 1))

    @classmethod
    def of(cls, decay_NTD: Tensor) -> Decays:
        """Those of steps of which each has a decay of its own."""
        steps = decay_NTD.shape[1]
        written = torch.eye(steps, dtype=decay_NTD.dtype, device=decay_NTD.device)[:, :, None]
        row, kept = torch.zeros_like(decay_NTD), torch.ones_like(decay_NTD[:, :1])
        rows, since = [row], [kept]
        for t in range(steps):
            row = row * decay_NTD[:, t : t + 1] + written[t]
            kept = kept * decay_NTD[:, t : t + 1]
            rows.append(row)
            since.append(kept)
        return cls(torch.stack(rows, 1), torch.cat(since, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Some steps of a core: its state before the first one, and the values of each step that it reads."""

    core: Core
    state: Tensor
    steps: Sequence[Values]

    def run(self) -> tuple[Tensor, list[list[Tensor]]]:
        """The state behind the last step, and of each readout what it gives in each step."""
        state_NDE, (k_NTD, v_NTE) = self._matrix(self.state), self._written()
        decays = self._decays(self.core.update.state)
        kept = (k_NTD * decays.between[:, -1]).mT @ v_NTE
        last_NDE = state_NDE * decays.since[:, -1, :, None] + kept
        read = []
        for node, form in self.core.readouts.items():
            over = self._over_rows if form.summed == self.core.row else self._over_columns
            y_NT = over(form, decays, state_NDE, k_NTD, v_NTE)
            read.append([self._shaped(y_NT[:, t], node, form) for t in range(len(self.steps))])
        return self._state(last_NDE), read

    def _decays(self, factors: Factors) -> Decays:
        return Decays.of(self._rows(factors)) if factors else Decays.none(self.state, len(self.steps))

    def _written(self) -> tuple[Tensor, Tensor]:
        return self._rows(self.core.update.write or (), whole=True), self._columns(self.core.update.write or ())

    def _over_rows(self, form: Form, decays: Decays, state_NDE: Tensor, k_NTD: Tensor, v_NTE: Tensor) -> Tensor:
        q_NTD = self._rows(form.state, whole=True)
        between, since = decays.between[:, :-1], decays.since[:, :-1]
        if between.shape[-1] == 1:
            p_NTJ = (q_NTD @ k_NTD.mT) * between[..., 0]
        else:
            p_NTJ = (q_NTD[:, :, None] * between * k_NTD[:, None]).sum(-1)
        y_NTE = p_NTJ @ v_NTE + (q_NTD * since) @ state_NDE
        if form.write is None:
            return y_NTE
        return y_NTE + self._rows(form.write, whole=True).sum(-1, keepdim=True) * self._columns(form.write)

    def _over_columns(self, form: Form, decays: Decays, state_NDE: Tensor, k_NTD: Tensor, v_NTE: Tensor) -> Tensor:
        r_NTE, own_NTD = self._columns(form.state), self._rows(form.state)
        between, since = decays.between[:, :-1], decays.since[:, :-1]
        p_NTJ = r_NTE @ v_NTE.mT
        if between.shape[-1] == 1:
            y_NTD = (p_NTJ * between[..., 0]) @ k_NTD
        else:
            y_NTD = (p_NTJ[..., None] * between * k_NTD[:, None]).sum(2)
        y_NTD = (y_NTD + since * (r_NTE @ state_NDE.mT)) * own_NTD
        if form.write is None:
            return y_NTD
        return y_NTD + self._rows(form.write, whole=True) * self._columns(form.write).sum(-1, keepdim=True)

    def _rows(self, factors: Factors, *, whole: bool = False) -> Tensor:
        """(N, T, D): the product of those of factors that do not vary over columns; unless it is to be ``whole``, of
        one entry over rows, or over the batch, where none of them varies."""
        return self._product([each for each in factors if self.core.column not in each.has], self.core.row, whole=whole)

    def _columns(self, factors: Factors) -> Tensor:
        """(N, T, E): the product of those that do."""
        return self._product([each for each in factors if self.core.column in each.has], self.core.column, whole=True)

    def _product(self, factors: Sequence[Factor], dim: int, *, whole: bool) -> Tensor:
        sizes, batch = self.core.sizes, self._batch
        varied = {dim, *batch} if whole else {at for each in factors for at in each.has}
        if varied & set(batch):
            varied |= set(batch)
        shape = [size if at in varied else 1 for at, size in enumerate(sizes)]
        given = (each.value(self._in_all(each), sizes) for each in factors)
        made = reduce(mul, given, self.state.new_ones(())).expand(len(self.steps), *shape)
        order = [*(1 + at for at in batch), 0, 1 + self.core.row, 1 + self.core.column]
        return made.permute(order).reshape(-1, len(self.steps), shape[dim])

    def _in_all(self, factor: Factor) -> Any:
        """A factor in all steps, in the type of the state; once where it is the same in all."""
        if not isinstance(factor.source, fx.Node):
            return factor.source
        given = [values[factor.source] for values in self.steps]
        if not isinstance(given[0], Tensor):
            return given[0]
        same = all(each is given[0] for each in given)
        return (given[0][None] if same else torch.stack(given)).to(self.state.dtype)

    @property
    def _batch(self) -> list[int]:
        return [at for at in range(len(self.core.sizes)) if at not in (self.core.row, self.core.column)]

    def _matrix(self, state: Tensor) -> Tensor:
        turned = state.permute(*self._batch, self.core.row, self.core.column)
        return turned.reshape(-1, *turned.shape[-2:])

    def _state(self, state_NDE: Tensor) -> Tensor:
        order = [*self._batch, self.core.row, self.core.column]
        turned = state_NDE.reshape([self.core.sizes[at] for at in order])
        return turned.permute(sorted(range(len(order)), key=order.__getitem__))

    def _shaped(self, y: Tensor, node: fx.Node, form: Form) -> Tensor:
        """What a readout gives, (N, D or E), laid out as the value of its node."""
        sizes = self.core.sizes
        left = [*self._batch, self.core.column if form.summed == self.core.row else self.core.row]
        order = [at for group in form.axes for at in group]
        whole = y.reshape([sizes[at] for at in left]).permute(
            [left.index(at) for at in (*order, *_others(left, order))]
        )
        return whole.reshape([prod(sizes[at] for at in group) for group in form.axes])


def _others(left: Sequence[int], order: Sequence[int]) -> list[int]:
    """Dimensions of one entry, which views may have left out."""
    return [at for at in left if at not in order]
