"""A second application for fault injection: real ingress and metrics, and an engine without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ray import serve

from minivllm.actors.app import bind_app
from minivllm.actors.config import AppArgs
from minivllm.actors.transport.messages import EngineInfo, EngineSnapshot
from tests.conftest import RayCluster
from tests.faults.faulty_engine import build_engine
from tests.processes import wait_until


@dataclass(frozen=True)
class Broken:
    """The application under fault injection, at `base_url` and by handle."""

    app: str
    base_url: str
    model: str

    def engine(self) -> Any:
        return serve.get_deployment_handle("Engine", self.app)

    def metrics(self) -> Any:
        return serve.get_deployment_handle("Metrics", self.app)

    def info(self) -> EngineInfo:
        info: EngineInfo = self.engine().info.remote().result(timeout_s=60)
        return info

    def stats(self) -> EngineSnapshot:
        snapshot: EngineSnapshot = self.engine().stats.remote().result(timeout_s=60)
        return snapshot

    def wait_for_another_engine(self, old_id: str) -> None:
        def is_replaced() -> bool:
            try:
                return self.info().engine_id != old_id
            except Exception:
                return False

        wait_until(is_replaced, "Serve replaced the engine")


@pytest.fixture(scope="module")
def broken(ray_cluster: RayCluster) -> Iterator[Broken]:
    args = AppArgs(served_model_name="broken", validate_blocks=True, stall_timeout_s=3, max_num_seqs=64)
    serve.run(bind_app(args, build_engine), name="broken", route_prefix="/broken")
    yield Broken("broken", f"{ray_cluster.base_url}/broken", "broken")
    serve.delete("broken")
