"""Networks of torchdiffeq, torchcde, ncps, xlstm, torchrl and transformers."""

from __future__ import annotations

from typing import Any

import torch
from door_networks.case import Make, Network, over_time
from torch import Tensor, nn

T, B, IN, N = 96, 16, 12, 32


def ode(method: str, count: int = 64) -> Make:
    """A neural ODE on a fixed grid (Chen et al., arXiv 1806.07366)."""

    def make() -> Network:
        from torchdiffeq import odeint

        class Field(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(N, 64), nn.Tanh(), nn.Linear(64, N))

            def forward(self, t: Tensor, y: Tensor) -> Tensor:
                return self.net(y) - 0.1 * t * y

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.field, self.out = Field(), nn.Linear(N, 3)

            def forward(self, y0: Tensor, times: Tensor) -> Tensor:
                return self.out(odeint(self.field, y0, times, method=method))

        return over_time(Net(), torch.randn(B, N), torch.linspace(0.0, 4.0, count))

    return make


def cde() -> Network:
    """A neural controlled differential equation on a fixed grid (Kidger et al., arXiv 2005.08926)."""
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(N, 64), nn.ReLU(), nn.Linear(64, N * 3), nn.Tanh())

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.net(z).view(z.size(0), N, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.initial, self.out = Field(), nn.Linear(3, N), nn.Linear(N, 1)

        def forward(self, coeffs: Tensor) -> Tensor:
            path = torchcde.LinearInterpolation(coeffs)
            z0 = self.initial(path.evaluate(path.interval[0]))
            z = torchcde.cdeint(
                X=path, func=self.field, z0=z0, t=path.grid_points, adjoint=False, method="rk4",
                options={"step_size": 1.0},
            )  # fmt: skip
            return self.out(z)

    return over_time(Net(), torchcde.linear_interpolation_coeffs(torch.randn(B, 48, 3)))


def ncps_layer(name: str) -> Make:
    """Liquid networks (Hasani et al., arXiv 2006.04439 and 2106.13898)."""

    def make() -> Network:
        import ncps.torch

        return over_time(getattr(ncps.torch, name)(IN, N), torch.randn(B, 40, IN))

    return make


def slstm() -> Network:
    """xlstm's sLSTM in plain torch (Beck et al., arXiv 2405.04517)."""
    from xlstm.blocks.slstm.layer import sLSTMLayer, sLSTMLayerConfig

    kinds = {f"dtype{end}": "float32" for end in ("", "_b", "_r", "_w", "_g", "_s", "_a")}
    layer = sLSTMLayer(sLSTMLayerConfig(backend="vanilla", embedding_dim=N, num_heads=4, dropout=0.0, **kinds))
    layer.reset_parameters()
    return over_time(layer, torch.randn(B, 48, N))


def torchrl_layer(name: str) -> Make:
    """torchrl's layers in Python."""

    def make() -> Network:
        import torchrl.modules

        layer = getattr(torchrl.modules, name)(IN, N, num_layers=2, batch_first=True)
        return over_time(layer, torch.randn(B, T, IN))

    return make


def dreamer() -> Network:
    """torchrl's prior and posterior of a recurrent state-space model (Hafner et al., arXiv 1811.04551), in a loop.

    The noise is given: torch's inductor does not draw what nobody reads, and then draws other numbers than eager.
    """
    from types import SimpleNamespace

    from torchrl.modules import RSSMPosterior, RSSMPrior

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            action: Any = SimpleNamespace(shape=torch.Size([4]))
            self.prior = RSSMPrior(action, hidden_dim=N, rnn_hidden_dim=N, state_dim=8, action_dim=4)
            self.posterior = RSSMPosterior(hidden_dim=N, state_dim=8, rnn_hidden_dim=N, obs_embed_dim=IN)

        def forward(self, seen_TBI: Tensor, actions_TBA: Tensor, noise_TBS: Tensor) -> Tensor:
            state, belief = seen_TBI.new_zeros(B, 8), seen_TBI.new_zeros(B, N)
            loss = seen_TBI.new_zeros(())
            for t in range(seen_TBI.shape[0]):
                mean, std, _, belief = self.prior(state, belief, actions_TBA[t], noise_TBS[t])
                own_mean, own_std, state = self.posterior(belief, seen_TBI[t], noise_TBS[t])
                one, other = (torch.distributions.Normal(*each) for each in ((own_mean, own_std), (mean, std)))
                loss = loss + torch.distributions.kl_divergence(one, other).mean()
            return loss

    return over_time(Net(), torch.randn(48, B, IN), torch.randn(48, B, 4), torch.randn(48, B, 8))


def language(name: str, **options: Any) -> Make:
    """A causal language model of transformers, small."""

    def make() -> Network:
        import transformers

        config = getattr(transformers, name + "Config")(vocab_size=64, hidden_size=64, num_hidden_layers=2, **options)
        model = getattr(transformers, name + "ForCausalLM")(config)

        def loss(tokens: Tensor) -> Tensor:
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

        return Network(loss, (model,), (torch.randint(0, 64, (4, 64)),))

    return make


NETWORKS: dict[str, Make] = {
    "torchdiffeq: euler": ode("euler"),
    "torchdiffeq: midpoint": ode("midpoint"),
    "torchdiffeq: rk4": ode("rk4"),
    "torchcde: rk4": cde,
    "ncps: CfC": ncps_layer("CfC"),
    "ncps: LTC": ncps_layer("LTC"),
    "xlstm: sLSTM": slstm,
    "torchrl: LSTM": torchrl_layer("LSTM"),
    "torchrl: GRU": torchrl_layer("GRU"),
    "torchrl: RSSM": dreamer,
    "transformers: RWKV": language("Rwkv", attention_hidden_size=64),
    "transformers: RecurrentGemma": language(
        "RecurrentGemma", intermediate_size=128, num_attention_heads=4, num_key_value_heads=1, lru_width=64,
        attention_window_size=64, block_types=("recurrent", "recurrent"),
    ),
    "transformers: Mamba": language("Mamba"),
    "transformers: FalconMamba": language("FalconMamba"),
}  # fmt: skip
