"""Tokenizer: text and chat messages -> ids, ids -> text and bytes. Wraps a transformers tokenizer."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minivllm.core.config import EngineConfig
from minivllm.core.errors import InvalidRequestError, ModelLoadError
from minivllm.core.models.gguf.file import GGUFFile
from minivllm.core.models.location import ModelLocation, resolve_tokenizer
from minivllm.core.text.incremental_decoding import (
    BYTE_TOKEN,
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
    byte_level_bytes,
    choose_decoder,
)

logger = logging.getLogger(__name__)

_RENDERING_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Arguments of transformers' `apply_chat_template`, which are not variables of a template."""


class Tokenizer:
    """Wraps a transformers tokenizer, fast (backed by `tokenizers`) or not. Safe to use from several threads.

    Args:
        end_of_turn_ids: tokens that end an answer beside EOS and the one of the chat template.
    """

    def __init__(self, tokenizer: Any, end_of_turn_ids: Iterable[int] = ()) -> None:
        self.hf_tokenizer = tokenizer
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._tokens: dict[int, str] = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            if self._backend.decoder is not None:
                decoder = json.loads(self._backend.decoder.__getstate__())  # as under "decoder" in tokenizer.json
            # Decoders see added tokens as the normalizer writes them, not as they were added.
            for token_id in self._added:
                self._tokens[token_id] = str(self._backend.id_to_token(token_id))
        self._make_decoder = choose_decoder(decoder)
        self._is_byte_level = self._make_decoder is ByteLevelDecoder
        self.vocab_size = max(self._tokens, default=-1) + 1
        if not self._decoder_equals_decode():
            logger.warning("this tokenizer's decoder differs from others of its kind: using WindowDecoder")
            self._make_decoder = WindowDecoder

    @property
    def eos_token_id(self) -> int | None:
        token_id = self.hf_tokenizer.eos_token_id
        return token_id if isinstance(token_id, int) else None

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """EOS and the special tokens that end the model's turn; a model's generation_config may have more."""
        found = {self.eos_token_id, self._end_of_chat_turn()}
        return self._end_of_turn_ids | {token_id for token_id in found if token_id is not None}

    def _end_of_chat_turn(self) -> int | None:
        """Returns the special token that the chat template writes after an answer, None where it writes other text."""
        answer = "an answer of the assistant"
        talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            _, found, after = self.render_chat(talk, add_generation_prompt=False).partition(answer)
        except InvalidRequestError:
            return None
        after = after.lstrip() if found else ""
        ends = [
            token_id for token_id in self._special if self._added[token_id] and after.startswith(self._added[token_id])
        ]
        return max(ends, key=lambda token_id: len(self._added[token_id]), default=None)

    def token(self, token_id: int) -> str | None:
        """Returns the token as the vocabulary writes it, None for an unknown id."""
        return self._tokens.get(token_id)

    def is_special(self, token_id: int) -> bool:
        """Returns True for tokens that `skip_special_tokens` leaves out."""
        return token_id in self._special

    def has_added_token(self, text: str) -> bool:
        """Returns whether `text` is one token beside the vocabulary, such as a tag."""
        return text in self._added.values()

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text, None where there is none."""
        return next((token_id for token_id in self._special if self._added[token_id] == text), None)

    def backend_json(self) -> str | None:
        """Returns the content of `tokenizer.json`, None for a slow tokenizer."""
        return None if self._backend is None else str(self._backend.to_str())

    # -- text <-> ids ------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Returns the token ids of a text, with `add_special_tokens` also the model's special tokens, such as BOS.

        Raises InvalidRequestError naming the request's field `param` for a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{param}: not valid Unicode text: a lone surrogate at position {error.start}"
            raise InvalidRequestError(message, param=param) from error
        if self._backend is not None:
            # `encode` keeps the GIL for seconds if the text is long; a batch does not.
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids, without cleaning up spaces before punctuation. Unknown ids have no text."""
        if self._backend is not None:
            return str(self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0])
        known = [token_id for token_id in token_ids if token_id in self._tokens]
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.hf_tokenizer.decode(known, **options))

    def incremental_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """Returns a decoder for one output. Its pieces, joined, are `decode` of all ids."""
        return self._make_decoder(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, which may be part of a character. Empty for an unknown id."""
        token = self._tokens.get(token_id)
        if token is None:
            return b""
        if token_id in self._added and (self._is_byte_level or token_id in self._special):
            return self._added[token_id].encode("utf-8")
        if self._is_byte_level:
            return byte_level_bytes(token)
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace("\u2581", " ").encode("utf-8")

    def _decoder_equals_decode(self) -> bool:
        """Compares the chosen decoder with `decode` on a sample of the vocabulary."""
        step = max(1, len(self._tokens) // 500)
        sample = sorted(self._tokens)[:300] + sorted(self._tokens)[::step]
        decoders = {skip: self.incremental_decoder(skip) for skip in (True, False)}
        return all(
            "".join(map(decoder.push, sample)) + decoder.flush() == self.decode(sample, skip)
            for skip, decoder in decoders.items()
        )

    # ---- chat

    def chat_template(self, *, with_tools: bool) -> str | None:
        """Returns the model's template, None without one. A model may have one of its own for tools."""
        try:
            return str(self.hf_tokenizer.get_chat_template(None, tools=[{}] if with_tools else None))
        except ValueError:
            return None

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text of a conversation by the model's own template.

        Args:
            messages: dicts with `role` and `content` (a text, None, or a list of text parts), in OpenAI's form.
            continue_final_message: leaves the last message open, so that the model continues it.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, or it rejects these messages; `param` is "messages".
        """
        template = self.chat_template(with_tools=tools is not None)
        if template is None:
            message = "this model has no chat template, so it cannot chat; use completions"
            raise InvalidRequestError(message, param="messages")
        variables = dict(chat_template_kwargs or {})
        for name in variables:
            if name in _RENDERING_ARGUMENTS:
                message = f"chat_template_kwargs: {name!r} is not a variable of the template"
                raise InvalidRequestError(message, param="chat_template_kwargs")
        normalized = [_normalize_message(message, place, template) for place, message in enumerate(messages)]
        if not normalized:
            raise InvalidRequestError("messages: must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message: cannot be combined with add_generation_prompt"
            raise InvalidRequestError(message, param="continue_final_message")
        variables |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            return str(
                self.hf_tokenizer.apply_chat_template(
                    normalized, tools=tools, chat_template=template, tokenize=False, **variables
                )
            )
        except Exception as error:
            # A template is a program that comes with the model and may raise anything about these messages.
            message = f"the model's chat template refuses these messages: {str(error)[:500]}"
            raise InvalidRequestError(message, param="messages") from error


def _normalize_message(message: Any, place: int, template: str) -> dict[str, Any]:
    """Returns the message in the form that templates expect: content as one text, a role that the template handles."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{place}]: must be an object with a role", param="messages")
    normalized = dict(message)
    if normalized["role"] == "developer" and "developer" not in template:
        normalized["role"] = "system"
    content = normalized.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, place) for part in content)
    if not isinstance(content, str | None):
        raise InvalidRequestError(f"messages[{place}].content: must be a text or a list of parts", param="messages")
    normalized["content"] = content or ""
    return normalized


