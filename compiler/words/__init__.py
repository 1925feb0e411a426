"""What people write: sizes, durations and names, and what these stand for.

In: texts and numbers as users give them: "512MiB", 0.3, "double"
Out: bytes, seconds, the value registered under a name; numbers as text for messages and reports
Nouns: Registry
Mind: One Registry holds passes, schedules, codecs and tiers: a second list of names somewhere would not be asked.
    An unknown name is an error that names the nearest valid one (`reroll.errors.nearest`, the only place that looks for
    it).
    There is one `seconds_text` and one `nbytes_text`: reports, pages, the command line and messages agree by them.
"""
