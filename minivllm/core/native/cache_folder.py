"""cache_folder: where files are kept that are slow to make again, such as the compiled C++ library."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path | None:
    """Returns the first of these folders that can be written to: in `XDG_CACHE_HOME`, `~/.cache`, the temporary folder.

    Returns None if there is none. The user may have no home directory, as under an arbitrary user id in a container.
    """
    for folder in _candidates():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Another user could put a library into a folder of theirs for us to load.
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
        except OSError:
            continue
    return None


def _candidates() -> Iterator[Path]:
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        yield Path(chosen) / "minivllm"
    else:
        home = os.path.expanduser("~")  # as it is, if there is none
        if os.path.isabs(home):
            yield Path(home) / ".cache" / "minivllm"
    yield Path(tempfile.gettempdir()) / f"minivllm-{os.getuid()}"
