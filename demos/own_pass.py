"""Write a pass: keep the last chunk's carry on the device.

The backward half begins with the last chunk, so its carry would be read back as soon as it was written.
"""

import argparse

import torch
from parts.spiking import Network, spike_trains

import reroll
from reroll.program import Context, Program, offload, save


@reroll.register_pass("keep-last")
def keep_last(program: Program, _context: Context) -> Program:
    """Save the carries of the last offloaded block locally instead. Costs their bytes between turn and first replay."""
    program = program.copy()
    graph = program.graph
    blocks = graph.find_nodes(op="call_function", target=offload)
    if not blocks:
        return program
    block = blocks[-1]
    for read in list(block.users):
        for pick in list(read.users):
            with graph.inserting_before(block):
                kept = graph.call_function(save, (block.args[0][pick.args[1]],))
            pick.replace_all_uses_with(kept)
            graph.erase_node(pick)
        graph.erase_node(read)
    graph.erase_node(block)
    return program


PASSES = (*reroll.DEFAULT_PASSES[:-2], "keep-last", *reroll.DEFAULT_PASSES[-2:])


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--lowering", default="eager", help="inductor or eager")
    args = parser.parse_args()
    torch.set_num_threads(1)
    network, x_TBI = Network(neurons=16), spike_trains(torch.rand(4, 64), args.steps)
    gradients = []
    for title, passes in {"default passes": reroll.DEFAULT_PASSES, "with keep-last": PASSES}.items():
        options = {"schedule": "double", "chunk": args.steps // 4, "passes": passes, "lowering": args.lowering}
        model = torch.compile(network, backend="reroll", options=options)
        gradients.append(torch.autograd.grad(model(x_TBI).square().sum(), list(network.parameters())))
        tally = reroll.explain(model, x_TBI).loops[0].tally
        print(
            f"{title}: {tally.remote_writes} writes, {tally.remote_reads} reads, {tally.remote_peak:,} bytes on disk, "
            f"{tally.local_peak:,} bytes of carries and tapes, {tally.reforward_steps} steps run again"
        )
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    print(f"Gradients equal bit for bit: {equal}")
    return None if equal else "The pass changed a gradient."


if __name__ == "__main__":
    raise SystemExit(main())
