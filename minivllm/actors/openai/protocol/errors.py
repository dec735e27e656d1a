"""Maps every exception to an OpenAI error: `{"error": {"message", "type", "param", "code"}}` and an HTTP status.

Messages of our typed errors are written for clients, except that of EngineDeadError, which quotes the fault. Those of
other exceptions may contain paths and internals, so they are only logged.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from minivllm.core.errors import (
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    MinivllmError,
    NeverFitsError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)

MAX_LISTED_ERRORS = 10
MAX_SHOWN_INPUT = 200
MAX_MESSAGE = 4000

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}
_HTTP_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
}
"""Codes of the errors that concern HTTP alone, by status."""


class ModelNotFoundError(InvalidRequestError):
    """The request names a model other than the served one."""


class ServiceLoadingError(MinivllmError):
    """The engine is not ready yet."""


@dataclass(frozen=True, slots=True)
class ApiError:
    """An error in the API's form. `headers` are in lower case."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Returns the JSON object; it contains `param` and `code` even when they are null."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = cut(self.message, MAX_MESSAGE)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def error_response(error: BaseException) -> Response:
    """Returns the HTTP response for `error`."""
    api_error = to_api_error(error)
    return JSONResponse(api_error.body(), api_error.status, headers=api_error.headers)


def to_api_error(error: BaseException) -> ApiError:
    """Returns what a client sees of `error`. Logs an unexpected one with its traceback."""
    match error:
        case ModelNotFoundError():
            return ApiError(404, error.message, error.param, "model_not_found")
        case InvalidRequestError():
            default = "context_length_exceeded" if isinstance(error, NeverFitsError) else None
            return ApiError(400, error.message, error.param, getattr(error, "code", default))
        case EngineOverloadedError():
            headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, error.message, code="engine_overloaded", headers=headers)
        case ServiceLoadingError():
            return ApiError(503, error.message, code="loading", headers={"retry-after": "2"})
        case EngineDeadError():
            message = "the engine has failed or cannot be reached; it is being replaced, try again soon"
            return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})
        case RequestFailedError():
            return ApiError(500, error.message, code="request_failed")
        case HTTPException(status_code=status):
            headers = {name.lower(): value for name, value in (error.headers or {}).items()}
            return ApiError(status, str(error.detail), code=_HTTP_CODES.get(status), headers=headers)
    logger.error("a request failed with an unexpected exception", exc_info=error)
    return ApiError(500, "internal server error", code="internal_error")


# ---- validation errors of pydantic

# pydantic's paths contain the branches of unions between the names of fields; clients never wrote these.
_UNION_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none", "constrained-str", "function-before"}


def wrong_field(param: str, reason: str, **details: Any) -> InvalidRequestError:
    """Returns the error of one field, whose message begins with its name."""
    return InvalidRequestError(f"{param}: {reason}", param=param, **details)


def invalid_request(details: Sequence[Any], renamed: Mapping[str, str] | None = None) -> InvalidRequestError:
    """Converts the error details of a ValidationError to one InvalidRequestError; `param` is the first wrong field.

    `renamed` maps fields of the validated model to fields of the API.
    """
    merged: dict[str, tuple[list[str], str]] = {}
    for detail in details:
        path, reason, shows_input = _path_and_reason(detail, renamed or {})
        if path not in merged:
            is_shown = shows_input and len(merged) < MAX_LISTED_ERRORS
            merged[path] = [], f" (got {shorten(detail['input'])})" if is_shown else ""
        reasons, _ = merged[path]
        if reason not in reasons and len(reasons) < MAX_LISTED_ERRORS:
            reasons.append(reason)
    listed = list(merged.items())[:MAX_LISTED_ERRORS]
    lines = [(f"{path}: " if path else "") + ", or ".join(reasons) + shown for path, (reasons, shown) in listed]
    if len(merged) > len(listed):
        lines.append(f"and {len(merged) - len(listed)} more")
    return InvalidRequestError("; ".join(lines), param=listed[0][0] or None)


def _path_and_reason(detail: Any, renamed: Mapping[str, str]) -> tuple[str, str, bool]:
    """Returns the field and the reason of one error detail, and whether its input belongs in the message."""
    path = field_path(part for part in detail["loc"] if isinstance(part, int) or not _is_branch(part))
    reason = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if detail["type"] == "model_type":
        reason = "should be an object"
    shows_input = bool(path) and detail["type"] != "missing"
    if not path:
        # Messages of checks across fields begin with the name of the field.
        name, colon, rest = reason.partition(": ")
        if colon and name.isidentifier():
            path, reason = name, rest
    top, dot, rest = path.partition(".")
    return renamed.get(top, top) + dot + rest, reason, shows_input


def _is_branch(part: str) -> bool:
    return part in _UNION_BRANCHES or "[" in part or part[:1].isupper()  # the latter are names of models


def field_path(parts: Iterable[str | int]) -> str:
    """Formats `("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{cut(part, 100)}" if text else cut(part, 100)
    return text


# ---- truncation of shown values

_shortener = reprlib.Repr()
_shortener.maxlevel = 3
_shortener.maxdict = _shortener.maxlist = _shortener.maxtuple = 6
_shortener.maxlong = _shortener.maxstring = _shortener.maxother = MAX_SHOWN_INPUT
_MAX_PRINTED_BITS = 1000
"""Python refuses to print integers above 4300 digits."""


def shorten(value: Any) -> str:
    """Returns at most 200 characters of `repr(value)`, without formatting all of a large value."""
    if isinstance(value, int) and value.bit_length() > _MAX_PRINTED_BITS:
        return "a very large integer"
    return cut(_shortener.repr(value), MAX_SHOWN_INPUT)


def cut(text: str, limit: int) -> str:
    """Returns at most `limit` characters of `text`; a truncated one ends in three dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
