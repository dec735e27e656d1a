"""`serve run` on a configuration file with a mistake, and `make serve` on a model that is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import yaml
from safetensors.torch import load_file, save_file

from tests.conftest import free_port
from tests.engine.tiny_models import TINY, save_tiny

ROOT = Path(__file__).resolve().parents[2]


def test_serve_run_prints_the_unknown_argument_and_a_suggestion(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] = {"blok_size": 32}
    broken = tmp_path / "serve_config.yaml"
    broken.write_text(yaml.safe_dump(config))
    output = run_until(broken, "did you mean 'block_size'?")
    assert "unknown argument 'blok_size'; did you mean 'block_size'?" in output


def test_make_serve_ends_with_the_reason_why_a_model_is_refused(tmp_path: Path) -> None:
    model = save_tiny(TINY["llama"](), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors")
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = free_port()
    config["applications"][0]["args"] = {"model": str(model), "tokenizer": "smollm2-135m-instruct", "device": "cpu"}
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    with tempfile.TemporaryDirectory(prefix="mv-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "minivllm.actors.serve_run", str(path)],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
            check=False,
        )
    last = done.stdout.splitlines()[-1]
    assert (done.returncode, last) == (
        1,
        f"{path}: {str(model)!r} cannot be served: its checkpoint lacks lm_head.weight",
    )


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
