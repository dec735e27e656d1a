"""Typed errors. Each is a ValueError, survives pickling (Ray sends it between processes) and has details as attributes.

Only `EngineOverloadedError` is worth a retry: the others would occur again.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MinivllmError(ValueError):
    """Base of all errors of minivllm. Keyword details become attributes; `_defaults` are those not given."""

    _defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.__dict__.update(self._defaults | details)


class InvalidRequestError(MinivllmError):
    """The request itself is wrong. `param` names the wrong field, if it is one."""

    param: str | None
    _defaults: ClassVar = {"param": None}


class NeverFitsError(InvalidRequestError):
    """The prompt leaves no room for one output token in the context or in the pool, however long it waits."""


class NoFreeBlocksError(MinivllmError):
    """The pool has too few free blocks. None was taken."""


class BlockNotInUseError(MinivllmError):
    """A block to be freed is not in use, does not exist or is repeated in the call. None was freed."""

    block_id: int | None
    _defaults: ClassVar = {"block_id": None}


class IntegrityError(MinivllmError):
    """An invariant of the block manager is broken. Names the block and the sequences concerned."""

    block_id: int | None
    request_ids: tuple[str, ...]
    _defaults: ClassVar = {"block_id": None, "request_ids": ()}


class EngineOverloadedError(MinivllmError):
    """The waiting queue is full. `retry_after_s` is a hint when to retry."""

    retry_after_s: float
    _defaults: ClassVar = {"retry_after_s": 1.0}


class RequestFailedError(MinivllmError):
    """This one request failed on the server's side; other requests continue."""


class NotFiniteError(RequestFailedError):
    """The model's output for this request is not finite, so its K and V may not be either."""


class EngineDeadError(MinivllmError):
    """A forward pass failed or a block invariant is broken. Ends every live request; the replica must be replaced."""


class ModelLoadError(MinivllmError):
    """The model cannot be served: not found, of an unsupported architecture, or a package is missing."""
