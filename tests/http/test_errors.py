"""What clients are told when something fails: enough to mend it, nothing about our insides."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.exceptions import HTTPException

from minivllm.actors.openai.protocol.errors import (
    MAX_SHOWN_INPUT,
    ModelNotFoundError,
    RequestTooLargeError,
    ServiceLoadingError,
    UnauthorizedError,
    answer_for,
    field_path,
    shorten,
)
from minivllm.actors.openai.protocol.fields import parse
from minivllm.actors.openai.protocol.requests import ChatCompletionRequest, CompletionRequest
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
    (UnauthorizedError("x"), 401),
    (RequestTooLargeError("x"), 413),
    (EngineOverloadedError("x", retry_after_s=2.1), 429),
    (ServiceLoadingError("x"), 503),
    (EngineDeadError("x"), 503),
    (RequestFailedError("x"), 500),
    (HTTPException(405, headers={"Allow": "POST"}), 405),
    (RuntimeError("/secret/path.py is broken"), 500),
]


@pytest.mark.parametrize(("error", "status"), STATUSES, ids=[type(error).__name__ for error, _ in STATUSES])
def test_every_error_has_its_status_and_all_four_fields(error: BaseException, status: int) -> None:
    answer = answer_for(error)
    assert answer.status == status
    assert set(answer.body()["error"]) == {"message", "type", "param", "code"}


def test_overload_says_when_to_come_again() -> None:
    assert answer_for(EngineOverloadedError("x", retry_after_s=2.1)).headers["retry-after"] == "3"
    assert answer_for(EngineOverloadedError("x", retry_after_s=0.0)).headers["retry-after"] == "1"


def test_unforeseen_errors_tell_nothing() -> None:
    assert "secret" not in str(answer_for(RuntimeError("/secret/path.py is broken")).body())


def test_allowed_methods_are_told() -> None:
    assert answer_for(HTTPException(405, headers={"Allow": "POST"})).headers["allow"] == "POST"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, list(range(10**6)), {str(n): n for n in range(10**5)}, 10**10_000, [[[[[[]]]]]]],
    ids=range(5),
)
def test_shown_values_are_short_whatever_they_are(value: Any) -> None:
    assert len(shorten(value)) <= MAX_SHOWN_INPUT


def test_paths_are_written_as_in_the_request() -> None:
    assert field_path(("messages", 0, "tool_calls", 1, "function")) == "messages[0].tool_calls[1].function"


def refusal(kind: Any, fields: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        parse(kind, fields)
    return caught.value


def test_branches_of_unions_are_no_part_of_the_path() -> None:
    error = refusal(ChatCompletionRequest, {"messages": [{"role": "user"}], "tool_choice": 5})
    assert error.param == "tool_choice"
    assert "Named" not in error.message
    error = refusal(CompletionRequest, {"prompt": "x", "stop": 5})
    assert error.param == "stop"
    assert error.message.count("stop") == 1


def test_a_long_list_of_wrong_items_stops_at_the_first() -> None:
    error = refusal(CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 100_000})
    assert error.param == "stop_token_ids[0]"
    assert "[1]" not in error.message


def test_checks_across_fields_name_the_field() -> None:
    error = refusal(CompletionRequest, {"prompt": "x", "max_tokens": 0})
    assert error.param == "max_tokens"
    assert error.message.startswith("max_tokens: must")


def test_what_is_no_object_is_refused() -> None:
    for value in (None, [], "text", 5):
        assert "object" in refusal(CompletionRequest, value).message  # type: ignore[arg-type]
