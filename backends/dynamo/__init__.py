"""The torch.compile backend named reroll.

In: Dynamo's graph and its example inputs, before autograd
Out: the callable that Dynamo gets: loops as nodes, the rest as torch runs it or inductor compiles it
Nouns: Graph
Mind: The entry point is a plain function: Dynamo sets attributes on it. Two compiled models never share a backend
    object: Dynamo shares what it compiled between equal backends, options and all.
    What is around a loop is compiled only where that can pay (`outer_compile.py`): compiling every piece takes 10 s
    more for a peeled step of 0.4 ms.
    Peaks around the loop (`outer_memory.py`): the outer graph and its backward run on fake tensors. Autograd adds to
    the gradient that comes first in place if a recurrence gave it, else it makes a sum (`_last_to_use`; both seen on
    torch 2.13).
    What plain PyTorch holds (`plain.py`) is asked for where plans hold a MiB or more: two short graphs run and are
    reversed on fake tensors, which takes 0.1 to 1.5 s.
    `tag_activation_checkpoint` run as it is does not keep random numbers: torch's own checkpoint is put in its place;
    nested ones still do not keep them.
    Inputs of a graph are as its placeholders say, but for numbers of Python's `random`, which `python_rng_inputs.py`
    mends first.
    What Dynamo builds in without a guard is refused, or read anew (``unguarded.py``).
    Torch registers a backend in two steps, between which another thread may come (`names.py`).
    accelerate has a closed Enum of backends: `register_with_accelerate` answers its `_missing_`.
"""

from reroll.backends.dynamo.entry import reroll
from reroll.backends.dynamo.graph_breaks import listen
from reroll.backends.dynamo.names import register_once

register_once(reroll, listen)

__all__ = ["reroll"]
