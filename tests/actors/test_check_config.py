"""check_config: reports mistakes in a configuration file before Ray starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.actors.check_config import mistakes, taken_ports, unreadable_models

ROOT = Path(__file__).parent.parent.parent
APPLICATION = "applications:\n  - import_path: minivllm.actors.app:build_app\n"


@pytest.mark.parametrize("path", ["serve_config.yaml", "deploy/serve_config.yaml"])
def test_shipped_configurations_have_no_mistakes(path: str) -> None:
    assert list(mistakes(ROOT / path)) == []


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("    args: {quantisation: int8}", "args: unknown argument 'quantisation'; did you mean 'quantization'?"),
        ("    args: {quantization: int7}", "args.quantization: Input should be 'int8'"),
        ("    args: {block_size: 0, seed: x}", "args.block_size: Input should be greater than or equal to 1"),
        (
            "    deployments: [{name: Engine, user_config: {consumer_timeout_sec: 3}}]",
            "user_config.consumer_timeout_sec: Extra inputs are not permitted",
        ),
        ("    args: {http_port: 8000}", "args.http_port: 8000 is the port of Serve's proxy"),
        ("    args: {http_port: 7000, num_ingress_replicas: 2}", "args: http_port: only one ingress can have it"),
        ("    deployments: [{name: Engine, num_replicas: 2}]", "deployments: Engine runs as one replica"),
        ("    deployments: [{name: Metrics, num_replicas: auto}]", "deployments: Metrics runs as one replica"),
        ("    args: [", "it cannot be read"),
    ],
    ids=[
        "unknown argument",
        "invalid choice",
        "out of range",
        "unknown live setting",
        "port of the proxy",
        "port of several ingresses",
        "several engines",
        "several metrics actors",
        "invalid YAML",
    ],
)
def test_mistake_is_reported_with_its_argument(rest: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(APPLICATION + rest)
    found = list(mistakes(path))
    assert any(mistake.startswith(expected) for mistake in found), found


def test_mistakes_do_not_show_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(APPLICATION + "    args: {api_keys: ['my secret'], block_size: none}")
    assert "secret" not in " ".join(mistakes(path))


def test_arguments_of_other_applications_are_not_checked(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("applications:\n  - import_path: other:app\n    args: {anything: 1}\n")
    assert list(mistakes(path)) == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "applications: 3", "applications: [a]", APPLICATION + "    deployments: [a]"],
    ids=["empty", "list", "applications: 3", "applications: [a]", "deployments: [a]"],
)
def test_files_of_another_form_are_reported(text: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert list(mistakes(path))


def test_missing_file_exits_with_an_error_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minivllm.actors.check_config", str(tmp_path / "no.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path / 'no.yaml'}: there is no such file\n")


def test_ports_in_use_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as another:
        own, proxy = other.getsockname()[1], another.getsockname()[1]
        path.write_text(
            f"http_options: {{host: 127.0.0.1, port: {proxy}}}\n{APPLICATION}    args: {{http_port: {own}}}\n"
        )
        assert list(mistakes(path)) == []
        assert list(taken_ports(path)) == [
            f"http_options.port: cannot listen on port {proxy} of 127.0.0.1: Address already in use",
            f"args.http_port: cannot listen on port {own} of 127.0.0.1: Address already in use",
        ]
    assert list(taken_ports(path)) == []


def test_model_whose_files_cannot_be_read_is_reported(tmp_path: Path) -> None:
    path, model = tmp_path / "serve.yaml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\x09")
    path.write_text(f"{APPLICATION}    args: {{model: {model}}}\n")
    (reported,) = unreadable_models(path)
    assert reported.startswith("args.model: ")
    assert "model.safetensors' is truncated" in reported
    path.write_text(f"{APPLICATION}    args: {{model: {model}, load_format: dummy}}\n")
    assert list(unreadable_models(path)) == []


def test_checking_a_configuration_loads_no_torch() -> None:
    code = "import sys, minivllm.actors.check_config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
