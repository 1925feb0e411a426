"""Passes on halves of segments: the same forward or backward, cheaper.

In: the ATen graph of a forward or a backward, and a Context
Out: a graph with the same operands and results, but for rounding
Nouns: pass, half
Mind: `merge-gradients` comes before `batch-products`: else `g^T z` and `h^T z` are joined through `z`. `event-products`
    comes after both. `DEFAULT_PASSES` has the order.
    What a forward saves must lie as its backward was told: no pass changes strides of a forward's results. Results of a
    backward may lie as they like.
    A graph that draws random numbers more than once is not reordered, one that reads memory as it lies is not touched
    (`graph/editing.py`). A product is distributed only if all but its rows is made of constants.
    An event kernel decides by its operand alone: density measured in earlier steps would make replayed runs round
    differently. It takes any operand; the pass proves only that a look (5 us) is worth its time.
    `CROSSOVER` is a constant: a measured one would make results differ from process to process. Packed events go up to
    a density of 0.4.
    Packed are weights on the right of a product of matrices. `W @ h` with columns, batched products and convolutions
    are torch's. Convolutions of spikes are dense.
    Event products with constant weights gather from packed panels, one panel after another for 64 rows, so that it
    stays in the first cache; too dense, they fall back to the packed dense product.
    A negated bias is subtracted (`split_biases.py`), because inductor would put a sum of product and bias together
    again.
"""
