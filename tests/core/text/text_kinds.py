"""One tokenizer per decoder type: small ones trained here, and the one of the default model."""

from __future__ import annotations

import functools
import json
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from minivllm.core.config import EngineConfig
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  leading spaces,  double  spaces, and a trailing one ",
    "你好\uff0c世界。日本語のテキスト、한국어 텍스트",
    "family 👨‍👩‍👧‍👦 flag 🇩🇪 skin 👍🏽 plain 😀😀",
    "combining e\u0301 n\u0303 and Zalgo Z\u0351\u036b\u0343",
    "עברית שלום, العربية مرحبا \u202bmixed\u202c",
    "def f(x):\n\treturn {'a': [1, 2]}  # naïve\r\n",
    "∑ ∞ ≠ \U0001d518\U0001d52b\U0001d526 \ufffd literal replacement",
)

SPECIAL = ["<unk>", "<s>", "</s>"]


def _wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("naïve✓", special=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return Tokenizer(wrapped)


def _byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 2, trainer)
    return _wrap(backend)


def _pieces(decoder: Any, normalizer: Any = None) -> Tokenizer:
    """Builds a SentencePiece-style BPE with byte fallback, trained on ASCII: other characters become bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL + byte_tokens, show_progress=False)
    backend.train_from_iterator([text for text in TEXTS if text.isascii()] * 2, trainer)
    # The trainer marks byte tokens as special, but decoding must keep them: only SPECIAL stays special.
    data = backend.to_str()

    parsed = json.loads(data)
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if token["content"] in SPECIAL]
    backend = Backend.from_str(json.dumps(parsed))
    backend.decoder = decoder
    return _wrap(backend)


def _word_piece() -> Tokenizer:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TEXTS * 2, trainer)
    return _wrap(backend)


_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

KINDS = {
    "byte_level": _byte_level,
    "llama": lambda: _pieces(decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)])),
    "gguf_llama": lambda: _pieces(
        decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
        )
    ),
    "gemma": lambda: _pieces(decoders.Sequence(_LLAMA), normalizers.Replace(" ", "▁")),
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "metaspace_never": lambda: _pieces(decoders.Metaspace(prepend_scheme="never")),
    "word_piece": _word_piece,
    "default_model": lambda: load_tokenizer(EngineConfig()),
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()
