"""Passes on training programs: from the program that keeps all to the program of the schedule.

In: a legal Program and its Context
Out: a new legal Program with the same results; the given one is left as it is
Nouns: pass, part
Mind: The verifier runs after each pass and names the pass that broke a rule. Passes share nothing but program and
    Context.
    Equal intervals become one part (`recompute.py`), and equal ends of lists of children too; not with codecs that
    round.
    Parts are local: what holds a carry in a tier is spelled out, so `offload.py` sees it.
    A carry that the forward itself reads again is never rounded (`compress.py`), whatever passes did before.
    The pass in `record_facts.py` is called "sparsity" in options: that name is public.
"""
