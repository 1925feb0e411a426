"""Finds the step that repeats in a graph, and takes it out as a Recurrence.

In: a graph in normal form
Out: regions of equal steps, a Recurrence for each, and the graph around them
Nouns: Recurrence, colour (what a node is without its place), region, relation (of an operand to its step)
Mind: Longest coverage wins, then the shortest period; a step begins where the fewest bytes cross from step to step
    (spikes count as bits).
    Each operand keeps one relation over all steps, else the region ends there. Nothing is papered over.
    A step that differs (the first, the last) is peeled: it stays in the outer graph as plain operations.
    The modes of autograd and autocast before a node are compared too.
    Layers that differ from step to step (a `ModuleList` of T layers) are left alone.
"""
