"""A configuration file run by `serve run` and by `make serve`: mistakes, failed starts, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from tests.conftest import free_port
from tests.engine.tiny_models import TINY, save_tiny

ROOT = Path(__file__).resolve().parents[2]
SERVE_RUN = (str(Path(sys.executable).parent / "serve"), "run")
MAKE_SERVE = (sys.executable, "-m", "minivllm.actors.serve_run")


def test_serve_run_prints_the_unknown_argument_and_a_suggestion(tmp_path: Path) -> None:
    config = configuration(tmp_path, blok_size=32)
    output, _ = run_until(SERVE_RUN, config, "did you mean 'block_size'?", signal.SIGINT)
    assert "unknown argument 'blok_size'; did you mean 'block_size'?" in output


def test_make_serve_ends_with_the_reason_why_a_model_is_refused(tmp_path: Path) -> None:
    model = save_tiny(TINY["llama"](), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    config = configuration(tmp_path, model=str(model), tokenizer="smollm2-135m-instruct", device="cpu")
    with running(MAKE_SERVE, config) as process:
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    reason = f"{str(model)!r} cannot be served: its checkpoint lacks lm_head.weight"
    assert output.splitlines()[-1] == f"{config}: {reason}"


def test_sigterm_ends_a_server_whose_shell_ignores_sigint(tmp_path: Path) -> None:
    config = configuration(tmp_path, num_blocks=64)
    output, code = run_until(MAKE_SERVE, config, "minivllm.engine -- engine", signal.SIGTERM, ignore_sigint=True)
    assert code == 0
    assert "Traceback" not in output
    assert "*** SIGTERM" not in output  # Ray's stack trace


def configuration(folder: Path, **args: Any) -> Path:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] = args
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def running(command: tuple[str, ...], config: Path, *, ignore_sigint: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Runs the command on its own Ray."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignore_sigint else None
    with tempfile.TemporaryDirectory(prefix="mv-") as folder:  # a short path: Ray puts sockets there
        process = subprocess.Popen(
            [*command, str(config)],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ignore_sigint:
            signal.signal(signal.SIGINT, before)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run_until(
    command: tuple[str, ...], config: Path, words: str, end: signal.Signals, *, ignore_sigint: bool = False
) -> tuple[str, int]:
    """Runs the command until it prints `words`, ends it by a signal, and returns its complete output and exit code."""
    with running(command, config, ignore_sigint=ignore_sigint) as process:
        deadline = threading.Timer(120, process.send_signal, [end])
        deadline.start()
        lines = []
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if words in line:
                break
        process.send_signal(end)
        rest, _ = process.communicate(timeout=60)
        deadline.cancel()
        return "".join(lines) + rest, process.returncode
