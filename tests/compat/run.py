"""`make compat`: starts the server with `serve run` and runs third-party clients against it.

The clients run in a separate environment (.venv-compat), since their dependencies differ from ours.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ROOT / ".venv-compat" / "bin" / "python"
START_TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_config(folder: str, port: int) -> Path:
    """Writes the shipped configuration with another port and a short context, which random requests may use up."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"]["http_port"] = port
    config["applications"][0]["args"]["max_model_len"] = 256
    path = Path(folder) / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_until_healthy(base_url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"the server was not healthy within {START_TIMEOUT_S} s")


def main() -> int:
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="mv-") as folder:
        config = write_config(folder, port)
        serve = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        server = subprocess.Popen(serve, cwd=ROOT, env=environment, start_new_session=True)
        try:
            wait_until_healthy(base_url, server)
            check = [str(OTHERS), str(Path(__file__).with_name("check.py")), base_url, *sys.argv[1:]]
            return subprocess.run(check, cwd=folder, check=False).returncode
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


if __name__ == "__main__":
    sys.exit(main())
