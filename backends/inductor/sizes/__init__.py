"""Halves of segments that differ in sizes alone, such as the size of a batch, share what is compiled of them.

In: the graph of a half, with the sizes of one call
Out: its code: an earlier one, one for these sizes alone, or one whose kernels take sizes as operands
Nouns: Numbered (a graph and its numbers), Fit (numbers as functions of a few sizes), Family (graphs of one structure)
Mind: The graph of every size is traced and cut, as ever; only what inductor would compile of it is shared. So a size
    that leads to another graph has code of its own, and shared code is used only where *all* numbers of the graph of
    this size are those that the shared one has at this size. What inductor assumed of sizes (its guards) is asked, too.
    The second size is compiled with symbols in place of the numbers that changed. Inductor's text of it is made
    concrete for each size (`wrapper_codegen/concrete.py`), so its wrapper, our chains and predicted bytes are those of
    fixed sizes, and kernels get sizes as numbers: nothing but text is made for a third size.
    A size of 0 or 1 is compiled for itself: such dimensions are broadcast, and inductor takes symbols to be 2 or more.
    So is every size on a GPU, and of a graph that holds constants. Where numbers follow no size, or torch cannot follow
    symbols, it is said once.
    What is compiled is held for the process, the families used last; `forget()` drops it.
"""
