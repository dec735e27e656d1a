"""Checks a configuration file before anything is started; `make serve` does.

    python -m minivllm.actors.check_config serve_config.yaml

`serve run` finds the same mistakes, but only once Ray is up, within a traceback, and then waits for a better file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError

from minivllm.actors.config import AppArgs, LiveSettings

BUILDER = "minivllm.actors.app:build_app"


def mistakes(path: Path) -> Iterator[str]:
    """What is wrong with our applications in the file. What belongs to Serve is Serve's to check."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        yield "there is no such file"
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"it cannot be read: {error}"
        return
    for application in _dicts_in(config, "applications"):
        if application.get("import_path") == BUILDER:
            yield from _of_model(AppArgs, application.get("args") or {}, "args")
            for deployment in _dicts_in(application, "deployments"):
                if deployment.get("name") == "Engine":
                    yield from _of_model(LiveSettings, deployment.get("user_config") or {}, "user_config")


def _dicts_in(parent: Any, name: str) -> list[dict[str, Any]]:
    """The dicts of a list in a dict, as far as all of them are what they should be."""
    found = parent.get(name) if isinstance(parent, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _of_model(model: type[BaseModel], values: Any, where: str) -> Iterator[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            yield f"{'.'.join((where, *map(str, one['loc'])))}: {one['msg'].removeprefix('Value error, ')}"


def main() -> None:
    path = Path(sys.argv[1])
    found = list(mistakes(path))
    for mistake in found:
        sys.stderr.write(f"{path}: {mistake}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
