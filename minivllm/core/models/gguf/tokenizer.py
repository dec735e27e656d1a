"""Builds the tokenizer of a GGUF file from its metadata, equal to the Hugging Face tokenizer of the original model.

A GGUF file has the vocabulary, but only names the steps before it: `tokenizer.ggml.pre` is the name of a family whose
way of splitting text is in the tables here. A family that is not in them is refused, since a wrong split gives wrong
ids without any error.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from minivllm.core.errors import ModelLoadError

logger = logging.getLogger(__name__)

_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_TURN_IDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_TEMPLATE = "tokenizer.chat_template"
_UNSUPPORTED_FLAGS = ("tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces")

USED_KEYS = frozenset(
    {"tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
    | {"tokenizer.ggml.scores", "tokenizer.ggml.merges", *_IDS.values(), *_TURN_IDS, *_UNSUPPORTED_FLAGS}
    | {"tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"}
    | {_TEMPLATE, "tokenizer.chat_templates"}
)
"""And `tokenizer.chat_template.NAME`."""

_INFILL = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle")
IGNORED_KEYS: Mapping[str, str] = {
    "tokenizer.huggingface.json": "the same vocabulary in another form",
    "tokenizer.ggml.token_type_count": "of encoders",
    **{f"tokenizer.ggml.{name}_token_id": "of encoders" for name in ("seperator", "cls", "mask")},
    **{f"tokenizer.ggml.{name}_token_id": "clients write infill prompts themselves" for name in _INFILL},
}
"""Keys without meaning for text generation, with the reason."""

_END_TOKENS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"}
    | {"<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
)
"""Control tokens that end a turn or a text in every model that has them."""

_NO_ID = 2**32 - 1
_SPECIAL_LOOK = re.compile(r"<.+>|\[[A-Z@_/ ]+\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


# ---- families of byte-level tokenizers


@dataclass(frozen=True, slots=True)
class _Family:
    """What a byte-level tokenizer does before BPE.

    Attributes:
        nfc: normalizes to Unicode's NFC.
        whole_words: a piece that is in the vocabulary is one token, whatever the merges say.
        adds_bos: where the file does not say.
    """

    pre_tokenizer: Any
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


def _split(*patterns: str, digits: bool = False) -> Any:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    if digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_LINES_AND_SPACES}")
_QWEN2 = _split(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_LINES_AND_SPACES}")
_QWEN35 = _split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_TEKKEN = _split(rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}|{_LINES_AND_SPACES}")
_GPT4O = _split(rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_PATHS}|{_LINES_AND_SPACES}")
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        _GPT2,
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
)
_DEEPSEEK_CODER = _split(
    "[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", digits=True
)
_DEEPSEEK_V3 = _split(
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}""",
)

FAMILIES: Mapping[str, _Family] = {
    "gpt-2": _Family(_GPT2),
    "phi-2": _Family(_GPT2),
    "olmo": _Family(_GPT2, nfc=True),
    "mpt": _Family(_GPT2, nfc=True),
    "smollm": _Family(_DIGITS),
    "starcoder": _Family(_DIGITS),
    "refact": _Family(_DIGITS),
    "command-r": _Family(_DIGITS, nfc=True),
    "falcon": _Family(_FALCON),
    "llama-bpe": _Family(_LLAMA3, whole_words=True, adds_bos=True),
    "llama3": _Family(_LLAMA3, whole_words=True, adds_bos=True),
    "llama-v3": _Family(_LLAMA3, whole_words=True, adds_bos=True),
    "smaug-bpe": _Family(_LLAMA3, whole_words=True),
    "dbrx": _Family(_LLAMA3),
    "qwen2": _Family(_QWEN2, nfc=True),
    "deepseek-r1-qwen": _Family(_QWEN2, nfc=True),
    "qwen35": _Family(_QWEN35, nfc=True),
    "tekken": _Family(_TEKKEN, whole_words=True, adds_bos=True),
    "gpt-4o": _Family(_GPT4O),
    "llama4": _Family(_GPT4O, whole_words=True),
    "deepseek-coder": _Family(_DEEPSEEK_CODER),
    "deepseek-v3": _Family(_DEEPSEEK_V3),
}
"""By `tokenizer.ggml.pre`. Source of each: the `tokenizer.json` of the model that gave the name."""


