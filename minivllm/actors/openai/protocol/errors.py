"""Every failure as an OpenAI error: `{"error": {"message", "type", "param", "code"}}` and an HTTP status.

What a client sees is decided here and nowhere else: messages of our own typed errors are written for clients, those of
any other exception may tell of paths and internals and are only logged.
"""

from __future__ import annotations

import logging
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException

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


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that we do not serve."""


class UnauthorizedError(MinivllmError):
    """The request carries none of the API keys."""


class RequestTooLargeError(MinivllmError):
    """The body is larger than `max_request_bytes`."""


class UnsupportedMediaTypeError(MinivllmError):
    """The body is not declared as JSON."""


class ServiceLoadingError(MinivllmError):
    """The engine is not ready yet."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What goes over the wire. `headers` are in lower case."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object; `code` and `param` are there even when they are null."""
        return {
            "error": {
                "message": cut(self.message, MAX_MESSAGE),
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


ENGINE_GONE = "the engine has failed or cannot be reached; it is being replaced, try again soon"
"""In place of an EngineDeadError's own words, which quote the fault: they are in the engine's log."""


def answer_for(error: BaseException) -> ErrorAnswer:
    """What tells a client of `error`. An unexpected one is logged with its traceback and becomes a bare 500."""
    if isinstance(error, EngineOverloadedError):
        retry_after = str(max(1, math.ceil(error.retry_after_s)))
        return ErrorAnswer(
            429, error.message, "rate_limit_error", code="engine_overloaded", headers={"retry-after": retry_after}
        )
    if isinstance(error, InvalidRequestError):
        return _refusal(error)
    if isinstance(error, HTTPException):
        return _http_answer(error)
    for kind, status, error_type, code, headers in _TYPED:
        if isinstance(error, kind):
            message = ENGINE_GONE if kind is EngineDeadError else str(error)
            return ErrorAnswer(status, message, error_type, code=code, headers=dict(headers))
    logger.error("a request failed for a reason nobody foresaw", exc_info=error)
    return ErrorAnswer(500, "internal server error", "server_error", code="internal_error")


_TYPED: tuple[tuple[type[MinivllmError], int, str, str, tuple[tuple[str, str], ...]], ...] = (
    (UnauthorizedError, 401, "authentication_error", "invalid_api_key", (("www-authenticate", "Bearer"),)),
    (RequestTooLargeError, 413, "invalid_request_error", "request_too_large", ()),
    (UnsupportedMediaTypeError, 415, "invalid_request_error", "unsupported_media_type", ()),
    (ServiceLoadingError, 503, "service_unavailable", "loading", (("retry-after", "2"),)),
    (EngineDeadError, 503, "service_unavailable", "engine_unavailable", (("retry-after", "5"),)),
    (RequestFailedError, 500, "server_error", "request_failed", ()),
)


def _refusal(error: InvalidRequestError) -> ErrorAnswer:
    if isinstance(error, ModelNotFoundError):
        return ErrorAnswer(404, error.message, "invalid_request_error", error.param, "model_not_found")
    code = getattr(error, "code", None)
    if code is None and isinstance(error, NeverFitsError):
        code = "context_length_exceeded"
    return ErrorAnswer(400, error.message, "invalid_request_error", error.param, code)


def _http_answer(error: HTTPException) -> ErrorAnswer:
    """Unknown paths and methods, which the router raises itself."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    return ErrorAnswer(error.status_code, str(error.detail), kind, code=codes.get(error.status_code), headers=headers)


# ----------------------------------------------------------------------------------------------------------------
# Validation errors of pydantic
# ----------------------------------------------------------------------------------------------------------------


def invalid_request(error: ValidationError, renamed: dict[str, str] | None = None) -> InvalidRequestError:
    """One InvalidRequestError for all that pydantic found wrong; `param` is the first field at fault.

    `renamed` maps fields of the model that refused to what the client called them.
    """
    merged: dict[str, tuple[list[str], Any]] = {}
    details = error.errors(include_url=False, include_context=False)
    for detail in details:
        path, reason, value = _path_and_reason(detail, renamed or {})
        reasons, _ = merged.setdefault(path, ([], value))
        if reason not in reasons and len(reasons) < MAX_LISTED_ERRORS:
            reasons.append(reason)
    listed = list(merged.items())[:MAX_LISTED_ERRORS]
    lines = [_line(path, reasons, value) for path, (reasons, value) in listed]
    if len(merged) > len(listed):
        lines.append(f"and {len(merged) - len(listed)} more")
    return InvalidRequestError("; ".join(lines), param=listed[0][0] or None)


def _line(path: str, reasons: Sequence[str], value: Any) -> str:
    text = ", or ".join(reasons)
    shown = "" if value is _NOTHING_TO_SHOW else f" (got {shorten(value)})"
    return f"{path}: {text}{shown}" if path else f"{text}{shown}"


_NOTHING_TO_SHOW = object()
# Branches of a union stand in pydantic's paths beside the names of fields; clients never wrote these.
_UNION_BRANCHES = frozenset(
    {"str", "int", "float", "bool", "dict", "list", "none", "constrained-str", "function-before"}
)


def _path_and_reason(detail: ErrorDetails, renamed: dict[str, str]) -> tuple[str, str, Any]:
    path = field_path(part for part in detail["loc"] if isinstance(part, int) or not _is_branch(part))
    is_no_object = detail["type"] in ("model_type", "model_attributes_type")
    reason = (
        "should be an object" if is_no_object else detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    )
    if not path:
        # Checks across fields have no place of their own: by our custom they begin with the field's name.
        name, colon, rest = reason.partition(": ")
        if colon and name.isidentifier():
            return renamed.get(name, name), rest, _NOTHING_TO_SHOW
    top, dot, rest = path.partition(".")
    value = _NOTHING_TO_SHOW if detail["type"] == "missing" or not path else detail["input"]
    return renamed.get(top, top) + dot + rest, reason, value


def _is_branch(part: str) -> bool:
    return part in _UNION_BRANCHES or "[" in part or part[:1].isupper()  # names of models


def field_path(parts: Iterable[str | int]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{cut(part, 100)}" if text else cut(part, 100)
    return text


# ----------------------------------------------------------------------------------------------------------------
# Cutting what is shown
# ----------------------------------------------------------------------------------------------------------------


def _make_shortener() -> reprlib.Repr:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = MAX_SHOWN_INPUT
    shortener.maxlist = shortener.maxtuple = shortener.maxdict = 6
    shortener.maxlevel = 3
    return shortener


_shortener = _make_shortener()


def shorten(value: Any) -> str:
    """`value` as text of at most 200 characters, without first writing out all of a giant one."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a very large integer"  # Python refuses to print those above 4300 digits
    return cut(_shortener.repr(value), MAX_SHOWN_INPUT)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, and the end of a cut one is marked."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
