"""Tutorial 5 of snnTorch, a spiking network that learns handwritten digits, with one line added.

The network, the loss and the loop are the tutorial's (Eshraghian et al., MIT licence). It trains without the added line
and with it. MNIST has to be downloaded, so the digits of scikit-learn stand in for it: --mnist FOLDER takes MNIST.
It ends with an error if the results or gradients of the two ways differ.
"""

import argparse
import copy
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import snntorch as snn
import torch
from parts.learning import History, plot
from parts.spiking import image_sets
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader

import reroll

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--mnist", type=Path, help="folder of MNIST")
parser.add_argument("--steps", type=int, default=25, help="time steps")
parser.add_argument("--hidden", type=int, default=1000, help="neurons of the first layer")
parser.add_argument("--epochs", type=int, default=10, help="MNIST needs one")
parser.add_argument("--lowering", default="inductor", help="inductor or eager")
parser.add_argument("--out", type=Path, default=Path(__file__).with_name("out") / "snntorch_tutorial.png")
args = parser.parse_args()
num_inputs, num_hidden, num_outputs = 28 * 28 if args.mnist else 8 * 8, args.hidden, 10
num_steps, beta, batch_size = args.steps, 0.95, 128


class Net(nn.Module):
    """Two layers of leaky neurons. It gives spikes and membranes of the second one at all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, num_hidden)
        self.lif1 = snn.Leaky(beta=beta)
        self.fc2 = nn.Linear(num_hidden, num_outputs)
        self.lif2 = snn.Leaky(beta=beta)

    def forward(self, x):  # type: ignore[no-untyped-def]  # noqa: D102  # all of it is the tutorial's
        mem1, mem2 = self.lif1.init_leaky(), self.lif2.init_leaky()
        spk2_rec, mem2_rec = [], []
        for step in range(num_steps):  # noqa: B007
            cur1 = self.fc1(x)
            spk1, mem1 = self.lif1(cur1, mem1)
            cur2 = self.fc2(spk1)
            spk2, mem2 = self.lif2(cur2, mem2)
            spk2_rec.append(spk2)
            mem2_rec.append(mem2)
        return torch.stack(spk2_rec, dim=0), torch.stack(mem2_rec, dim=0)


def loss_of(recorded: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return sum((nn.functional.cross_entropy(mem, targets) for mem in recorded[1]), start=torch.zeros(1))


def train(name: str, net: Any, train_set: Any, test_set: Any) -> History:
    torch.manual_seed(1)
    optimizer, history = torch.optim.Adam(net.parameters(), lr=5e-4, betas=(0.9, 0.999)), History(name)
    for _ in track(range(args.epochs), f"{name}, {args.epochs} epochs"):
        for data, targets in DataLoader(train_set, batch_size, shuffle=True, drop_last=True):
            began = process_time()
            loss_val = loss_of(net(data.view(batch_size, -1)), targets)
            optimizer.zero_grad()
            loss_val.backward()
            optimizer.step()
            history.add(loss_val.item(), process_time() - began)
        with torch.no_grad():
            data, targets = next(iter(DataLoader(test_set, len(test_set))))
            history.judge(net(data.flatten(1))[0].sum(dim=0).argmax(1) == targets)
    print(history)
    return history


def main() -> str | None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, test_set = image_sets(args.mnist)
    data, targets = next(iter(DataLoader(train_set, batch_size)))
    plain: Any = Net()
    net: Any = copy.deepcopy(plain)
    net = reroll.compile(net, schedule="standard", lowering=args.lowering)  # the line that is added
    print(check := reroll.check(net, data.view(batch_size, -1), loss=partial(loss_of, targets=targets)))
    histories = [train("plain BPTT", plain, train_set, test_set), train("reroll", net, train_set, test_set)]
    plot(histories, f"Tutorial 5 of snnTorch, {num_steps} steps", args.out)
    print(f"Learning curves: {args.out}")
    return None if check.equal else "The two ways differ by more than rounding. Please report it."


if __name__ == "__main__":
    raise SystemExit(main())
