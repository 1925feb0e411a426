"""Places outside of the device for encoded blocks: host memory and disk; and what they move in a second.

In: encoded blocks, written once
Out: the same blocks later, read ahead; bandwidth and latency of this machine (calibration)
Nouns: Tier, Block, Device, Traffic, slab
Mind: Whatever goes wrong in a tier is a StorageError before a wrong gradient.
    One `Transfers` for a device in a process, so that slabs of pinned memory are shared by all lengths and loops. Its
    rules are in the docstring of `transfers.py`. The disk tier goes through pinned memory too.
    Memory of a device belongs to the stream that allocated it, and is freed behind that stream's work.
    Reading behind the end of a mapped file ends the process: `mapped.py` looks at the user's files before each half of
    a run.
    `_let_go(0)` at a read makes predicted peaks true on a device too.
    The allocator's counters do not see what the process holds as holes in its heap: `heap.py` gives their pages back.
    Nothing waits to be written when the backward begins (`Tier.settle`): the predicted peak relies on it. On a device
    that is a wait of the present stream; `drain` waits on the CPU.
    `device.py` is a protocol so that tests can simulate a device (`tests/support/device`). Every line of ours that
    waits has a mutant there that does not. The simulation sees no races between kernels, no real allocator, no real
    capture.
"""

from reroll.backends.tiers import disk, host

__all__ = ["disk", "host"]
