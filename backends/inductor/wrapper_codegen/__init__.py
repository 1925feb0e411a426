"""The code that inductor writes for a CPU, read and written anew.

In: the text of inductor's wrapper, and of its kernels
Out: the same with runs of calls as one C++ call, built in one translation unit; the bytes that it holds at most
Nouns: chain (calls of kernels as one C++ call), unit (one translation unit), Statement (of a wrapper)
Mind: One reader of inductor's wrapper text (`wrapper.py`), for chains and for bytes.
    `chains.py` rewrites the text: runs of calls become one C++ function, their buffers one workspace. What is not
    understood stays as it was. It is no pass, so `speed.py` measures it by a patch. A test runs random wrappers in both
    forms.
    Kernels are written for no more threads than there are cores (`threads.py`).
    What no model changes is made once for a machine, and every file under another name first (`machine.py`).
    What takes over later is compiled ahead by another process, which only fills caches (`ahead.py`).
    A chain frees behind and allocates ahead, up to 1.3 MB more memory. Gaps between buffers made no difference.
"""
