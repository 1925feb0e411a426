"""Several processes that train one model: what speaks with the others, and whether all play one program.

In: modules around which processes speak (DDP, FSDP), steps with functional collectives
Out: agreement before each call, or a refusal with what to do
Nouns: Together
Mind: Runs that only look at a model may never start a collective (`in_silence` raises where one would, and Dynamo reads
    the model then).
    Blocks that `fully_shard` has sharded one by one are opened while the model is called (`sharded.gathering`): hooks
    off, parameters as properties that gather, restored whatever happens. Tapes never keep what is gathered
    (`segment/cut/partition.gathered_from`).
    Programs of steps with functional collectives are compared before each call. Such a loop is never planned anew,
    timed, recorded as CUDA graphs, or played again: new code that runs segments again must ask it.
    Not covered: collectives of a peeled first step run before the comparison; NCCL; an error in one process alone
    leaves the others waiting until their timeout.
"""
