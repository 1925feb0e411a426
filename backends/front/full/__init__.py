"""Models recorded at the full length of a call, and rolled as they stand.

In: a model and a call
Out: the model's result, by a program that was made of its own run at that length
Nouns: AtLength (the programs of a model), Unnamed (what calls a model whose time nobody has named)
Mind: One record is one length: nothing is said of another one. It is the first way where nobody names time, and the
    last one where short runs do not tell what a model does. Values may not be asked for: Dynamo reads such a model, and
    cuts its graph there, where time is not named.
    A program without a loop is held, too (`_Nothing`), so that a shape is recorded once.
    Among several processes `reroll.compile(model)` stays Dynamo's: its runs are those of the user, and no more.
"""
