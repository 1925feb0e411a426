"""The normal form in which the repeating step is looked for.

In: Dynamo's graph, with updates in place, indices, windows, symbolic sizes
Out: an equal graph of values only: selects, one stack for rows written one by one, sizes as numbers
Nouns: none
Mind: The normal form ends names as operations: from here on a name is `meta["named"]` of its value's node.
    Aliases are read off storages of example values. Windows of one numpy array are two storages and look apart: neither
    this room nor torch's own `aot_eager` sees that they share memory.
    A multi-step operator of SpikingJelly is a loop that no graph shows: it is written out here, before steps are
    searched.
"""
