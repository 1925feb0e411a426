"""Look at what the compiler made of a small network: the plan, one step, and the rewritten training program."""

import argparse
from pathlib import Path

import torch
from parts.spiking import Network, spike_trains

import reroll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lowering", default="eager", help="inductor or eager")
    parser.add_argument("--page", type=Path, help="also write the report as an HTML page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    network, x_TBI = Network(neurons=16), spike_trains(torch.rand(4, 64), args.steps)
    options = {
        "schedule": "double",
        "segment": 2,
        "chunk": args.steps // 2,
        "slots": 2,
        "lowering": args.lowering,
        "on_no_recurrence": "error",
    }
    report = reroll.explain(torch.compile(network, backend="reroll", options=options), x_TBI)
    print(report)
    assert report.step is not None
    print("\nOne step, (carry, input, constants) -> (carry, outputs):\n", report.step.graph)
    print("\nThe training program; each instruction runs over whole segments:\n", report.loops[0].program)
    if args.page:
        report.save_html(args.page)
        print(f"\nThe same as a page: {args.page}")


if __name__ == "__main__":
    main()
