"""Idioms, of which ``kinds.py`` makes programs: lines of a model and of its caller, by kind.

An idiom begins with a dash. Each of its lines says where it stands: ``init``, ``before``, ``step``, ``after`` and
``between``, or ``result``, which names something more that the model gives. In it stand for

    {m} a row [B, H] of the step    {n} a new one           {a}, {b} other new names    {q} a new attribute
    {F} what changes gradients      {k} a number of steps   {p} a small number          {c} a call
    {S} rows that are stacked       {D} what is made of these
"""

from __future__ import annotations

import re

FUNCTIONS = r"""
- step: {n} = torch.tanh({m} @ {F}(self.w))
- step: {n} = torch.tanh({m} @ {F}(self.w) + 0.3 * {m} @ self.w)
- step: {n} = {m} * {F}(self.v)
- step: {n} = {m} * {F}(self.v) + {F}(self.v)
- step: {n} = F.linear({m}, {F}(self.fc.weight), self.fc.bias).tanh()
- step: {n} = {m} + 0.5 * {F}(u)
- step: {n} = 0.5 * {m} + {F}(self.fc(u)).tanh()
- step: {n} = 0.5 * {m} + 0.3 * {F}(x[0])
- step: {n} = 0.5 * {m} + 0.3 * self.fc({F}(x[{k} % T_]))
- step: {n} = {F}({m})
- step: {n} = {F}({m} @ self.w)
- step: {n} = torch.tanh(self.fc({F}(x[t])) + {m})
- step: h = {F}(h)
- step: h = {F}(h) if t % 2 else h
- before: {a} = {F}(self.w)
  step: {n} = torch.tanh({m} @ {a})
- before: {a} = {F}(self.v * 2)
  step: {n} = {m} * {F}({a})
- before: {a} = {F}(u)
  step: {n} = {m} * 0.5 + {a}
- before: x = {F}(x)
- before: h = {F}(h)
- after: r = {F}(r)
- after: r = torch.stack([{F}(each) for each in out])
- after: r = r + {F}(h)
- after: h = {F}(h)
  result: h
- step: {n} = Product.apply({m}, self.v.expand_as({m}))
- step: {n} = Product.apply({m}, h)
- step: {n} = Product.apply({m}, u.detach())
- step: {n} = Counted.apply({m}, {p})
- step: {n} = Counted.apply({m}, t % 2 + 1)
- step: {n} = {m} @ Counted.apply(self.w, {p})
- step: {a}, {b} = Pair.apply({m})
  step: {n} = {a} - 0.5 * {b}
- step: {a}, {b} = Pair.apply(self.v)
  step: {n} = {m} * {a} - 0.5 * {b}
- step: {a}, _ = Pair.apply({m})
  step: {n} = {a} + 0.1
- step: {n}, {a} = Fire.apply({m} * 1.0)
  step: {n} = {n} + 0.1 * {a}
- step: h, {a} = Fire.apply(h * 0.9)
  step: {n} = {m} + 0.1 * {a}
- step: {a} = self.w * 1.0
  step: if {a}.requires_grad:
  step:     {a}.register_hook(lambda g: g.clamp(-0.02, 0.02))
  step: {n} = torch.tanh({m} @ {a})
- step: {n} = {m} * 1.0
  step: if {n}.requires_grad:
  step:     {n}.register_hook(lambda g: g / (1 + g.norm()))
- step: {n} = {m} * 1.0
  step: if {n}.requires_grad:
  step:     {n}.register_hook(lambda g: g * CONFIG['scale'])
- init: self.w.register_hook(lambda g: g.clamp(-0.05, 0.05))
- init: self.fc.register_full_backward_hook(lambda module, given, made: (given[0].clamp(-0.02, 0.02),))
  step: {n} = self.fc({m}).tanh()
- init: self.{q} = nn.Linear(H_, H_)
  init: self.{q}.register_forward_hook(lambda module, given, made: {F}(made))
  step: {n} = self.{q}({m}).tanh()
- init: self.{q} = {F}
  step: {n} = self.{q}({m})
- init: self.{q} = nn.Linear(H_, H_)
  init: nn.utils.parametrize.register_parametrization(self.{q}, 'weight', Changed({F}))
  step: {n} = self.{q}({m}).tanh()
- step: {n} = checkpoint(lambda v: {F}(v @ self.w).tanh(), {m}, use_reentrant=False)
- step: {n} = torch.utils.checkpoint.checkpoint(self.fc, {m}, use_reentrant=True).tanh()
- step: if h.requires_grad:
  step:     h.retain_grad()
- after: if h.requires_grad and not h.is_leaf:
  after:     h.retain_grad()
  result: h
- step: {n} = {F}(torch.cat([{m}, h], 1))[:, :H_]
- step: {n} = {m} + 0.1 * {F}(self.w).mean()
- step: {a} = {F}(self.w)
  step: {n} = torch.tanh({m} @ {a}) + 0.1 * h @ {a}.t()
- step: {n} = {m} + 0.1 * {F}(self.table[t])
- step: {n} = {m} + 0.1 * {F}(self.table)[t]
- step: {n} = {m} + 0.1 * {F}(self.table)[{p}]
- step: with torch.no_grad():
  step:     {a} = {F}(h)
  step: {n} = {m} + 0.1 * {a}
"""
CONTAINERS = r"""
- init: self.{q} = collections.deque(maxlen={p})
  after: self.{q}.append(h.detach().mean(0))
  after: r = r + torch.stack(list(self.{q})).mean(0)
- init: self.{q} = collections.deque([0.1, 0.2], maxlen=2)
  after: r = r * sum(self.{q})
  between: net.{q}.append(0.3 * number)
- init: self.{q} = []
  after: self.{q}.append(h.detach().mean(0))
  after: r = r + torch.stack(self.{q}).mean(0)
- init: self.{q} = []
  after: r = r * (1 + 0.1 * len(self.{q}))
  after: self.{q}.append(T_)
- init: self.{q} = [0.5, 0.7]
  step: {n} = {m} * self.{q}[t % 2]
  between: if number == {c}:
  between:     net.{q}[1] = 0.9
- init: self.{q} = [0.5, 0.7]
  step: {n} = {m} * sum(self.{q})
  between: if number == {c}:
  between:     net.{q}.append(0.2)
- init: self.{q} = {{'a': 0.5}}
  step: {n} = {m} * self.{q}['a']
  between: if number == {c}:
  between:     net.{q}['a'] = 0.8
- init: self.{q} = {{}}
  after: r = r + self.{q}.get('last', 0.0)
  after: self.{q}['last'] = h.detach().mean(0)
- init: self.{q} = {{'sum': torch.zeros(H_)}}
  step: {n} = {m} + 0.1 * self.{q}['sum']
  after: self.{q}['sum'] = self.{q}['sum'] * 0.5 + h.detach().mean(0)
- init: self.{q} = collections.OrderedDict(a=0.5, b=0.3)
  step: for {a} in self.{q}.values():
  step:     h = h * {a}
  between: if number == {c}:
  between:     net.{q}.move_to_end('a')
  between:     net.{q}['c'] = 0.7
- init: self.{q} = collections.OrderedDict(a=torch.ones(H_), b=torch.zeros(H_))
  step: {n} = {m} * next(iter(self.{q}.values()))
  between: if number == {c}:
  between:     net.{q}.move_to_end('a')
- init: self.{q} = collections.defaultdict(float)
  after: self.{q}[T_] += 0.1
  after: r = r * (1 + self.{q}[T_])
- init: self.{q} = collections.Counter()
  after: self.{q}['calls'] += 1
  after: r = r * (1 + 0.1 * self.{q}['calls'])
- init: self.{q} = set()
  after: r = r * (1 + 0.1 * len(self.{q}))
  after: self.{q}.add(T_ % 3)
- init: self.{q} = np.array([0.5, 0.9])
  step: {n} = {m} * float(self.{q}[0])
  between: if number == {c}:
  between:     net.{q}[0] = 0.7
- init: self.{q} = np.linspace(0.1, 0.9, H_)
  step: {n} = {m} * torch.from_numpy(self.{q})
  between: net.{q} *= 0.9
- init: self.{q} = np.linspace(0.1, 0.9, H_)
  before: {a} = torch.as_tensor(self.{q})
  step: {n} = {m} * {a}
  between: if number == {c}:
  between:     net.{q}[:] = 0.5
- init: self.{q} = np.zeros(3)
  after: self.{q}[{p} % 3] += 1
  after: r = r * (1 + 0.1 * float(self.{q}.sum()))
- init: self.{q} = [nn.Linear(H_, H_), nn.Identity()]
  step: {n} = self.{q}[0]({m}).tanh()
  between: if number == {c}:
  between:     net.{q}.reverse()
- init: self.{q} = nn.ModuleList([nn.Linear(H_, H_), nn.Tanh()])
  step: {n} = {m}
  step: for {a} in self.{q}:
  step:     {n} = {a}({n})
  between: if number == {c}:
  between:     net.{q}.append(nn.Softmax(-1))
- init: self.{q} = [torch.ones(H_)]
  step: self.{q}[0] = self.{q}[0] * 0.9
  step: {n} = {m} * self.{q}[0]
- init: self.{q} = {{'h': None}}
  before: if self.{q}['h'] is not None:
  before:     h = h + self.{q}['h']
  after: self.{q}['h'] = h.detach().mean(0)
- init: self.{q} = None
  before: if self.{q} is not None:
  before:     h = h + self.{q}
  after: self.{q} = h.detach().mean(0)
- init: self.{q} = ([0.5], 0.3)
  step: {n} = {m} * self.{q}[0][0]
  between: if number == {c}:
  between:     net.{q}[0][0] = 0.9
- after: CONFIG['log'].append(T_)
  after: r = r * (1 + 0.1 * len(CONFIG['log']))
- before: CONFIG['log'].append(T_)
- step: {n} = {m} * CONFIG['scale']
  between: if number == {c}:
  between:     CONFIG['scale'] = 0.5
- init: self.{q} = collections.deque([torch.zeros(H_)] * 2, maxlen=2)
  step: {n} = {m} + 0.3 * self.{q}[0]
  step: self.{q}.append(h.detach().mean(0))
- before: {a} = collections.deque([h] * {p}, maxlen={p})
  step: {n} = {m} + 0.3 * {a}[0]
  step: {a}.append({n})
- before: {a} = collections.deque(maxlen={p})
  step: {a}.append({m})
  step: {n} = sum({a}) / len({a})
- before: {a} = {{'h': h, 'n': 0}}
  step: {n} = {m} + 0.3 * {a}['h']
  step: {a}['h'] = {n}
  step: {a}['n'] += 1
"""
NUMBERS = r"""
- init: self.{q} = 0
  after: self.{q} += 1
  after: r = r * (1 + 0.1 * self.{q})
- init: self.{q} = 0
  step: self.{q} += 1
- init: self.{q} = 1.0
  step: {n} = {m} * self.{q}
  after: self.{q} *= 0.9
- init: self.{q} = 0.5
  step: {n} = {m} * self.{q}
  between: net.{q} = 0.5 + 0.1 * number
- init: self.{q} = 0.5
  step: {n} = {m} * self.{q}
  between: if number == {c}:
  between:     net.{q} = 1
- init: self.{q} = True
  step: {n} = {m} * 0.5 if self.{q} else {m} * 0.9
  between: net.{q} = not net.{q}
- init: self.{q} = random.Random({p})
  after: r = r * self.{q}.random()
- init: self.{q} = random.Random({p})
  before: {a} = self.{q}.randint(1, 3)
  step: {n} = {m} * (0.3 * {a})
- init: self.{q} = random.Random({p})
  step: {n} = {m} * self.{q}.random()
- init: self.{q} = random.Random({p})
  step: {n} = {m} * 0.5 if self.{q}.random() < 0.5 else {m}
- init: self.{q} = random.Random({p})
  after: r = r * self.{q}.random()
  between: net.{q}.seed(number)
- init: self.{q} = np.random.default_rng({p})
  after: r = r * float(self.{q}.random())
- init: self.{q} = np.random.default_rng({p})
  before: {a} = int(self.{q}.integers(1, 3))
  step: {n} = {m} * (0.3 * {a})
- init: self.{q} = np.random.default_rng({p})
  step: {n} = {m} * torch.from_numpy(self.{q}.random(H_))
- init: self.{q} = np.random.RandomState({p})
  after: r = r * float(self.{q}.rand())
- init: self.{q} = np.random.RandomState({p})
  before: {a} = self.{q}.randint(1, 3)
  step: {n} = {m} * float(0.3 * {a})
- init: self.{q} = itertools.count()
  after: r = r * (1 + 0.1 * next(self.{q}))
- init: self.{q} = itertools.count()
  before: {a} = next(self.{q})
  step: {n} = {m} * (0.5 + 0.1 * {a})
- init: self.{q} = itertools.cycle([0.5, 0.7, 0.9])
  after: r = r * next(self.{q})
- init: self.{q} = itertools.cycle([0.5, 0.7, 0.9])
  step: {n} = {m} * next(self.{q})
- init: self.{q} = torch.Generator().manual_seed({p})
  after: r = r * torch.rand((), generator=self.{q})
- init: self.{q} = torch.Generator().manual_seed({p})
  before: {a} = torch.rand(H_, generator=self.{q})
  step: {n} = {m} * {a}
- init: self.{q} = torch.Generator().manual_seed({p})
  step: {n} = {m} * torch.rand(H_, generator=self.{q})
- after: r = r * random.random()
- step: {n} = {m} * random.random()
- step: {n} = {m} if random.random() < 0.5 else h
- step: if torch.rand(()) < 0.5:
  step:     h = h * 0.5
- after: r = r * float(np.random.rand())
- step: {n} = {m} * float(np.random.rand())
- after: r = r * float(os.environ.get('KINDS_SCALE', '0.5'))
  between: os.environ['KINDS_SCALE'] = str(0.5 + 0.1 * number)
- init: self.drop = nn.Dropout(0.3)
  step: {n} = self.drop({m})
  between: if number == {c}:
  between:     net.drop.p = 0.6
- init: self.register_buffer('{q}', torch.zeros(()))
  step: self.{q} += 1
  step: {n} = {m} / self.{q}.clone()
- init: self.register_buffer('{q}', torch.zeros(()))
  after: r = r * (1 + self.{q})
  after: self.{q} += 0.1
- init: self.{q} = torch.zeros(H_)
  step: {n} = {m} + 0.1 * self.{q}
  after: self.{q} = h.detach().mean(0)
- between: with torch.no_grad():
  between:     net.w.mul_(0.9)
- between: if number == {c}:
  between:     net.w.requires_grad_(not net.w.requires_grad)
- between: if number == {c}:
  between:     net.fc = nn.Linear(H_, H_)
  step: {n} = self.fc({m}).tanh()
- between: if number == {c}:
  between:     net.w = nn.Parameter(net.w.detach() * 0.5)
"""
SIZES = r"""
- step: {n} = {m} + 0.3 * x.chunk({k})[0].sum(0)
- step: {n} = {m} + 0.3 * x.chunk({k})[-1].mean(0)
- step: {n} = {m} + 0.3 * x.split({k})[0].mean(0)
- step: {n} = {m} + 0.3 * x.split({k})[-1].sum(0)
- step: {n} = {m} + 0.3 * x.tensor_split({k})[0].sum(0)
- step: {n} = {m} + 0.3 * x[::{k}].mean(0)
- step: {n} = {m} + 0.3 * x[::{k}][-1]
- step: {n} = {m} + 0.3 * x[:{k}][-1]
- step: {n} = {m} + 0.3 * x[:{k}].mean(0)
- step: {n} = {m} + 0.3 * x[-{k}:].mean(0)
- step: {n} = {m} + 0.3 * x[-{k}:][0]
- step: {n} = {m} + 0.3 * x[{k}:].sum(0)
- step: {n} = {m} + 0.3 * x[t:t + {k}].mean(0)
- step: {n} = {m} + 0.3 * x[max(0, t - {k}):t + 1].mean(0)
- step: {n} = {m} + 0.3 * x[: t + 1].mean(0)
- step: {n} = {m} + 0.3 * x[t:].mean(0)
- step: {n} = {m} + 0.3 * x[min(t, {k}, T_ - 1)]
- step: {n} = {m} + 0.3 * x[min(t + {k}, T_ - 1)]
- step: {n} = {m} * (0.1 * min(t, {k}))
- step: {n} = {m} * (0.05 * min(T_, {k}))
- step: {n} = {m} * (0.05 * len(x.split({k})))
- step: {n} = {m} + 0.3 * x.narrow(0, 0, min(T_, {k})).mean(0)
- step: {n} = {m} + 0.3 * x.unfold(0, 3, {p})[-1].mean(-1)
- step: {n} = {m} + 0.3 * F.avg_pool1d(x.permute(1, 2, 0), 5, {k}).mean(-1)
- step: {n} = {m} + 0.3 * F.adaptive_avg_pool1d(x.permute(1, 2, 0), {k})[..., 0]
- step: {n} = {m} + 0.3 * x[torch.arange(0, T_, {k})].sum(0)
- step: {n} = {m} + 0.3 * x[: T_ // 2 + 1].mean(0)
- step: {n} = {m} + 0.3 * x[T_ // {p} - 1]
- step: {n} = {m} + 0.3 * x.topk(min({k}, T_), 0).values.mean(0)
- step: {n} = {m} + 0.3 * torch.stack(out[-{k}:]).mean(0) if out else {m}
- step: {n} = {m} + 0.1 * sum(out[-{p}:])
- step: {n} = {m} + 0.3 * out[-{p}] if len(out) >= {p} else {m}
- step: {n} = {m} + 0.3 * out[max(0, len(out) - {k})] if out else {m}
- before: {a} = x.chunk({k})[0].sum(0)
  step: {n} = {m} + 0.3 * {a}
- before: {a} = x[::{k}].mean(0)
  step: {n} = {m} + 0.3 * {a}
- before: {a} = x.split({k})
  step: {n} = {m} + 0.3 * {a}[t // {k}].mean(0)
- before: {a} = x.split({k})
  step: {n} = {m} + 0.3 * {a}[t // {k}][t % {k}]
- after: r = r + torch.stack(out[:{k}]).mean(0)
- after: r = r + torch.stack(out)[::{k}].mean(0)
- after: r = torch.cat([each.mean(0, keepdim=True) for each in r.split({k})])
- step: if t % {k} == 0:
  step:     h = h * 0.5
- before: {a} = []
  step: if t % {k} == 0:
  step:     {a}.append(h)
  result: {a}
- step: if t < {k}:
  step:     h = h * 0.5
- step: if t == {k}:
  step:     h = h * 0.5
- step: for {a} in range(min(t, 3)):
  step:     h = h * 0.9 + 0.1 * x[{a}]
"""
LAYOUTS = r"""
- before: {a} = []
  step: {b} = self.conv({m}.unflatten(1, (1, 2, -1)).contiguous(memory_format=torch.channels_last)).tanh()
  step: {a}.append({b})
  step: {n} = {m} + 0.3 * {b}.mean(1).flatten(1)
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {b} = self.conv({m}.unflatten(1, (1, 2, -1))).tanh()
  step: {a}.append({b}.contiguous(memory_format=torch.channels_last))
  after: {b} = {S}
  result: {D}
- before: {a}, {b} = [], None
  step: {b} = self.conv({m}.unflatten(1, (1, 2, -1)) + (0 if {b} is None else {b}.mean(1, keepdim=True))).tanh()
  step: {a}.append({b}.to(memory_format=torch.channels_last))
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {n} = {m}.t().contiguous().t()
  step: {a}.append({n})
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append(({m} @ self.w).t())
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append({m}.unsqueeze(0).expand(2, -1, -1))
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append({m}.unflatten(1, (2, -1)).transpose(1, 2))
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append(torch.einsum('bh,bk->khb', {m}, h))
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append({m}.unflatten(1, (1, 2, -1)).permute(3, 0, 2, 1) * 0.5)
  after: {b} = {S}
  result: {D}
- before: {a} = []
  step: {a}.append({m}[:, ::2])
  after: {b} = {S}
  result: {D}
- before: h = h.t().contiguous().t()
  result: h
- before: h = h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
  result: h.t()
- before: x = x.transpose(0, 1).contiguous().transpose(0, 1)
  result: x * 2
- before: x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)
  result: torch.stack(list(x))
- step: {n} = F.dropout({m}.t().contiguous().t(), 0.3, self.training)
- step: {n} = {m}.t().contiguous().t()
  step: {n} = {n} * torch.rand_like({n})
- step: {n} = {m}.clone(memory_format=torch.contiguous_format).view(-1).view_as({m})
- step: {n} = {m}.reshape(H_, -1).reshape({m}.shape)
- step: h = h.t().contiguous().t()
- step: {n} = {m} * (1.0 if {m}.is_contiguous() else 0.5)
- step: {n} = torch.zeros_like({m}.t()).t() + {m}
- before: {a} = x.new_zeros(T_, *h.shape)
  step: {a}[t] = {m}
  result: {a}
- before: {a} = x.new_zeros(h.shape[0], T_, H_)
  step: {a}[:, t] = {m}
  result: F.dropout({a}, 0.5, self.training)
- before: {a} = torch.zeros(h.shape[0], H_, T_)
  step: {a}[:, :, t] = {m}
  result: {a}.transpose(1, 2)
"""
LINALG = r"""
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = torch.linalg.solve({a}, {m}.t()).t()
- step: {a} = self.eye + 0.1 * {m}.t() @ h
  step: {n} = {m} @ torch.linalg.inv({a})
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = torch.cholesky_solve({m}.t(), torch.linalg.cholesky({a})).t()
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = {m} / torch.linalg.det({a})
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = {m} * torch.linalg.slogdet({a}).logabsdet * 0.2
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = {m} * 0.5 + 0.1 * torch.linalg.eigvalsh({a})
- step: {a}, {b} = torch.linalg.eigh(self.eye + 0.1 * h.t() @ h)
  step: {n} = {m} @ ({b} * {a}.log()) @ {b}.t()
- step: {a} = torch.linalg.cholesky(self.eye + 0.1 * h.t() @ h)
  step: {n} = torch.linalg.solve_triangular({a}, {m}.t(), upper=False).t()
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = {m} @ torch.linalg.pinv({a}).mT
- step: {a} = self.eye + 0.1 * h.t() @ h
  step: {n} = torch.linalg.lstsq({a}, {m}.t()).solution.t()
- step: {n} = {m} @ torch.matrix_exp(0.1 * h.t() @ h) * 0.5
- step: {a}, {b} = torch.linalg.qr(self.eye + 0.1 * h.t() @ h)
  step: {n} = {m} @ ({a} @ {b}) * 0.2
- step: {a}, _ = torch.linalg.inv_ex(self.eye + 0.1 * self.w @ self.w.t())
  step: {n} = {m} @ {a}
- step: {n} = {m} @ torch.linalg.inv(self.eye + 0.1 * self.w @ self.w.t())
- step: {a} = (self.eye + 0.1 * h.t() @ h).expand(h.shape[0], -1, -1)
  step: {n} = torch.linalg.solve({a}, {m}.unsqueeze(-1)).squeeze(-1)
- step: {a} = self.eye + 0.1 * h.unsqueeze(2) * {m}.unsqueeze(1)
  step: {n} = torch.linalg.solve({a}, {m})
- step: {a} = torch.linalg.lu_factor(self.eye + 0.1 * h.t() @ h)
  step: {n} = torch.linalg.lu_solve(*{a}, {m}.t()).t()
- before: {a} = torch.linalg.inv(self.eye + 0.1 * self.w @ self.w.t())
  step: {n} = {m} @ {a}
- before: {a} = self.eye
  step: {a} = {a} * 0.9 + 0.1 * {m}.t() @ {m}
  step: {n} = {m} @ torch.linalg.inv({a})
  result: {a}
- step: {n} = {m} * torch.linalg.svdvals(self.eye + 0.1 * h.t() @ h) * 0.3
- step: {n} = {m} @ torch.linalg.matrix_power(self.eye * 0.2 + 0.1 * self.w, {p})
- step: {n} = {m} / (1 + torch.linalg.vector_norm({m}, dim=1, keepdim=True))
- step: {n} = {m} @ torch.inverse(self.eye + 0.1 * {m}.t() @ {m})
- after: r = torch.linalg.solve(self.eye + 0.1 * h.t() @ h, r.mT).mT
"""
TENSORS = r"""
- step: {n} = {m} + self.emb(torch.tensor([t]))
- step: {n} = {m} + self.emb(torch.tensor(t)) * 0.3
- step: {n} = {m} + self.emb(torch.as_tensor(t)) * 0.3
- step: {n} = {m} + self.emb(torch.arange(t, t + 1))
- step: {n} = {m} + self.emb(torch.full((1,), t))
- step: {n} = {m} + self.emb(torch.tensor([t, t + 1])).mean(0)
- step: {n} = {m} + self.emb(torch.tensor([t] * h.shape[0]))
- step: {n} = {m} * x.new_tensor([t / T_])
- step: {n} = {m} * x.new_full((1,), 0.1 * t).cos()
- step: {n} = {m} * torch.tensor(0.1 * t).cos()
- step: {n} = {m} * torch.tensor([math.sin(t), math.cos(t)]).mean()
- step: {n} = {m} * torch.scalar_tensor(t).cos()
- step: {n} = {m} * torch.tensor(float(t)).exp().reciprocal()
- step: {n} = {m} + 0.1 * torch.linspace(0, t, H_).cos()
- step: {n} = {m} + F.one_hot(torch.tensor(t % H_), H_)
- step: {n} = {m} * torch.ones(H_).mul_(0.1 * t).cos()
- step: {n} = {m} + 0.1 * (torch.arange(H_) < t)
- step: {n} = {m} + 0.1 * (torch.arange(H_) == t % H_).to(x.dtype)
- step: {n} = {m} * torch.sin(torch.arange(H_) * t)
- step: {n} = {m} + 0.1 * self.table.index_select(0, torch.tensor([t]))
- step: {n} = {m} + 0.1 * self.table[torch.tensor([t, t])].mean(0)
- step: {n} = {m} + 0.3 * x.index_select(0, torch.tensor([t]))[0]
- step: {n} = {m} + 0.3 * x[torch.tensor([t])].squeeze(0)
- step: {n} = {m} * torch.pow(torch.tensor(0.9), t)
- step: {n} = {m} + 0.1 * torch.zeros(H_).index_fill(0, torch.tensor([t % H_]), 1.0)
- step: {n} = {m} * torch.tensor(t % 3 == 0)
- step: {n} = torch.where(torch.tensor(t % 2 == 0), {m}, h)
- step: {n} = torch.where(torch.tensor(t) > {k}, {m}, h)
- before: {a} = torch.arange(T_)
  step: {n} = {m} + self.emb({a}[t])
- before: {a} = torch.arange(T_)
  step: {n} = {m} + self.emb({a}[t : t + 1])
- before: {a} = torch.linspace(0, 1, T_)
  step: {n} = {m} * {a}[t]
- before: {a} = torch.tensor([0.9 ** n for n in range(T_)])
  step: {n} = {m} * {a}[t]
- before: {a} = [0.9 ** n for n in range(T_)]
  step: {n} = {m} * {a}[t]
- before: {a} = torch.zeros((), dtype=torch.long)
  step: {n} = {m} + self.emb({a})
  step: {a} = {a} + 1
- before: {a} = torch.tensor(1.0)
  step: {a} = {a} * 0.9
  step: {n} = {m} * {a}
"""
COND = r"""
- step: {n} = torch.cond({m}.sum() > 0, lambda v: v.clone(), lambda v: torch.sigmoid(v) * 0.5, ({m},))
- step: {n} = torch.cond({m}.sum() > 0, lambda v: v.tanh(), lambda v: v * self.v, ({m},))
- step: {n} = torch.cond(h.mean() > {m}.mean(), lambda v, w: v + w, lambda v, w: v - 0.5 * w, ({m}, h))
- before: def {a}(v):
  before:     return torch.tanh(v @ self.w)
  before: def {b}(v):
  before:     return v * 0.5
  step: {n} = torch.cond({m}.mean() > 0, {a}, {b}, ({m},))
- step: {n} = torch.where({m}.sum() > 0, {m}.clone(), torch.sigmoid({m}) * 0.5)
- step: {n} = torch.where({m}.sum(1, keepdim=True) > 0, {m}, h)
- step: {n} = torch.cond({m}.sum() > 0, lambda v: {F}(v), lambda v: v * 0.5, ({m},))
"""
PER_STEP = r"""
- init: self.{q} = nn.ModuleList(nn.LayerNorm(H_) for _ in range(32))
  step: {n} = self.{q}[t]({m}) * 0.3
- init: self.{q} = nn.ModuleList(nn.BatchNorm1d(H_) for _ in range(32))
  step: {n} = self.{q}[t]({m}) * 0.3
- init: self.{q} = nn.ModuleList(nn.Linear(H_, H_) for _ in range(32))
  step: {n} = self.{q}[t]({m}).tanh()
- init: self.{q} = nn.ModuleList(nn.Linear(H_, H_) for _ in range(3))
  step: {n} = self.{q}[t % 3]({m}).tanh()
- init: self.{q} = nn.ModuleList(nn.LayerNorm(H_) for _ in range(4))
  step: {n} = self.{q}[min(t, 3)]({m}) * 0.3
- init: self.{q} = nn.ModuleDict({{str(k): nn.LayerNorm(H_) for k in range(32)}})
  step: {n} = self.{q}[str(t)]({m}) * 0.3
- init: self.{q} = nn.ParameterList(torch.randn(H_) * 0.4 for _ in range(32))
  step: {n} = {m} * self.{q}[t]
- init: self.{q} = nn.ParameterList(torch.randn(H_, H_) * 0.4 for _ in range(32))
  step: {n} = torch.tanh({m} @ self.{q}[t])
- init: self.{q} = nn.ParameterList(torch.randn(H_) * 0.4 for _ in range(32))
  step: {n} = {m} * self.{q}[T_ - 1 - t]
- step: {n} = {m} * self.table[t]
- step: {n} = {m} * self.table[T_ - 1 - t]
- step: {n} = {m} * self.table[t % 3]
- step: {n} = {m} * self.table[min(t, {k})]
- step: {n} = {m} + 0.3 * F.layer_norm({m}, (H_,), self.table[t])
- init: self.{q} = [0.9 ** k for k in range(32)]
  step: {n} = {m} * self.{q}[t]
- init: self.{q} = [torch.rand(H_) for _ in range(32)]
  step: {n} = {m} * self.{q}[t]
- init: self.{q} = nn.ModuleList(nn.LayerNorm(H_) for _ in range(32))
  step: {n} = {m} * 0.5 + self.{q}[t].weight * 0.1
- init: for k in range(32):
  init:     setattr(self, f'{q}_{{k}}', nn.LayerNorm(H_))
  step: {n} = getattr(self, f'{q}_{{t}}')({m}) * 0.3
- init: self.{q} = nn.ModuleList(nn.LayerNorm(H_) for _ in range(32))
  step: {n} = self.{q}[t]({m}) * 0.3
  between: if number == {c}:
  between:     net.{q}[2].requires_grad_(False)
- init: self.{q} = nn.ParameterList(torch.randn(H_) * 0.4 for _ in range(32))
  step: {n} = {m} * {F}(self.{q}[t])
"""
RANDOM = r"""
- step: {n} = F.dropout({m}, 1.0, self.training)
- step: {n} = {m} + F.dropout({m}, 1.0, self.training)
- step: {n} = F.dropout({m}, 0.0, self.training)
- step: {n} = F.dropout({m}, {p} / 5, self.training)
- init: self.{q} = nn.AlphaDropout(0.2)
  step: {n} = self.{q}({m}) * 0.5
- init: self.{q} = nn.Dropout(1.0)
  step: {n} = {m} - self.{q}({m})
- step: {n} = {m} * torch.bernoulli(torch.full_like({m}, 0.7))
- step: {n} = {m} + 0.1 * torch.randn(H_)
- step: {n} = {m} + 0.1 * torch.rand_like({m})
- before: {a} = torch.rand(H_)
  step: {n} = {m} * {a}
- before: x = F.dropout(x, 0.3, self.training)
- after: r = F.dropout(r, 0.5, self.training)
- after: r = r + 0.1 * torch.randn_like(r)
- step: {n} = F.gumbel_softmax({m}, tau=1.0)
- step: {n} = F.rrelu({m}, 0.1, 0.3, self.training)
- step: {n} = {m}[:, torch.randperm(H_)]
"""

