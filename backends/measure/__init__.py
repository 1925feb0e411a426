"""What a compiled model does, told or measured: explain, measure, breakdown, gradient_error; the doctor of a machine.

In: a compiled model and its inputs
Out: a Report; bytes and seconds of a call; how far a rounding codec moves gradients
Nouns: Report, Measurement
Mind: `explain` runs no training step: what it says of time is predicted, unless there was a call to compare with.
    Memory is read from the allocator (torch.profiler on a CPU, for the calling thread), never from our own predictions.
    This is the only room of backends that imports `reroll.report`.
"""
