"""LLM on a tiny random model with a byte-level tokenizer, whose tokens often split characters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.core.errors import EngineDeadError, InvalidRequestError, NeverFitsError
from minivllm.core.sampling_params import StructuredOutput
from minivllm.core.sequence import FinishReason, Sequence
from minivllm.core.text.detokenizer import IncrementalDetokenizer
from tests.core.text.text_kinds import TEXTS, tokenizer_of

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
PROMPTS = [*TEXTS, "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    hf_tokenizer = copy.deepcopy(tokenizer_of("byte_level").hf_tokenizer)
    hf_tokenizer.chat_template = TEMPLATE
    hf_tokenizer.save_pretrained(path)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(hf_tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=hf_tokenizer.bos_token_id,
        eos_token_id=hf_tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", num_blocks=64, block_size=8, validate_blocks=True)


@pytest.fixture
def llm(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """Returns the shared LLM; checks after each test that it is idle."""
    prepared: list[Sequence] = []
    runner = shared.engine.model_runner
    prepare = runner.prepare

    def record(sequence: Sequence) -> None:
        prepared.append(sequence)
        prepare(sequence)

    monkeypatch.setattr(runner, "prepare", record)
    yield shared
    assert not shared.engine.has_unfinished_requests()
    stats = shared.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_total_blocks)
    assert all(sequence.sampler_state is None for sequence in prepared)


def greedy(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def generate(llm: LLM, prompts: Any, params: Any = None, **options: Any) -> Any:
    return llm.generate(prompts, params, use_tqdm=False, **options)


@pytest.fixture(scope="module")
def expected(folder: Path, shared: LLM) -> list[list[int]]:
    """Returns the tokens that transformers generates, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([shared.tokenizer.encode(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


# -- results -------------------------------------------------------------------------------------


def test_greedy_text_equals_transformers_at_every_length(llm: LLM, expected: list[list[int]]) -> None:
    for cut in range(1, 25):
        for result, token_ids in zip(generate(llm, PROMPTS, greedy(cut)), expected, strict=True):
            assert result.token_ids == token_ids[:cut]
            assert result.text == llm.tokenizer.hf_tokenizer.decode(token_ids[:cut], skip_special_tokens=True)
            ended = cut >= len(token_ids) and token_ids[-1] == llm.tokenizer.eos_token_id
            assert result.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [greedy(24 - place, ignore_eos=True) for place in range(len(PROMPTS))]
    results = generate(llm, PROMPTS, params)
    assert [result.prompt for result in results] == PROMPTS
    assert [len(result.token_ids) for result in results] == [24 - place for place in range(len(PROMPTS))]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompts_are_strings_or_token_ids(llm: LLM, count: int) -> None:
    token_ids = [5, 6, 7]
    prompts = ["ab", token_ids, "cd"][:count]
    results = generate(llm, prompts, greedy(2))
    assert [result.prompt_token_ids for result in results] == [
        llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    assert len(generate(llm, "ab", greedy(2))) == 1
    assert generate(llm, token_ids, greedy(2))[0].prompt_token_ids == token_ids
    assert generate(llm, token_ids, greedy(2))[0].prompt is None


def test_chat_applies_the_chat_template(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    for messages in (talk, [talk]):
        (result,) = llm.chat(messages, greedy(3), use_tqdm=False)
        assert result.prompt == "<user>Hi:"
        assert result.prompt_token_ids == llm.tokenizer.encode("<user>Hi:", add_special_tokens=False)
    assert len(llm.chat([talk, talk], greedy(2), use_tqdm=False)) == 2


def test_sample_k_equals_a_request_with_seed_plus_k(llm: LLM) -> None:
    (result,) = generate(llm, "The", SamplingParams(n=4, seed=9, max_tokens=8))
    singles = [generate(llm, "The", SamplingParams(seed=9 + k, max_tokens=8))[0] for k in range(4)]
    assert [sample.index for sample in result.outputs] == [0, 1, 2, 3]
    assert [sample.token_ids for sample in result.outputs] == [single.token_ids for single in singles]
    assert len({sample.text for sample in result.outputs}) > 1


def test_logprobs_match_the_generated_tokens(llm: LLM) -> None:
    (result,) = generate(llm, "The", greedy(6, logprobs=2, ignore_eos=True))
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in result.logprobs)
    assert generate(llm, "The", greedy(2))[0].logprobs is None


def test_structured_output_follows_its_grammar(llm: LLM) -> None:
    choices = StructuredOutput(kind="choice", value='["yes", "no"]')
    for result in generate(llm, PROMPTS, SamplingParams(max_tokens=20, structured_output=choices)):
        assert result.text in ("yes", "no")
        assert result.finish_reason is FinishReason.STOP


# -- stopping ------------------------------------------------------------------------------------


def test_stop_string_ends_the_text_and_frees_the_blocks(llm: LLM) -> None:
    unstopped = generate(llm, PROMPTS, greedy(24, ignore_eos=True))
    stops = [result.text[4:7] for result in unstopped]
    params = [greedy(24, ignore_eos=True, stop=(stop,)) for stop in stops]
    for result, plain, stop in zip(generate(llm, PROMPTS, params), unstopped, stops, strict=True):
        assert result.text == plain.text[: plain.text.index(stop)]
        assert result.finish_reason is FinishReason.STOP
        assert result.outputs[0].stop_reason == stop
        assert result.outputs[0].num_tokens <= 24


def test_stop_string_that_is_a_special_token_ends_the_text(llm: LLM) -> None:
    token_id = llm.tokenizer.special_token_id("<|end|>")
    assert token_id is not None
    params = greedy(24, ignore_eos=True, stop=("<|end|>",), logit_bias={token_id: 100.0})
    result = generate(llm, "The", params)[0]
    assert (result.text, result.finish_reason) == ("", FinishReason.STOP)
    assert result.outputs[0].stop_reason == "<|end|>"
    assert result.outputs[0].num_tokens == 1


def test_end_of_turn_of_the_chat_template_ends_the_text(folder: Path, tmp_path: Path) -> None:
    hf_tokenizer = copy.deepcopy(tokenizer_of("byte_level").hf_tokenizer)
    hf_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<|end|>\n{% endfor %}"
    hf_tokenizer.save_pretrained(tmp_path)
    llm = LLM(str(folder), tokenizer=str(tmp_path), dtype="float32", device="cpu", num_blocks=16, block_size=8)
    bias = {hf_tokenizer.convert_tokens_to_ids("<|end|>"): 100.0}
    ended, ignored = generate(llm, ["The"] * 2, [greedy(logit_bias=bias), greedy(logit_bias=bias, ignore_eos=True)])
    assert (ended.text, ended.finish_reason, len(ended.token_ids)) == ("", FinishReason.STOP, 1)
    assert (ignored.finish_reason, len(ignored.token_ids)) == (FinishReason.LENGTH, 24)


def test_stop_string_ends_only_the_sample_that_contains_it(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=16, ignore_eos=True)
    plain = generate(llm, "The", params)[0].outputs
    stop = plain[1].text[2:5]
    stopped = generate(llm, "The", params.model_copy(update={"stop": (stop,)}))[0].outputs
    for sample, before in zip(stopped, plain, strict=True):
        assert sample.text == before.text.split(stop)[0]
    assert stopped[1].finish_reason is FinishReason.STOP


def test_streamed_deltas_join_to_the_text_of_generate(llm: LLM) -> None:
    params = greedy(24, stop=("e", "zq"), logprobs=0)
    results = generate(llm, PROMPTS, params)
    texts = {f"s{place}": IncrementalDetokenizer(llm.tokenizer, params) for place in range(len(PROMPTS))}
    joined = dict.fromkeys(texts, "")
    for request_id, prompt in zip(texts, PROMPTS, strict=True):
        llm.engine.add_request(request_id, llm.tokenizer.encode(prompt), params)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            delta = texts[output.request_id].push(
                output.new_token_ids,
                output.logprobs,
                finish_reason=output.finish_reason,
                stop_token_id=output.stop_token_id,
            )
            joined[output.request_id] += delta.text
            if delta.finish_reason is not None and not output.finished:
                llm.engine.abort_request(output.request_id)
    assert [joined[request_id] for request_id in texts] == [result.text for result in results]
    assert [text.token_ids for text in texts.values()] == [result.token_ids for result in results]
    assert [text.finish_reason for text in texts.values()] == [result.finish_reason for result in results]


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (["ok", ""], greedy(), "prompt"),
        (["ok", []], greedy(), "prompt"),
        ([], None, None),
        (["ok", [1, 10**6]], greedy(), "prompt"),
        (["ok", [1, -1]], greedy(), "prompt"),
        (["ok", [1, True]], greedy(), "prompt"),
        (["ok", 5.0], greedy(), "prompt"),
        (5, greedy(), "prompt"),
        (["ok", "\ud800"], greedy(), "prompt"),
        (["ok", "ok"], [greedy()], "sampling_params"),
        (["ok"], ["greedy"], "sampling_params"),
        (["ok", "ok"], [greedy(), greedy(logit_bias={10**6: 1.0})], "logit_bias"),
        (["ok", "ok"], [greedy(), greedy(stop_token_ids=(10**6,))], "stop_token_ids"),
        (
            ["ok", "ok"],
            [greedy(), greedy(structured_output=StructuredOutput(kind="json_schema", value='{"type": 5}'))],
            "response_format",
        ),
    ],
    ids=[
        "empty text",
        "no token ids",
        "no prompts",
        "token id too large",
        "token id negative",
        "token id of wrong type",
        "prompt of wrong type",
        "prompts of wrong type",
        "lone surrogate",
        "too few sampling params",
        "sampling params of wrong type",
        "logit_bias id too large",
        "stop token id too large",
        "invalid schema",
    ],
)
def test_bad_prompt_rejects_the_call_by_field_and_leaves_no_request(
    llm: LLM, prompts: Any, params: Any, field: str | None
) -> None:
    if field is None:
        assert generate(llm, prompts, params) == []
        return
    with pytest.raises(InvalidRequestError) as caught:
        generate(llm, prompts, params)
    assert caught.value.param == field
    assert not llm.engine.has_unfinished_requests()


def test_prompt_that_never_fits_is_rejected(llm: LLM) -> None:
    with pytest.raises(NeverFitsError):
        generate(llm, ["ok", [5] * 600], greedy())


def test_bad_messages_are_rejected_by_field(llm: LLM) -> None:
    for messages in ([], "hi", [{"role": "user", "content": 5}], [[{"role": "user"}], 5]):
        with pytest.raises(InvalidRequestError) as caught:
            llm.chat(messages, greedy(), use_tqdm=False)  # type: ignore[arg-type]
        assert caught.value.param == "messages"


def test_unknown_setting_is_rejected_by_name(folder: Path) -> None:
    with pytest.raises(ValidationError, match="blok_size"):
        LLM(str(folder), blok_size=8)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("in the caller's own code")], ids=repr)
