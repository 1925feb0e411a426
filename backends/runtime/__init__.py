"""Plays a program: one call of one loop, forward and backward, as one node of autograd.

In: an Executable, operands, later incoming gradients
Out: outputs, then gradients of operands; None where no incoming gradient reaches, as in eager
Nouns: Run, Executable, Compiled, Carry, Tape, Kept, Stored, Reloaded, CudaGraph
Mind: There is one forward kernel per segment length. First run, re-run and taping call it, so decisions are
    bit-identical by construction. A second, tape-free forward would be faster to run and wrong to trust.
    Carries at borders are contiguous, and operands are laid out as segments were compiled for (`node.conform`).
    Operands that no incoming gradient reaches get None (`Executable.live_operands`). No gradient that is given is
    memory of an incoming one: autograd would take it for a leaf's own, and add to the user's (`run._apart`).
    A backward that torch runs node by node hands gradients over while it runs (`gradients._Taking`): what is its own
    memory becomes the sum, and is written to from then on. Recorded and compiled ones give all at their end.
    `_Reversible` is told whether gradients are wanted: `ctx.needs_input_grad` is true under `no_grad` too, and all was
    taped there.
    After a failed allocation a call is played again from its operands (`run.again`), so gradients are whole.
    CUDA graphs (`recordings.py`): one `Graphs` for the kernels of a loop; all of a device share a pool, so halves take
    turns (`_turns_of`). A result is copied out unless it is used up before the same half runs again
    (`executable._passing`). Results that are memory of inputs are given as that memory. Loops that speak with other
    processes are not recorded.
    Custom functions whose backward adds something are refused at steps that the loss does not use
    (`undefined_grads.py`): such a step is run by torch, on the first values and on normal numbers, reversed with zeros
    and with none for what is not used, once for each set of outputs that matter. Compared is what reaches the
    functions' own operands (weights need no gradient for that). Only graphs with operations that are not torch's are
    looked at, and no steps that speak with other processes.
    Per-step outputs are taken one by one by `unused.rows`, whose hook says which rows got a gradient; a loop tells the
    one whose rows it reads which it used.
    An operand that not every result reaches is behind those that do, not behind the loop's node (`reach.py`): autograd
    goes to all that a node was given, with zeros or None, where eager does not go at all.
    What a caller is given is a node of autograd of its own, behind the last carries that are given (`shown.py`): hooks
    on these get what comes through other results. Nothing is made for it unless somebody looks. Rows that `rows` takes
    are of a node of their own, too, as they are not made of the stack that is given.
"""
