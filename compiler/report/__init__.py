"""Plans as people read them: text, data, pictures, the page, the command line.

In: plans, programs and timelines as values
Out: a Report; text tables, HTML, JSON, a trace for Perfetto, a picture, the output of `python -m reroll`
Nouns: Report, Loop, Headline
Mind: Nothing that compiles or runs a model imports this room; only `backends/measure` does.
    A renderer is imported by the method that needs it, so that asking for text loads neither sympy nor matplotlib.
    Programs are read spelled out (`reroll.program.spelled`); a second reading of instructions would drift from the
    first.
    Formulas stand beside counts of the same plan: what differs is shown, not hidden.
    The format of traces is checked strictly; by Perfetto itself only where its trace processor can be had.
"""
