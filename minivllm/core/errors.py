"""Typed errors. Each is a ValueError, survives pickling (Ray sends it between processes) and has details as attributes.

Only `EngineOverloadedError` is worth a retry: the others would occur again.
"""

from __future__ import annotations

from typing import Any


class MinivllmError(ValueError):
    """Base of all errors of minivllm.

    Keyword details become attributes and survive `pickle`, which by default calls `cls(*args)` and loses them.
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
    """The request itself is wrong. `param` names the wrong field, if it is one."""

    def __init__(self, message: str, *, param: str | None = None, **details: Any) -> None:
        super().__init__(message, param=param, **details)
        self.param = param


class NeverFitsError(InvalidRequestError):
    """The prompt leaves no room for one output token in the context or in the pool, however long it waits."""


class NoFreeBlocksError(MinivllmError):
    """The pool has too few free blocks. None was taken."""


class BlockNotInUseError(MinivllmError):
    """A block to be freed is not in use, does not exist or is repeated in the call. None was freed."""

    def __init__(self, message: str, *, block_id: int | None = None, **details: Any) -> None:
        super().__init__(message, block_id=block_id, **details)
        self.block_id = block_id


class IntegrityError(MinivllmError):
    """An invariant of the block manager is broken. Names the block and the sequences concerned."""

    def __init__(
        self, message: str, *, block_id: int | None = None, request_ids: tuple[str, ...] = (), **details: Any
    ) -> None:
        super().__init__(message, block_id=block_id, request_ids=request_ids, **details)
        self.block_id = block_id
        self.request_ids = request_ids


class EngineOverloadedError(MinivllmError):
    """The waiting queue is full. `retry_after_s` is a hint when to retry."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, **details: Any) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **details)
        self.retry_after_s = retry_after_s


class RequestFailedError(MinivllmError):
    """This one request failed on the server's side; other requests continue."""


class EngineDeadError(MinivllmError):
    """A forward pass failed or a block invariant is broken. Ends every live request; the replica must be replaced."""


class ModelLoadError(MinivllmError):
    """The model cannot be served: not found, of an unsupported architecture, or a package is missing."""
