"""What outlives a process: one folder, whose entries are whole, this user's own, and found by all that they depend on.

In: bytes, with a text of everything that they depend on
Out: the same bytes in a later process, where that text is the same
Nouns: entry, kind (of entries: a folder of their own), key (the text)
Mind: A wrong hit is a wrong gradient. What a text cannot tell to the last bit is not kept (`Unkept`): operators that
    are not torch's own, modes and passes of the user's, memory that a graph holds.
    An entry is written only after it was read back and found equal, under another name first, so that no process sees
    half of it. One that is broken, or may be another user's, is ignored with a word.
    What is read is plain data (``table.py``), never a pickle: reading calls nothing that a file names. A file is opened
    once, and what is open is asked whose it is (``folder.py``); a path is never asked.
    The text has a digest of our own sources: whoever changes the code that makes entries has none of the old ones.
"""
