"""Where a replica's own messages go."""

from __future__ import annotations

import logging


def show_logs() -> None:
    """Sends what minivllm logs, from INFO on, to the replica's output, which Ray hands on to `serve run`'s.

    Serve itself gives a handler to its own loggers only: progress while loading would be lost.
    """
    logger = logging.getLogger("minivllm")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s -- %(message)s"))
        logger.addHandler(handler)
