"""From the fields of a request to SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from minivllm.actors.openai.protocol.errors import invalid_request, shorten
from minivllm.actors.openai.protocol.fields import GenerationBody
from minivllm.core.errors import InvalidRequestError
from minivllm.core.sampling_params import SamplingParams

SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
_TOKEN_ID = re.compile(r"[0-9]{1,18}", re.ASCII)


def make_sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    renamed: dict[str, str] | None = None,
    **computed: Any,
) -> SamplingParams:
    """SamplingParams of a request.

    Args:
        body: what the client says; a null is as good as silence.
        defaults: SamplingParams fields of the model's generation_config, where the client is silent.
        renamed: SamplingParams field -> the field of this API it came from, for errors.
        computed: fields that do not have the same name and meaning in the API (max_tokens, logprobs, ...).

    Raises InvalidRequestError naming the client's field.
    """
    values: dict[str, Any] = dict(defaults)
    for name in SAME_NAMES:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    values.update(computed)
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        raise invalid_request(error, renamed) from None


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """JSON has no integer keys: `{"5": 1}` is meant as `{5: 1}`."""
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(f"logit_bias: the keys must be token ids, not {shorten(key)}", param="logit_bias")
    return {int(key): bias for key, bias in biases.items()}
