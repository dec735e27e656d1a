"""The files under deploy/ and serve_config.yaml, checked without a cluster."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.schema import ServeDeploySchema

from minivllm.actors.config import AppArgs
from minivllm.actors.metrics.prometheus import render_prometheus
from minivllm.actors.transport.messages import EngineSnapshot, empty_histograms
from minivllm.core.stats import EngineStats

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/minivllm.json"
RAY_SERVICE = yaml.safe_load((DEPLOY / "kuberay/rayservice.yaml").read_text())

SERVE_CONFIGS = {
    "serve_config.yaml": yaml.safe_load((ROOT / "serve_config.yaml").read_text()),
    "deploy/serve_config.yaml": yaml.safe_load((DEPLOY / "serve_config.yaml").read_text()),
    "deploy/kuberay/rayservice.yaml": yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"]),
}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Returns label values by exported sample name (`_total` and `_bucket` included)."""
    text = render_prometheus(EngineSnapshot(EngineStats(), engine_id="1", histograms=empty_histograms()))
    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels.values())
    return samples


def expressions(value: Any) -> list[str]:
    """Returns every PromQL expression of a dashboard or rule file."""
    if isinstance(value, list):
        return [found for item in value for found in expressions(item)]
    if isinstance(value, dict):
        own = [value["expr"]] if isinstance(value.get("expr"), str) else []
        return own + [found for item in value.values() for found in expressions(item)]
    return []


@pytest.mark.parametrize("name", SERVE_CONFIGS)
def test_configurations_are_valid_for_serve_and_the_application(name: str) -> None:
    config = ServeDeploySchema.model_validate(SERVE_CONFIGS[name])
    (application,) = config.applications
    assert application.name == "minivllm"
    assert application.import_path == "minivllm.actors.app:build_app"
    assert AppArgs(**application.args).model


def test_configurations_contain_only_keys_known_to_serve() -> None:
    """Serve drops unknown keys silently."""
    for config in SERVE_CONFIGS.values():
        known = ServeDeploySchema.model_fields
        assert set(config) <= set(known)
        assert set(config["http_options"]) <= set(known["http_options"].annotation.model_fields)
        for application in config["applications"]:
            assert set(application) <= {"name", "route_prefix", "import_path", "args", "runtime_env", "deployments"}


def test_default_configuration_listens_on_localhost_only() -> None:
    config = SERVE_CONFIGS["serve_config.yaml"]
    assert config["http_options"]["host"] == "127.0.0.1"
    assert AppArgs(**config["applications"][0]["args"]).http_host == "127.0.0.1"


@pytest.mark.parametrize("name", SERVE_CONFIGS)
def test_configurations_open_one_port(name: str) -> None:
    assert SERVE_CONFIGS[name]["http_options"]["port"] == 8000
    assert AppArgs(**SERVE_CONFIGS[name]["applications"][0]["args"]).http_port is None


def test_kuberay_uses_the_installed_ray_version() -> None:
    assert RAY_SERVICE["apiVersion"] == "ray.io/v1"
    assert RAY_SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == importlib.metadata.version("ray")


@pytest.mark.parametrize("path", [DASHBOARD, DEPLOY / "alerts.yml"], ids=lambda path: path.name)
def test_dashboard_and_alerts_query_only_exported_metrics(path: Path, exported: dict[str, set[str]]) -> None:
    asked = expressions(yaml.safe_load(path.read_text()))
    assert asked
    for expression in asked:
        names = re.findall(r"\bminivllm_\w+", expression)
        assert names, f"{expression} queries no minivllm metric"
        for name in names:
            assert name in exported, f"{expression}: {name} is not exported"
        for name, value in re.findall(r"\b(minivllm_\w+)\{\w+=\"(\w+)\"\}", expression):
            assert value in exported[name], f"{expression}: {name} has no {value}"


def test_dashboard_shows_every_block_metric(exported: dict[str, set[str]]) -> None:
    text = DASHBOARD.read_text()
    about_blocks = [name for name in exported if re.search("kv_blocks|rejections|preemption|integrity", name)]
    assert about_blocks
    assert not [name for name in about_blocks if name not in text and not name.endswith("_created")]


def test_dashboard_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


def test_files_used_by_compose_and_dockerfile_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
    mounts = [mount.split(":")[0] for service in compose["services"].values() for mount in service.get("volumes", [])]
    folders = [DEPLOY / mount for mount in mounts if mount.startswith(".")]
    assert folders
    copies = re.findall(r"^COPY (.*) \S+$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    files = [ROOT / name for line in copies for name in line.split()]
    assert files
    assert not [path for path in folders + files if not path.exists()]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert not [path for path in files if f"!{path.relative_to(ROOT)}" not in ignored]
