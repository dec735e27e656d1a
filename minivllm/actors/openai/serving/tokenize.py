"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic_core import to_json

from minivllm.actors.openai.protocol.requests import DetokenizeRequest, TokenizeRequest
from minivllm.actors.openai.serving.chat import chat_prompt
from minivllm.actors.openai.serving.logprobs import token_text
from minivllm.actors.openai.serving.service import GenerationService

PART = 10_000
"""Values that are formatted or checked at a time."""


async def tokenize(service: GenerationService, body: TokenizeRequest) -> dict[str, Any]:
    """Returns the token ids of a text or of a conversation."""
    service.check_model(body.model)
    if body.messages:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
        token_ids = (await chat_prompt(service, body, tools)).token_ids
    else:
        adds = body.add_special_tokens is not False
        token_ids = await service.encode(body.prompt or "", add_special_tokens=adds, param="prompt", is_prompt=False)
    texts = None
    if body.return_token_strs:
        texts = await service.in_thread(
            lambda: [token_text(service.tokenizer, token_id) for token_id in token_ids], is_long=len(token_ids) > PART
        )
    max_model_len = service.info.max_model_len
    return {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids, "token_strs": texts}


async def tokenize_to_json(service: GenerationService, body: TokenizeRequest) -> bytes:
    """Returns the response of `tokenize` as JSON."""
    response = await tokenize(service, body)
    work = partial(_format, response)
    return work() if response["count"] <= PART else await service.in_thread(work, is_long=True)


async def detokenize(service: GenerationService, body: DetokenizeRequest) -> dict[str, Any]:
    """Returns the text of token ids."""
    service.check_model(body.model)

    def work() -> str:
        if body.tokens:
            service.check_vocabulary(body.tokens, "tokens")
        return service.tokenizer.decode(body.tokens, bool(body.skip_special_tokens))

    return {"prompt": await service.in_thread(work, is_long=len(body.tokens) > PART)}


def _format(fields: dict[str, Any]) -> bytes:
    """Formats long lists part by part: one call would keep the GIL, and other requests waiting."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), _format_value(fields[name])) for name in fields) + b"}"


def _format_value(value: Any) -> bytes:
    if not isinstance(value, list):
        return to_json(value)
    return b"[" + b",".join(to_json(value[at : at + PART])[1:-1] for at in range(0, len(value), PART)) + b"]"


def tokenizer_info(service: GenerationService) -> dict[str, Any]:
    """Returns what programs need that render prompts themselves, such as lm-eval's remote tokenizer."""
    hf_tokenizer = service.tokenizer.hf_tokenizer
    named = {name: getattr(hf_tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(hf_tokenizer).__name__,
        "vocab_size": service.tokenizer.vocab_size,
        "model_max_length": service.info.max_model_len,
        **{name: None if token is None else str(token) for name, token in named.items()},
        "chat_template": service.tokenizer.chat_template(with_tools=True) or None,
    }
