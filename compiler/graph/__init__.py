"""What is known of one fx node or graph, and how it is edited; every stage uses this room.

In: any fx node or graph, as Dynamo, the recorder or AOTAutograd gives it
Out: effects, names, in-place updates, bytes, the user's line; edited graphs; private torch API under plain names
Nouns: none
Mind: This room knows nothing of loops, segments or programs.
    Code that makes a node from another copies its `meta`: a name that `reroll.name` gave lives in `meta["named"]`.
    `reroll.name` is an operation (`names.LABEL`) until the normal form, then only `meta["named"]`. It is an operation
    again (`NAMED`) only while a segment is traced, and only with `keep` or `recompute`.
    A graph that may draw random numbers more than once is not reordered (`editing.in_order`); foreign operations and
    `torch.cond` count as such draws.
    A graph that reads memory as it lies (`as_strided`) is not rewritten (`editing.reads_memory`).
    Private torch API that the capture needs stands in `private.py` alone, each use with its reason and the versions
    tried.
"""
