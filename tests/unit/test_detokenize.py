"""Incremental detokenisation: complete characters only, and together equal to decoding all tokens at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from examples import examples
from fakes import make_tokenizer
from proa.errors import TokenizerError
from proa.text.detokenize import Detokenizer
from proa.text.token_bytes import TokenBytes
from proa.text.tokenizer import Tokenizer
from proa.text.tokenizer_source import TokenizerSource

HARD_TEXTS = (
    "plain ascii, two  spaces\n\nnew\tlines",
    "emoji 😀😃 flags 🇩🇪 families 👩‍👩‍👧‍👦 skin 👍🏽",
    "combining e\u0301 n\u0303 Z\u0351\u036b\u0343",
    "CJK 你好，世界 日本語テキスト 한국어",
    "नमस्ते مرحبا שלום ไทย",
    " leading and trailing ",
    "\u2581 the sentencepiece mark itself",
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("byte_level")))


def sentencepiece_backend(*, metaspace: bool) -> tokenizers.Tokenizer:
    """A backend with letters, a few words and all 256 byte tokens; spaces are U+2581, and one is prepended, as in
    Llama."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehilnorstw,", "▁t", "▁th"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(
        vocab=vocabulary,
        merges=[("▁", "t"), ("▁t", "h")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
        )
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    return backend


@pytest.fixture(scope="module", params=["replace", "metaspace"])
def sentencepiece(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(TokenizerSource(sentencepiece_backend(metaspace=request.param == "metaspace")))


def pieces_of(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.feed(t) for t in tokens), detokenizer.flush()]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_byte_level_text_round_trips_in_whole_characters(byte_level: Tokenizer, text: str) -> None:
    tokens = byte_level.encode(text)
    pieces = pieces_of(byte_level.detokenizer(), tokens)
    assert "".join(pieces) == text == byte_level.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", HARD_TEXTS[:-1])  # the mark itself is read back as a space, by design
def test_sentencepiece_text_round_trips_in_whole_characters(sentencepiece: Tokenizer, text: str) -> None:
    tokens = sentencepiece.encode(text)
    pieces = pieces_of(sentencepiece.detokenizer(from_start=True), tokens)
    if sentencepiece._backend.pre_tokenizer is not None:  # Metaspace adds no space in front of one: it is lost
        text = text.removeprefix(" ")
    assert "".join(pieces) == text == sentencepiece.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(300))
@given(data=st.data(), skip=st.booleans())
def test_random_byte_level_tokens_decode_as_the_library_does(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, byte_level.vocab_size - 1), max_size=40))
    pieces = pieces_of(byte_level.detokenizer(skip), tokens)
    library = byte_level._backend.decode(tokens, skip_special_tokens=skip)
    assert "".join(pieces) == library == byte_level.decode(tokens, skip)


@settings(max_examples=examples(300))
@given(data=st.data(), skip=st.booleans())
def test_random_sentencepiece_tokens_decode_as_the_library_does(
    sentencepiece: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """Only for byte tokens that form valid characters: around an invalid byte the library replaces valid neighbours
    too, as it decodes a whole run of bytes. The library's Metaspace drops all spaces of the first token, Proa one."""
    space = sentencepiece._backend.token_to_id("<0x20>")  # never used: a space is always U+2581
    ids = [i for i in range(sentencepiece.vocab_size) if i != space]
    tokens = data.draw(st.lists(st.sampled_from(ids), max_size=40))
    ours = "".join(pieces_of(sentencepiece.detokenizer(skip, from_start=True), tokens))
    assert ours == sentencepiece.decode(tokens, skip)
    library = sentencepiece._backend.decode(tokens, skip_special_tokens=skip)
    if "\ufffd" not in library:
        assert ours == library


@given(text=st.text(max_size=60))
def test_any_text_survives_token_by_token(byte_level: Tokenizer, text: str) -> None:
    pieces = pieces_of(byte_level.detokenizer(), byte_level.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text


def test_an_incomplete_character_is_held_back_until_flush(byte_level: Tokenizer) -> None:
    half = byte_level.encode("😀")[:-1]
    detokenizer = byte_level.detokenizer()
    assert [detokenizer.feed(t) for t in half] == [""] * len(half)
    assert detokenizer.has_partial
    assert detokenizer.flush() == "\ufffd"
    assert not detokenizer.has_partial


def test_an_answer_keeps_the_space_that_a_whole_text_drops(sentencepiece: Tokenizer) -> None:
    tokens = [sentencepiece._backend.token_to_id(t) for t in ("▁th", "e")]
    assert sentencepiece.decode(tokens) == "the"
    assert "".join(pieces_of(sentencepiece.detokenizer(), tokens)) == " the"


def test_token_bytes_are_exact(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        tokens = tokenizer.encode("é 😀 th", add_special_tokens=False)
        text = b"".join(map(tokenizer.token_bytes, tokens)).decode()
        assert text.strip() == "é 😀 th"
    assert byte_level.token_bytes(10**6) == b""  # embeddings may be longer than the vocabulary


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("a<|im_end|>b")
    assert byte_level.decode(tokens) == "ab"
    assert byte_level.decode(tokens, skip_special_tokens=False) == "a<|im_end|>b"


def test_an_unknown_decoder_is_refused() -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(TokenizerError, match="missing"):
        TokenBytes(backend)
    backend.decoder = decoders.CTC()
    with pytest.raises(TokenizerError, match="CTC"):
        TokenBytes(backend)
