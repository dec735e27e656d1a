"""Typed errors. Each is a ValueError, survives pickling (Ray carries it between processes) and knows what it is about.

Of them all only `EngineOverloadedError` is worth a retry: the others would come again.
"""

from __future__ import annotations

from typing import Any


class MinivllmError(ValueError):
    """Base of all our errors.

    Keyword details become attributes and survive `pickle`, which by default would call `cls(*args)` and lose them.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(details)
        self._details = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self._details)


def _rebuild(kind: type[MinivllmError], message: str, details: dict[str, Any]) -> MinivllmError:
    return kind(message, **details)


class InvalidRequestError(MinivllmError):
    """The request itself is wrong. `param` names the field at fault, when one is."""

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        super().__init__(message, param=param, **details)
        self.param = param


class NeverFitsError(InvalidRequestError):
    """The prompt leaves no room for one output token, in the context or in the pool: waiting would not help."""


class NoFreeBlocksError(MinivllmError):
    """The pool has fewer free blocks than were asked for. Nothing was taken."""


class BlockNotInUseError(MinivllmError):
    """A block was given back that nobody holds, does not exist, or stands twice in one call. Nothing was freed."""


class IntegrityError(MinivllmError):
    """An invariant of the block ledger does not hold. Names the block and the sequences concerned."""

    def __init__(
        self, message: str, *, block_id: int | None = None, request_ids: tuple[str, ...] = (), **details: Any
    ) -> None:
        super().__init__(message, block_id=block_id, request_ids=request_ids, **details)
        self.block_id = block_id
        self.request_ids = request_ids


class EngineOverloadedError(MinivllmError):
    """The waiting queue is full. `retry_after_s` is a hint: when it is worth asking again."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class RequestFailedError(MinivllmError):
    """This one request failed on the server's side; its neighbours go on."""


class EngineDeadError(MinivllmError):
    """A forward pass failed. Every waiting request was ended with this error; the replica must be replaced."""


class ModelLoadError(MinivllmError):
    """The model cannot be served: not found, of an unsupported architecture, or in need of a package."""
