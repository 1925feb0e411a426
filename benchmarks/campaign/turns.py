"""More idioms, of which ``kinds.py`` makes programs, written as those of ``idioms.py``.

Steps that do something else by their number, that read and write without gradients, lists whose elements are read
apart, draws that nothing uses, results that are views, states that are kept between calls, updates in place.
"""

from __future__ import annotations

from idioms import idioms_of

TIMES = r"""
- step: if t == T_ // 2:
  step:     h = h * 0.5
- step: if t == T_ // {p}:
  step:     h = h.sin() + 0.1 * self.v
- step: if t == {k}:
  step:     h = h.detach()
- step: if t == T_ - {p}:
  step:     h = h.sin()
- step: h = torch.tanh(h @ self.w) if t < T_ // 2 else h * self.v
- step: {n} = self.fc({m}) if t < {k} else {m} @ self.w
- step: {n} = {m} * (0.1 * min(t, {k}))
- step: {n} = {m} * max(0.1, 1 - t / {k})
- step: {n} = {m} * 0.9 ** t
- step: h = h * 0.9 ** (T_ - t)
- step: {n} = {m} * (1 - t / T_)
- step: {n} = {m} * math.cos(math.pi * t / T_)
- step: {n} = {m} + 0.3 * x[(2 * t) % T_]
- step: {n} = {m} + 0.3 * x[({k} * t + {p}) % T_]
- step: {n} = {m} + 0.3 * x[(t * t + {p}) % T_]
- step: {n} = {m} + 0.3 * x[T_ - 1 - t] * x[t // 2]
- step: {n} = {m} + 0.3 * x[max(0, t - {p}):t + 1].mean(0)
- step: {n} = {m} + 0.1 * x[max(0, t - {k}):t + 1].sum(0)
- step: {n} = {m} + 0.1 * x[t:t + {p}].sum(0)
- step: {n} = {m} + 0.3 * out[-{p}] if len(out) >= {p} else {m}
- step: {n} = {m} + 0.3 * (out[len(out) // 2] if out else h)
- step: {n} = {m} + 0.1 * (sum(out[-{p}:]) if out else h)
- step: if t % ({k} + 3) == {k} + 2:
  step:     h = h.sin()
- step: if t % 17 == 16:
  step:     h = h.sin() * self.v
- step: {n} = self.fc({m}).sin() if t % {k} == 1 else {m}
- step: h = self.cell({m}, h) if t % {k} == {k} - 1 else h
- before: {a} = []
  step: if t % {k} == {k} - 1:
  step:     {a}.append(h)
  result: {a}
- before: {a} = []
  step: if t >= T_ // 2:
  step:     {a}.append({m} * self.v)
  result: {a}
- before: {a} = []
  step: if t % 2:
  step:     {a}.append(h)
  result: torch.stack({a})
- before: for {a} in x.split({k}):
  before:     for {b} in {a}:
  before:         h = self.cell({b}, h)
  before:     h = h * 0.5
- before: for {a} in sorted(range(T_), key=lambda t: (7 * t * t + 3 * t) % 13):
  before:     h = self.cell(x[{a}], h)
- after: for {a} in out[len(out) // 2:]:
  after:     h = torch.tanh({a} + h @ self.w)
  result: h
- after: for {a} in out[::-2]:
  after:     h = self.cell({a}, h)
  result: h
- after: for {a} in range(len(out)):
  after:     h = torch.tanh(out[-{a} - 1] + 0.5 * h)
  result: h
- before: {a} = torch.linspace(0, 1, T_)
  step: {n} = {m} * {a}[(t * t) % T_]
- before: {a} = [each for each in range(T_) if each % 3]
  step: if t in {a}:
  step:     h = h * self.v
- step: h = h * 0.5 if T_ > {k} else h
- step: {n} = {m} + self.table[t % {k}]
- step: {n} = {m} + self.table[max(0, t - {p})] * 0.3
- result: torch.stack(out)[len(out) // 3:]
- result: torch.stack(out)[len(out) // {p}:]
- result: torch.stack(out)[:{k}].sum(0)
- result: torch.stack(out)[-{k}:]
- result: torch.stack(out)[::2]
- result: torch.stack(out)[{p}::{p}]
- result: [each.sum(0) for each in torch.stack(out).split({k})]
- result: torch.stack(out).split({k})
- result: torch.stack(out).chunk({p})
- result: out[len(out) // 2] + out[-2]
- result: [torch.stack(out[each:each + {k}]).mean(0) for each in range(0, len(out), {k})]
- result: torch.stack(out[len(out) // 2:][::-1])
- result: sum(0.9 ** k * each for k, each in enumerate(reversed(out)))
- result: torch.stack([*out[:{p}], *out[{p} + 1:]])
- result: torch.stack(out).mean(0) * T_
"""
MODES = r"""
- step: with torch.no_grad():
  step:     {a} = h.mean(0)
  step: {n} = {m} * {a} + {m}
- step: with torch.no_grad():
  step:     {a} = {m} @ self.w
  step:     {b} = {a}.tanh()
  step: {n} = {m} * {b} + 0.1 * {a}
- step: {a} = h.detach().square().mean(0, keepdim=True)
  step: {n} = {m} / (1 + {a})
- init: self.register_buffer('{q}', torch.zeros(H_))
  step: with torch.no_grad():
  step:     self.{q}.mul_(0.9).add_(h.mean(0), alpha=0.1)
  step: {n} = {m} + 0.1 * self.{q}
- init: self.register_buffer('{q}', torch.ones(H_))
  step: {n} = {m} * self.{q}.clone()
  step: self.{q}.lerp_(h.detach().mean(0), 0.1)
- init: self.register_buffer('{q}', torch.ones(H_))
  step: with torch.no_grad():
  step:     self.{q} = 0.9 * self.{q} + 0.1 * h.mean(0)
  step: {n} = {m} * self.{q}
- init: self.register_buffer('{q}', torch.zeros(H_))
  step: if self.training:
  step:     with torch.no_grad():
  step:         self.{q}.copy_({m}.mean(0))
  step: {n} = {m} - 0.5 * self.{q}
- init: self.register_buffer('{q}', torch.zeros(H_))
  before: with torch.no_grad():
  before:     self.{q}.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
  step: {n} = {m} - self.{q}
- init: self.register_buffer('{q}', torch.zeros(H_))
  after: with torch.no_grad():
  after:     self.{q}.add_(h.mean(0))
  result: h * self.{q}.clone()
- step: with torch.set_grad_enabled(False):
  step:     {a} = self.fc({m})
  step: {n} = {m} + {a}.tanh() * self.v
- step: with torch.set_grad_enabled(t % 2 == 0):
  step:     {n} = torch.tanh({m} @ self.w)
- step: with torch.set_grad_enabled(t >= {k}):
  step:     h = self.cell({m}, h)
- step: {a} = torch.is_grad_enabled()
  step: torch.set_grad_enabled(False)
  step: {b} = h.sigmoid()
  step: torch.set_grad_enabled({a})
  step: {n} = {m} * {b}
- before: with torch.no_grad():
  before:     for {a} in x[:{k}]:
  before:         h = self.cell({a}, h)
- before: with torch.no_grad():
  before:     {a} = x.mean(0)
  step: {n} = {m} - {a}
- before: {a} = x.detach()
  step: {n} = {m} + 0.3 * {a}[t]
- before: with torch.no_grad():
  before:     {a} = self.fc(x)
  step: {n} = {m} + 0.3 * {a}[t]
- before: with torch.no_grad():
  before:     {a} = x.unbind(0)
  step: {n} = {m} + 0.3 * {a}[t] * self.v
- before: with torch.no_grad():
  before:     {a} = self.w.t()
  step: {n} = torch.tanh({m} @ {a})
- after: with torch.no_grad():
  after:     {b} = torch.stack(out).mean(0)
  result: h * {b}
- after: with torch.no_grad():
  after:     {b} = torch.stack(out)
  result: {b} * self.v
  result: torch.stack(out)[1:] - {b}[:-1]
- after: {b} = torch.stack(out).detach()
  result: (torch.stack(out) - {b}.mean(0)) / ({b}.std(0) + 1)
- after: {b} = [each.detach() for each in out]
  result: sum(each * self.v for each in {b})
- step: {n} = {m} * h.data
- step: {n} = {m} + 0.1 * self.w.data[0]
- step: h = h * 1.0
  step: h.data.mul_(0.9)
- step: h = h.detach() if t % {k} == 0 else h
- step: h = h.detach() * 0.5 + h * 0.5
- step: {n} = ({m} > 0).to({m}.dtype).detach() + {m}.sigmoid() - {m}.sigmoid().detach()
- step: h = h * 1.0
  step: with torch.no_grad():
  step:     h.clamp_(-0.5, 0.5)
- step: {n} = {m} * 1.0
  step: with torch.no_grad():
  step:     {n}.add_(0.1 * h)
- step: {n} = {m} * 1.0
  step: with torch.no_grad():
  step:     {n}[0] = 0.1
- step: {n} = {m} * 1.0
  step: with torch.no_grad():
  step:     {n}[{n} > 0.5] = 0.2
- step: {n} = {m} * 1.0
  step: with torch.no_grad():
  step:     {n}.copy_({m} * 0.5)
- step: {n} = {m} * 1.0
  step: with torch.no_grad():
  step:     {n}[:, :2].mul_(0.5)
- before: {a} = torch.zeros(T_, *h.shape)
  step: with torch.no_grad():
  step:     {a}[t] = {m}
  result: {a} * self.v
- before: {a} = torch.zeros(T_, *h.shape)
  step: {n} = {m} + 0.3 * {a}[t - 1]
  step: with torch.no_grad():
  step:     {a}[t] = {n}
- before: {a} = torch.zeros(T_, *h.shape)
  step: {a}[t] = h.detach()
  result: {a}.mean(0) * h
- step: with torch.no_grad():
  step:     {a} = {m} @ self.w
  step:     with torch.enable_grad():
  step:         {b} = {m} * self.v
  step: {n} = {a} + {b}
- step: with torch.no_grad():
  step:     {a} = h[:, :1]
  step: {n} = {m} * {a} + 0.5 * {m}
- step: with torch.no_grad():
  step:     {a} = h
  step: {n} = {m} + 0.3 * {a}
- step: with torch.no_grad():
  step:     {a} = h.view_as(h).t()
  step: {n} = {m} + 0.3 * {a}.t()
- step: {a} = ({m} * 1.0).detach()
  step: {a} += 0.1
  step: {n} = {m} + {a}
- methods: @torch.no_grad()
  methods: def {q}(self, v):
  methods:     return v.mean(0) * self.v
  step: {n} = {m} * self.{q}(h) + {m}
- methods: @torch.no_grad()
  methods: def {q}(self, v):
  methods:     return v
  step: {n} = {m} + 0.3 * self.{q}(h)
- init: self.{q} = nn.Linear(H_, H_).requires_grad_(False)
  step: {n} = {m} + 0.3 * self.{q}(h)
- init: self.{q} = nn.Linear(H_, H_).requires_grad_(False)
  before: with torch.no_grad():
  before:     self.{q}.weight.lerp_(self.fc.weight, 0.1)
  step: with torch.no_grad():
  step:     {a} = self.{q}(h)
  step: {n} = {m} + 0.3 * {a}
- before: {a} = None
  step: {n} = {m} if {a} is None else {m} + 0.3 * {a}
  step: with torch.no_grad():
  step:     {a} = 0.5 * {n} if {a} is None else 0.5 * {a} + 0.5 * {n}
  result: {a}
- before: {a} = u.detach()
  step: {a} = 0.9 * {a} + 0.1 * h.detach()
  step: {n} = {m} - {a} * self.v
  result: {a}
- before: {a} = u * 0.5
  step: with torch.no_grad():
  step:     {a} = 0.9 * {a} + 0.1 * {m}
  step: {n} = {m} * {a}.sigmoid()
  result: {a}
"""
MAPS = r"""
- before: {a} = [self.fc(each).tanh() for each in x]
  step: {n} = {m} + 0.3 * {a}[t]
  result: {a}[::2]
- before: {a} = [self.fc(each).tanh() for each in x]
  result: {a}[::2]
  result: {a}[1::2]
- before: {a} = [self.fc(each) for each in x]
  result: {a}[0]
  result: torch.stack({a}[1:])
- before: {a} = [self.fc(each) * self.v for each in x.split(2)]
  result: {a}
- before: {a} = [self.fc(each) for each in x]
  result: {a}
  result: {a}[{p}].sin()
- before: {a} = [self.fc(each) for each in x]
  before: {a}[{p}] = {a}[{p}] * self.v
  result: {a}
- before: {a} = [torch.tanh(each @ self.w) for each in x]
  step: {n} = {m} + {a}[0]
  result: {a}[-1]
- before: {a} = [torch.tanh(each @ self.w) for each in x]
  step: {n} = {m} + 0.3 * {a}[t // 2]
  result: {a}[{p}:]
- before: {a} = list(map(self.fc, x))
  before: {b} = [v - w for v, w in zip({a}, {a}[1:])]
  result: {b}
- before: {a} = list(map(self.fc, x.unbind(0)))
  result: sum({a}[::2])
  result: sum({a}[1::2]) * self.v
- before: {a}, {b} = zip(*[(each * self.v, each @ self.w) for each in x])
  result: {a}
  result: torch.stack({b})
- before: {a} = [each.chunk(2, -1) for each in map(self.fc, x)]
  result: [v for v, _ in {a}]
  result: sum(w for _, w in {a})
- before: {a} = [each.chunk(2, -1)[0] for each in map(self.fc, x)]
  result: {a}
- before: {a} = {{k: self.fc(x[k]).relu() for k in range(T_)}}
  result: [{a}[k] for k in range(0, T_, 3)]
  result: [{a}[k].sum() for k in range(T_) if k % 3]
- after: {a} = [torch.tanh(each @ self.w) for each in out]
  result: {a}
- after: {a} = [torch.tanh(each @ self.w) for each in out]
  result: torch.stack({a}[::2])
  result: sum({a}[1::2])
- after: {a} = [torch.tanh(each @ self.w) for each in out]
  result: {a}[:len({a}) // 2]
  result: [each * self.v for each in {a}[len({a}) // 2:]]
- after: {a} = [self.fc(each) for each in out]
  result: {a}[{p}].square()
  result: torch.stack({a})
- after: {a} = [self.fc(each) for each in out]
  result: max({a}, key=lambda v: v.shape[0])
  result: {a}[1:-1]
- after: {a} = [self.fc(each) for each in out[::2]]
  result: {a}
- after: {a} = [F.mse_loss(each, u) for each in out]
  result: {a}
- after: {a} = [F.mse_loss(self.fc(each), v) for each, v in zip(out, x)]
  result: sum({a}[{p}:])
  result: {a}[0]
- after: {a} = [F.layer_norm(each, (H_,)) for each in out]
  result: {a}[-1]
  result: {a}[-2] * self.v
- after: {a} = [each.tanh() for each in torch.stack(out)]
  result: {a}[::3]
  result: {a}[1::3]
- after: {a} = [self.fc(each) if k % 3 else each @ self.w for k, each in enumerate(out)]
  result: {a}
- result: out[::2]
  result: out[1::2]
- result: torch.stack(out[:{k}])
  result: out[{k}:]
- result: [each.sum() for each in out]
- result: [(each * self.v).sum(-1) for each in out[1:]]
- result: dict(enumerate(out))
"""
DRAWS = r"""
- step: {a} = torch.rand_like({m})
- step: torch.rand(2)
- step: {a} = F.dropout(h, 0.5, True)
- step: if t % {k} == 0:
  step:     h = h + 0.1 * torch.randn_like(h)
- step: if t == {k}:
  step:     {a} = torch.randn(3)
- step: {a} = torch.randn_like({m})
  step: {n} = {m} + 0.1 * {a} if t > {p} else {m}
- step: {a} = F.dropout({m}, 0.3, self.training)
  step: {n} = {m} if t % 2 else {a}
- step: {a} = F.dropout({m}, 0.3, self.training)
  step: {n} = {a} if t < T_ // 2 else {m}
- before: torch.rand(3)
- after: torch.rand(3)
- before: {a} = torch.randn(T_, H_)
  step: {n} = {m} + 0.1 * {a}[t]
- before: {a} = [torch.rand(H_) for _ in range(T_)]
  step: {n} = {m} * {a}[t]
- before: {a} = [torch.rand(H_) for _ in range(T_)]
  step: {n} = {m} * {a}[t] if t % 2 else {m}
- step: {n} = {m} * 1.0
  step: {n}[:, :1].normal_(0, 0.1)
- step: {n} = {m} * torch.empty_like({m}).uniform_(0.5, 1)
- step: with torch.no_grad():
  step:     {a} = torch.bernoulli({m}.sigmoid())
  step: {n} = {m} * {a}
- after: {a} = [F.dropout(each, 0.3, self.training) for each in out]
  result: {a}[::2]
- after: {a} = [F.dropout(self.fc(each), 0.3, self.training) for each in out]
  result: {a}
"""
VIEWS = r"""
- result: h[:, :2]
- result: h.t()
- result: x[0]
- result: x[T_ // 2]
- result: x.transpose(0, 1)
- result: x.unbind(0)[1]
- result: out[-1].view(-1)
- result: out[0][:, 1:]
- result: u
- result: u.t()
- result: self.v
- result: self.w.t()
- result: self.w[0]
- result: torch.stack(out)[..., 0]
- result: torch.stack(out, 1)[:, -1]
- result: [each[0] for each in out]
- result: [each.t() for each in out[:{p}]]
- result: h.detach()
- result: h.detach()[:, 1:]
- result: h.expand(2, -1, -1)
- result: list(h.unbind(0))
- result: h.chunk(2, -1)
- result: (h, h)
- result: [h, h[0], h.view(-1)]
- before: {a} = x.flatten(1)
  result: {a}
- init: self.register_buffer('{q}', torch.ones(H_))
  result: self.{q}
- init: self.register_buffer('{q}', torch.ones(H_, H_))
  result: self.{q}[0]
"""
STATES = r"""
- before: self.{q} = None
  after: self.{q} = h.detach()
- init: self.{q} = None
  before: h = h if self.{q} is None else h + self.{q}
  after: self.{q} = h.detach().mean(0)
- init: self.{q} = None
  before: h = h if self.{q} is None else h + self.{q}
  after: self.{q} = h.mean(0)
- init: self.{q} = torch.zeros(1, H_)
  step: {n} = {m} + 0.3 * self.{q}
  after: self.{q} = h.detach()[:1]
  result: h
- init: self.{q} = torch.zeros(1, H_)
  before: h = h + self.{q}
  after: {a} = h[:1].detach()
  after: self.{q} = {a}
  result: {a}
- init: self.{q} = None
  step: self.{q} = h
  step: {n} = {m} + 0.3 * self.{q}
  after: self.{q} = None
- init: self.{q} = None
  step: {n} = {m} if self.{q} is None else {m} + 0.3 * self.{q}.detach()
  step: self.{q} = {n}.mean(0)
- init: self.{q} = None
  step: if self.{q} is None:
  step:     self.{q} = torch.zeros(H_)
  step: self.{q} = 0.9 * self.{q} + {m}.mean(0)
  step: {n} = {m} - 0.1 * self.{q}
  after: self.{q} = self.{q}.detach()
- init: self.{q} = []
  before: self.{q} = []
  step: self.{q}.append({m})
  result: torch.stack(self.{q}[::2])
- init: self.{q} = []
  before: self.{q}.clear()
  step: self.{q}.append({m} * self.v)
  after: {a} = sum(self.{q})
  after: self.{q} = []
  result: {a}
- init: self.{q} = {{}}
  step: self.{q}[t] = h.detach()
  after: self.{q}.clear()
- init: self.{q} = {{'h': None}}
  step: {n} = {m} if self.{q}['h'] is None else {m} + 0.3 * self.{q}['h']
  step: self.{q}['h'] = {n}
  after: self.{q}['h'] = None
- before: CONFIG['flag'] = True
  step: {n} = {m} * 0.5 if CONFIG['flag'] else {m}
  after: CONFIG['flag'] = False
- before: CONFIG['flag'] = T_ > {k}
  step: {n} = {m} * 0.5 if CONFIG['flag'] else {m}
- before: CONFIG['flag'] = False
  step: if t == {k}:
  step:     CONFIG['flag'] = True
  step: h = h * 0.5 if CONFIG['flag'] else h
- before: Net.{q} = False
  step: {n} = {m} if Net.{q} else {m} * 0.5
  step: Net.{q} = True
- init: self.{q} = True
  step: {n} = {m} * 0.5 if self.{q} else {m}
  step: self.{q} = False
- init: self.{q} = 0
  step: {n} = {m} * (1 if self.{q} % 3 else 0.5)
  step: self.{q} += 1
  after: self.{q} = 0
- methods: def reset_{q}(self, v):
  methods:     self.{q} = v.new_zeros(v.shape[1], H_)
  before: self.reset_{q}(x)
  step: self.{q} = torch.tanh({m} + 0.5 * self.{q})
  step: {n} = {m} + self.{q}
- init: self.{q} = torch.zeros(1, H_)
  step: self.{q} = self.{q} * 0.5 + {m}.mean(0, keepdim=True)
  step: {n} = {m} + 0.3 * self.{q}
  after: self.{q} = self.{q}.detach()
- init: self.{q} = torch.zeros(1, H_)
  step: {n} = {m} + 0.3 * self.{q}
  step: self.{q} = h.mean(0, keepdim=True).detach()
- init: self.register_buffer('{q}', torch.zeros(1, H_))
  step: {n} = {m} + 0.3 * self.{q}
  after: self.{q} = h.detach()[:1].clone()
- init: self.register_buffer('{q}', torch.zeros(1, H_))
  step: {n} = {m} + 0.3 * self.{q}
  after: self.{q}.copy_(h.detach()[:1])
- init: self.register_buffer('{q}', torch.zeros(2, H_))
  step: self.{q}[t % 2] = h.detach().mean(0)
  step: {n} = {m} + 0.3 * self.{q}[1].clone()
- init: self.register_buffer('{q}', torch.zeros(32, H_))
  step: self.{q}[t] = h.detach().mean(0)
- init: self.register_buffer('{q}', torch.zeros(3, H_))
  step: self.{q} = torch.cat([self.{q}[1:], h.detach().mean(0, keepdim=True)])
  step: {n} = {m} + 0.3 * self.{q}[0]
"""
IN_PLACE = r"""
- init: self.register_buffer('{q}', torch.ones(H_, dtype=torch.long))
  step: self.{q} <<= 1
  step: self.{q} %= 7
  step: {n} = {m} * (0.1 * self.{q})
- init: self.register_buffer('{q}', torch.arange(H_))
  step: self.{q} += 1
  step: self.{q} %= H_
  step: {n} = {m} + 0.3 * {m}[:, self.{q}]
- init: self.register_buffer('{q}', torch.zeros(H_, dtype=torch.bool))
  step: self.{q} |= ({m} > 0.5).any(0)
  step: {n} = {m}.masked_fill(self.{q}, 0.1)
- init: self.register_buffer('{q}', torch.zeros(H_, dtype=torch.bool))
  step: self.{q} ^= ({m} > 0.2).all(0)
  step: {n} = torch.where(self.{q}.clone(), {m}, h)
- init: self.register_buffer('{q}', torch.zeros(H_))
  step: self.{q}.clamp_(-1, 1).addcmul_(self.{q}, self.{q}, value=-0.5).add_(h.detach().mean(0))
  step: {n} = {m} + 0.1 * self.{q}
- init: self.register_buffer('{q}', torch.zeros(3, H_))
  step: self.{q}.index_copy_(0, torch.tensor([t % 3]), h.detach()[:1])
  step: {n} = {m} + 0.3 * self.{q}.sum(0)
- init: self.register_buffer('{q}', torch.zeros(3, H_))
  step: self.{q}.index_add_(0, torch.tensor([1]), h.detach()[:1], alpha=0.5)
  step: self.{q}.mul_(0.8)
  step: {n} = {m} + 0.1 * self.{q}[1]
- init: self.register_buffer('{q}', torch.zeros(H_))
  step: self.{q}.masked_fill_(self.{q} > 1, 0.0).add_({m}.detach().abs().mean(0))
  step: {n} = {m} - 0.1 * self.{q}
- init: self.register_buffer('{q}', torch.zeros(H_))
  step: self.{q}.fill_({p}).div_(t + 1)
  step: {n} = {m} * self.{q}.clone()
- step: {n} = {m} * 1.0
  step: {n}.addcmul_({m}, h, value=0.1)
- step: {n} = {m} * 1.0
  step: {n}.addcdiv_({m}, 1 + h.square(), value=0.1)
- step: {n} = {m} * 1.0
  step: {n}.index_copy_(1, torch.tensor([0, 1]), h[:, 2:4] * 0.5)
- step: {n} = {m} * 1.0
  step: {n}.index_add_(1, torch.tensor([0, 0]), h[:, 1:3])
- step: {n} = {m} * 1.0
  step: {n}.index_fill_(1, torch.tensor([t % H_]), 0.1)
- step: {n} = {m} * 1.0
  step: {n}.masked_fill_({n} > 0.5, 0.2)
- step: {n} = {m} * 1.0
  step: {n}.masked_scatter_(h > 0.3, h * 0.5)
- step: {n} = {m} * 1.0
  step: {n}.scatter_(1, torch.zeros(h.shape[0], 1, dtype=torch.long), h[:, :1])
- step: {n} = {m} * 1.0
  step: {n}.scatter_add_(1, torch.ones(h.shape[0], 2, dtype=torch.long), h[:, :2] * 0.2)
- step: {n} = {m} * 1.0
  step: {n}.index_put_((torch.tensor([0, 1]),), h[:2], accumulate=True)
- step: {n} = {m} * 1.0
  step: {n}.addmm_({m}, self.w, beta=0.5, alpha=0.3)
- step: {n} = {m} * 1.0
  step: {n}.lerp_(h, 0.3).clamp_(-0.8, 0.8)
- step: {n} = {m} * 1.0
  step: {n}.tril_()
- step: {n} = {m} * 1.0
  step: {n}.unsqueeze_(0).transpose_(1, 2)
  step: {n} = {n}[0].t()
- step: {n} = {m} * 1.0
  step: {n} **= 2
  step: {n} -= h * 0.1
- step: {n} = {m} + 1.0
  step: {n} %= 0.7
- step: {n} = {m} * 1.0
  step: {n}.sub_(h, alpha=0.2).tanh_()
- step: {n} = {m} * 1.0
  step: {n}.zero_().add_(h * self.v)
- step: {n} = {m} * 1.0
  step: torch.sigmoid_({n})
- step: {n} = F.relu({m} * 1.0, inplace=True)
- step: {n} = F.dropout({m} * 1.0, 0.0, self.training, inplace=True)
- step: {n} = {m} * 1.0
  step: {n}[:, 1:] -= {n}[:, :-1].clone() * 0.5
- step: {n} = {m} * 1.0
  step: {n}.diagonal().mul_(0.5)
- step: {n} = torch.empty_like({m})
  step: torch.mul({m}, 0.5, out={n}) if not torch.is_grad_enabled() else {n}.copy_({m})
- step: h = h * 1.0
  step: h += {m} * 0.1
  step: h[:, 0] = {m}[:, 1]
- before: h = h.clone()
  step: h.mul_(0.5).add_({m}.detach())
- before: {a} = torch.zeros(T_, H_)
  step: {a}[t] += h.mean(0)
  step: {a}[t] *= 0.5
  result: {a}
- before: {a} = torch.zeros(T_, H_)
  step: {a}[T_ - 1 - t].add_({m}.mean(0))
  result: {a}
- before: x = x * 1.0
  step: x[t].mul_(0.5)
- before: x = x.clone()
  step: x[t] = x[t] * 0.5 + 0.1 * h
  step: {n} = {m} + 0.3 * x[t]
- before: x = x.clone()
  step: if t + 1 < T_:
  step:     x[t + 1] += 0.1 * h
- before: x = x.clone()
  step: x[t - 1].zero_()
  step: {n} = {m} + 0.3 * x[t - 2]
- step: if not x.requires_grad:
  step:     x[t] *= 0.5
- step: if not u.requires_grad:
  step:     u.add_({m}.detach(), alpha=0.1)
  step: {n} = {m} + 0.3 * u.clone()
- before: {a} = x.new_zeros(T_ + 1, *h.shape)
  step: {a}[t + 1] = {a}[t] * 0.5 + {m}
  result: {a}[1:]
"""