# ---- the vocabulary


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a file, and the ids of those that exist.

    Attributes:
        ids: without the tokens that only fill gaps up to the model's size.
        special_ids: of `bos_token`, `eos_token`, `unk_token`, `pad_token`, where the file has them.
    """

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    special_ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        tokens = _list_of(metadata, "tokenizer.ggml.tokens", str)
        if tokens is None:
            raise _refusal("it has no tokenizer.ggml.tokens")
        named = {name: found for name, key in _IDS.items() if (found := _token_id(metadata, key, tokens)) is not None}
        types = _list_of(metadata, "tokenizer.ggml.token_type", int, len(tokens)) or _guess_types(tokens, named)
        if metadata.get("tokenizer.ggml.model") == "llama":
            for name, token_id, kind in (("unk_token", 0, 2), ("bos_token", 1, 3), ("eos_token", 2, 3)):
                if types[token_id : token_id + 1] == [kind]:  # the ids where the format has no key
                    named.setdefault(name, token_id)
        ids: dict[str, int] = {}
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            is_filler = kind == TokenType.UNUSED and token == f"[PAD{token_id}]" and token_id not in named.values()
            if is_filler or not token:
                continue
            if ids.setdefault(token, token_id) != token_id:
                raise _refusal(f"tokens {ids[token]} and {token_id} are the same: {token!r}")
        return cls(tokens, types, ids, named)

    def special(self) -> set[int]:
        """Returns the ids of tokens that `skip_special_tokens` leaves out."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
        return {i for i, kind in enumerate(self.types) if kind in kinds} | set(self.special_ids.values())


def _list_of(
    metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], length: int | None = None
) -> list[Any] | None:
    values = metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise _refusal(f"{key} is not a list of {'texts' if kind is str else 'numbers'}")
    if length is not None and len(values) != length:
        raise _refusal(f"{key} has {len(values)} values for {length} tokens")
    return values


def _token_id(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    token_id = metadata.get(key)
    if token_id is None or token_id == _NO_ID:
        return None
    if isinstance(token_id, int) and 0 <= token_id < len(tokens):
        return token_id
    if key == _IDS["pad_token"]:
        return None  # often beyond the vocabulary, and never used
    raise _refusal(f"{key} is {token_id!r}, and there are {len(tokens)} tokens")


def _guess_types(tokens: list[str], special_ids: Mapping[str, int]) -> list[int]:
    """Returns the types of a file without them; refuses one with further tokens that look special."""
    special = set(special_ids.values())
    types = [
        TokenType.CONTROL if i in special else TokenType.BYTE if _BYTE.fullmatch(token) else TokenType.NORMAL
        for i, token in enumerate(tokens)
    ]
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.NORMAL and _SPECIAL_LOOK.fullmatch(token):
            raise _refusal(f"without tokenizer.ggml.token_type it is unknown whether {token!r} is a special token")
    return [int(kind) for kind in types]


def _refusal(reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"no tokenizer can be built from this GGUF file: {reason}. "
        "Set `tokenizer` to a folder or Hugging Face id that has the model's own tokenizer"
    )


# ---- building


def unknown_keys(metadata: Mapping[str, Any]) -> list[str]:
    """Returns the keys under `tokenizer.` that are neither used nor ignorable."""
    return [
        key
        for key in metadata
        if key.startswith("tokenizer.")
        and key not in USED_KEYS
        and key not in IGNORED_KEYS
        and not key.startswith(_TEMPLATE + ".")
    ]


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Returns the tokenizer that the metadata of a GGUF file describes.

    Raises:
        ModelLoadError: it is of a kind that cannot be built exactly; the message names the reason and the remedy.
    """
    if unknown := unknown_keys(metadata):
        raise _refusal(f"the meaning of {', '.join(sorted(unknown))} is unknown")
    for key in _UNSUPPORTED_FLAGS:
        if metadata.get(key):
            raise _refusal(f"{key} is not supported")
    model = metadata.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(model))
    if build is None:
        raise _refusal(f"tokenizer.ggml.model is {model!r}, and only 'gpt2' and 'llama' can be built")
    vocabulary = _Vocabulary.read(metadata)
    try:
        backend, adds_bos = build(metadata, vocabulary)
        _add_tokens(backend, metadata, vocabulary)
        _add_bos_and_eos(backend, metadata, vocabulary, adds_bos)
    except ModelLoadError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise _refusal(str(error)) from error
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        chat_template=_chat_templates(metadata),
        **{name: vocabulary.tokens[token_id] for name, token_id in vocabulary.special_ids.items()},
    )


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Returns a GPT-2 style BPE over bytes, and whether the family adds BOS."""
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        raise _refusal("tokenizer.ggml.add_space_prefix is not supported with tokenizer.ggml.model 'gpt2'")
    merges = _merges(metadata)
    if merges is None:
        raise _refusal("it has no tokenizer.ggml.merges")
    family = _family(metadata.get("tokenizer.ggml.pre"), merges)
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=family.whole_words))
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend, family.adds_bos


