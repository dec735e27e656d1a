"""Checks a configuration file and runs it, as `serve run` does; `make serve` calls it.

    python -m minivllm.actors.run serve_config.yaml

`serve run` keeps running after a failed start, ignores SIGINT where the shell that started it does, and Ray answers
SIGTERM with a stack trace.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from ray.serve.scripts import run

from minivllm.actors.check_config import check

_POLL_INTERVAL_S = 0.5


def main() -> None:
    path = sys.argv[1]
    check(path)
    _end_on_signals()
    failures: list[str] = []
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS"), namespace="serve")
        _end_on_signals()  # Ray sets handlers of its own
        threading.Thread(target=_watch_start, args=(failures,), daemon=True).start()
        run.main([path, "--address", "auto"], standalone_mode=False)
    except KeyboardInterrupt:
        ray.shutdown()
    except SystemExit:
        pass
    for failure in failures:
        sys.stderr.write(f"{path}: {failure}\n")
    sys.exit(bool(failures))


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _watch_start(failures: list[str]) -> None:
    """Ends the process when an application fails before all of them run."""
    while True:
        time.sleep(_POLL_INTERVAL_S)
        try:
            applications = serve.status().applications
        except Exception:  # Serve is being shut down
            return
        for name, application in applications.items():
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                failures.append(f"the application {name!r} cannot be started: {_reason(application)}")
        if failures:
            os.kill(os.getpid(), signal.SIGINT)
            return
        if applications and all(one.status == ApplicationStatus.RUNNING for one in applications.values()):
            return


def _reason(application: ApplicationStatusOverview) -> str:
    """Returns the exception of a deployment's constructor, without its traceback and class."""
    messages = [deployment.message for deployment in application.deployments.values()]
    raised = re.findall(r"^minivllm\.core\.errors\.\w+: (.+)$", "\n".join(messages), re.MULTILINE)
    return str(raised[-1]) if raised else application.message


if __name__ == "__main__":
    main()
