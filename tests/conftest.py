"""Session fixtures: one Ray cluster and one application on the default model, started on first use."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
APP_NAME = "minivllm"


@dataclass(frozen=True)
class RayCluster:
    """A local Ray with Serve's proxy; `address` is where other drivers connect."""

    address: str
    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Served:
    """The application on the default model: over HTTP at `base_url`, from Python by `handle`."""

    cluster: RayCluster
    base_url: str
    model: str
    handle: Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Starts Ray in its own temporary folder with four logical CPUs, regardless of the machine's number."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    # Not pytest's tmp_path: Ray puts sockets there, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="mv-")
    port = free_port()
    context = ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=128 * 1024**2,
        _temp_dir=folder,
    )
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    serve.start(http_options={"host": "127.0.0.1", "port": port}, controller_options=shipped["controller_options"])
    yield RayCluster(context.address_info["address"], port)
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def served(ray_cluster: RayCluster) -> Served:
    """Starts the application like `serve run`, with block validation enabled."""
    from ray import serve

    from minivllm.actors.app import build_app
    from minivllm.actors.config import AppArgs

    # One thread: two threads that wait for each other are very slow on a busy machine.
    args = AppArgs(validate_blocks=True, max_num_seqs=64, cpu_kv_cache_bytes=256 * 1024**2, num_threads=1)
    handle = serve.run(build_app(args), name=APP_NAME, route_prefix="/")
    return Served(ray_cluster, ray_cluster.base_url, args.model_name, handle)