def _family(name: str | None, merges: list[tuple[str, str]]) -> _Family:
    if family := FAMILIES.get(name or ""):
        return family
    if name not in (None, "default"):
        raise _refusal(f"how tokenizer.ggml.pre {name!r} splits text is unknown")
    # A vocabulary agrees with GPT-2's split if none of its tokens crosses a border of it. A large one without two
    # digits in a token is of a family that splits digits.
    splits_digits = len(merges) > 10_000
    for left, right in merges:
        text = decoders.ByteLevel().decode([left + right]).replace("\ufffd", "")  # of incomplete characters
        if len(_GPT2.pre_tokenize_str(text)) > 1:
            raise _refusal(f"tokenizer.ggml.pre does not say how it splits text, and {text!r} shows that not as GPT-2")
        splits_digits = splits_digits and re.search(r"\d\d", text) is None
    if splits_digits:
        raise _refusal("tokenizer.ggml.pre does not say how it splits text, and it has no token of two digits")
    logger.warning("the GGUF file does not name how its tokenizer splits text; its vocabulary agrees with GPT-2's way")
    return FAMILIES["gpt-2"]


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    merges = _list_of(metadata, "tokenizer.ggml.merges", str)
    if merges is None:
        return None
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        raise _refusal("tokenizer.ggml.merges has an entry without a space")
    return pairs


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Returns SentencePiece's BPE over characters, with bytes for those it lacks; True, since it adds BOS."""
    ids = {_with_marks(vocabulary, token, token_id): token_id for token, token_id in vocabulary.ids.items()}
    merges = _merges(metadata)
    if merges is None:
        merges = _merges_by_score(metadata, vocabulary, ids)
    unk_id = vocabulary.special_ids.get("unk_token")
    backend = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=merges,
            unk_token=None if unk_id is None else vocabulary.tokens[unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    mark_spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark_spaces]) if has_prefix else mark_spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend, True


def _with_marks(vocabulary: _Vocabulary, token: str, token_id: int) -> str:
    """Returns the token with "▁" for spaces: converters write user-defined runs of them (Gemma's) as they look."""
    marked = "▁" * len(token)
    is_run = vocabulary.types[token_id] == TokenType.USER_DEFINED and not token.strip(" ")
    return marked if is_run and marked not in vocabulary.ids else token


