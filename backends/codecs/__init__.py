"""How a tensor is held: encoded, and given back bit for bit unless rounding was asked for.

In: a tensor, and the name of a codec
Out: an Encoded: bytes, and all that is needed to give the tensor back
Nouns: Codec, Encoded, raw
Mind: A codec says whether it can represent a tensor exactly; what it cannot is held as it is ("raw").
    A lossless codec of ours is one that a fact names (`Fact.codec`); a test says so.
    Rounding codecs are used on request, for carries alone, and give raw or sparse where a value is not finite.
    On a device a check waits for the device. So carries that a segment made are packed without asking where `bits` is
    proved, and what may be sparse stays raw there. The first carry, `two`, `small` and rounding codecs still ask.
    A dense tensor keeps its strides. On a CPU temporaries stay below 1 MiB.
    Lossless packing is always on: no budget chooses among codecs. `codec="none"` with inductor keeps bools on the tape
    and is about 1.8 times slower forward than packed bits.
"""

from reroll.backends.codecs import bits, rounding, small, sparse

__all__ = ["bits", "rounding", "small", "sparse"]
