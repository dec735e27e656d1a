"""build_app: binds the three deployments to each other. `serve run` and Serve's controller call it.

No postponed annotations in this file: the builder's parameter type would be a string, and Serve would pass an unchecked
dict.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve import Application

from minivllm.actors.config import AppArgs
from minivllm.actors.engine.deployment import Engine, load_engine
from minivllm.actors.ingress.deployment import Ingress
from minivllm.actors.metrics.deployment import Metrics
from minivllm.core.config import EngineConfig

if TYPE_CHECKING:
    from minivllm.core.engine import LLMEngine

MAX_ONGOING_REQUESTS = 100_000
"""Far above what the engine admits: the engine refuses requests with an error body of the API, Serve never queues."""

REPLICA_ENV_VARS = {
    # User code, router and Serve's own work on one asyncio loop: no switch between threads per token.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Exporting Serve's own counters every 0.1 s, the default, costs a tenth of an idle replica's CPU time.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Access log records per write to disk.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    # A prompt of a million tokens is larger than gRPC's default limit of 4 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 1024**2),
    # OpenMP threads spin for 0.5 ms instead of 5 ms between steps: proxy, ingress and clients need the cores then.
    "GOMP_SPINCOUNT": "20000",
}

NO_ACCESS_LOG = {"enable_access_log": False}
"""For deployments that only this application calls, several times per second."""


def build_app(args: AppArgs) -> Application:
    """Returns the application for the `args:` of serve_config.yaml. Starts nothing.

    Keys may come from the environment as MINIVLLM_API_KEYS, separated by commas: Ray writes `args` into its logs.
    """
    keys = os.environ.get("MINIVLLM_API_KEYS", "").split(",")
    if not args.api_keys:
        args = args.model_copy(update={"api_keys": tuple(key.strip() for key in keys if key.strip())})
    return bind_app(args)


def bind_app(args: AppArgs, build_engine: Callable[[EngineConfig], "LLMEngine"] = load_engine) -> Application:
    """Returns the application with another `build_engine`, which must be importable where the replicas run."""
    metrics = _deployment(
        serve.deployment(Metrics),
        num_cpus=0,
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=2,
        logging_config=NO_ACCESS_LOG,
    ).bind(args.metrics_history_size)
    device = _choose_device(args.device)
    engine = _deployment(
        serve.deployment(Engine),
        num_cpus=args.engine_num_cpus,
        num_gpus=0 if device == "cpu" else 1,
        env_vars=args.engine_env_vars,
        num_replicas=1,
        health_check_timeout_s=30,
        max_constructor_retry_count=2,  # a model that cannot be loaded is not tried twenty times
        logging_config=NO_ACCESS_LOG,
    ).bind(args.engine_config(device=device), args.live_settings(), metrics, build_engine)
    ingress = _deployment(Ingress, num_cpus=0.1, num_replicas=args.num_ingress_replicas)
    application: Application = ingress.bind(args, engine, metrics)
    return application


def _choose_device(device: str) -> str:
    """Returns "cuda" or "cpu". `auto` uses a GPU that the cluster has now; one that an autoscaler would add needs
    `device: cuda`. The engine needs an explicit "cpu": Ray does not hide GPUs from actors that reserve none."""
    if device != "auto":
        return device
    return "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def _deployment(
    deployment: Any, *, num_cpus: float, num_gpus: int = 0, env_vars: dict[str, str] | None = None, **options: Any
) -> Any:
    """Returns the deployment with `options` besides those that all three share."""
    runtime_env = {"env_vars": REPLICA_ENV_VARS | (env_vars or {})}
    shared = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        # A failed engine refuses everything until it is replaced, which takes Serve three failed checks.
        "health_check_period_s": 1,
        "graceful_shutdown_timeout_s": 10,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus, "runtime_env": runtime_env},
    }
    return deployment.options(**(shared | options))
