"""Conversion of engine events to chunks: stop strings, incomplete characters, and logprobs aligned with tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import logprob_of, make_tokenizer
from proa.text.answer import AnswerFold, Choice
from proa.text.choice import ChoiceStream
from proa.text.tokenizer import Tokenizer
from proa.types import Chunk, EngineRequest, Sampling, SamplingParams, TokenEvent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("model")))


def run(
    tokenizer: Tokenizer,
    tokens: list[int],
    sizes: list[int] | None = None,
    ending: dict[str, Any] | None = None,
    **wishes: Any,
) -> tuple[list[Chunk], Choice]:
    """Feed `tokens` in events of `sizes` tokens (the last size repeats); return the chunks and the answer they form."""
    params = SamplingParams(logprobs=1, **wishes)
    sampling = Sampling(max_tokens=99, logprobs=1, eos_token_ids=(2,), stop_token_ids=params.stop_token_ids)
    stream = ChoiceStream(
        0,
        EngineRequest(id="r", tokens=[5], sampling=sampling),
        params,
        tokenizer.detokenizer(params.skip_special_tokens),
    )
    chunks, rest, cut = [], list(tokens), list(sizes or [1])
    while not stream.finished:
        size = cut.pop(0) if len(cut) > 1 else max(cut[0], 1)
        now, rest = rest[:size], rest[size:]
        end = (ending or {"finish": "length"}) if not rest else {}
        event = TokenEvent(id="r", tokens=now, logprobs=[logprob_of(t, 1) for t in now], **end)
        chunk = stream.feed(event)
        if chunk is not None:
            chunks.append(chunk)
    answer = AnswerFold()
    for chunk in chunks:
        answer.add(chunk)
    return chunks, answer.result().choices[0]


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


def test_plain_text_comes_token_by_token(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Hello world, you")
    chunks, choice = run(tokenizer, tokens)
    assert [c.tokens for c in chunks] == [[t] for t in tokens]
    assert [c.text for c in chunks] == [tokenizer.token_text(t) for t in tokens]
    assert [c.finish for c in chunks] == [None] * (len(tokens) - 1) + ["length"]
    assert choice == Choice(
        index=0,
        text="Hello world, you",
        tokens=tokens,
        logprobs=[logprob_of(t, 1) for t in tokens],
        finish="length",
    )


def test_an_emoji_over_four_tokens_comes_whole_with_its_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀b")
    assert len(tokens) == 6
    chunks, choice = run(tokenizer, tokens)
    assert [(c.text, len(c.tokens)) for c in chunks] == [("a", 1), ("😀", 4), ("b", 1)]
    assert choice.text == "a😀b"


def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three four")
    chunks, choice = run(tokenizer, tokens, stop=("o thr",))
    assert (choice.text, choice.finish, choice.stop_reason) == ("one tw", "stop", "o thr")
    assert text_of(tokenizer, choice.tokens).startswith("one tw")
    assert "".join(c.text for c in chunks[:-1]) == "one tw"[: sum(len(c.text) for c in chunks[:-1])]
    included = run(tokenizer, tokens, stop=("o thr",), include_stop_str_in_output=True)[1]
    assert (included.text, included.stop_reason) == ("one two thr", "o thr")


@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [50]])
def test_where_the_text_of_each_token_ends(tokenizer: Tokenizer, sizes: list[int]) -> None:
    tokens = tokenizer.encode("Hello 😀, world")
    chunks, _ = run(tokenizer, tokens, sizes=sizes)
    ends, before = [], 0
    for chunk in chunks:
        assert len(chunk.ends) == len(chunk.tokens)
        ends += [before + end for end in chunk.ends]
        before += len(chunk.text)
    whole = [text_of(tokenizer, tokens[: i + 1]) for i in range(len(tokens))]
    assert ends == [len(text) for text in whole]


def test_an_unmatched_stop_string_changes_nothing(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two th")
    choice = run(tokenizer, tokens, stop=("two three",))[1]
    assert (choice.text, choice.tokens, choice.finish, choice.stop_reason) == ("one two th", tokens, "length", None)


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ({"finish": "stop", "stop_token": 2}, None),
        ({"finish": "stop", "stop_token": 7}, 7),
        ({"finish": "abort"}, None),
    ],
)
def test_finish_and_stop_reasons(tokenizer: Tokenizer, ending: dict[str, Any], reason: int | None) -> None:
    choice = run(tokenizer, tokenizer.encode("end"), ending=ending, stop_token_ids=(7,))[1]
    assert (choice.text, choice.finish, choice.stop_reason) == ("end", ending["finish"], reason)


def test_an_empty_answer(tokenizer: Tokenizer) -> None:
    chunks, choice = run(tokenizer, [], ending={"finish": "stop", "stop_token": 2})
    assert len(chunks) == 1
    assert (choice.text, choice.tokens, choice.finish) == ("", [], "stop")


def test_an_incomplete_character_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀")[:-1]
    choice = run(tokenizer, tokens)[1]
    assert (choice.text, choice.tokens) == ("a\ufffd", tokens)


def test_stop_strings_count_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("x.y.z.")
    assert len(tokens) == 6
    assert run(tokenizer, tokens, stop=(".",))[1].text == "x"
    assert run(tokenizer, tokens, stop=(".",), min_tokens=3)[1].text == "x.y"


def test_the_first_chunk_comes_with_the_first_event(tokenizer: Tokenizer) -> None:
    """The first chunk has the prompt's counts, even while all text is held back."""
    chunks, _ = run(tokenizer, tokenizer.encode("😀"))
    assert [c.prompt_tokens for c in chunks] == [[5], None]
    assert (chunks[0].text, chunks[0].tokens) == ("", [])


