"""One call of a compiled model: its arguments, and when it is its turn.

In: the arguments of a user's call
Out: a Call, and the same call at other sizes
Nouns: Call, turn (one thread looks at a model at a time)
Mind: Whether Dynamo is off is asked within a turn: another thread switches it off for its own.
"""
