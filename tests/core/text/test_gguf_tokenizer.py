"""Tokenizers of GGUF files equal those of the original models, or are refused by name."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, Qwen2Tokenizer

from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.gguf.tokenizer import (
    FAMILIES,
    IGNORED_KEYS,
    USED_KEYS,
    build_tokenizer,
    end_of_turn_ids,
    unknown_keys,
)
from minivllm.core.text.tokenizer import Tokenizer as TextTokenizer
from minivllm.core.text.tokenizer import load_tokenizer
from tests.core.text.text_kinds import TEXTS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CORPUS = (
    *TEXTS,
    "It's 12 o'clock; I'LL pay 1234567 or 3.50, they've said. HTTPServer getUserName MiXeD",
    "a\n\n\n  b\r\n\r\n\tc   1\n 2   \n",
    "e\u0301tude café ﬁ Ⅷ ½ ² १२१२ ٣٤٥ 한국어 ไทย తెలుగు नमस्ते",
    "path/to//file... (name) [x] {y}; !!?? -- ==> _a_b_ $5 50% <br/> ``x``",
    "<|im_start|>user\nhi<|im_end|>  <think>so</think> <unk></s>",
)

# As the `tokenizer.json` of one model of each family has it: the pre-tokenizer's steps and the normalizer.
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = {**_GPT2, "use_regex": False}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_NFC = {"type": "NFC"}


def _isolated(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER: list[dict[str, Any]] = [
    _isolated("[\r\n]"),
    _isolated(r"\s?\p{L}+"),
    _isolated(r"\s?\p{P}+"),
    _isolated("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
    _SINGLE_DIGITS,
    _BYTES,
]
_DEEPSEEK_V3: list[dict[str, Any]] = [
    _isolated(r"\p{N}{1,3}"),
    _isolated("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    _isolated(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    _BYTES,
]
_FALCON: list[dict[str, Any]] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    _GPT2,
    {"type": "Digits", "individual_digits": False},
    _isolated("[0-9][0-9][0-9]"),
]

ORIGINALS: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None]] = {
    "gpt-2": ([_GPT2], None),
    "phi-2": ([_GPT2], None),
    "olmo": ([_GPT2], _NFC),
    "mpt": ([_GPT2], _NFC),
    "smollm": ([_SINGLE_DIGITS, _GPT2], None),
    "starcoder": ([_SINGLE_DIGITS, _GPT2], None),
    "refact": ([_SINGLE_DIGITS, _GPT2], None),
    "command-r": ([_SINGLE_DIGITS, _GPT2], _NFC),
    "falcon": (_FALCON, None),
    "llama-bpe": ([_isolated(_LLAMA3), _BYTES], None),
    "llama3": ([_isolated(_LLAMA3), _BYTES], None),
    "llama-v3": ([_isolated(_LLAMA3), _BYTES], None),
    "smaug-bpe": ([_isolated(_LLAMA3), _BYTES], None),
    "dbrx": ([_isolated(_LLAMA3), _BYTES], None),
    "qwen2": ([_isolated(_QWEN2), _BYTES], _NFC),
    "deepseek-r1-qwen": ([_isolated(_QWEN2), _BYTES], _NFC),
    "qwen35": ([_isolated(_QWEN35), _BYTES], _NFC),
    "tekken": ([_isolated(_TEKKEN), _BYTES], None),
    "gpt-4o": ([_isolated(_GPT4O), _BYTES], None),
    "llama4": ([_isolated(_GPT4O), _BYTES], None),
    "deepseek-coder": (_DEEPSEEK_CODER, None),
    "deepseek-v3": (_DEEPSEEK_V3, None),
}

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "</s>"]
ADDED = ["<think>", "</think>", "  \t"]

texts = st.lists(
    st.one_of(
        st.sampled_from(CORPUS),
        st.text(max_size=12),
        st.text(alphabet="abZé \n\t\r'12٣½.,/<|>_\u0301\u3000你한", max_size=20),
        st.sampled_from([*SPECIAL, *ADDED, "'s", "'LL", "   ", "\n\n", "1234"]),
    ),
    max_size=4,
).map("".join)


@functools.cache
def original(name: str) -> Tokenizer:
    """Returns a small byte-level tokenizer of a family, trained with the pre-tokenizer of its `tokenizer.json`."""
    steps, normalizer = ORIGINALS[name]
    data = json.loads(Tokenizer(models.BPE()).to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    data["normalizer"] = normalizer
    data["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    backend = Tokenizer.from_str(json.dumps(data))
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return backend


def file_of(backend: Tokenizer, **metadata: Any) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's converter writes for a byte-level tokenizer."""
    data = json.loads(backend.to_str())
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in data["added_tokens"]}
    by_id = {token_id: token for token, token_id in backend.get_vocab().items()}
    size = len(by_id) + 3  # the model has more rows than tokens
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [kinds.get(i, NORMAL if i in by_id else UNUSED) for i in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": backend.token_to_id("<|im_start|>"),
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.{name.replace('__', '.')}": value for name, value in metadata.items()}


@functools.cache
def built(name: str) -> TextTokenizer:
    return TextTokenizer(build_tokenizer(file_of(original(name), ggml__pre=name)))


def agree(tokenizer: TextTokenizer, backend: Tokenizer, text: str) -> None:
    expected = backend.encode(text, add_special_tokens=False).ids
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == expected
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == backend.decode(expected, skip_special_tokens=skip)


# Byte-level tokenizers


def test_every_family_is_compared_with_its_original() -> None:
    assert FAMILIES.keys() == ORIGINALS.keys()


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_tokenizer_equals_its_original(name: str) -> None:
    backend, tokenizer = original(name), built(name)
    assert {tokenizer.token(i) for i in range(tokenizer.vocab_size)} - {None} == set(backend.get_vocab())

    @settings(max_examples=60, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        agree(tokenizer, backend, text)

    check()
    for text in CORPUS:
        agree(tokenizer, backend, text)


def test_qwen2_equals_the_class_of_transformers() -> None:
    data = json.loads(original("qwen2").to_str())["model"]
    merges = [tuple(pair) for pair in data["merges"]]
    backend = Qwen2Tokenizer(vocab=data["vocab"], merges=merges).backend_tokenizer
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    for text in CORPUS:
        agree(built("qwen2"), backend, text)


@pytest.mark.parametrize("name", ["llama-bpe", "tekken", "smaug-bpe", "llama4"])
def test_word_of_a_tiktoken_vocabulary_is_one_token_without_merges(name: str) -> None:
    metadata = file_of(original(name), ggml__pre=name)
    metadata["tokenizer.ggml.tokens"][-1] = "ĠUnmergeable"
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    encode = TextTokenizer(build_tokenizer(metadata)).encode
    assert encode(" Unmergeable", add_special_tokens=False) == [len(metadata["tokenizer.ggml.tokens"]) - 1]


def test_packaged_model_splits_digits_before_white_space() -> None:
    tokenizer = load_tokenizer(EngineConfig())
    for text, tokens in [
        ("a\n\n1. b", ["a", "ĊĊ", "1", ".", "Ġb"]),
        ("x   42", ["x", "ĠĠĠ", "4", "2"]),
        ("x   y", ["x", "ĠĠ", "Ġy"]),
    ]:
        assert [tokenizer.token(i) for i in tokenizer.encode(text)] == tokens
    assert {tokenizer.token(i) for i in tokenizer.eos_token_ids} == {"<|im_end|>", "<|endoftext|>"}


# SentencePiece


class SentencePiece:
    """SentencePiece's BPE, written down from its definition: join the two neighbours with the best score."""

    def __init__(self, scores: dict[str, float], *, prefix: bool) -> None:
        self.scores, self.prefix = scores, prefix

    def pieces(self, text: str) -> list[str]:
        marked = ("▁" if self.prefix and text else "") + text.replace(" ", "▁")
        parts = list(marked)
        while True:
            joined = [
                (-self.scores[left + right], place)
                for place, (left, right) in enumerate(itertools.pairwise(parts))
                if left + right in self.scores
            ]
            if not joined:
                break
            _, place = min(joined)
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
        bytes_of = [[part] if part in self.scores else [f"<0x{b:02X}>" for b in part.encode()] for part in parts]
        return [piece for pieces in bytes_of for piece in pieces]


@functools.cache
def sentencepiece_merges() -> tuple[tuple[str, str], ...]:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    ascii_only = [text for text in CORPUS if text.isascii() and "<" not in text]
    backend.train_from_iterator(
        [*ascii_only * 3, "你好 naïve"], trainers.BpeTrainer(vocab_size=500, show_progress=False)
    )
    return tuple(tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"])


def sentencepiece_file(*, prefix: bool = True, architecture: str = "llama", **metadata: Any) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's converter writes for a `tokenizer.model`."""
    merged = dict.fromkeys(left + right for left, right in sentencepiece_merges())
    letters = dict.fromkeys(letter for token in merged for letter in token)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *merged]
    tokens += [letter for letter in letters if letter not in merged]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    for token, kind in (("<|user|>", CONTROL), ("<|end|>", CONTROL), ("<think>", USER_DEFINED)):
        tokens, kinds, scores = [*tokens, token], [*kinds, kind], [*scores, -1000.0]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    } | {f"tokenizer.{name.replace('__', '.')}": value for name, value in metadata.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_equals_its_algorithm(prefix: bool) -> None:
    metadata = sentencepiece_file(prefix=prefix)
    tokenizer = TextTokenizer(build_tokenizer(metadata))
    rows = zip(*(metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type")), strict=True)
    reference = SentencePiece({token: score for token, score, kind in rows if kind == NORMAL}, prefix=prefix)

    @settings(max_examples=200, deadline=None)
    @given(st.text(alphabet="the andoi.,'12 \n\t▁你é🙂sxqWI", max_size=60) | st.text(max_size=20))
    def check(text: str) -> None:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.token(i) for i in token_ids] == reference.pieces(text)
        assert tokenizer.decode(token_ids) == text.replace("▁", " ")
        assert tokenizer.encode(text) == [1, *token_ids]

    check()


def test_sentencepiece_prefix_follows_each_special_token() -> None:
    tokenizer = TextTokenizer(build_tokenizer(sentencepiece_file()))
    tokens = [tokenizer.token(i) for i in tokenizer.encode("<s>the<|end|>the", add_special_tokens=False)]
    assert tokens == ["<s>", "▁the", "<|end|>", "▁the"]


def test_merges_of_the_file_precede_its_scores() -> None:
    merges = [" ".join(pair) for pair in sentencepiece_merges()]
    metadata = sentencepiece_file(ggml__merges=merges)
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.scores"])
    by_merges = TextTokenizer(build_tokenizer(metadata))
    del metadata["tokenizer.ggml.merges"]
    by_order = TextTokenizer(build_tokenizer(metadata))  # all scores are equal: the tokens are in the order of merges
    by_scores = TextTokenizer(build_tokenizer(sentencepiece_file()))
    for text in CORPUS:
        assert by_merges.encode(text) == by_scores.encode(text) == by_order.encode(text)


@pytest.mark.parametrize("says_prefix", [True, False])
def test_gemma_equals_the_class_of_transformers(says_prefix: bool) -> None:
    """Gemma's runs of spaces are user-defined tokens, which converters write as spaces with a score of -1000."""
    metadata = sentencepiece_file(prefix=False, architecture="gemma2")
    if not says_prefix:  # as in files of 2024
        del metadata["tokenizer.ggml.add_space_prefix"]
    vocab = {token: token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    runs = ["▁" * length for length in range(2, 9)]
    for run in runs:
        vocab[run] = len(vocab)
        metadata["tokenizer.ggml.tokens"].append(" " * len(run))
        metadata["tokenizer.ggml.token_type"].append(USER_DEFINED)
        metadata["tokenizer.ggml.scores"].append(-1000.0)
    merges = [("▁" * cut, run[cut:]) for run in runs for cut in range(1, len(run))]
    backend = GemmaTokenizer(
        vocab=vocab, merges=[*merges, *sentencepiece_merges()], bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ).backend_tokenizer
    backend.add_special_tokens(["<|user|>", "<|end|>"])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ["<think>", *runs]])
    tokenizer = TextTokenizer(build_tokenizer(metadata))
    for text in (*CORPUS, "a  b   c    d" + " " * 20 + "e", "the <think> the"):
        agree(tokenizer, backend, text)


def test_special_tokens_of_phi3_take_the_white_space_after_them() -> None:
    tokenizer = TextTokenizer(build_tokenizer(sentencepiece_file(architecture="phi3")))
    tokens = [tokenizer.token(i) for i in tokenizer.encode("<|user|>\n the<|end|>\n<s> the", add_special_tokens=False)]
    assert tokens == ["<|user|>", "▁the", "<|end|>", "<s>", "▁", "▁the"]


# Special tokens and templates


@pytest.mark.parametrize(
    ("pre", "keys", "added"),
    [
        ("llama-bpe", {}, "<|im_start|>"),
        ("llama-bpe", {"add_bos_token": False}, ""),
        ("gpt-2", {}, ""),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "<|im_start|><|im_end|>"),
    ],
)
def test_bos_and_eos_are_added_as_the_file_or_its_family_says(pre: str, keys: dict[str, bool], added: str) -> None:
    metadata = file_of(original(pre), ggml__pre=pre)
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = TextTokenizer(build_tokenizer(metadata))
    assert "".join(str(tokenizer.token(i)) for i in tokenizer.encode("")) == added


def test_token_types_decide_which_tokens_are_special() -> None:
    tokenizer = built("qwen2")
    ids = {str(tokenizer.token(i)): i for i in range(tokenizer.vocab_size)}
    assert all(tokenizer.is_special(ids[token]) for token in SPECIAL)
    assert not any(tokenizer.is_special(ids[token]) for token in ADDED)
    assert tokenizer.hf_tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.vocab_size == len(file_of(original("qwen2"))["tokenizer.ggml.tokens"]) - 3


def test_named_chat_templates_are_kept() -> None:
    one = build_tokenizer(file_of(original("gpt-2"), ggml__pre="gpt-2", chat_template="one"))
    assert TextTokenizer(one).chat_template(with_tools=True) == "one"
    several = {"chat_template": "one", "chat_template__tool_use": "two", "chat_templates": ["tool_use"]}
    two = TextTokenizer(build_tokenizer(file_of(original("gpt-2"), ggml__pre="gpt-2", **several)))
    assert two.chat_template(with_tools=False) == "one"
    assert two.chat_template(with_tools=True) == "two"
    none = TextTokenizer(build_tokenizer(file_of(original("gpt-2"), ggml__pre="gpt-2")))
    assert none.chat_template(with_tools=False) is None


def test_end_of_turn_tokens_are_those_of_keys_and_of_known_names() -> None:
    backend = original("gpt-2")
    metadata = file_of(backend, ggml__eot_token_id=7, ggml__eom_token_id=8)
    known = {backend.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")}
    assert end_of_turn_ids(metadata) == known | {7, 8}
    del metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.token_type"][backend.token_to_id("<|endoftext|>")] = NORMAL
    assert end_of_turn_ids(metadata) == {backend.token_to_id("<|im_end|>"), 7, 8}
    assert end_of_turn_ids(sentencepiece_file()) == {2}


def save_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("after", "end"), [("<|user|>", {"<|user|>"}), ("<think>", set())], ids=["special", "text"])
def test_tokenizer_of_a_file_has_all_tokens_that_end_a_turn(after: str, end: set[str], tmp_path: Path) -> None:
    metadata = sentencepiece_file() | {
        "tokenizer.ggml.eot_token_id": 300,
        "tokenizer.chat_template": "{% for m in messages %}{{ bos_token }}{{ m.content }}" + after + "{% endfor %}",
    }
    save_gguf(tmp_path / "model.gguf", metadata)
    tokenizer = load_tokenizer(EngineConfig(model=str(tmp_path / "model.gguf")))
    for text in CORPUS:
        assert tokenizer.encode(text) == TextTokenizer(build_tokenizer(metadata)).encode(text)
    expected = {"</s>", metadata["tokenizer.ggml.tokens"][300]} | end
    assert {tokenizer.token(i) for i in tokenizer.eos_token_ids} == expected


# Files that are refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None"),
        ({"tokenizer.ggml.pre": "poro-chat"}, "tokenizer.ggml.pre 'poro-chat'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre does not say"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre does not say"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of texts"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 values"),
        ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type it is unknown whether '<|endoftext|>'"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges has an entry without a space"),
        ({"tokenizer.ggml.merges": ["Ġ Unknown"]}, "Unknown"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000"),
        ({"tokenizer.ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token"),
        ({"tokenizer.ggml.add_space_prefix": True}, "tokenizer.ggml.add_space_prefix"),
        ({"tokenizer.ggml.add_sep_token": True}, "tokenizer.ggml.add_sep_token"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "tokenizer.ggml.precompiled_charsmap"),
        ({"tokenizer.ggml.suppress_tokens": [1]}, "tokenizer.ggml.suppress_tokens"),
        ({"tokenizer.rwkv.world": "x"}, "tokenizer.rwkv.world"),
        ({"tokenizer.chat_template": 5}, "a chat template is not a text"),
        ({"tokenizer.chat_templates": ["tool_use"]}, "lacks the chat template 'tool_use'"),
    ],
)
def test_file_whose_tokenizer_cannot_be_built_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    metadata = file_of(original("llama-bpe"), ggml__pre="llama-bpe") | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(ModelLoadError) as caught:
        build_tokenizer(metadata)
    assert reason in str(caught.value)
    assert "Set `tokenizer` to" in str(caught.value)


def test_repeated_token_is_refused() -> None:
    metadata = file_of(original("gpt-2"), ggml__pre="gpt-2")
    metadata["tokenizer.ggml.tokens"][-1] = metadata["tokenizer.ggml.tokens"][300]
    with pytest.raises(ModelLoadError, match="are the same"):
        build_tokenizer(metadata)


@pytest.mark.parametrize("scores", [None, [1.0], [math.nan] * len(sentencepiece_file()["tokenizer.ggml.tokens"])])
def test_sentencepiece_file_without_usable_scores_is_refused(scores: list[float] | None) -> None:
    metadata = sentencepiece_file() | {"tokenizer.ggml.scores": scores}
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores"):
        build_tokenizer(metadata)


def test_padding_beyond_the_vocabulary_is_no_fault() -> None:
    assert (
        build_tokenizer(file_of(original("gpt-2"), ggml__pre="gpt-2", ggml__padding_token_id=10**6)).pad_token is None
    )


def test_padding_token_may_be_one_that_fills_a_gap() -> None:
    metadata = file_of(original("gpt-2"), ggml__pre="gpt-2")
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    hf_tokenizer = build_tokenizer(metadata | {"tokenizer.ggml.padding_token_id": last})
    assert (hf_tokenizer.pad_token, hf_tokenizer.pad_token_id) == (f"[PAD{last}]", last)


def test_empty_tokens_do_not_exist() -> None:
    metadata = file_of(original("gpt-2"), ggml__pre="gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["", ""]
    metadata["tokenizer.ggml.token_type"] += [NORMAL, CONTROL]
    tokenizer = TextTokenizer(build_tokenizer(metadata))
    for text in CORPUS:
        agree(tokenizer, original("gpt-2"), text)


def test_keys_without_meaning_are_ignored_with_a_reason() -> None:
    metadata = file_of(original("gpt-2"), ggml__pre="gpt-2") | dict.fromkeys(IGNORED_KEYS, 1)
    assert unknown_keys(metadata) == []
    assert all(IGNORED_KEYS.values())
    assert not USED_KEYS & IGNORED_KEYS.keys()
    build_tokenizer(metadata)


DEFAULTS = {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"}
"""Keys whose absence has a meaning in the format, or only leaves out a token of that name."""


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3", "sentencepiece"])
def test_file_without_one_of_its_keys_is_equal_or_refused(name: str) -> None:
    whole = sentencepiece_file() if name == "sentencepiece" else file_of(original(name), ggml__pre=name)
    expected = [TextTokenizer(build_tokenizer(whole)).encode(text, add_special_tokens=False) for text in CORPUS]
    for key in whole:
        for changed in ({}, {key + "s": whole[key]}):
            metadata = {other: value for other, value in whole.items() if other != key} | changed
            try:
                tokenizer = TextTokenizer(build_tokenizer(metadata))
            except ModelLoadError:
                continue
            assert not changed or not key.startswith("tokenizer.")
            assert [tokenizer.encode(text, add_special_tokens=False) for text in CORPUS] == expected, key


def test_vocabulary_that_agrees_with_gpt2_needs_no_name(caplog: pytest.LogCaptureFixture) -> None:
    for changes in ({}, {"ggml__pre": "default"}):
        metadata = file_of(original("gpt-2"), **changes)
        tokenizer = TextTokenizer(build_tokenizer(metadata))
        for text in CORPUS:
            agree(tokenizer, original("gpt-2"), text)
        assert "does not name how its tokenizer splits text" in caplog.text
