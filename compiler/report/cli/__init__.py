"""The command line: `python -m reroll`.

In: the arguments of the process
Out: tables, sentences or JSON on stdout; what is wrong on stderr; an exit code
Nouns: none of its own
Mind: What needs the backend is asked for by the public names of `reroll`, as a user would, when a command runs.
"""
