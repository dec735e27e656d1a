"""`serve run` that ends with one line when the application cannot be started; `make serve` runs it.

    python -m minivllm.actors.serve_run serve_config.yaml

`serve run` itself logs the error and then waits for a corrected file.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from ray.serve.scripts import cli

_ERROR = re.compile(r"^(?:minivllm\.core\.errors\.)?(\w+Error): (.+)$", re.MULTILINE)


def reason(application: ApplicationStatusOverview) -> str:
    """Returns the last exception in the messages of a failed application, or all of its message."""
    messages = [each.message for each in application.deployments.values()]
    found = [match[2] for text in (application.message, *messages) for match in _ERROR.finditer(text)]
    return found[-1] if found else application.message


def wait_until_started() -> str | None:
    """Returns why an application has failed to start, or None once all of them run."""
    while True:
        time.sleep(0.5)
        if not ray.is_initialized():
            continue
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
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C: `serve run` shuts Serve down

    threading.Thread(target=watch, daemon=True).start()
    try:
        cli(["run", path])
    finally:
        if failures:
            sys.stderr.write(f"{path}: {failures[0]}\n")
            sys.exit(1)


if __name__ == "__main__":
    main()
