"""build_app: the deployments that it binds, without starting them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import ray
from ray.serve import Application

from minivllm.actors import app as app_module
from minivllm.actors.app import build_app
from minivllm.actors.config import AppArgs


def arguments_of(application: Application) -> tuple[Any, ...]:
    arguments: tuple[Any, ...] = application._bound_deployment.init_args
    return arguments


def engine_of(application: Application) -> Any:
    return arguments_of(application)[1]._bound_deployment


def test_builder_annotation_lets_serve_validate_the_arguments() -> None:
    """Serve validates only where the annotation is the class; a postponed annotation is a string."""
    [parameter] = inspect.signature(build_app).parameters.values()
    assert parameter.annotation is AppArgs


def test_api_keys_come_from_the_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_API_KEYS", "one, two,")
    assert arguments_of(build_app(AppArgs()))[0].api_keys == ("one", "two")
    assert arguments_of(build_app(AppArgs(api_keys=("three",))))[0].api_keys == ("three",)
    monkeypatch.setenv("MINIVLLM_API_KEYS", "")
    assert arguments_of(build_app(AppArgs()))[0].api_keys == ()


@pytest.mark.parametrize(
    ("device", "gpus_of_cluster", "gets"),
    [
        ("auto", 0, ("cpu", 0)),
        ("auto", 2, ("cuda", 1)),
        ("cpu", 2, ("cpu", 0)),
        ("cuda", 0, ("cuda", 1)),
    ],
    ids=["auto without GPUs", "auto with GPUs", "cpu", "cuda"],
)
def test_engine_device_matches_its_gpu_reservation(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus_of_cluster: int, gets: tuple[str, int]
) -> None:
    """Ray does not hide GPUs from actors that reserve none, so the device is set explicitly."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": float(gpus_of_cluster)})
    engine = engine_of(build_app(AppArgs(device=device)))
    assert (engine.init_args[0].device, engine.ray_actor_options["num_gpus"]) == gets


def test_max_ongoing_requests_exceeds_the_engine_capacity() -> None:
    application = build_app(AppArgs(max_num_seqs=4096, max_waiting_requests=50_000))
    for deployment in (application._bound_deployment, engine_of(application)):
        assert deployment.max_ongoing_requests > 4096 + 50_000


def test_engine_has_one_replica_with_its_own_environment() -> None:
    engine = engine_of(build_app(AppArgs(engine_env_vars={"LD_PRELOAD": "libtcmalloc.so"}, num_ingress_replicas=3)))
    assert engine.num_replicas == 1
    variables = engine.ray_actor_options["runtime_env"]["env_vars"]
    assert variables["LD_PRELOAD"] == "libtcmalloc.so"
    assert variables["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "0"
    assert "LD_PRELOAD" not in app_module.REPLICA_ENV_VARS
