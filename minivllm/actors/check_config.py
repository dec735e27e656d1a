"""Checks a configuration file before anything is started; `make serve` runs it.

    python -m minivllm.actors.check_config serve_config.yaml

`serve run` finds the same mistakes only once Ray is up, within a traceback, and then waits for a corrected file.
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
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.checkpoint import read_headers
from minivllm.core.models.location import resolve_model, resolve_tokenizer

BUILDER = "minivllm.actors.app:build_app"


def mistakes(path: Path) -> Iterator[str]:
    """Yields the mistakes in the arguments of this package's applications. Serve checks the rest of the file."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        yield "there is no such file"
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"it cannot be read: {error}"
        return
    proxy_port = _http_options(config).get("port", 8000)
    for application in _applications(config):
        args = application.get("args") or {}
        yield from _validate(AppArgs, args, "args")
        if isinstance(args, dict) and args.get("http_port") == proxy_port:
            yield f"args.http_port: {proxy_port} is the port of Serve's proxy (http_options); choose another one"
        for deployment in _dicts_in(application, "deployments"):
            if deployment.get("name") == "Engine":
                yield from _validate(LiveSettings, deployment.get("user_config") or {}, "user_config")


def taken_ports(path: Path) -> Iterator[str]:
    """Yields the ports of a valid configuration on which other programs listen.

    Serve's proxy would share its port with the proxy of another Ray, each with some of the connections.
    """
    config = yaml.safe_load(path.read_text())
    options = _http_options(config)
    wanted = [("http_options.port", options.get("host", "127.0.0.1"), options.get("port", 8000))]
    for application in _applications(config):
        args = AppArgs.model_validate(application.get("args") or {})
        if args.http_port is not None:
            wanted.append(("args.http_port", args.http_host, args.http_port))
    for name, host, port in wanted:
        try:
            listen(host, port).close()
        except (OSError, TypeError, OverflowError) as error:  # also for values that are no host or port
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            yield f"{name}: cannot listen on port {port} of {host}: {reason}"


def unreadable_models(path: Path) -> Iterator[str]:
    """Yields why models of a valid configuration cannot be read on this machine. Reads no weights and loads no torch.

    The engine finds what else is wrong with a model when it loads it.
    """
    for application in _applications(yaml.safe_load(path.read_text())):
        args = AppArgs.model_validate(application.get("args") or {})
        try:
            resolve_tokenizer(args)
            location = resolve_model(args)
            if location.is_local and location.gguf_file is None and args.load_format == "auto":
                read_headers(sorted(Path(location.path).glob("*.safetensors")))
        except ModelLoadError as error:
            yield f"args.model: {error.message}"


def _http_options(config: Any) -> dict[str, Any]:
    options = config.get("http_options") if isinstance(config, dict) else None
    return options if isinstance(options, dict) else {}


def _applications(config: Any) -> list[dict[str, Any]]:
    return [each for each in _dicts_in(config, "applications") if each.get("import_path") == BUILDER]


def _dicts_in(parent: Any, name: str) -> list[dict[str, Any]]:
    """Returns the dicts in the list `parent[name]`; none where the file has another shape."""
    found = parent.get(name) if isinstance(parent, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _validate(model: type[BaseModel], values: Any, where: str) -> Iterator[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            yield f"{'.'.join((where, *map(str, one['loc'])))}: {one['msg'].removeprefix('Value error, ')}"


def main() -> None:
    path = Path(sys.argv[1])
    found = list(mistakes(path))
    if not found and os.environ.get("RAY_ADDRESS") == "local":  # a Ray that is joined may run this application already
        found = [*taken_ports(path), *unreadable_models(path)]
    for mistake in found:
        sys.stderr.write(f"{path}: {mistake}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
