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
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from minivllm.actors.config import AppArgs, LiveSettings
from minivllm.actors.ingress.http_server import listen
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.checkpoint import read_headers
from minivllm.core.models.location import resolve_model, resolve_tokenizer

BUILDER = "minivllm.actors.app:build_app"


def mistakes(path: Path) -> Iterator[str]:
    """Yields the mistakes in a file of Serve, and in the arguments of this package's applications."""
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        yield "there is no such file"
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"it cannot be read: {error}"
        return
    refused = list(_validate(ServeDeploySchema, config))
    if refused:
        yield from refused
        return
    proxy, applications = _read(config)
    for application in applications:
        yield from _validate(AppArgs, application.args, "args")
        if application.args.get("http_port") == proxy.port:
            yield f"args.http_port: {proxy.port} is the port of Serve's proxy (http_options); choose another one"
        for deployment in application.deployments:
            options = deployment.model_dump(exclude_unset=True)
            is_scaled = options.get("num_replicas") not in (None, 1) or options.get("autoscaling_config")
            if deployment.name in ("Engine", "Metrics") and is_scaled:
                yield f"deployments: {deployment.name} runs as one replica; num_ingress_replicas scales the ingress"
            if deployment.name == "Engine":
                yield from _validate(LiveSettings, deployment.user_config or {}, "user_config")


def taken_ports(path: Path) -> Iterator[str]:
    """Yields the ports of a valid configuration on which other programs listen.

    Serve's proxy would share its port with the proxy of another Ray, each with some of the connections.
    """
    proxy, applications = _read(yaml.safe_load(path.read_text()))
    wanted = [("http_options.port", proxy.host, proxy.port)]
    for application in applications:
        args = AppArgs.model_validate(application.args)
        if args.http_port is not None:
            wanted.append(("args.http_port", args.http_host, args.http_port))
    for name, host, port in wanted:
        try:
            listen(host, port).close()
        except (OSError, OverflowError) as error:  # also for values that are no host or port
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            yield f"{name}: cannot listen on port {port} of {host}: {reason}"


def _read(config: Any) -> tuple[HTTPOptionsSchema, list[ServeApplicationSchema]]:
    """Returns the options of Serve's proxy and this package's applications."""
    schema = ServeDeploySchema.model_validate(config)
    return schema.http_options, [each for each in schema.applications if each.import_path == BUILDER]


def unreadable_models(path: Path) -> Iterator[str]:
    """Yields why models of a valid configuration cannot be read on this machine. Reads no weights and loads no torch.

    The engine finds what else is wrong with a model when it loads it.
    """
    _, applications = _read(yaml.safe_load(path.read_text()))
    for application in applications:
        args = AppArgs.model_validate(application.args)
        try:
            resolve_tokenizer(args)
            location = resolve_model(args)
            if location.is_local and location.gguf_file is None and args.load_format == "auto":
                read_headers(sorted(Path(location.path).glob("*.safetensors")))
        except ModelLoadError as error:
            yield f"args.model: {error.message}"


def _validate(model: type[BaseModel], values: Any, *where: str) -> Iterator[str]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        for one in error.errors(include_url=False, include_context=False, include_input=False):
            yield f"{'.'.join((*where, *map(str, one['loc'])))}: {one['msg'].removeprefix('Value error, ')}"
    except (AttributeError, TypeError) as error:  # Serve's validators read attributes of whatever a file has
        yield f"this is not a configuration of Serve: {error}"


def check(file: str) -> None:
    """Exits with the mistakes of a configuration file on stderr, if there are any."""
    path = Path(file)
    found = list(mistakes(path))
    if not found and os.environ.get("RAY_ADDRESS") == "local":  # a Ray that is joined may run this application already
        found = [*taken_ports(path), *unreadable_models(path)]
    for mistake in found:
        sys.stderr.write(f"{path}: {mistake}\n")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    check(sys.argv[1])
