"""The C++ decoder against transformers in float32 for every supported model type, with its fallbacks."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from minivllm.core import native
from minivllm.core.config import EngineConfig
from minivllm.core.errors import ModelLoadError
from minivllm.core.models import backbone
from minivllm.core.models.quantization import PackedProjection, TorchInt8Projection
from minivllm.core.native.bindings import Workspace
from minivllm.core.native.packing import NumberFormat, check_amx, gemm, pack
from tests.engine.native.portable_library import library_with_amx, portable_library
from tests.engine.running import WatchedRun, greedy
from tests.engine.tiny_models import TINY, reference_logits, reference_model, save_tiny

PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 40)), "c": [9], "d": list(range(60, 20, -1))}
LLAMA_LIKE = [
    "llama",
    "llama-multi-query",
    "qwen2",
    "qwen2-window-in-upper-layers",
    "qwen3",
    "mistral",
    "mistral-window",
]
# Relative to the norm of the logits. transformers in bfloat16 has 2e-2 to 4e-2 on these models.
TOLERANCE = {None: 1.8e-2, "int8": 1.5e-1}
CPUS_WITHOUT_INTEGER_DOT = ["no integer dot products", "no compiler"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("native")
    return {name: save_tiny(make_config(), root / name) for name, make_config in TINY.items()}


@pytest.fixture(params=["this CPU", *CPUS_WITHOUT_INTEGER_DOT])
def int8_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL | None:
    """The native library that computes 8-bit products; None without a compiler."""
    if request.param == "no integer dot products":
        monkeypatch.setattr("minivllm.core.native.build._load", lambda: (portable_library(), None))
    elif request.param == "no compiler":
        monkeypatch.setattr("minivllm.core.native.build._load", lambda: (None, "there is no C++ compiler"))
    return native.library()


def settings(folder: Path, **changes: object) -> EngineConfig:
    values = {
        "model": str(folder),
        "dtype": "bfloat16",
        "device": "cpu",
        "num_threads": 2,
        "block_size": 16,
        "num_blocks": 40,
        "max_num_batched_tokens": 17,
    }
    return EngineConfig(**{**values, **changes})


def largest_error(run: WatchedRun, folder: Path) -> float:
    """Returns the largest relative error of the sampled logits, against float32 on the same bfloat16 weights."""
    reference = reference_model(folder, torch.bfloat16).float()
    worst = 0.0
    for request_id, prompt in PROMPTS.items():
        wanted = reference_logits(reference, prompt + run.tokens[request_id])[len(prompt) - 1 : -1]
        got = torch.stack(run.logits[request_id])
        worst = max(worst, float((got - wanted).norm() / wanted.norm()))
    return worst


def run_prompts(config: EngineConfig, prompts: dict[str, list[int]] = PROMPTS) -> WatchedRun:
    run = WatchedRun(config)
    for request_id, prompt in prompts.items():
        run.add(request_id, prompt, greedy(10))
    run.run()
    return run


@pytest.mark.parametrize(
    ("name", "quantization"), [(name, None) for name in LLAMA_LIKE] + [("qwen2", "int8"), ("qwen3", "int8")]
)
def test_llama_like_models_match_transformers(name, quantization, folders):
    run = run_prompts(settings(folders[name], quantization=quantization))
    assert run.engine.model_runner.backbone.name == "native"
    assert largest_error(run, folders[name]) < TOLERANCE[quantization]


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_portable_build_matches_transformers(quantization, folders, monkeypatch):
    monkeypatch.setattr("minivllm.core.native.build._load", lambda: (portable_library(), None))
    run = run_prompts(settings(folders["qwen3"], quantization=quantization))
    assert run.engine.model_runner.backbone.name == "native"
    assert largest_error(run, folders["qwen3"]) < TOLERANCE[quantization]


def test_int8_of_a_float32_model_matches_transformers(int8_cpu, folders):
    run = run_prompts(settings(folders["llama"], dtype="float32", quantization="int8"))
    assert run.engine.model_runner.backbone.name == ("native" if int8_cpu else "transformers")
    assert largest_error(run, folders["llama"]) < TOLERANCE["int8"]


@pytest.mark.parametrize(("name", "limit"), [("qwen2", 1.5e-1), ("qwen3", 1.5e-1), ("phi3", 2.5e-1)])
def test_int8_matches_transformers_on_every_cpu(name, limit, int8_cpu, folders):
    run = run_prompts(settings(folders[name], quantization="int8"))
    assert largest_error(run, folders[name]) < limit


def test_int8_does_not_change_the_embedding_of_a_tied_model(int8_cpu, tmp_path):
    config = LlamaConfig(**{**TINY["llama"]().to_dict(), "tie_word_embeddings": True, "architectures": None})
    run = run_prompts(settings(save_tiny(config, tmp_path), quantization="int8"))
    assert largest_error(run, tmp_path) < TOLERANCE["int8"]


@pytest.mark.parametrize("quantize", [TorchInt8Projection, partial(PackedProjection, number_format=NumberFormat.INT8)])
@pytest.mark.parametrize("bias", [False, True])
def test_int8_row_result_is_independent_of_the_batch(bias, quantize, monkeypatch):
    monkeypatch.setattr("minivllm.core.native.build._load", lambda: (portable_library(), None))
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(192, 97, bias=bias)
    torch.nn.init.normal_(linear.weight, generator=generator)
    projection, rows = quantize(linear), torch.randn(40, 192, generator=generator)
    rows[0] *= 1000
    with torch.inference_mode():
        together, wanted = projection(rows), linear(rows)
        alone = torch.cat([projection(row) for row in rows.split(1)])
    norms = wanted.norm(dim=1)
    assert ((together - alone).norm(dim=1) / norms).max() < 1e-6
    assert ((together - wanted).norm(dim=1) / norms).max() < LIMITS[NumberFormat.INT8]


@pytest.mark.parametrize("int8_cpu", CPUS_WITHOUT_INTEGER_DOT, indirect=True)
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_int8_log_probabilities_are_independent_of_the_batch(name, int8_cpu, tmp_path):
    """One prompt of the batch has activations far larger than those of the others."""
    model = reference_model(save_tiny(TINY[name](), tmp_path))
    loud = PROMPTS["c"][0]
    model.get_input_embeddings().weight.data[loud] = 0
    model.get_input_embeddings().weight.data[loud, 3] = 1000
    model.save_pretrained(tmp_path)
    config = settings(tmp_path, dtype="float32", quantization="int8")
    together = run_prompts(config)
    for request_id, prompt in PROMPTS.items():
        alone = run_prompts(config, {request_id: prompt})
        assert alone.tokens[request_id] == together.tokens[request_id]
        found, wanted = (torch.stack(run.logits[request_id]).log_softmax(-1) for run in (together, alone))
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4), (request_id, (found - wanted).abs().max())


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_every_block_size_matches_transformers(block_size, folders):
    run = run_prompts(settings(folders["qwen3"], block_size=block_size, num_blocks=400))
    assert largest_error(run, folders["qwen3"]) < TOLERANCE[None]


def test_projection_biases_are_applied(tmp_path):
    config = LlamaConfig(
        **{**TINY["llama"]().to_dict(), "attention_bias": True, "mlp_bias": True, "architectures": None}
    )
    save_tiny(config, tmp_path)
    model = reference_model(tmp_path)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    run = run_prompts(settings(tmp_path))
    assert run.engine.model_runner.backbone.name == "native"
    assert largest_error(run, tmp_path) < TOLERANCE[None]


@pytest.mark.parametrize(
    ("name", "quantization"), [("gemma2", None), ("phi3", None), ("gpt2", None), ("olmo2", None), ("phi3", "int8")]
)
def test_packed_projections_of_other_models_match_transformers(name, quantization, folders):
    run = run_prompts(settings(folders[name], quantization=quantization))
    assert run.engine.model_runner.backbone.name == "transformers"
    assert largest_error(run, folders[name]) < (3e-2 if quantization is None else 2.5e-1)


def test_compile_off_uses_the_transformers_decoder(folders):
    run = run_prompts(settings(folders["llama"], compile="off"))
    assert run.engine.model_runner.backbone.name == "transformers"
    assert largest_error(run, folders["llama"]) < 3e-2


def test_missing_compiler_falls_back_to_torch(folders, monkeypatch):
    """Decoder, attention and int8 run without the C++ library."""
    monkeypatch.setattr("minivllm.core.native.build._load", lambda: (None, "there is no C++ compiler"))
    for quantization in (None, "int8"):
        run = run_prompts(settings(folders["llama"], quantization=quantization))
        assert run.engine.model_runner.backbone.attention.name != "native"
        assert largest_error(run, folders["llama"]) < (3e-2 if quantization is None else 1.5e-1)


def test_failed_compilation_disables_the_library_and_is_reported(tmp_path, monkeypatch):
    from minivllm.core.native import build

    build._load.cache_clear()
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        assert build.library() is None
        assert "no space left" in str(build.why_not())
    finally:
        build._load.cache_clear()


LIMITS = {NumberFormat.FLOAT: 1e-6, NumberFormat.INT16: 1e-3, NumberFormat.INT8: 3e-2, NumberFormat.BFLOAT16: 4e-3}


@pytest.mark.parametrize(
    "make_library",
    [native.library, portable_library, library_with_amx],
    ids=["native build", "portable build", "AMX build"],
)
def test_packed_products_match_float64_at_every_size(make_library):
    """Covers every number format, and more threads than cores."""
    library = make_library()
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, 1, 4, 1), (2, 13, 64, 97), (1, 16, 192, 32), (2, 33, 128, 65), (5, 97, 36, 64), (3, 200, 576, 33))
    formats = [NumberFormat.FLOAT, NumberFormat.INT8]
    if library.minivllm_has_integer_dot():
        formats += [NumberFormat.INT16]
    if library.minivllm_has_amx():
        formats += [NumberFormat.BFLOAT16]
    try:
        for threads, rows, depth, width in sizes:
            torch.set_num_threads(threads)
            weight = torch.randn(width, depth, generator=generator).bfloat16().float()
            bias = torch.randn(width, generator=generator)
            states = torch.randn(rows, depth, generator=generator) * torch.rand(rows, 1, generator=generator) * 50
            wanted = states.double() @ weight.double().T + bias
            for number_format in formats:
                packed = pack(library, weight, bias, number_format)
                got = gemm(library, Workspace(library), packed, states)
                error = float((got - wanted).norm() / wanted.norm())
                assert error < LIMITS[number_format], (threads, rows, depth, width, number_format, error)
    finally:
        torch.set_num_threads(before)


def test_sleeping_threads_complete_every_stage():
    """Uses more threads than cores, and work items so long that waiting threads go to sleep."""
    library = native.library()
    before = torch.get_num_threads()
    states, weight = torch.randn(48, 1024), torch.randn(2048, 1024)
    try:
        torch.set_num_threads(6)
        workspace, packed = Workspace(library), pack(library, weight, None, NumberFormat.FLOAT)
        first = gemm(library, workspace, packed, states)
        assert all(torch.equal(gemm(library, workspace, packed, states), first) for _ in range(100))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_amx_build_matches_transformers(quantization, folders, monkeypatch):
    monkeypatch.setattr("minivllm.core.native.build._load", lambda: (library_with_amx(), None))
    assert backbone.number_format_for(torch.bfloat16, None) is NumberFormat.BFLOAT16
    run = run_prompts(settings(folders["qwen3"], quantization=quantization))
    assert run.engine.model_runner.backbone.name == "native"
    assert largest_error(run, folders["qwen3"]) < (3e-2 if quantization is None else TOLERANCE["int8"])


def test_faulty_amx_is_disabled(monkeypatch, caplog):
    class Broken:
        """Has AMX whose products write no result."""

        is_disabled = False

        def __getattr__(self, name):
            return getattr(library_with_amx(), name)

        def minivllm_gemm(self, *arguments):
            pass

        def minivllm_disable_amx(self):
            self.is_disabled = True

    broken = Broken()
    check_amx(broken)
    assert broken.is_disabled
    assert "AMX is disabled" in caplog.text
    check_amx(library_with_amx())
    assert library_with_amx().minivllm_has_amx()


def test_int16_products_do_not_overflow():
    """Covers the worst cases: all weights and activations at their limits, and outliers among small activations."""
    library = native.library()
    assert library is not None
    if not library.minivllm_has_integer_dot():
        assert backbone.number_format_for(torch.bfloat16, None) is not NumberFormat.INT16
        return
    outliers = torch.full((2, 4096), 0.3)
    outliers[:, 7] = 30.0
    for weight, states in (
        (torch.ones(32, 4096), torch.ones(3, 4096)),
        (-torch.ones(32, 4096), torch.ones(3, 4096)),
        (torch.ones(32, 4096), outliers),
        (torch.zeros(32, 4096), torch.zeros(1, 4096)),
    ):
        packed = pack(library, weight, None, NumberFormat.INT16)
        got = gemm(library, Workspace(library), packed, states)
        wanted = states.double() @ weight.double().T
        assert torch.allclose(got.double(), wanted, rtol=3e-3, atol=1e-9), (got[0, 0], wanted[0, 0])


def test_row_result_is_independent_of_the_batch():
    """A row gives bitwise the same result alone and in a batch."""
    library = library_with_amx()
    generator = torch.Generator().manual_seed(0)
    formats = [NumberFormat.BFLOAT16, *([NumberFormat.INT16] if library.minivllm_has_integer_dot() else [])]
    for number_format in formats:
        packed = pack(library, torch.randn(96, 128, generator=generator), None, number_format)
        states = torch.randn(50, 128, generator=generator)
        together = gemm(library, Workspace(library), packed, states)
        alone = torch.cat([gemm(library, Workspace(library), packed, row) for row in states.split(1)])
        assert torch.equal(together, alone)


def test_quantization_on_cuda_is_rejected(folders):
    config = settings(folders["llama"], quantization="int8")

    class OnCuda:
        device = torch.device("cuda")

    with pytest.raises(ModelLoadError, match="quantization"):
        backbone.choose_backbone(config, OnCuda(), None, None)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_default_dtype_of_the_caller_does_not_change_the_tokens(default, quantization, folders):
    check_default_dtype_is_ignored(default, settings(folders["llama"], quantization=quantization))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_of_the_caller_does_not_change_int8_tokens_on_every_cpu(default, int8_cpu, folders):
    check_default_dtype_is_ignored(default, settings(folders["llama"], quantization="int8"))


def check_default_dtype_is_ignored(default: torch.dtype, config: EngineConfig) -> None:
    expected = run_prompts(config)
    torch.set_default_dtype(default)
    try:
        found = run_prompts(config)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.tokens == expected.tokens


def test_models_in_two_threads_generate_the_same_tokens(folders):
    """Runs in a subprocess, since memory corruption would end the process."""
    program = f"""
import threading
from minivllm import EngineConfig, LLMEngine, SamplingParams

config = EngineConfig(model={str(folders["llama"])!r}, dtype="bfloat16", device="cpu", num_blocks=64)
found = []

def run():
    for _ in range(3):
        engine, tokens = LLMEngine(config), []
        engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        while engine.has_unfinished_requests():
            tokens += [output.new_token_ids for output in engine.step()]
        found.append(tokens)

threads = [threading.Thread(target=run) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 6 and all(one == found[0] for one in found), found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
