"""Tokenizer: text and chat messages -> ids, ids -> text and bytes. Wraps a transformers tokenizer."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minivllm.core.config import EngineConfig
from minivllm.core.errors import InvalidRequestError, ModelLoadError
from minivllm.core.models.location import ModelLocation, resolve_tokenizer
from minivllm.core.text.incremental_decoding import (
    IncrementalDecoder,
    WindowDecoder,
    byte_level_bytes,
    choose_decoder,
    spells_bytes,
)

logger = logging.getLogger(__name__)


class Tokenizer:
    """What the text layer needs of a tokenizer. Safe to use from several threads.

    Args:
        tokenizer: a transformers tokenizer, fast (backed by the `tokenizers` library) or not.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.hf_tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        decoder = self._decoder_description()
        self._is_byte_level = spells_bytes(decoder)
        self._make_decoder = choose_decoder(decoder)
        self._tokens: dict[int, str] = {place: token for token, place in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: str(token.content) for token_id, token in added.items()}
        if self._backend is not None:
            # Decoders see added tokens as the normalizer spells them, not as they were added.
            for token_id in self._added:
                self._tokens[token_id] = str(self._backend.id_to_token(token_id))
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(self._tokens, default=-1) + 1
        if not self._decodes_alike():
            logger.warning("this tokenizer's decoder is not as its kind: falling back to the general one")
            self._make_decoder = WindowDecoder

    # -- facts -------------------------------------------------------------------------------------

    @property
    def eos_token_id(self) -> int | None:
        token_id = self.hf_tokenizer.eos_token_id
        return token_id if isinstance(token_id, int) else None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own; a model's generation_config may name more."""
        return frozenset() if self.eos_token_id is None else frozenset({self.eos_token_id})

    @property
    def bos_token_id(self) -> int | None:
        token_id = self.hf_tokenizer.bos_token_id
        return token_id if isinstance(token_id, int) else None

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that stands for nothing."""
        return self._tokens.get(token_id)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` leaves out."""
        return token_id in self._special

    def backend_json(self) -> str | None:
        """The whole tokenizer in the format of `tokenizer.json`, None when it is not a fast one."""
        return None if self._backend is None else str(self._backend.to_str())

    def _decoder_description(self) -> dict[str, Any] | None:
        """What `tokenizer.json` says under "decoder", without writing and reading the whole of it."""
        decoder = None if self._backend is None else self._backend.decoder
        return None if decoder is None else dict(json.loads(decoder.__getstate__()))

    # -- text <-> ids ------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put the model's own marks, such as BOS, around it.
            param: the request's field that the text came from, for the error.

        Raises:
            InvalidRequestError: the text is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param}: not valid Unicode text: a lone surrogate at position {error.start}", param=param
            ) from error
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; never "cleaned up" (spaces before punctuation are the model's). Unknown ids are no text."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        known = [token_id for token_id in token_ids if token_id in self._tokens]
        return str(
            self.hf_tokenizer.decode(known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def incremental_decoder(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one output whose pieces, joined, are `decode` of all its ids."""
        return self._make_decoder(self, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, which need not be whole characters. Empty for ids that stand for nothing."""
        token = self._tokens.get(token_id)
        if token is None:
            return b""
        if token_id in self._added and (self._is_byte_level or token_id in self._special):
            return self._added[token_id].encode("utf-8")
        if self._is_byte_level:
            return byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return token.replace("\u2581", " ").encode("utf-8")

    def _decodes_alike(self) -> bool:
        """Tries the chosen decoder on tokens from all over the vocabulary."""
        step = max(1, len(self._tokens) // 500)
        sample = sorted(self._tokens)[:300] + sorted(self._tokens)[::step]
        for skip in (True, False):
            decoder = self.incremental_decoder(skip)
            pieces = [decoder.push(token_id) for token_id in sample]
            if "".join(pieces) + decoder.flush() != self.decode(sample, skip):
                return False
        return True

    # -- chat --------------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's own template.

        Args:
            messages: dicts with `role` and `content` (a text, None, or a list of text parts), in OpenAI's form.
            continue_final_message: leave the last message open, so that the model goes on with it.
            chat_template_kwargs: further variables of the template.

        Raises:
            InvalidRequestError: no template, or the template refuses these messages; `param` is "messages".
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode(text, add_special_tokens=False, param="messages")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; see `apply_chat_template`."""
        template = self._template(tools)
        extra = _checked_kwargs(chat_template_kwargs)
        normal = [_normal_message(message, place, template) for place, message in enumerate(messages)]
        if not normal:
            raise InvalidRequestError("messages: must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
            )
        try:
            rendered = self.hf_tokenizer.apply_chat_template(
                normal,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **extra,
            )
        except Exception as error:
            # A template is a program that came with the model: whatever it raises is about these messages.
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {str(error)[:500]}", param="messages"
            ) from error
        return str(rendered)

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        try:
            return str(self.hf_tokenizer.get_chat_template(None, tools=tools))
        except ValueError as error:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot chat; use completions", param="messages"
            ) from error


_OWN_TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Variables for the template; not the arguments of the function that applies it."""
    variables = {} if kwargs is None else dict(kwargs)
    for name in variables:
        if name in _OWN_TEMPLATE_ARGUMENTS:
            raise InvalidRequestError(
                f"chat_template_kwargs: {name!r} is not a variable of the template", param="chat_template_kwargs"
            )
    return variables


def _normal_message(message: Any, place: int, template: str) -> dict[str, Any]:
    """The message in the form that templates expect: content as one text, a role that the template knows."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"messages[{place}]: must be an object with a role", param="messages")
    normal = dict(message)
    if normal["role"] == "developer" and "developer" not in template:
        normal["role"] = "system"
    content = normal.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part_text(part, place) for part in content)
    if not isinstance(content, str):
        raise InvalidRequestError(f"messages[{place}].content: must be a text or a list of parts", param="messages")
    normal["content"] = content
    return normal


def _part_text(part: Any, place: int) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequestError(f"messages[{place}].content: only parts of type text are supported", param="messages")
    return text


# -- loading ---------------------------------------------------------------------------------------


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Loads the tokenizer of `config.tokenizer` or `config.model`.

    Reading one out of a GGUF file takes seconds, so the result is kept in the user's cache folder.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    location = resolve_tokenizer(config)
    if location.gguf_path is not None:
        kept = _kept_folder(location.gguf_path)
        if kept is not None and kept.is_dir():
            try:
                return Tokenizer(_from_pretrained(ModelLocation(str(kept)), config))
            except ModelLoadError:
                logger.warning("the kept tokenizer in %s cannot be read; making it again", kept)
                shutil.rmtree(kept, ignore_errors=True)
        tokenizer = _from_pretrained(location, config)
        if kept is not None:
            _keep(tokenizer, kept)
        return Tokenizer(tokenizer)
    return Tokenizer(_from_pretrained(location, config))


def import_transformers_without_torch(config: EngineConfig) -> None:
    """For a process that only needs the tokenizer: lets transformers, from its first import on, do without torch.

    It would import torch beside any tokenizer, which takes a second and 180 MB. Where torch is needed, to read a GGUF
    file or for a model's own code, or where either is imported already, nothing happens.
    """
    if _needs_torch(config) or "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise us to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to say that there is no such module
    try:
        # It looks once and remembers; whoever imports torch later gets it.
        importlib.import_module("transformers")
    finally:
        if sys.modules.get("torch") is None:
            sys.modules.pop("torch", None)


def _needs_torch(config: EngineConfig) -> bool:
    gguf_path = resolve_tokenizer(config).gguf_path
    if gguf_path is None:
        return config.trust_remote_code
    kept = _kept_folder(gguf_path)
    return kept is None or not _is_readable(kept)


def _is_readable(kept: Path) -> bool:
    """Looked into and not only for: of a broken copy the GGUF file is read again, and for that torch must be there."""
    import tokenizers

    try:
        json.loads((kept / "tokenizer_config.json").read_text())
        tokenizers.Tokenizer.from_file(str(kept / "tokenizer.json"))
    except Exception:  # the library raises nothing narrower
        return False
    return True


def _from_pretrained(location: ModelLocation, config: EngineConfig) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if location.gguf_file is not None:
        options["gguf_file"] = location.gguf_file
    if location.revision is not None:
        options["revision"] = location.revision
    try:
        return AutoTokenizer.from_pretrained(location.path, **options)
    except Exception as error:
        raise ModelLoadError(f"the tokenizer of {location.path!r} cannot be loaded: {error}") from error


def _kept_folder(gguf_path: Path) -> Path | None:
    """Where this file's tokenizer is kept, None without a home. A new file or transformers makes a new name."""
    try:
        status = gguf_path.stat()
        with gguf_path.open("rb") as file:
            head = file.read(1 << 20)
        chosen = os.environ.get("XDG_CACHE_HOME")
        root = Path(chosen) if chosen else Path.home() / ".cache"
    except (OSError, RuntimeError):
        return None
    facts = json.dumps([1, gguf_path.name, status.st_size, status.st_mtime_ns, version("transformers")])
    digest = hashlib.sha256(facts.encode() + head).hexdigest()[:32]
    return root / "minivllm" / "tokenizers" / digest


def _keep(tokenizer: Any, folder: Path) -> None:
    """Saves it in one step: readers see a whole folder or none. A failure only costs the next start some seconds."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.mkdtemp(dir=folder.parent)
        try:
            tokenizer.save_pretrained(scratch)
            os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():
            return  # another process was faster
        logger.info("the tokenizer was not kept for the next start: %s", error)
