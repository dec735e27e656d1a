"""The import graph has no circle, imports between folders run one way, and ARCHITECTURE.md names what exists."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minivllm"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()

# The folders that each folder may import from, besides the modules directly in `core/`, which all may import.
ALLOWED_IMPORTS = {
    "core/kv_cache": set(),
    "core/scheduler": {"core/kv_cache"},
    "core/attention": set(),
    "core/native": {"core/attention"},
    "core/models": {"core/attention", "core/models/gguf", "core/native"},
    "core/models/gguf": set(),
    "core/text": {"core/models", "core/models/gguf"},
    "core/sampling": {"core/text"},
    "core/worker": {
        "core/attention",
        "core/models",
        "core/native",
        "core/sampling",
        "core/scheduler",
        "core/text",
    },
    "actors/transport": set(),
    "actors/metrics": {"actors/transport"},
    "actors/engine": {"actors/metrics", "actors/transport", "core/worker"},
    "actors/openai/protocol": set(),
    "actors/openai/tools": {"actors/openai/protocol"},
    "actors/openai/serving": {"actors/openai/protocol", "actors/openai/tools", "actors/transport", "core/text"},
    "actors/openai/http": {"actors/metrics", "actors/openai/protocol", "actors/openai/serving"},
    "actors/ingress": {
        "actors/openai/http",
        "actors/openai/protocol",
        "actors/openai/serving",
        "actors/transport",
        "core/text",
    },
}
TORCH_FREE = ("core/scheduler", "core/kv_cache")


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in PACKAGE.rglob("*.py")}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those under `if TYPE_CHECKING:`."""
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from runtime_nodes(child)


def imported_modules(path: Path, *, types_too: bool) -> Iterator[str]:
    """Names of all modules that a file imports, also inside its functions, and with `types_too` for annotations."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if types_too else runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules() else node.module


@cache
def imports(*, types_too: bool = False) -> dict[str, set[str]]:
    return {
        name: {found for found in imported_modules(path, types_too=types_too) if found in modules() and found != name}
        for name, path in modules().items()
    }


def folder(module: str) -> str:
    return str(modules()[module].parent.relative_to(PACKAGE))


def node(module: str) -> str:
    """A folder, or a module directly in `minivllm/`, `core/` or `actors/`."""
    place = folder(module)
    return str(modules()[module].relative_to(PACKAGE)) if place in (".", "core", "actors") else place


def test_modules_import_each_other_without_circles() -> None:
    graph = {name: found - {"minivllm"} for name, found in imports(types_too=True).items() if name != "minivllm"}
    list(TopologicalSorter(graph).static_order())


def test_folders_import_each_other_without_circles() -> None:
    graph: dict[str, set[str]] = {}
    for name, found in imports().items():
        graph.setdefault(node(name), set()).update({node(other) for other in found} - {node(name), "__init__.py"})
    list(TopologicalSorter(graph).static_order())


def test_folders_import_only_in_the_allowed_direction() -> None:
    wrong = [
        (name, other)
        for name, found in imports().items()
        for other in found
        if folder(name) in ALLOWED_IMPORTS
        and folder(other) in ALLOWED_IMPORTS
        and folder(name) != folder(other)
        and folder(other) not in ALLOWED_IMPORTS[folder(name)]
    ]
    assert wrong == []
    places = {folder(name) for name in modules()} - {".", "core", "actors", "actors/openai"}
    assert places == set(ALLOWED_IMPORTS)


def test_core_imports_nothing_from_actors() -> None:
    assert [name for name, found in imports().items() if name.startswith("minivllm.core") for other in found
            if other.startswith("minivllm.actors")] == []  # fmt: skip


@pytest.mark.parametrize("place", TORCH_FREE)
def test_scheduler_and_kv_cache_import_no_torch(place: str) -> None:
    for path in (PACKAGE / place).glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names}
        names |= {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
        assert not {name for name in names if name.split(".")[0] in ("torch", "ray", "transformers")}


def test_every_folder_has_a_row() -> None:
    rows = re.findall(r"^\| `([\w/]+)/` \|", section("Folders"), flags=re.MULTILINE)
    assert sorted(rows) == sorted({folder(name) for name in modules()} - {".", "actors/openai"})


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=]", line)[0] for line in project["dependencies"]}
    rows = re.findall(r"^\| (`.*?) \|", section("Dependencies"), flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(.*?)`", row)} == names


def test_files_named_in_the_text_exist() -> None:
    names = set(re.findall(r"`([\w/]+\.(?:py|yaml|md|cpp|hpp))`", TEXT))
    folders = [path for top in (PACKAGE, ROOT / "tests") for path in top.rglob("*") if path.is_dir()]
    places = [ROOT, PACKAGE, *folders]
    assert not [name for name in names if not any((place / name).exists() for place in places)]
