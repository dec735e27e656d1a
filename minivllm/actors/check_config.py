"""Checks a configuration file before anything is started; `make serve` does.

    python -m minivllm.actors.check_config serve_config.yaml

`serve run` finds the same mistakes, but only once Ray is up, within a traceback, and then waits for a better file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ValidationError

from minivllm.actors.config import AppArgs, LiveSettings
from minivllm.actors.ingress.http_server import listen

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
    proxy_port = _http_options(config).get("port", 8000)
    for application in _dicts_in(config, "applications"):
        if application.get("import_path") == BUILDER:
            args = application.get("args") or {}
            yield from _of_model(AppArgs, args, "args")
            if isinstance(args, dict) and args.get("http_port") == proxy_port:
                yield f"args.http_port: {proxy_port} is the port of Serve's proxy (http_options); one needs another"
            for deployment in _dicts_in(application, "deployments"):
                if deployment.get("name") == "Engine":
                    yield from _of_model(LiveSettings, deployment.get("user_config") or {}, "user_config")


def _http_options(config: Any) -> dict[str, Any]:
    """Those of Serve's proxy, or none if they are not what they should be."""
    options = config.get("http_options") if isinstance(config, dict) else None
    return options if isinstance(options, dict) else {}


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


def taken_ports(path: Path) -> Iterator[str]:
    """Which ports of a configuration without mistakes others listen on. Serve's proxies would share one with those of
    another Ray, each with some of the connections, and an ingress says it only when all else is up."""
    config = yaml.safe_load(path.read_text())
    options = _http_options(config)
    wanted = [("http_options.port", options.get("host", "127.0.0.1"), options.get("port", 8000))]
    for application in _dicts_in(config, "applications"):
        if application.get("import_path") == BUILDER:
            args = AppArgs.model_validate(application.get("args") or {})
            if args.http_port is not None:
                wanted.append(("args.http_port", args.http_host, args.http_port))
    for name, host, port in wanted:
        try:
            listen(host, port).close()
        except (OSError, TypeError, OverflowError) as error:  # not every host or port is one
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            yield f"{name}: cannot listen on port {port} of {host}: {reason}"


def main() -> None:
    path = Path(sys.argv[1])
    found = list(mistakes(path))
    if not found and os.environ.get("RAY_ADDRESS") == "local":  # a Ray that is joined may run the same already
        found = list(taken_ports(path))
    for mistake in found:
        sys.stderr.write(f"{path}: {mistake}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
