"""Incremental detokenization: deltas add up to decoding all ids at once, and the text is cut at stop strings."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.core.outputs import TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason
from minivllm.core.text.detokenizer import IncrementalDetokenizer, StopStrings, TextDelta
from minivllm.core.text.incremental_decoding import ByteLevelDecoder, PieceDecoder, WindowDecoder
from minivllm.core.text.tokenizer import Tokenizer
from tests.core.text.text_kinds import KINDS, TEXTS, tokenizer_of

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **fields)


def parts_of(token_ids: list[int], seed: int) -> list[list[int]]:
    """Splits the tokens into random parts of 0 to 4."""
    chance = random.Random(seed)
    parts, place = [], 0
    while place < len(token_ids):
        size = chance.randrange(5)
        parts.append(token_ids[place : place + size])
        place += size
    return parts


def run(
    tokenizer: Tokenizer, sampling: SamplingParams, parts: list[list[int]], end: FinishReason = FinishReason.LENGTH
) -> tuple[IncrementalDetokenizer, list[TextDelta]]:
    """Pushes all parts, the last one with the finish reason `end`; stops early once a stop string is found."""
    output, deltas = IncrementalDetokenizer(tokenizer, sampling), []
    for place, part in enumerate(parts or [[]]):
        logprobs = [TokenLogprobs(token, -1.0) for token in part] if sampling.logprobs is not None else None
        is_last = place == max(len(parts) - 1, 0)
        deltas.append(output.push(part, logprobs, finish_reason=end if is_last else None))
        if deltas[-1].finish_reason is not None:
            break
    return output, deltas


# Decoding


def test_each_tokenizer_kind_gets_its_incremental_decoder() -> None:
    expected = {"byte_level": ByteLevelDecoder, "default_model": ByteLevelDecoder, "word_piece": WindowDecoder}
    for kind in KINDS:
        decoder = tokenizer_of(kind).incremental_decoder()
        assert type(decoder) is expected.get(kind, PieceDecoder), kind


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(st.data())
def test_joined_deltas_equal_decoding_all_ids_at_once(kind: str, data: Any) -> None:
    """Any ids in any order: partial characters, invalid UTF-8, special tokens in the middle, unknown ids."""
    tokenizer = tokenizer_of(kind)
    size = tokenizer.vocab_size + 3
    any_id = st.one_of(st.integers(0, size), st.integers(0, min(size, 270)), st.integers(max(0, size - 8), size))
    token_ids = data.draw(st.lists(any_id, max_size=40))
    skip = data.draw(st.booleans())
    sampling = params(skip_special_tokens=skip)
    output, deltas = run(tokenizer, sampling, parts_of(token_ids, data.draw(st.integers(0, 2**16))))
    assert "".join(delta.text for delta in deltas) == output.text == tokenizer.decode(token_ids, skip)
    assert [token for delta in deltas for token in delta.token_ids] == token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", TEXTS, ids=["english", "spaces", "cjk", "emoji", "combining", "bidirectional", "code", "symbols"]
)
def test_text_after_every_token_equals_decoding_at_once(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(token_ids) + 1):
        output, _ = run(tokenizer, params(), [[token] for token in token_ids[:cut]])
        assert output.text == tokenizer.decode(token_ids[:cut], True)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "default_model"])
def test_deltas_contain_only_complete_characters(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in TEXTS[:-1]:
        _, deltas = run(tokenizer, params(), [[token] for token in tokenizer.encode(text)])
        assert not any("\ufffd" in delta.text for delta in deltas)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_carry_tokens_and_logprobs_together_with_their_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(" ".join(TEXTS))
    _, deltas = run(tokenizer, params(logprobs=0), [[token] for token in token_ids])
    for delta in deltas[:-1]:
        assert bool(delta) == bool(delta.text) == bool(delta.token_ids)
        assert [entry.token_id for entry in delta.logprobs or []] == delta.token_ids
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["byte_level", "default_model", "gemma", "metaspace_never"])
def test_joined_token_bytes_are_the_text_in_utf8(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token) for token in token_ids)
        if tokenizer.decode(token_ids) == text:
            assert joined == text.encode()


def test_token_bytes_of_a_partial_character_are_its_raw_bytes() -> None:
    tokenizer = tokenizer_of("default_model")
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode("你")]
    assert len(pieces) > 1
    assert b"".join(pieces) == "你".encode()
    assert tokenizer.token_bytes(10**9) == b""


def test_decoder_that_disagrees_with_decode_falls_back_to_window_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.core.text.incremental_decoding.byte_level_bytes", lambda token: token.encode())
    tokenizer = Tokenizer(tokenizer_of("byte_level").hf_tokenizer)
    assert isinstance(tokenizer.incremental_decoder(), WindowDecoder)
    monkeypatch.undo()
    token_ids = tokenizer.encode(TEXTS[3])
    assert run(tokenizer, params(), [[token] for token in token_ids])[0].text == tokenizer.decode(token_ids)


# Stop strings


def first_stop(text: str, stops: tuple[str, ...], since: int = 0) -> tuple[int, int, str] | None:
    """Returns (start, end, stop string) of the stop string that ends first, by trying every end."""
    for end in range(since + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


words = st.text(alphabet="ab ", min_size=1, max_size=5)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text(alphabet="abc ", max_size=6), max_size=12),
    st.lists(words, min_size=1, max_size=4),
    st.integers(0, 6),
)
def test_stop_strings_equal_a_search_character_by_character(
    pieces: list[str], stops: list[str], num_ignored: int
) -> None:
    """The first `num_ignored` pieces must not stop the text, as before `min_tokens`."""
    stop_strings, text = StopStrings(tuple(stops)), ""
    for number, piece in enumerate(pieces):
        may_stop = number >= num_ignored
        found = stop_strings.find(piece, may_stop=may_stop)
        expected = first_stop(text + piece, tuple(stops), since=len(text)) if may_stop else None
        if found is not None:
            assert expected is not None
            assert (len(text) + found[0], found[1]) == expected[1:]
            return
        assert expected is None
        text += piece
        starts = [
            length
            for length in range(len(text) + 1)
            if any(stop.startswith(text[len(text) - length :]) and length < len(stop) for stop in stops)
        ]
        assert stop_strings.longest_start == max(starts)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "default_model"])
@quick
@given(st.data())
def test_text_is_cut_at_the_first_stop_string(kind: str, data: Any) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode(data.draw(st.sampled_from(TEXTS)) + data.draw(st.sampled_from(TEXTS)))
    full_text = tokenizer.decode(token_ids)
    starts = st.integers(0, len(full_text) - 1)
    stops = tuple(
        full_text[start : start + data.draw(st.integers(1, 12))]
        for start in data.draw(st.lists(starts, min_size=1, max_size=3))
    )
    included = data.draw(st.booleans())
    min_tokens = data.draw(st.sampled_from([0, 0, 3, 10]))
    sampling = params(stop=stops, include_stop_str_in_output=included, min_tokens=min_tokens, logprobs=0)
    output, deltas = run(tokenizer, sampling, parts_of(token_ids, data.draw(st.integers(0, 2**16))))
    found = first_stop(full_text, stops, since=len(settled_text(tokenizer, token_ids[:min_tokens])))
    assert "".join(delta.text for delta in deltas) == output.text
    if found is None:
        assert output.text == full_text
        assert output.finish_reason is FinishReason.LENGTH
        assert output.token_ids == token_ids
        return
    start, end, stop = found
    assert output.text == full_text[: end if included else start]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason == stop
    # The token ids cover the text and no token that is cut off completely; usage counts to the end of the stop string.
    assert output.token_ids == token_ids[: len(output.token_ids)]
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert tokenizer.decode(output.token_ids).startswith(output.text.removesuffix("\ufffd"))
    assert len(output.token_ids) <= output.num_tokens
    assert len(settled_text(tokenizer, token_ids[: output.num_tokens - 1])) < end


def settled_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    decoder = tokenizer.incremental_decoder()
    return "".join(decoder.push(token) for token in token_ids)


def byte_tokens(text: str) -> list[int]:
    """Returns one token per byte."""
    tokenizer = tokenizer_of("byte_level")
    by_bytes = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([value])] for value in text.encode()]


@pytest.mark.parametrize("in_one_push", [True, False], ids=["one-push", "token-by-token"])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabcd", ("abcd", "bc"), "xa"),  # completes first, although the other one begins first
        ("xabc", ("bc", "abc"), "xa"),  # both complete together: the first in the list
        ("xabc", ("abc", "bc"), "x"),
        ("x\n\nHuman y\n\n", ("\n\nHuman", "\n\n"), "x"),
        ("aab", ("ab",), "a"),  # a partial match before the match
        ("你好吗", ("好",), "你"),
        ("é😀!", ("😀",), "é"),
    ],
    ids=[
        "ends-before-one-that-starts-first",
        "short-one-first-in-the-list",
        "long-one-first-in-the-list",
        "prefix-of-another",
        "after-a-partial-match",
        "three-byte-character",
        "four-byte-character",
    ],
)
def test_stop_string_that_ends_first_wins(text: str, stops: tuple[str, ...], expected: str, in_one_push: bool) -> None:
    token_ids = byte_tokens(text)
    parts = [token_ids] if in_one_push else [[token] for token in token_ids]
    output, _ = run(tokenizer_of("byte_level"), params(stop=stops), parts)
    assert output.text == expected
    assert output.finish_reason is FinishReason.STOP


def test_partial_stop_string_is_held_back_until_it_cannot_complete() -> None:
    output = IncrementalDetokenizer(tokenizer_of("byte_level"), params(stop=("STOP",)))
    texts = [output.push([token]).text for token in byte_tokens("a STO! STO")]
    assert texts == ["a", " ", "", "", "", "STO!", " ", "", "", ""]
    assert output.push([], finish_reason=FinishReason.LENGTH).text == "STO"
    assert output.finish_reason is FinishReason.LENGTH


def test_stop_string_counts_as_usage_and_later_tokens_are_dropped() -> None:
    token_ids = byte_tokens("ab STOP cd")
    output, deltas = run(tokenizer_of("byte_level"), params(stop=("STOP",), logprobs=0), [token_ids])
    assert output.text == "ab "
    assert output.token_ids == token_ids[:3]
    assert [entry.token_id for entry in output.logprobs] == token_ids[:3]
    assert output.num_tokens == 7
    assert output.push([5], finish_reason=FinishReason.LENGTH) == TextDelta()
    assert len(deltas) == 1


def test_stop_string_is_found_in_the_text_flushed_at_the_end() -> None:
    output, _ = run(tokenizer_of("byte_level"), params(stop=("\ufffd",)), [byte_tokens("a你")[:2]])
    assert output.text == "a"
    assert output.finish_reason is FinishReason.STOP


def test_stop_strings_are_ignored_until_min_tokens() -> None:
    token_ids = byte_tokens("x.y.z.")
    output, _ = run(tokenizer_of("byte_level"), params(stop=(".",), min_tokens=2), [[token] for token in token_ids])
    assert output.text == "x.y"


@pytest.mark.parametrize("kind", ["byte_level", "llama", "word_piece", "default_model"])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("included", [True, False])
def test_stop_string_that_is_a_special_token_ends_the_text_at_that_token(kind: str, skip: bool, included: bool) -> None:
    tokenizer = tokenizer_of(kind)
    stop = "<|im_end|>" if kind == "default_model" else "<|end|>"
    stop_id = tokenizer.special_token_id(stop)
    assert stop_id is not None
    before, after = tokenizer.encode("one two"), tokenizer.encode(" three", add_special_tokens=False)
    sampling = params(
        stop=("zq", stop), skip_special_tokens=skip, include_stop_str_in_output=included, logprobs=0, ignore_eos=True
    )
    for parts in ([[*before, stop_id, *after]], [[token_id] for token_id in [*before, stop_id, *after]]):
        output, deltas = run(tokenizer, sampling, parts)
        text = output.text.replace(" ", "")
        assert text == "onetwo" + (stop if included else "")
        assert "".join(delta.text for delta in deltas) == output.text
        assert output.finish_reason is FinishReason.STOP
        assert output.stop_reason == stop
        # WordPiece writes a space with the token.
        has_text = included or (kind == "word_piece" and not skip)
        assert output.token_ids == ([*before, stop_id] if has_text else before)
        assert output.num_tokens == len(before) + 1


def test_special_stop_string_also_ends_what_the_engine_ends_at_eos() -> None:
    tokenizer = tokenizer_of("byte_level")
    eos = tokenizer.eos_token_id
    assert eos is not None
    output = IncrementalDetokenizer(tokenizer, params(stop=("</s>",)))
    output.push([*byte_tokens("ab"), eos], finish_reason=FinishReason.STOP, stop_token_id=eos)
    assert (output.text, output.finish_reason, output.num_tokens) == ("ab", FinishReason.STOP, 3)


def test_special_stop_string_shows_the_incomplete_character_before_it() -> None:
    tokenizer = tokenizer_of("byte_level")
    stop_id = tokenizer.special_token_id("<|end|>")
    assert stop_id is not None
    output, _ = run(tokenizer, params(stop=("<|end|>",)), [[*byte_tokens("é")[:1], stop_id]])
    assert output.text == "\ufffd"


def test_special_stop_string_waits_for_min_tokens() -> None:
    tokenizer = tokenizer_of("byte_level")
    stop_id = tokenizer.special_token_id("<|end|>")
    assert stop_id is not None
    token_ids = [*byte_tokens("a"), stop_id, *byte_tokens("b"), stop_id, *byte_tokens("c")]
    output, _ = run(tokenizer, params(stop=("<|end|>",), min_tokens=3), [token_ids])
    assert (output.text, output.num_tokens) == ("ab", 4)


# Stop tokens and finish


@pytest.mark.parametrize(("included", "expected"), [(False, "ab"), (True, "abc")], ids=["excluded", "included"])
def test_stop_token_counts_as_usage_and_its_text_is_shown_only_on_request(included: bool, expected: str) -> None:
    token_ids = byte_tokens("abc")
    sampling = params(stop_token_ids=(token_ids[-1],), include_stop_str_in_output=included)
    output = IncrementalDetokenizer(tokenizer_of("byte_level"), sampling)
    output.push(token_ids[:2])
    output.push(token_ids[2:], finish_reason=FinishReason.STOP, stop_token_id=token_ids[-1])
    assert output.text == expected
    assert output.token_ids == token_ids
    assert output.num_tokens == 3
    assert output.stop_reason == token_ids[-1]


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "ab</s>")], ids=["skipped", "shown"])
def test_eos_text_follows_skip_special_tokens(skip: bool, expected: str) -> None:
    tokenizer = tokenizer_of("byte_level")
    eos = tokenizer.eos_token_id
    assert eos is not None
    output = IncrementalDetokenizer(tokenizer, params(skip_special_tokens=skip))
    output.push([*byte_tokens("ab"), eos], finish_reason=FinishReason.STOP, stop_token_id=eos)
    assert output.text == expected
    assert output.token_ids[-1] == eos
    assert output.stop_reason is None


def test_empty_output_ends_with_one_empty_delta() -> None:
    output = IncrementalDetokenizer(tokenizer_of("llama"), params())
    delta = output.push([], finish_reason=FinishReason.ABORT)
    assert delta == TextDelta(finish_reason=FinishReason.ABORT)
    assert bool(delta)
