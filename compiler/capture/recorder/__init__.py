"""What a model does while Python really runs it, operation by operation.

In: a model, its arguments, and a run of it under a TorchFunctionMode
Out: a list of events; or an fx graph spelled as Dynamo spells it, for `reroll.compile`
Nouns: Recorder, GraphRecorder, event, Same (two things are the same to a model), Fold (a record stored once)
Mind: `fold.py` is the first step of a capture from one run (issue 57); nothing but its tests uses it yet.
    What an operation does inside is no event: custom operations apply autograd.Functions inside.
    Functions are compared by identity (`identity.py`), so that two runs of one model can be told apart.
    Autograd's history of a run that is only looked at is cut short (`events.py`): kept whole it grows with the run.
    A recorded graph has no guards of Dynamo's; `backends/front/held/keys.py` guards in their place. It is seven times
    faster than Dynamo on snnTorch's networks, which take Dynamo 100 ms a step.
"""
