"""One template for every number of steps, from captures at three short lengths.

In: captures and recordings of one model at three short lengths; a run at the full length T
Out: a template, and from it the capture at T, checked event by event against the run
Nouns: Template, Pattern, Literals, form (a number a + b r + c T at run r of its loop)
Mind: What short traces say is only an extrapolation: nothing is returned before `check.py` has followed a run at that
    T.
    A number of the user's that is no affine function of step and length is *free*. The template must ask for it
    (`Literals.unasked` finds those that it did not ask for), else the call is refused.
    A number that depends on T becomes an input of the step (`lift.py`), so that one compiled step serves every length.
    A run that checks a length keeps no history; its time is eager's own work and torch's dispatch under a mode.
"""
