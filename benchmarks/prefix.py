"""Shared prefixes: 64 requests with 400 common tokens, prefix caching on and off, and with a peer.

python -m benchmarks.prefix [--peer-python PATH --peer-model FOLDER]
"""

from __future__ import annotations

from benchmarks.common import arguments, print_environment, quiet, run_ours, run_peer, shared_work, write_json
from benchmarks.throughput import report


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    print_environment()
    requests = shared_work()
    found = []
    for caching in (True, False):
        with quiet():
            found.append(run_ours("shared", requests, 1, dtype="bfloat16", enable_prefix_caching=caching))
    if options.peer_python:
        found.append(run_peer("vllm", options.peer_python, options.peer_model, "shared", requests, prefix_caching=True))
    report(found)
    write_json(options.json, "prefix", found)


if __name__ == "__main__":
    main()
