"""What a model does while Python really runs it, operation by operation.

In: a model, its arguments, and a run of it under a TorchFunctionMode
Out: a list of events; or an fx graph spelled as Dynamo spells it, for `reroll.compile`
Nouns: Recorder, GraphRecorder, event, Same (two things are the same to a model), Loop (runs that repeat), place
Mind: Runs that repeat are followed, not written down (`repeats.py`): an operation is compared with the one that is
    expected, and the first other one ends that. Nothing is inferred, so `unfold` gives what a record of all runs does.
    What makes a folded graph wrong to read (a row that is updated later, a loop in the step of a loop) unfolds it.
    What an operation does inside is no event: custom operations apply autograd.Functions inside.
    Functions are compared by identity (`identity.py`), so that two runs of one model can be told apart.
    Autograd's history of a run that is only looked at is cut short (`events.py`): kept whole it grows with the run.
    A recorded graph has no guards of Dynamo's; `backends/front/python_state/keys.py` guards in their place. It is
    seven times faster than Dynamo on snnTorch's networks, which take Dynamo 100 ms a step.
"""
