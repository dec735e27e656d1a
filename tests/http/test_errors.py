"""Error answers: status, OpenAI body and headers, without internal details."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.exceptions import HTTPException

from minivllm.actors.openai.protocol.errors import (
    MAX_SHOWN_INPUT,
    ModelNotFoundError,
    ServiceLoadingError,
    field_path,
    shorten,
    to_api_error,
)
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, CompletionRequest, parse
from minivllm.core.errors import (
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    NeverFitsError,
    RequestFailedError,
)

STATUSES: list[tuple[BaseException, int]] = [
    (InvalidRequestError("x", param="n"), 400),
    (NeverFitsError("x", param="prompt"), 400),
    (ModelNotFoundError("x"), 404),
    (HTTPException(401, "x"), 401),
    (HTTPException(413, "x"), 413),
    (EngineOverloadedError("x", retry_after_s=2.1), 429),
    (ServiceLoadingError("x"), 503),
    (EngineDeadError("x"), 503),
    (RequestFailedError("x"), 500),
    (HTTPException(405, headers={"Allow": "POST"}), 405),
    (RuntimeError("/secret/path.py is broken"), 500),
]


@pytest.mark.parametrize(
    ("error", "status"), STATUSES, ids=[f"{type(error).__name__}-{status}" for error, status in STATUSES]
)
def test_every_error_maps_to_its_status_and_an_openai_body(error: BaseException, status: int) -> None:
    answer = to_api_error(error)
    assert answer.status == status
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_overload_error_has_a_retry_after_header() -> None:
    assert to_api_error(EngineOverloadedError("x", retry_after_s=2.1)).headers["retry-after"] == "3"
    assert to_api_error(EngineOverloadedError("x", retry_after_s=0.0)).headers["retry-after"] == "1"


def test_unexpected_error_message_is_hidden() -> None:
    assert "secret" not in str(to_api_error(RuntimeError("/secret/path.py is broken")).body())


def test_method_not_allowed_error_has_an_allow_header() -> None:
    assert to_api_error(HTTPException(405, headers={"Allow": "POST"})).headers["allow"] == "POST"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, list(range(10**6)), {str(n): n for n in range(10**5)}, 10**10_000, [[[[[[]]]]]]],
    ids=["string", "list", "object", "integer", "nested list"],
)
def test_shown_input_values_are_truncated(value: Any) -> None:
    assert len(shorten(value)) <= MAX_SHOWN_INPUT


def test_field_paths_use_dots_and_brackets() -> None:
    assert field_path(("messages", 0, "tool_calls", 1, "function")) == "messages[0].tool_calls[1].function"


def refusal(kind: Any, fields: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(kind, fields)
    return caught.value


def test_field_paths_omit_union_branches() -> None:
    error = refusal(ChatCompletionRequest, {"messages": [{"role": "user"}], "tool_choice": 5})
    assert error.param == "tool_choice"
    assert "Named" not in error.message
    error = refusal(CompletionRequest, {"prompt": "x", "stop": 5})
    assert error.param == "stop"
    assert error.message.count("stop") == 1


def test_list_errors_stop_at_the_first_wrong_item() -> None:
    error = refusal(CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 100_000})
    assert error.param == "stop_token_ids[0]"
    assert "[1]" not in error.message


def test_cross_field_checks_name_the_field() -> None:
    error = refusal(CompletionRequest, {"prompt": "x", "max_tokens": 0})
    assert error.param == "max_tokens"
    assert error.message.startswith("max_tokens: must")


def test_non_object_body_is_rejected() -> None:
    for value in (None, [], "text", 5):
        assert "object" in refusal(CompletionRequest, value).message  # type: ignore[arg-type]
