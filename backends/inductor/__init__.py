"""A half of a segment as one compiled callable: inductor, and kernels of our own among its kernels.

In: the graph of a forward or a backward
Out: a compiled Segment; counts of event products
Nouns: Segment, Watch
Mind: There is one forward kernel per segment length: see the runtime's header.
    Inductor keeps the strides of results (`user_visible_output_idxs`), and fake tensors carry static shapes, so that
    its cache on disk may be used. `layout_optimization=False`: channels-last made every state a transpose.
    Kernels of our own are written by inductor among its own (`native_products.py`: an extern node that defines a
    kernel), from `native/`. Their `edition` is an operand, because inductor's cache knows the graph and not our
    headers.
    A weight is packed into panels once per call, not at every product as MKL does. Sums of 256 keep float32 as exact as
    MKL's.
    Event products count in a row of `Watch`'s table, which is an operand.
    Size asserts of inductor stay on (2.5 % of D2r): they caught a layout that a pass had changed.
    What a node reads twice inductor writes out twice: `force_realize.py` has a value stored before that grows to hours.
    Whole graphs (`whole.py`) are compiled without donated buffers: torch wrote into users' inputs.
"""
