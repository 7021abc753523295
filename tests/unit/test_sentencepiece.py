"""tokenizer.model files: pieces, spaces, and models that are refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from proa.errors import TokenizerError
from proa.text.sentencepiece import NORMAL, UNKNOWN, USER_DEFINED, Pieces, build_backend
from proa.text.tokenizer import Tokenizer
from unit.sentencepiece_models import PIECES, SP_TEXTS, model_proto


def by_hand(text: str) -> list[str]:
    """Encode by the definition of sentencepiece BPE: repeatedly merge the adjacent pair that gives the piece of highest
    score, leftmost first."""
    score = {piece: s for piece, s, kind in PIECES if kind == NORMAL}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return [b for s in symbols for b in ([s] if s in score else [f"<0x{byte:02X}>" for byte in s.encode()])]


@pytest.mark.parametrize("text", SP_TEXTS)
def test_a_sentencepiece_model_encodes_by_its_scores(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    tokenizer = Tokenizer.load(tmp_path)
    ids = {piece: i for i, (piece, _, _) in enumerate(PIECES)}
    assert tokenizer.encode(text) == [1, *(ids[p] for p in by_hand(text))]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("single_spaces", [1, None])
@pytest.mark.parametrize(
    ("text", "same"),
    [("  the   axe ", "the axe"), ("the\n  the", "the\n the"), (" \n ", "\n"), ("a</s>the ", "a</s>the")],
)
def test_models_with_single_spaces_see_no_others(
    tmp_path: Path, single_spaces: int | None, legacy: bool, text: str, same: str
) -> None:
    """OpenLLaMA v1 was trained so (remove_extra_whitespaces)."""
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    want = Tokenizer.load(tmp_path).encode(same)
    (tmp_path / "tokenizer.model").write_bytes(model_proto(single_spaces=single_spaces))
    assert Tokenizer.load(tmp_path).encode(text) == want
    assert Tokenizer.load(tmp_path).encode("   ") == [1]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("model", [0, 1])
def test_the_config_decides_on_the_space_before_a_text(tmp_path: Path, model: int, legacy: bool) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_proto(dummy_prefix=model))
    for value, pieces in ((True, ["▁the"]), (False, ["t", "he"]), (None, ["▁the"] if model else ["t", "he"])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy, "add_prefix_space": value}))
        tokenizer = Tokenizer.load(tmp_path)
        tokens = tokenizer.encode("the")
        assert [PIECES[token][0] for token in tokens] == ["<s>", *pieces]
        assert tokenizer.decode(tokens) == "the"


def test_spaces_form_the_user_defined_pieces_of_several() -> None:
    """No text has them as they are written, so they are merged, before all others, whatever their scores."""
    texts = ["<unk>", "▁", "a", "▁a", "▁▁", "▁▁▁"]
    types = [UNKNOWN, NORMAL, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED]
    backend = build_backend(Pieces(texts, [0.0] * 6, types))
    assert backend.encode("a   a").tokens == ["▁a", "▁▁▁", "a"]
    assert backend.encode("  ").tokens == ["▁▁▁"]


def test_the_space_after_special_tokens_is_legacy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    pieces = [piece for piece, _, _ in PIECES]
    for legacy, after in ((True, "▁the"), (None, "▁the"), (False, "he")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
        tokens = [pieces[t] for t in Tokenizer.load(tmp_path).encode("the</s>the")]
        assert tokens[:3] == ["<s>", "▁the", "</s>"]
        assert tokens[-1] == after


def test_empty_names_of_special_tokens_count_as_absent(tmp_path: Path) -> None:
    """The first conversions of Llama 1 have them."""
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    about = {"bos_token": "", "eos_token": "", "unk_token": "", "tokenizer_class": "LLaMATokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    tokenizer = Tokenizer.load(tmp_path)
    assert [PIECES[token][0] for token in tokenizer.encode("the")] == ["<s>", "▁the"]
    assert tokenizer.eos_token_ids == {2}


def test_tokens_of_added_tokens_json_are_whole(tmp_path: Path) -> None:
    """Older folders have them there, if tokenizer.model was not changed."""
    (tmp_path / "tokenizer.model").write_bytes(model_proto())
    size = len(PIECES)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": size + 1, "<pad>": size, "<s>": 1}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<|end|>"]}))
    tokenizer = Tokenizer.load(tmp_path)
    tokens = tokenizer.encode("the<pad><|end|>")
    assert tokens[-2:] == [size, size + 1]
    assert tokenizer.decode(tokens) == "the<pad>"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 7}))
    with pytest.raises(TokenizerError, match=f"'<pad>' has id {size + 7} in .*added_tokens.json, but {size}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (model_proto(model_type=1), "unigram model"),
        (model_proto(charsmap=b"x"), "normalisation"),
        (model_proto(escapes=0), "unusual spaces"),
        (model_proto(space_last=1), "unusual spaces"),
        (model_proto()[:1000], "cannot be read"),
        (b"\xff" * 20, "cannot be read"),
        (b"not protobuf at all", "cannot be read"),
    ],
)
def test_other_sentencepiece_models_are_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(tmp_path)
