"""A step, k times: one joint graph, cut in a forward and a backward, with what is proved of its values.

In: a Recurrence and k, the number of steps compiled together
Out: two ATen graphs (halves), facts of values, packed 0/1 values, loop invariants and factors set apart
Nouns: Traced, Cut, half, Fact, Policy, tape
Mind: Whether a gradient depends on what comes in is read off autograd's graph (`trace._leaves_of`), not off the joint
    graph.
    Placeholders say what they are: `meta["constant"]` (its name), `["carry"]`, `["per_step"]` (`trace._mark`). A
    product is distributed over steps only if all but its rows is made of constants.
    `invariants.py`: what depends on constants alone is made once per call, not once per segment. `factors.py`: a
    backward gives the two factors of a weight's gradient, and `addmm_` or `event_outer_add` adds their product to the
    sum. Few windows of an image are such factors, too. What is run node by node hands each gradient over right behind
    the node that makes it (`handing_over`); only memory that nothing else reads may become a sum. Sums by events lie by
    rows, K x N, however the weight lies; else they would be dense in silence.
    A carry that is memory of its own is handed on as it is (`trace._shared`; `joint/graph._hand_on` where a step had to
    be made functional): where a tape saves it, the next tape begins with the same memory, which counts once
    (`SegmentBytes.joined`).
    Brought together are at most 4 MiB on a CPU (`products.LARGEST`).
    Fake tensors have a `ShapeEnv` so that inductor keeps graphs on disk; no shape may depend on data.
"""
