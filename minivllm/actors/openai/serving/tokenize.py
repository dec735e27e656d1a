"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

from minivllm.actors.openai.protocol.fields import parse
from minivllm.actors.openai.protocol.requests import DetokenizeRequest, TokenizeRequest
from minivllm.actors.openai.serving.chat_prompt import chat_prompt, chat_template
from minivllm.actors.openai.serving.logprobs import token_text
from minivllm.actors.openai.serving.service import GenerationService


async def tokenize(service: GenerationService, fields: object) -> dict[str, Any]:
    """Token ids of a text or of a conversation."""
    body = parse(TokenizeRequest, fields)
    service.check_model(body.model)
    if body.messages is not None:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []] or None
        token_ids = (await chat_prompt(service, body, tools)).token_ids
    else:
        adds = body.add_special_tokens is not False
        token_ids = await service.encode(body.prompt or "", add_special_tokens=adds, param="prompt", is_prompt=False)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.info.max_model_len,
        "tokens": token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [token_text(service.tokenizer, token_id) for token_id in token_ids]
    return answer


async def detokenize(service: GenerationService, fields: object) -> dict[str, Any]:
    """Text of token ids."""
    body = parse(DetokenizeRequest, fields)
    service.check_model(body.model)
    if body.tokens:
        service.check_vocabulary(body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    return {"prompt": await service.in_thread(lambda: service.tokenizer.decode(body.tokens, skip))}


def tokenizer_info(service: GenerationService) -> dict[str, Any]:
    """What programs that render prompts themselves want to know, such as lm-eval's remote tokenizer."""
    hf_tokenizer = service.tokenizer.hf_tokenizer
    named = {name: getattr(hf_tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {
        "tokenizer_class": type(hf_tokenizer).__name__,
        "vocab_size": service.tokenizer.vocab_size,
        "model_max_length": service.info.max_model_len,
        **{name: None if token is None else str(token) for name, token in named.items()},
        "chat_template": chat_template(service.tokenizer) or None,
    }