NORMS = r"""
- init: self.{q} = nn.BatchNorm1d(H_)
  step: {n} = self.{q}({m}).tanh()
- init: self.{q} = nn.BatchNorm1d(H_, affine=False, momentum=None)
  step: {n} = 0.5 * self.{q}({m} + h)
- init: self.{q} = nn.BatchNorm1d(H_, track_running_stats=False)
  step: {n} = self.{q}({m}) * self.v
- init: self.{q} = nn.BatchNorm1d(H_)
  init: self.{q}.requires_grad_(False).eval().train = lambda mode=True: self.{q}
  step: {n} = self.{q}({m}).tanh()
- init: self.{q} = nn.ModuleList(nn.BatchNorm1d(H_) for _ in range(2))
  step: {n} = self.{q}[t % 2]({m}).tanh()
- init: self.{q} = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
  step: {n} = self.{q}({m}.reshape(-1, 2, H_ // 2)).flatten(1).tanh()
- init: self.{q} = nn.GroupNorm(2, H_)
  step: {n} = self.{q}({m}).tanh()
- init: self.{q} = nn.LayerNorm(H_, elementwise_affine=False)
  step: {n} = self.{q}({m} + 0.5 * h)
- init: self.register_buffer('{q}', torch.ones(H_))
  step: {n} = F.batch_norm({m}, self.v.detach(), self.{q}, training=False)
- init: self.register_buffer('{q}', torch.ones(2, H_))
  step: {n} = F.batch_norm({m}, self.{q}[0], self.{q}[1], self.v, training=self.training).tanh()
- step: {n} = F.batch_norm({m}, None, None, self.v, training=True)
- init: self.{q} = nn.RMSNorm(H_)
  step: {n} = self.{q}({m}) * 0.5
- after: r = F.batch_norm(r.flatten(0, -2), None, None, training=True) if r.ndim > 1 else r
"""
DELAYS = r"""
- before: {a}, {b} = u * 0.5, u * 0.3
  step: {n} = {m} + 0.5 * {b}
  step: {b}, {a} = {a}, {n}
  result: {b}
- before: {a}, {b} = u * 0.5, h
  step: {n} = {m} + 0.5 * {b}
  step: {b}, {a} = {a}, {n}
  result: {a}
  result: {b}
- before: {a}, {b} = torch.zeros_like(u), torch.zeros_like(u)
  step: {n} = torch.tanh({m} - 0.3 * {b} @ self.w)
  step: {b}, {a} = {a}, {n}
  result: {b}
- before: {a} = [u * 0.5, u * 0.3, u * 0.1]
  step: {n} = 0.8 * {m} + 0.3 * {a}[0]
  step: {a} = [*{a}[1:], {n}]
  result: {a}[0]
  result: {a}[2]
- before: {a} = [u * 0.5, u * 0.3, self.v.expand_as(u)]
  step: {n} = 0.8 * {m} + 0.3 * {a}[0]
  step: {a} = [*{a}[1:], {n}]
  result: {a}[1]
- before: {a}, {b} = u * 0.5, u * 0.3
  step: {a}, {b} = {b}, {a}
  step: {n} = {m} + 0.2 * {a}
  result: {a}
  result: {b}
- before: {a}, {b} = u * 0.5, u * 0.3
  step: {n} = {m} + 0.2 * {b}
  step: {a}, {b} = 0.5 * {a} + {n}, {a}
  result: {b}
- before: {a} = u * 0.5
  step: {n} = {m} + 0.1 * {a}
  step: {a} = x[t]
  result: {a}
- before: {a} = u * 0.5
  step: {n}, {a} = {m} + 0.4 * {a}, {m} * 0.7
  result: {a}
"""

TEXTS = {
    "delays": DELAYS,
    "norms": NORMS,
    "functions": FUNCTIONS,
    "containers": CONTAINERS,
    "numbers": NUMBERS,
    "sizes": SIZES,
    "layouts": LAYOUTS,
    "linalg": LINALG,
    "tensors": TENSORS,
    "cond": COND,
    "per step": PER_STEP,
    "random": RANDOM,
}


def idioms_of(text: str) -> tuple[str, ...]:
    """The idioms of a text."""
    return tuple(
        re.sub(r"^  ", "", idiom.rstrip(), flags=re.MULTILINE)
        for idiom in re.split("^- ", text, flags=re.MULTILINE)[1:]
    )


IDIOMS = {kind: idioms_of(text) for kind, text in TEXTS.items()}
