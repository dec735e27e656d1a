"""README.md and docs/ match the code: names, defaults and examples."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray import serve

from minivllm.actors.config import AppArgs, LiveSettings
from minivllm.actors.metrics.prometheus import render_prometheus
from minivllm.actors.transport.messages import EngineSnapshot
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.stats import EngineStats, RejectionReason
from tests.conftest import Served

ROOT = Path(__file__).parents[1]
DEFAULT_ADDRESS = "http://127.0.0.1:8000"
README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def as_written(value: Any) -> str:
    """Returns a default as written in YAML."""
    return value if isinstance(value, str) else json.dumps(value)


def test_configuration_tables_list_every_argument_with_its_default() -> None:
    section = CONFIGURATION.split("\n## Settings\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE)
    expected = [
        (name, as_written(field.get_default(call_default_factory=True))) for name, field in AppArgs.model_fields.items()
    ]
    assert rows == expected


def test_yaml_examples_use_existing_arguments() -> None:
    examples = code_blocks("yaml") + code_blocks("yaml", CONFIGURATION)
    assert examples
    for example in examples:
        for application in yaml.safe_load(example)["applications"]:
            AppArgs(**application["args"])
            for deployment in application.get("deployments", []):
                assert deployment["name"] == "Engine"
                LiveSettings(**deployment["user_config"])
            module, attribute = application["import_path"].split(":")
            assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("source", code_blocks("python"))
def test_python_examples_use_existing_names(source: str) -> None:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {missing}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SamplingParams":
            SamplingParams(**{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords})


def test_curl_example_sends_valid_json() -> None:
    bodies = re.findall(r"-d '(\{.*?\})'", "\n".join(code_blocks("bash")), flags=re.DOTALL)
    assert bodies
    for body in bodies:
        assert json.loads(body)["model"] == AppArgs().model


def test_curl_example_returns_an_answer(served: Served) -> None:
    [command] = code_blocks("bash")
    words = shlex.split(command.replace("\\\n", " ").replace(DEFAULT_ADDRESS, served.base_url))
    assert words[0] == "curl"
    options = list(zip(words[2::2], words[3::2], strict=True))
    headers = dict(value.split(": ", 1) for option, value in options if option == "-H")
    [body] = [value for option, value in options if option == "-d"]
    answer = httpx.post(words[1], headers=headers, content=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("source", code_blocks("python"))
def test_python_examples_run_without_errors(source: str, served: Served) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source.replace(DEFAULT_ADDRESS, served.base_url)],
        # RAY_ADDRESS: `address="auto"` is ambiguous where several Rays run. OMP_WAIT_POLICY: the example shares
        # the cores with the application, so its threads must not spin while they wait for each other.
        env={**os.environ, "RAY_ADDRESS": served.cluster.address, "OMP_WAIT_POLICY": "passive"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "capital of France" in source:
        assert "Paris" in done.stdout


def test_readme_has_fewer_than_200_lines() -> None:
    assert README.count("\n") < 200


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "docs/operations.md", "docs/benchmarks.md"])
def test_links_point_to_existing_files(name: str) -> None:
    page = ROOT / name
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text())
    assert targets
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_documented_handle_calls_return_values(served: Served) -> None:
    section = OPERATIONS.split("\n## Health, metrics and the state of the KV cache\n")[1].split("\n## ")[0]
    questions = re.findall(r"^\| `((?:handle|serve)\..*?)` \|", section, flags=re.MULTILINE)
    assert len(questions) == 3
    for question in questions:
        assert eval(question, {"handle": served.handle, "serve": serve}).result(timeout_s=60)


def test_documented_metrics_are_exported() -> None:
    named = set(re.findall(r"`(minivllm_\w+)`", OPERATIONS))
    exported = render_prometheus(EngineSnapshot(EngineStats()))
    assert named
    assert not [name for name in named if not re.search(rf"^{name}(?:\{{| )", exported, flags=re.MULTILINE)]


def test_every_rejection_reason_is_documented() -> None:
    section = OPERATIONS.split("\n## Why a request waits or is rejected\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", section, flags=re.MULTILINE) == list(RejectionReason)
