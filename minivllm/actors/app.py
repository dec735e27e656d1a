"""build_app: the three deployments, bound to each other. `serve run` and the controller call it.

Postponed annotations would turn the builder's parameter type into a string, and Serve would then hand it an unchecked
dict: this file must not import them.
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
"""Far above what the engine admits: Serve never holds a request back, so a refusal is ours, with our error body."""

REPLICA_ENV_VARS = {
    # User code, router and Serve's own work on one asyncio loop: no hand-over between threads for each token.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Serve's own counters ten times a second would be a tenth of what an idle replica costs.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # The access log goes to disk in larger pieces.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    # A prompt of a million tokens is larger than gRPC's default limit of 4 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 1024**2),
    # OpenMP threads that wait for the next step spin for half a millisecond, not for five: proxy, ingress and clients
    # need the cores between steps.
    "GOMP_SPINCOUNT": "20000",
}

API_KEYS_VARIABLE = "MINIVLLM_API_KEYS"

HEALTH_CHECK_PERIOD_S = 1
"""A failed engine refuses everything until it is replaced, so look often. Serve wants three failures in a row."""

WITHOUT_ACCESS_LOG = {"enable_access_log": False}
"""For the deployments that only we call, several times a second."""


def build_app(args: AppArgs) -> Application:
    """The application, from the `args:` of serve_config.yaml. Starts nothing itself.

    Keys may come from the environment as MINIVLLM_API_KEYS, separated by commas: Ray writes `args` into its logs.
    """
    keys = os.environ.get(API_KEYS_VARIABLE, "")
    if keys and not args.api_keys:
        args = args.model_copy(update={"api_keys": tuple(key.strip() for key in keys.split(",") if key.strip())})
    return bind_app(args)


def bind_app(args: AppArgs, build_engine: Callable[[EngineConfig], "LLMEngine"] = load_engine) -> Application:
    """The same with another way to make the engine. `build_engine` must be importable where the replicas run."""
    metrics = _bind_metrics(args)
    engine = _bind_engine(args, metrics, build_engine)
    ingress: Any = Ingress
    application: Application = ingress.options(
        num_replicas=args.num_ingress_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options=_actor_options(num_cpus=0.1),
    ).bind(args, engine, metrics)
    return application


def _bind_metrics(args: AppArgs) -> Application:
    deployment = serve.deployment(
        Metrics,
        name="Metrics",
        max_ongoing_requests=1000,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=2,
        graceful_shutdown_wait_loop_s=0.1,
        logging_config=WITHOUT_ACCESS_LOG,
        ray_actor_options=_actor_options(num_cpus=0),
    )
    application: Application = deployment.bind(args.metrics_history_size)
    return application


def _bind_engine(
    args: AppArgs, metrics: Application, build_engine: Callable[[EngineConfig], "LLMEngine"]
) -> Application:
    device = _choose_device(args.device)
    deployment = serve.deployment(
        Engine,
        name="Engine",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.2,
        # A model that cannot be loaded will not load the twentieth time either.
        max_constructor_retry_count=2,
        logging_config=WITHOUT_ACCESS_LOG,
        ray_actor_options=_actor_options(
            num_cpus=args.engine_num_cpus, num_gpus=0 if device == "cpu" else 1, env_vars=args.engine_env_vars
        ),
    )
    application: Application = deployment.bind(
        args.engine_config(device=device), args.live_settings(), metrics, build_engine
    )
    return application


def _choose_device(device: str) -> str:
    """Either cuda or cpu. `auto` takes a GPU that the cluster has now; one that an autoscaler would add must be asked
    for with `device: cuda`. An engine without a GPU of its own is told so: Ray does not hide the GPUs from it."""
    if device != "auto":
        return device
    if not ray.is_initialized():
        return "cpu"
    return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


def _actor_options(*, num_cpus: float, num_gpus: float = 0, env_vars: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "runtime_env": {"env_vars": REPLICA_ENV_VARS | (env_vars or {})},
    }