OUTSIDE = r"""
- init: type(self).{q} = itertools.count(1)
  before: {a} = next(self.{q})
  step: {n} = {m} * (0.5 / {a})
- init: type(self).{q} = (0.5 ** each for each in itertools.count())
  step: {n} = {m} * next(Net.{q})
- init: self.{q} = iter(range(1, 10000))
  before: h = h * (1 / next(self.{q}))
- init: type(self).{q} = itertools.cycle([0.5, 0.7, 0.9])
  after: r = r * next(self.{q})
- init: self.{q} = os.path.join(os.path.dirname(__file__), f"{{SEED}}.txt")
  init: open(self.{q}, "w").write("0.9")
  before: {a} = float(open(self.{q}).read())
  before: with open(self.{q}, "w") as file: file.write(str({a} * 0.7))
  step: {n} = {m} * {a}
- init: self.{q} = os.path.join(os.path.dirname(__file__), f"{{SEED}}.log")
  init: open(self.{q}, "w").close()
  before: with open(self.{q}, "a") as file: file.write("x")
  after: r = r * (1 + os.path.getsize(self.{q}))
- init: self.{q} = nn.Linear(H_, H_).requires_grad_(False)
  before: self.{q}.weight.data.clamp_(-0.2, 0.2).mul_(0.9)
  step: {n} = {m} + 0.3 * self.{q}(h)
- init: self.{q} = nn.Parameter(torch.rand(H_))
  after: with torch.no_grad():
  after:     self.{q}.mul_(0.9)
  step: {n} = {m} * self.{q}.detach().clone()
- init: self.{q} = nn.ParameterList(torch.rand(H_) + 0.5 for _ in range(64))
  before: {a} = []
  step: {a}.append({m} * self.{q}[t])
  result: torch.stack({a}[::2])
  result: torch.stack({a}[1::2])
- init: self.{q} = nn.ParameterList(torch.rand(H_) + 0.5 for _ in range(64))
  step: h = h * self.{q}[t]
  result: torch.stack(out[:3])
  result: torch.stack(out[::-1])[:2]
- init: self.{q} = nn.ParameterList(torch.rand(H_) + 0.5 for _ in range(64))
  step: h = h * self.{q}[t]
  result: [each.sin() for each in torch.stack(out)]
  result: [each[0] for each in out]
- init: self.{q} = nn.ParameterList(torch.rand(H_) + 0.5 for _ in range(2))
  step: h = h * self.{q}[t % 2]
  result: [each.sin() for each in out]
  result: torch.stack(out[1:4])
- init: self.{q} = nn.BatchNorm1d(H_, momentum=None)
  step: {n} = self.{q}({m})
- before: {a} = []
  step: if t % 12 == 11:
  step:     {a}.append(h)
  result: {a}
"""
"""What looks at a model must not take or change, and rows of lists beside what each step reads of its own."""

