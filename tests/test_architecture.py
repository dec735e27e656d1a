"""ARCHITECTURE.md lists every module and every dependency, and names only existing files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_architecture_lists_every_module() -> None:
    package = ROOT / "minivllm"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py") if path.name != "__init__.py"}
    assert re.findall(r"^\| `(\S+\.py)` \|", section("Modules"), flags=re.MULTILINE)
    listed = set(re.findall(r"^\| `(\S+\.py)` \|", section("Modules"), flags=re.MULTILINE))
    assert sorted(modules - listed) == [], "not listed"
    assert sorted(listed - modules) == [], "listed, but missing"


def test_architecture_explains_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=]", line)[0] for line in project["dependencies"]}
    rows = re.findall(r"^\| (`.*?) \|", section("Dependencies"), flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(.*?)`", row)} == names


def test_files_named_in_architecture_exist() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|yaml|md|cpp))`", TEXT))
    package = ROOT / "minivllm"
    places = [ROOT, package, *(path for path in package.rglob("*") if path.is_dir())]
    assert not [name for name in names if not any((place / name).exists() for place in places)]
