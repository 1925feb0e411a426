"""Write a schedule: chunks that grow towards the start of the sequence.

While the last chunk is reversed all carries are kept, while the first one is, only its own: what the freed carries held
is room for longer tapes. So the same memory needs fewer carries than with chunks of one length.
"""

import argparse

import torch
from parts.spiking import Network, spike_trains

import reroll
from reroll.program import save
from reroll.schedules import Interval, Problem


@reroll.register_schedule("growing", numbers=("chunk",))
def growing(problem: Problem) -> Interval:
    """The last chunk has the asked length, and is taped by the forward; each before it is longer by the carry that is
    freed when it is reversed."""
    lengths, left, memory = list[int](), problem.segments, (problem.chunk or 1) // problem.segment * problem.tape
    while left:
        lengths.append(min(max(memory // problem.tape, 1), left))
        left, memory = left - lengths[-1], memory + problem.carry
    steps = [length * problem.segment for length in reversed(lengths)]
    steps[-1] -= sum(steps) - problem.steps  # the last segment of the sequence may be short
    *kept, last = steps
    return Interval(problem.steps, children=(*map(Interval, kept), Interval(last, taped=True)))


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lowering", default="eager", help="inductor or eager")
    args = parser.parse_args()
    torch.set_num_threads(1)
    network, x_TBI = Network(neurons=16), spike_trains(torch.rand(4, 64), args.steps)
    gradients = []
    for schedule in ("standard", "growing"):
        model = reroll.compile(network, schedule=schedule, chunk=16, segment=4, lowering=args.lowering, verify=True)
        gradients.append(torch.autograd.grad(model(x_TBI).square().sum(), list(network.parameters())))
        loop = reroll.explain(model, x_TBI).loops[0]
        carries = sum(node.target is save for node in loop.program.graph.nodes)
        print(
            f"{schedule}: {carries} carries kept, {loop.tally.local_peak:,} bytes of carries and tapes at most, "
            f"{loop.tally.reforward_steps} steps run again"
        )
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    print(f"Gradients equal bit for bit: {equal}")
    return None if equal else "The schedule changed a gradient."


if __name__ == "__main__":
    raise SystemExit(main())
