"""Codecs give back every bit, whatever they are handed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bits import DTYPES, LOSSLESS, same
from reroll.backends.codecs import words
from reroll.backends.codecs.codec import CODECS, Codec, Encoded, Held, decode, encode, register_codec
from reroll.errors import StorageError, UnsupportedError
from reroll.segment.facts import LOSSY, Fact, bits, constants, integers


@pytest.fixture(params=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations: numpy, and the torch operations meant for other devices, here on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(words, "HOST", "")
    return str(request.param)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_any_bytes_come_back(codec: str, path: str) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(DTYPES), st.binary(min_size=0, max_size=400), st.sampled_from([0, 1, 3, 8]))
    def check(dtype: torch.dtype, data: bytes, rows: int) -> None:
        numel = len(data) // dtype.itemsize
        flat = torch.tensor(list(data[: numel * dtype.itemsize]), dtype=torch.uint8).view(dtype)
        tensor = flat[: numel // rows * rows].view(rows, -1) if rows and numel >= rows else flat
        assert same(decode(encode(tensor, codec)), tensor)

    check()


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES[:-2])
def test_few_values_come_back(codec: str, dtype: torch.dtype, path: str) -> None:
    special = [0.0, 1.0, 1.0, -0.0, float("nan"), float("inf"), 1e-40, 2.5, -3.0, 200.0, -129.0, 40000.0, 2.0**40]
    usable = special if dtype.is_floating_point else [0, 1]

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(usable), min_size=1, max_size=3), st.integers(0, 300), st.integers(0, 2**31))
    def check(choices: list[float], numel: int, seed: int) -> None:
        index = torch.randint(len(choices), (numel,), generator=torch.Generator().manual_seed(seed))
        tensor = torch.tensor(choices, dtype=torch.float64).to(dtype)[index]
        assert same(decode(encode(tensor, codec)), tensor)

    check()


@pytest.mark.parametrize("numel", [1, 7, 8, 9, words.BLOCK - 1, words.BLOCK, words.BLOCK + 1, 3 * words.BLOCK + 5])
@pytest.mark.parametrize(
    ("codec", "make", "ratio"),
    [
        ("bits", lambda u: (u > 0.8).float(), 30),
        ("bits", lambda u: u > 0.8, 7),
        ("two", lambda u: torch.where(u > 0.8, 0.3, -0.0), 30),
        ("small", lambda u: (u * 200).long(), 7.9),
        ("small", lambda u: (u * 1000).int() - 500, 1.9),
        ("small", lambda u: (u * 50).floor(), 3.9),
        ("sparse", lambda u: torch.where(u > 0.9, u, 0), 5),
    ],
)
def test_sizes(numel: int, codec: str, make: object, ratio: float, path: str) -> None:
    tensor = make(torch.rand(numel, generator=torch.Generator().manual_seed(3)))  # type: ignore[operator]
    encoded = encode(tensor, codec)
    assert same(decode(encoded), tensor)
    if numel > 1000:
        assert encoded.codec == codec
        assert tensor.nbytes / encoded.nbytes > ratio


def test_a_late_violation_is_seen(path: str) -> None:
    for value in (-0.0, 2.0, float("nan"), 1e-45):
        tensor = torch.ones(2 * words.BLOCK + 3)
        tensor[-2], tensor[-1] = 0.0, value
        for codec in ("bits", "two"):
            encoded = encode(tensor, codec)
            assert encoded.codec == "raw"
            assert same(decode(encoded), tensor)


def test_odd_booleans_stay_odd(path: str) -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)
    assert encode(odd, "bits").codec == "raw"


@pytest.mark.parametrize("codec", LOSSLESS)
def test_layouts(codec: str) -> None:
    base = (torch.rand(2, 3, 4, 6) > 0.5).float()
    dense = [base, base.permute(2, 0, 3, 1), base.to(memory_format=torch.channels_last), base[1], base[:0]]
    for tensor in [*dense, torch.tensor(1.0), base[:1, :1].transpose(0, 3)]:
        back = decode(encode(tensor, codec))
        assert same(back, tensor)
        assert back.stride() == tensor.stride()
    for tensor in [base[:, ::2], base[..., 1:], base[:1].expand(5, 3, 4, 6), base.as_strided((3, 4), (1, 1))]:
        back = decode(encode(tensor, codec))
        assert same(back, tensor)
        assert back.is_contiguous()
    assert same(decode(encode(base[:0].transpose(1, 2), codec)), base[:0].transpose(1, 2))


def test_lazy_bits_and_gradients() -> None:
    z = torch.randn(5, dtype=torch.complex64)
    assert same(decode(encode(z.conj(), "sparse")), z.conj().resolve_conj())
    assert same(decode(encode(z.conj().imag, "bits")), -z.imag)
    leaf = torch.ones(4, requires_grad=True)
    assert not decode(encode(leaf, "bits")).requires_grad
    assert not decode(encode(leaf * 0.3, "raw", copy=False)).requires_grad


def test_who_owns_the_memory() -> None:
    tensor = torch.rand(10)
    assert decode(encode(tensor, "raw", copy=False)).data_ptr() == tensor.data_ptr()
    assert decode(encode(tensor, "raw")).data_ptr() != tensor.data_ptr()
    part = torch.rand(100, 10)[3]
    assert encode(part, "raw", copy=False).payload[0].untyped_storage().nbytes() == part.nbytes
    bits = torch.ones(10)
    encoded = encode(bits, "bits", copy=False)
    assert decode(encoded).data_ptr() != decode(encoded).data_ptr()


def test_sparse_is_measured() -> None:
    tensor = torch.rand(1000)
    assert encode(tensor, "sparse").codec == "raw"
    assert encode(torch.where(tensor > 0.9, tensor, 0), "sparse").codec == "sparse"


def test_both_paths_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.where(torch.rand(1003) > 0.9, 1.0, 0.0)
    here = {codec: encode(tensor, codec) for codec in LOSSLESS}
    monkeypatch.setattr(words, "HOST", "")
    for codec, encoded in here.items():
        there = encode(tensor, codec)
        assert there.codec == encoded.codec
        assert all(torch.equal(*pair) for pair in zip(there.payload, encoded.payload, strict=True))
        assert same(decode(encoded), tensor)


def test_each_codec_is_registered_once_and_facts_name_no_others() -> None:
    assert {codec.name for codec in CODECS.values() if codec.exact} == set(LOSSLESS)
    assert {codec.name for codec in CODECS.values() if not codec.exact} == set(LOSSY)
    facts = Fact(), bits(torch.float32), constants(torch.float32, (2, 3)), integers(torch.float32, 0, 9)
    assert {fact.codec for fact in facts} == set(LOSSLESS) - {"raw"}
    with pytest.raises(StorageError, match=r"Codec name 'bits' of .*_encode_bits is taken by .*_encode_bits"):
        register_codec(CODECS.find("bits"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", [*LOSSLESS, *LOSSY])
@pytest.mark.parametrize("numel", [1, 9, 200])
def test_no_codec_takes_more_than_it_says(codec: str, dtype: torch.dtype, numel: int) -> None:
    for tensor in (torch.zeros(numel), torch.arange(numel) % 2, torch.arange(numel), torch.randn(numel)):
        encoded = encode(tensor.to(dtype), codec)
        assert encoded.nbytes <= CODECS.find(encoded.codec).nbytes(numel, dtype)


@pytest.mark.usefixtures("fresh_registry")
def test_a_codec_of_ones_own() -> None:
    def encode_constant(flat: Tensor) -> Held | None:
        return ("constant", (flat[:1].clone(),)) if torch.equal(flat, flat[:1].expand_as(flat)) else None

    def decode_constant(encoded: Encoded) -> Tensor:
        return encoded.payload[0].to(encoded.device).repeat(encoded.numel)

    register_codec(Codec("constant", encode_constant, decode_constant, lambda numel, dtype: dtype.itemsize))
    tensor = torch.full((3, 5), 0.3).t()
    encoded = encode(tensor, "constant")
    assert (encoded.codec, encoded.nbytes) == ("constant", CODECS.find("constant").nbytes(15, tensor.dtype))
    assert same(decode(encoded), tensor)
    assert decode(encoded).stride() == tensor.stride()
    assert encode(torch.rand(3, 5), "constant").codec == "raw"


def test_refusals() -> None:
    with pytest.raises(StorageError, match=r"no codec 'zip'.*bits"):
        encode(torch.ones(3), "zip")
    with pytest.raises(UnsupportedError, match="to_dense"):
        encode(torch.eye(3).to_sparse(), "bits")


def test_float8_and_unsigned() -> None:
    octets = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64):
        tensor = octets.view(dtype)
        for codec in LOSSLESS:
            assert same(decode(encode(tensor, codec)), tensor), (dtype, codec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_proved_bits_are_packed_without_asking(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    value = (torch.rand(13, 7) < 0.5).to(dtype)
    asked = encode(value, "bits")
    monkeypatch.setattr(words, "HOST", "")
    unasked = encode(value, "bits", proved=True)
    assert (unasked.codec, unasked.nbytes) == (asked.codec, asked.nbytes) == ("bits", 12)
    assert torch.equal(decode(unasked), value)
    assert encode(value, "sparse", proved=True).codec == "raw"
