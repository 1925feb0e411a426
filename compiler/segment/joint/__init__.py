"""Forward and backward of a function as one functional graph of ATen operations.

In: a function of fake tensors, and those of its results that have gradients
Out: a joint graph
Nouns: joint graph, SeenOperations
Mind: `graph.py` traces by `make_fx` alone, in 0.4 of the time of `aot_export_joint_simple`, and `functional.py` then
    makes new values of what is updated. What updates a part of some memory, or what has another name
    (`SeenOperations` watches a run), and higher-order operators but `autograd_function_apply` go
    through `aot_export_joint_simple`.
    `cells.py`: torch's cells in their parts, fused ones of a card and those that update their gates on a CPU.
"""