@given(data=st.data())
def test_the_split_into_events_changes_nothing(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """For any tokens and stop strings, text, tokens and logprobs do not depend on how tokens are grouped into events;
    there is a logprob per token; and the decoded tokens start with the emitted text."""
    alphabet = [*tokenizer.encode("ab. 😀é\n", add_special_tokens=False), 0, 1]
    tokens = data.draw(st.lists(st.sampled_from(alphabet), max_size=20))
    stop = tuple(data.draw(st.lists(st.text(alphabet="ab. 😀\ufffd", min_size=1, max_size=3), max_size=3)))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    wishes = {"stop": stop, "skip_special_tokens": data.draw(st.booleans())}
    choice = run(tokenizer, tokens, sizes, **wishes)[1]
    assert choice == run(tokenizer, tokens, **wishes)[1]
    assert choice.logprobs == [logprob_of(t, 1) for t in choice.tokens]
    assert choice.tokens == tokens[: len(choice.tokens)]
    own = tokenizer.detokenizer(wishes["skip_special_tokens"])
    text = "".join(map(own.feed, choice.tokens)) + own.flush()
    if choice.stop_reason is None:
        assert (choice.text, choice.tokens) == (text, tokens)
    else:
        assert text.startswith(choice.text)
        assert not any(s in choice.text for s in stop)


@given(data=st.data())
def test_no_chunk_is_empty_but_the_first_and_the_last(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(tokenizer.encode("ab😀", add_special_tokens=False)), max_size=20))
    chunks, _ = run(tokenizer, tokens, stop=("ba", "b😀"))
    assert all(c.text or c.tokens for c in chunks[1:-1])
    assert [c.finish is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.tokens) for c in chunks)
    assert all(math.isfinite(entry.logprob) for c in chunks for entry in c.logprobs or [])


def test_prompt_facts_of_an_event_are_never_dropped(tokenizer: Tokenizer) -> None:
    request = EngineRequest(id="r", tokens=[5, 6], sampling=Sampling(max_tokens=9))
    stream = ChoiceStream(0, request, SamplingParams(), tokenizer.detokenizer())
    assert stream.feed(TokenEvent(id="r")) == Chunk(prompt_tokens=[5, 6])
    told = [None, logprob_of(6, 1)]
    assert stream.feed(TokenEvent(id="r", cached_tokens=1, prompt_logprobs=told)) == Chunk(
        cached_tokens=1, prompt_logprobs=told
    )
    assert stream.feed(TokenEvent(id="r")) is None
