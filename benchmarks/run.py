"""Runs the short set of benchmarks, with ratios to the peers that are given or installed. `make bench` runs this.

    python -m benchmarks.run [--peer-python PATH --peer-model FOLDER] [--transformers-python PATH] [--llama FOLDER]

Without `--peer-python`, uses a vLLM under $MINIVLLM_PEERS (default ~/.cache/minivllm-peers) if there is one:
`vllm/bin/python`, and the default model as safetensors in `smollm2`.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.common import arguments, print_environment, write_json
from benchmarks.throughput import measure, peers_of, report


def installed_peer() -> tuple[str, str] | None:
    """Returns vLLM's Python and the model's folder if both exist."""
    folder = Path(os.environ.get("MINIVLLM_PEERS", Path.home() / ".cache" / "minivllm-peers"))
    python, model = folder / "vllm" / "bin" / "python", folder / "smollm2"
    return (str(python), str(model)) if python.exists() and model.exists() else None


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    found_peer = installed_peer()
    if options.peer_python is None and found_peer is not None:
        options.peer_python, options.peer_model = found_peer
    peers = peers_of(options)
    print_environment()
    if not peers and options.llama is None:
        print("no peer is installed; see --help")
    results = []
    for work in ("reference", "even", "shared", "one"):
        found = measure(
            work,
            quantizations=(None, "int8"),
            dtype="bfloat16",
            repeats=1,
            peers=peers,
            model=options.peer_model or "",
            llama=options.llama,
        )
        report(found)
        print()
        results += found
    write_json(options.json, "run", results)


if __name__ == "__main__":
    main()