def _merges_by_score(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a token, those of the best token first.

    SentencePiece has no list of merges: it joins the two neighbours whose token has the highest score.
    """
    scores = _list_of(metadata, "tokenizer.ggml.scores", (int, float), len(vocabulary.tokens))
    if scores is None:
        raise _refusal("it has neither tokenizer.ggml.merges nor tokenizer.ggml.scores")
    types, tokens = vocabulary.types, vocabulary.tokens
    ranked: list[tuple[float, int, str]] = []
    for token, token_id in ids.items():
        if types[token_id] == TokenType.NORMAL:
            ranked.append((-scores[token_id], token_id, token))
        elif token != tokens[token_id]:  # a run of spaces, which SentencePiece joins before all others
            ranked.append((-math.inf, token_id, token))
    if any(math.isnan(rank) for rank, _, _ in ranked):
        raise _refusal("tokenizer.ggml.scores has a value that is not a number")
    merges: list[tuple[str, str]] = []
    for _, _, token in sorted(ranked):
        pairs = [
            (left, right)
            for cut in range(1, len(token))
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _add_tokens(backend: Tokenizer, metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> None:
    """Adds the tokens that are found in a text before all else. Each is in the vocabulary and keeps its id."""
    special = vocabulary.special()
    # Phi-3's tokens take the white space after them, which no key says.
    strips = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    added = [
        AddedToken(
            token,
            special=token_id in special,
            normalized=False,
            rstrip=strips and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token_id, kind in enumerate(vocabulary.types)
        if (token_id in special or kind == TokenType.USER_DEFINED) and (token := backend.id_to_token(token_id))
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_bos_and_eos(backend: Tokenizer, metadata: Mapping[str, Any], vocabulary: _Vocabulary, adds_bos: bool) -> None:
    def token_of(name: str, *, default: bool) -> list[str]:
        wanted = metadata.get(f"tokenizer.ggml.add_{name}", default)
        token_id = vocabulary.special_ids.get(name)
        if token_id is None and wanted and f"tokenizer.ggml.add_{name}" in metadata:
            raise _refusal(f"tokenizer.ggml.add_{name} is true, and there is no {_IDS[name]}")
        return [vocabulary.tokens[token_id]] if wanted and token_id is not None else []

    bos, eos = token_of("bos_token", default=adds_bos), token_of("eos_token", default=False)
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *bos, "$B", *eos],
        special_tokens=[(token, vocabulary.ids[token]) for token in dict.fromkeys(bos + eos)],
    )


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Returns the chat template; several by name, as transformers has them."""
    named = {key.removeprefix(_TEMPLATE + "."): key for key in metadata if key.startswith(_TEMPLATE + ".")}
    names = _list_of(metadata, "tokenizer.chat_templates", str) or []
    if missing := set(names) - named.keys() - {"default"}:
        raise _refusal(f"it lacks the chat template {min(missing)!r}, which tokenizer.chat_templates names")
    if _TEMPLATE in metadata:
        named["default"] = _TEMPLATE
    templates = {name: metadata[key] for name, key in named.items()}
    if not all(isinstance(template, str) for template in templates.values()):
        raise _refusal("a chat template is not a text")
    return templates["default"] if list(templates) == ["default"] else templates or None


# ---- the end of a turn


def end_of_turn_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Returns the tokens that end an answer: EOS, end of turn, end of message, and control tokens known to do so.

    The token by which the chat template ends a turn is in `Tokenizer.eos_token_ids`.

    Raises:
        ModelLoadError: an id is outside the vocabulary.
    """
    vocabulary = _Vocabulary.read(metadata)
    found = {_token_id(metadata, key, vocabulary.tokens) for key in _TURN_IDS}
    found |= {vocabulary.special_ids.get("eos_token")}
    special = vocabulary.special()
    found |= {token_id for token in _END_TOKENS if (token_id := vocabulary.ids.get(token)) in special}
    return frozenset(token_id for token_id in found if token_id is not None)