def _part_text(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"messages[{place}].content: only parts of type text are supported", param="messages")
    return text


# ---- loading


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Loads the tokenizer of `config.tokenizer` or `config.model`.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    location = resolve_tokenizer(config)
    if location.gguf_path is None:
        return Tokenizer(_from_pretrained(location, config))
    from minivllm.core.models.gguf.tokenizer import build_tokenizer, end_of_turn_ids  # imports transformers

    metadata = GGUFFile.open(location.gguf_path).metadata
    return Tokenizer(build_tokenizer(metadata), end_of_turn_ids(metadata))


def import_transformers_without_torch(config: EngineConfig) -> None:
    """Imports transformers without torch, for a process that only needs the tokenizer.

    With torch the import takes a second and 180 MB more. Does nothing where a model's own code may need torch, and
    where one of the two is already imported.
    """
    if config.trust_remote_code or "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to mark a module as missing
    try:
        # transformers looks for torch once, at import; later imports of torch find it.
        importlib.import_module("transformers")
    finally:
        if sys.modules.get("torch") is None:
            sys.modules.pop("torch", None)


def _from_pretrained(location: ModelLocation, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if location.revision is not None:
        options["revision"] = location.revision
    if (is_alone := _is_sentencepiece_alone(Path(location.path))) and find_spec("sentencepiece") is None:
        raise ModelLoadError(
            f"the tokenizer of {location.path!r} is a tokenizer.model without tokenizer.json, "
            "which needs a package: pip install sentencepiece"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(location.path, **options)
        if is_alone and "add_bos_token" not in tokenizer.init_kwargs:  # these models expect BOS where none says no
            tokenizer = AutoTokenizer.from_pretrained(location.path, add_bos_token=True, **options)
        return tokenizer
    except Exception as error:
        raise ModelLoadError(f"the tokenizer of {location.path!r} cannot be loaded: {error}") from error


def _is_sentencepiece_alone(folder: Path) -> bool:
    model, others = folder / "tokenizer.model", ("tokenizer.json", "vocab.json", "tekken.json")
    if not model.is_file() or any((folder / other).is_file() for other in others):
        return False
    with model.open("rb") as file:
        return file.read(1) == b"\n"  # the first field of its format; tiktoken's files begin with text
