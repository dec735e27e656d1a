"""The garbage collector of a replica's process, once it has loaded what it lives with."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000
"""New objects between two passes. Python's 700 would be a pass every few steps."""


def spare_what_is_loaded() -> None:
    """What is alive now stays alive: no later pass walks the model and the libraries again while all streams wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
