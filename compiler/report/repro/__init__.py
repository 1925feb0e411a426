"""Files of a bug report: code that runs alone, and every stage of a loop.

In: a Report
Out: a repro, a benchmark, a folder of stages; each file is Python that runs without the model, or text
Nouns: Source, LoopSource
Mind: No value of a tensor is written: shapes, dtypes, layouts, and the operations of a step.
    The step is written as it was captured, before passes rewrite it: what is compared with is the model's.
    Functions of `parts.py` are written into files as they stand, so they use nothing but what those files import.
"""
