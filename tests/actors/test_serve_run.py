"""serve_run: the line with which a failed start ends."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ServeStatus,
)

from minivllm.actors.serve_run import reason, wait_until_started

TRACEBACK = """Failed to update the deployment 'Engine': The deployment failed to start 2 times in a row.
    raise ModelLoadError(f"cannot load")
minivllm.core.errors.ModelLoadError: 'm' cannot be served: its checkpoint lacks lm_head.weight
"""


def application(status: str, message: str = "") -> ApplicationStatusOverview:
    engine = DeploymentStatusOverview(
        status=DeploymentStatus.DEPLOY_FAILED,
        status_trigger=DeploymentStatusTrigger.REPLICA_STARTUP_FAILED,
        replica_states={},
        message=message,
    )
    return ApplicationStatusOverview(
        status=ApplicationStatus(status),
        message="Failed to update the deployments ['Engine'].",
        last_deployed_time_s=0,
        deployments={"Engine": engine},
    )


def test_reason_is_the_message_of_the_exception() -> None:
    assert (
        reason(application("DEPLOY_FAILED", TRACEBACK)) == "'m' cannot be served: its checkpoint lacks lm_head.weight"
    )
    assert reason(application("DEPLOY_FAILED")) == "Failed to update the deployments ['Engine']."


@pytest.mark.parametrize(
    ("last", "expected"),
    [("RUNNING", None), ("DEPLOY_FAILED", "'m' cannot be served: its checkpoint lacks lm_head.weight")],
)
def test_waiting_ends_when_the_application_runs_or_has_failed(
    last: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statuses() -> Iterator[ServeStatus]:
        yield ServeStatus()
        yield ServeStatus(applications={"a": application("DEPLOYING")})
        yield ServeStatus(applications={"a": application(last, TRACEBACK)})

    given = statuses()
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "status", lambda: next(given))
    assert wait_until_started() == expected
