"""Forward and backward of a function as one functional graph of ATen operations.

In: a function of fake tensors, and those of its results that have gradients
Out: a joint graph
Nouns: joint graph, SeenOperations
Mind: `graph.py` traces by `make_fx` alone what writes nothing, in 0.4 of the time. What writes (`SeenOperations`
    watches a run), batch norms and higher-order operators but `autograd_function_apply` go
    through `aot_export_joint_simple`.
    `cells.py`: the fused cells that torch runs on a card, in their parts.
"""
