"""The places: where programs are compiled, kept and played, and the doors for users.

In: a user's model, or Dynamo's graph of it
Out: the same model, trained segment by segment; reports and measurements of it
Nouns: see the rooms
Mind: A room imports only from rooms before it: cache, inductor and tiers, processes, runtime, construct, dynamo,
    front, measure.
    `progress.py` is imported by all of them and imports none.
"""
