"""From the graph of an unrolled model to its loops, and the graph around them.

In: Dynamo's GraphModule, or one that the recorder wrote
Out: the outer graph and its Recurrences, for the length of the graph
Nouns: Capture, Recurrence
Mind: The order is fixed: loops that are given as one node, the normal form, the search for steps,
    the ends of these (`ends.py`, then the search again). What rewrites loops is a pass (`passes/loop`).
    Sizes never decide what time is: dimensions are followed. A batch as large as the sequence is long changes nothing.
    What cannot be proved is refused or left alone; a region is never taken for a step by likeness.
"""
