"""Models recorded at the full length of a call, and rolled as they stand.

In: a model and a call
Out: the model's result, by a program that was made of its own run at that length
Nouns: Caller, AtLength (the programs of a model), Digest (of a record), Steps (which of their numbers differ)
Mind: One record is one length: nothing is said of another one. Kernels are shared between lengths where all that they
    depend on is equal (`construct.kernels.kind` and `made_by`, `construct.share.Conditions`): whatever tracing or
    compiling begins to read has to go in there, or another length gets the wrong code in silence. A step with functions
    of the user's own depends on all that the model's code may read. Numbers of arithmetic that differ from record to
    record become inputs of the step (`numbers.py`), with the values of each record: sizes, dimensions and indices stay.
    A proof is left out only as `alike.py` says.
    What a record asks for values is asked again at every call. From another answer on Dynamo reads the model, and cuts
    its graph there.
    A program without a loop is held, too (`_Nothing`), so that a shape is recorded once.
"""