def test_interrupted_call_aborts_all_of_its_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    push, calls = IncrementalDetokenizer.push, iter(range(100))

    def interrupted(self: IncrementalDetokenizer, *args: Any, **options: Any) -> Any:
        if next(calls) == 20:
            raise error
        return push(self, *args, **options)

    monkeypatch.setattr(IncrementalDetokenizer, "push", interrupted)
    with pytest.raises(type(error)):
        generate(llm, PROMPTS, greedy(24, ignore_eos=True))
    monkeypatch.undo()
    assert not llm.engine.has_unfinished_requests()
    assert len(generate(llm, PROMPTS, greedy(2))) == len(PROMPTS)


def test_failed_row_ends_only_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = llm.engine.model_runner.sampler
    sample = sampler.sample

    def spoiled(logits: torch.Tensor, sequences: list[Any]) -> Any:
        logits = logits.clone()
        for row, sequence in enumerate(sequences):
            if sequence.prompt_token_ids == [9, 9, 9] and len(sequence.output_token_ids) == 3:
                logits[row, 0] = float("nan")
        return sample(logits, sequences)

    monkeypatch.setattr(sampler, "sample", spoiled)
    plain, failed = generate(llm, [[8, 8], [9, 9, 9]], greedy(6, ignore_eos=True))
    assert plain.finish_reason is FinishReason.LENGTH
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.outputs[0].error is not None
    assert len(failed.token_ids) == 3


def test_more_prompts_than_max_waiting_requests_all_complete(folder: Path) -> None:
    small = LLM(str(folder), dtype="float32", device="cpu", num_blocks=64, max_waiting_requests=2, max_num_seqs=2)
    assert len(generate(small, PROMPTS, greedy(3))) == len(PROMPTS)


def test_failed_forward_pass_raises_engine_dead_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = LLM(str(folder), dtype="float32", device="cpu", num_blocks=64)

    def fails(step: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(doomed.engine.model_runner, "execute", fails)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            generate(doomed, PROMPTS, greedy(3))


# -- progress ------------------------------------------------------------------------------------


def test_progress_bar_shows_tokens_per_second_unless_disabled(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], greedy(3))
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown
    llm.generate(["a", "b"], greedy(3), use_tqdm=False)
    assert capsys.readouterr().err == ""


# -- the default model ---------------------------------------------------------------------------


def test_default_model_answers_the_capital_of_france() -> None:
    llm = LLM(device="cpu", num_blocks=16)
    (result,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], greedy(16), use_tqdm=False)
    assert result.text == "The capital of France is Paris."
    assert result.finish_reason is FinishReason.STOP
