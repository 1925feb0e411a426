"""Linear steps: carries that enter a step linearly, k steps of them as products of matrices.

In: the step of a Recurrence and fake examples of its operands
Out: the function of k steps, in which linear carries are done together
Nouns: Core, Form, Factor, Axes, Chunk, level
Mind: The step is looked through call by call (`forms.decomposed`), by names of torch's own calls alone: an
    `autograd.Function` with a gradient of its own, or `detach`, is never stepped over.
    What is found is found again for each length of segments, as `show_names` makes new nodes.
    Decays are multiplied up, never divided by.
"""
