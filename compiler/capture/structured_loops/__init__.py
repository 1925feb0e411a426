"""Loops that arrive as one node are taken as they are: nn.LSTM and its kin, torch.scan, marked regions.

In: a graph with calls of `torch.lstm` and its kin, `torch.scan`, or nested compile regions
Out: the same graph with recurrences in their place; a marked region is written out where it was called
Nouns: Body, Emitter
Mind: Layers, directions and dropout run in torch's own order, so that dropout draws what eager draws under one seed.
    On torch 2.11 Dynamo's shapes of the last states of `nn.LSTM` are wrong; they are refused there.
    Regions are written out before any step is looked for, so that a loop around them is found as if nothing had been
    marked.
"""
