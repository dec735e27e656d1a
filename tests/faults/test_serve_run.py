"""`serve run` on a configuration file with a mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import yaml

from tests.conftest import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_serve_run_prints_the_unknown_argument_and_a_suggestion(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] = {"blok_size": 32}
    broken = tmp_path / "serve_config.yaml"
    broken.write_text(yaml.safe_dump(config))
    output = run_until(broken, "did you mean 'block_size'?")
    assert "unknown argument 'blok_size'; did you mean 'block_size'?" in output


def run_until(config: Path, words: str, seconds: float = 120.0) -> str:
    """Runs the command until it prints `words`, interrupts it, and returns its complete output."""
    with tempfile.TemporaryDirectory(prefix="mv-") as folder:  # a short path: Ray puts sockets there
        process = subprocess.Popen(
            [Path(sys.executable).parent / "serve", "run", str(config)],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
        deadline.start()
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if words in line:
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
        deadline.cancel()
        return "".join(lines) + rest
