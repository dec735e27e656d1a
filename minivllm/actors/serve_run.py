"""Checks a configuration file and runs it, as `serve run` does; `make serve` calls it.

    python -m minivllm.actors.serve_run serve_config.yaml

`serve run` keeps waiting after a failed start, ignores SIGINT where the shell that started it does, and Ray answers
SIGTERM with a stack trace.
"""

from __future__ import annotations

import contextlib
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

_ERROR = re.compile(r"^(?:minivllm\.core\.errors\.)?\w+Error: (.+)$", re.MULTILINE)


def reason(application: ApplicationStatusOverview) -> str:
    """Returns the last exception in the messages of a failed application, or all of its message."""
    messages = [each.message for each in application.deployments.values()]
    found = _ERROR.findall("\n".join((application.message, *messages)))
    return str(found[-1]) if found else application.message


def wait_until_started() -> str | None:
    """Returns why an application has failed to start, or None once all of them run."""
    while True:
        time.sleep(0.5)
        applications: list[ApplicationStatusOverview] = []
        with contextlib.suppress(Exception):  # Serve is starting or ending
            applications = list(serve.status().applications.values())
        for application in applications:
            if application.status == ApplicationStatus.DEPLOY_FAILED:
                return reason(application)
        if applications and all(each.status == ApplicationStatus.RUNNING for each in applications):
            return None


def main() -> None:
    path, failures = sys.argv[1], []

    def watch() -> None:
        if (failure := wait_until_started()) is not None:
            failures.append(failure)
            os.kill(os.getpid(), signal.SIGINT)

    check(path)
    _end_on_signals()
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS"), namespace="serve")
        _end_on_signals()  # Ray sets handlers of its own
        threading.Thread(target=watch, daemon=True).start()
        run.main([path, "--address", "auto"], standalone_mode=False)
    except KeyboardInterrupt:
        ray.shutdown()
    except SystemExit:
        pass
    if failures:
        sys.exit(f"{path}: {failures[0]}")


def _end_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(*_: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