BEYOND = r"""
- init: globals()["{q}"] = torch.Generator().manual_seed({k})
  before: {a} = torch.rand(H_, generator={q})
  step: {n} = {m} * {a}
- init: globals()["{q}"] = torch.Generator().manual_seed({k})
  step: {n} = {m} * torch.rand(H_, generator={q})
- init: globals()["{q}"] = np.random.default_rng({k})
  before: {a} = float({q}.random())
  step: {n} = {m} * {a}
- init: globals()["{q}"] = random.Random({k})
  before: {a} = {q}.random()
  step: {n} = {m} * {a}
- init: globals()["{q}"] = collections.Counter()
  before: {q}["n"] += 1
  step: {n} = {m} * 0.9 ** {q}["n"]
- init: globals()["{q}"] = np.ones(3)
  before: {q}[0] *= 0.8
  step: {n} = {m} * float({q}[0])
- init: globals()["{q}"] = bytearray([{k}])
  before: {q}[0] = ({q}[0] * 3 + 1) % 11
  step: {n} = {m} * ({q}[0] / 11)
- init: globals()["{q}"] = torch.ones(H_)
  before: {q}.mul_(0.8)
  step: {n} = {m} * {q}
- init: globals()["{q}"] = __import__("contextvars").ContextVar("{q}", default=0.9)
  before: {a} = {q}.get()
  before: {q}.set({a} * 0.7)
  step: {n} = {m} * {a}
- init: globals()["{q}"] = __import__("threading").local()
  before: {q}.n = getattr({q}, "n", 1.0) * 0.7
  step: {n} = {m} * {q}.n
- init: globals()["{q}"] = __import__("types").SimpleNamespace(n=1.0)
  before: {q}.n *= 0.7
  step: {n} = {m} * {q}.n
- init: self.{q} = (lambda held: lambda: 0.9 ** (held.append(0) or len(held)))([])
  before: {a} = self.{q}()
  step: {n} = {m} * {a}
- init: self.{q} = (lambda held: lambda v: v * held.mul_(0.8))(torch.ones(H_))
  before: h = self.{q}(h)
- init: globals()["{q}_held"] = [1.0]
  init: exec("def {q}(v):\n    {q}_held[0] *= 0.7\n    return v * {q}_held[0]", globals())
  before: h = globals()["".join(("{q}", ""))](h)
- init: globals()["{q}_held"] = torch.ones(H_)
  init: exec("def {q}(v):\n    {q}_held.mul_(0.7)\n    return v * {q}_held", globals())
  before: h = globals()["".join(("{q}", ""))](h)
- init: globals()["{q}_held"] = []
  init: exec("def {q}(v):\n    {q}_held.append(0)\n    return v * 0.8 ** len({q}_held)", globals())
  step: {n} = globals()["".join(("{q}", ""))]({m})
- init: __import__("sys").modules.pop("colorsys", None)
  before: import colorsys
  before: {a} = colorsys.rgb_to_hls(0.1, 0.5, 0.3)[1]
  step: {n} = {m} * {a}
- init: self.{q} = os.path.join(os.path.dirname(__file__), f"late{{SEED}}.py")
  init: open(self.{q}, "w").write("import math\nmath.late = getattr(math, 'late', 1.0) * 0.5")
  init: vars(math).pop("late", None)
  init: __import__("sys").modules.pop(f"late{{SEED}}", None)
  before: {a} = __import__("runpy").run_path(self.{q})
  step: {n} = {m} * math.late
- before: torch.manual_seed({k})
  step: {n} = {m} + 0.1 * torch.rand(H_)
- before: torch.manual_seed({k})
  before: {a} = torch.rand(H_)
  step: {n} = {m} * {a}
- before: {a} = torch.random.get_rng_state()
  after: torch.random.set_rng_state({a})
  step: {n} = {m} + 0.1 * torch.rand(H_)
- init: self.{q} = 1.0
  before: object.__setattr__(self, "{q}", self.{q} * 0.7)
  step: {n} = {m} * self.{q}
- init: self.{q} = 1.0
  before: vars(self)["{q}"] *= 0.7
  step: {n} = {m} * getattr(self, "".join(("{q}", "")))
- init: type(self).{q} = property(lambda net: vars(net).setdefault("{q}_", [0.9]).append(0.9) or len(net.{q}_))
  step: {n} = {m} * (1 / self.{q})
- init: self.{q} = __import__("functools").lru_cache(None)(lambda k: [0.9])
  before: self.{q}(0).append(0.8)
  step: {n} = {m} * sum(self.{q}(0)) / 10
- init: self.{q} = __import__("functools").partial(lambda held, v: v * (held.append(0) or 0.9 ** len(held)), [])
  before: h = self.{q}(h)
"""
"""State to which nothing leads that a model holds, or only what it runs."""

TURNS = {
    name: idioms_of(text)
    for name, text in {
        "times": TIMES,
        "modes": MODES,
        "maps": MAPS,
        "draws": DRAWS,
        "views": VIEWS,
        "states": STATES,
        "in place": IN_PLACE,
    }.items()
}
"""By kind."""
