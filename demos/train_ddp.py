"""Train a spiking network on handwritten digits by several processes, each with its share of every batch.

    torchrun --nproc-per-node 2 demos/train_ddp.py

It ends with an error if the accuracy is missed, or if the gradients of the first batch are not those of one process.
"""

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from parts.spiking import Data, Network, digits, spike_trains
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import reroll


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="time steps per image")
    parser.add_argument("--neurons", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="images of all processes together")
    parser.add_argument("--rounds", type=int, default=150, help="updates")
    parser.add_argument("--lowering", default="inductor", help="inductor or eager")
    parser.add_argument("--accuracy", type=float, default=0.9, help="least accuracy on held-out digits")
    return parser.parse_args()


def share(whole_B: Tensor, dim: int = 0) -> Tensor:
    """The part of a batch that is this process's."""
    return whole_B.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def difference(model: Any, network: nn.Module, x_TBI: Tensor, y_B: Tensor) -> float:
    """The largest difference of gradients to those of one process with the whole batch, of their largest value."""
    alone = copy.deepcopy(network)
    cross_entropy(alone(x_TBI), y_B).backward()
    network.zero_grad()
    cross_entropy(model(share(x_TBI, 1)), share(y_B)).backward()
    gradients = [[parameter.grad for parameter in each.parameters()] for each in (network, alone)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True))


def train(model: Any, network: nn.Module, data: Data, args: argparse.Namespace) -> None:
    """Every process draws the same images and spikes, and takes its share of them."""
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.rounds)
    for number in range(args.rounds):
        chosen = torch.randint(len(data[1]), (args.batch,))
        x_TBI = spike_trains(data[0][chosen], args.steps)
        loss = cross_entropy(model(share(x_TBI, 1)), share(data[1][chosen]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if dist.get_rank() == 0 and number % 25 == 0:
            print(f"round {number:4}: loss {loss.item():.3f}", flush=True)


def main() -> str | None:
    """Give a sentence if the result is not as promised."""
    args = arguments()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, (x_NI, y_N) = digits()
    network = Network(args.neurons)
    model = DistributedDataParallel(reroll.compile(network, schedule="double", lowering=args.lowering))
    off = difference(model, network, spike_trains(data[0][: args.batch], args.steps), data[1][: args.batch])
    train(model, network, data, args)
    with torch.no_grad():
        accuracy = (network(spike_trains(x_NI, args.steps)).argmax(1) == y_N).double().mean().item()
    if dist.get_rank() == 0:
        print(f"Gradients of the first batch: {off:.1e} from those of one process with the whole batch")
        print(f"Accuracy on {len(y_N)} held-out digits: {accuracy:.3f}")
    dist.destroy_process_group()
    if off > 1e-4:
        return f"The gradients differ from those of one process by {off:.1e}. Please report it."
    return None if accuracy >= args.accuracy else f"Accuracy {accuracy:.3f} is below {args.accuracy}. Train for longer."


if __name__ == "__main__":
    raise SystemExit(main())
