"""Structured output on random logits: every answer follows its grammar."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from minivllm.core.config import EngineConfig
from minivllm.core.errors import InvalidRequestError, ModelLoadError, RequestFailedError
from minivllm.core.sampling import structured_output
from minivllm.core.sampling.sampler import Sampler
from minivllm.core.sampling.structured_output import MAX_REGEX_LENGTH
from minivllm.core.sampling_params import SamplingParams, StructuredOutput
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer

EOS = 2
VOCAB = 49152


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EngineConfig())


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(VOCAB, frozenset({EOS}), tokenizer=lambda: tokenizer)


def request(request_id: str, kind: str, value: Any = "", **params: Any) -> Sequence:
    text = value if isinstance(value, str) else json.dumps(value)
    structured = StructuredOutput(kind=kind, value=text)  # type: ignore[arg-type]
    return Sequence(request_id, [1], SamplingParams(max_tokens=None, structured_output=structured, **params))


def drive(
    sampler: Sampler,
    sequences: list[Sequence],
    steps: int,
    seed: int = 0,
    *,
    ahead: Callable[[int], bool] | None = None,
) -> dict[str, list[int]]:
    """Samples all from random logits until EOS; returns the output ids without EOS of the finished sequences."""
    generator = torch.Generator().manual_seed(seed)
    live, ended = list(sequences), {}
    for one in live:
        sampler.prepare(one)
    for step in range(steps):
        if not live:
            break
        if ahead is not None and ahead(step):
            sampler.start_bitmasks(live)
        # Shifted views of one row of noise: cheap, and different for each sequence.
        noise = torch.randn(VOCAB + len(sequences), generator=generator) * 2
        logits = torch.stack([noise[sequences.index(one) :][:VOCAB] for one in live])
        results = sampler.sample(logits, live)
        for one, result in zip(list(live), results, strict=True):
            assert result.error is None, result.error
            assert result.token_id is not None
            if result.token_id == EOS:
                ended[one.request_id] = one.output_token_ids
                live.remove(one)
                sampler.release(one)
            else:
                one.append_token(result.token_id)
    for one in live:
        sampler.release(one)
    return ended


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const", "pattern"]
    if depth < 2:
        kinds += ["array", "object", "object", "anyOf"]
    kind = chance.choice(kinds) if depth else "object"
    match kind:
        case "integer":
            low = chance.randrange(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(50)}
        case "string":
            return {"type": "string", "maxLength": chance.randrange(1, 12)}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(["^[a-f]{2,4}$", r"^\d{3}-\d{2}$", "^(yes|no)!?$"])}
        case "enum":
            return {"enum": chance.sample(["a", "b c", 'quo"te', 7, None, True, "né\n", 1.5], chance.randrange(1, 5))}
        case "const":
            return {"const": chance.choice(["fixed", 42, {"deep": [1]}, []])}
        case "array":
            low = chance.randrange(3)
            items = random_schema(chance, depth + 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + chance.randrange(3)}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(chance.randrange(1, 4))]}
        case "object":
            names = chance.sample(["name", "age", "tag list", "ключ", "x"], chance.randrange(1, 5))
            properties = {name: random_schema(chance, depth + 1) for name in names}
            required = [name for name in names if chance.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def test_answers_validate_against_random_schemas(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """Runs a hundred schemas in one batch, with masks precomputed on some steps only."""
    chance = random.Random(3)
    schemas = {f"{number}": random_schema(chance) for number in range(100)}
    sequences = [request(name, "json_schema", schema, seed=int(name)) for name, schema in schemas.items()]
    ended = drive(sampler, sequences, 600, ahead=lambda step: step % 3 != 1)
    assert set(ended) == set(schemas)
    for name, schema in schemas.items():
        jsonschema.validate(json.loads(tokenizer.decode(ended[name])), schema)


def test_json_object_mode_produces_an_object(sampler: Sampler, tokenizer: Tokenizer) -> None:
    # The bias favours closing characters, which random text rarely produces.
    closing = dict.fromkeys((tokenizer.encode("}")[0], tokenizer.encode('"')[0], EOS), 8.0)
    sequences = [request(f"{n}", "json_object", seed=n, logit_bias=closing) for n in range(8)]
    ended = drive(sampler, sequences, 300)
    assert len(ended) == 8
    assert all(isinstance(json.loads(tokenizer.decode(ids)), dict) for ids in ended.values())


@pytest.mark.parametrize(
    ("kind", "value", "matches"),
    [
        ("regex", r"[0-9]{3}-\d{2}(x|yy)?", lambda text: re.fullmatch(r"[0-9]{3}-[0-9]{2}(x|yy)?", text)),
        ("regex", "a/b|\u00e9{2}", lambda text: text in ("a/b", "\u00e9\u00e9")),
        ("choice", ["yes", 'quo"te', "né\n\t\\ /x/", "yes and more"], None),
        ("grammar", 'start: "a" b+\nb: /[0-9]/ "," ', lambda text: re.fullmatch(r"a([0-9],)+", text)),
    ],
    ids=["regex", "regex with escapes", "choice", "grammar"],
)
def test_answers_match_their_regex_choice_or_grammar(
    sampler: Sampler, tokenizer: Tokenizer, kind: str, value: Any, matches: Callable[[str], Any] | None
) -> None:
    sequences = [request(f"{n}", kind, value, seed=n) for n in range(20)]
    texts = {tokenizer.decode(ids) for ids in drive(sampler, sequences, 200).values()}
    assert len(texts) > 1
    for text in texts:
        assert matches(text) if matches else text in value


def test_precomputed_masks_do_not_change_the_tokens(sampler: Sampler) -> None:
    schema = random_schema(random.Random(8))
    runs = [
        drive(sampler, [request(f"{n}", "json_schema", schema, seed=n) for n in range(4)], 200, ahead=ahead)
        for ahead in (None, lambda _: True)
    ]
    assert runs[0] == runs[1] != {}


def test_stale_precomputed_mask_is_not_used(sampler: Sampler, tokenizer: Tokenizer) -> None:
    one = request("late", "choice", ["ab", "cd"], temperature=0.0)
    sampler.prepare(one)
    sampler.start_bitmasks([one])
    one.append_token(tokenizer.encode("c")[0])
    result = sampler.sample(torch.zeros(1, VOCAB), [one])[0]
    assert tokenizer.decode([result.token_id or 0]) == "d"
    sampler.release(one)


def test_matcher_state_is_rebuilt_from_the_output_tokens(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """Covers a sequence whose state was dropped, and a batch that is sampled again row by row."""
    one = request("resumed", "choice", ["abc", "xyz"], temperature=0.0)
    for token in tokenizer.encode("xy"):
        one.append_token(token)
    logits = torch.zeros(1, VOCAB)
    sampler.prepare(one)
    first = sampler.sample(logits, [one])[0].token_id
    assert sampler.sample(logits, [one])[0].token_id == first
    assert tokenizer.decode([first or 0]) == "z"
    sampler.release(one)


def test_only_eos_is_allowed_after_the_grammar_ends(sampler: Sampler, tokenizer: Tokenizer) -> None:
    logits = torch.zeros(1, VOCAB)
    for params in ({"min_tokens": 50}, {"ignore_eos": True}):
        one = request("done", "choice", ["ab"], temperature=0.0, **params)
        for token in tokenizer.encode("ab"):
            one.append_token(token)
        sampler.prepare(one)
        for _ in range(3):
            assert sampler.sample(logits, [one])[0].token_id == EOS
            one.append_token(EOS)
        sampler.release(one)


def test_output_outside_the_grammar_fails_only_its_row(sampler: Sampler, tokenizer: Tokenizer) -> None:
    rows = [
        request("bad", "choice", ["ab"]),
        request("good", "choice", ["ab"]),
        Sequence("plain", [1], SamplingParams(temperature=0.0)),
    ]
    for one in rows:
        sampler.prepare(one)
    rows[0].append_token(tokenizer.encode("Q")[0])
    for ahead in (False, True):
        if ahead:
            sampler.start_bitmasks(rows)
        results = sampler.sample(torch.zeros(3, VOCAB), rows)
        assert isinstance(results[0].error, RequestFailedError)
        assert tokenizer.decode([results[1].token_id or 0]) in ("a", "ab")
        assert results[2].token_id == 0
    for one in rows:
        sampler.release(one)


def test_thousand_optional_properties_are_supported(sampler: Sampler) -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(1000)}
    drive(sampler, [request("many", "json_schema", {"type": "object", "properties": properties})], 10)


@pytest.mark.parametrize("ahead", [False, True], ids=["mask on demand", "mask precomputed"])
def test_too_complex_grammar_is_an_invalid_request(sampler: Sampler, ahead: bool) -> None:
    one = request("r", "regex", "((a{100}){100}){100}")
    error: BaseException | None = None
    try:
        sampler.prepare(one)
    except InvalidRequestError as refusal:
        error = refusal
    if error is None:
        if ahead:
            sampler.start_bitmasks([one])
        error = sampler.sample(torch.zeros(1, VOCAB), [one])[0].error
    assert isinstance(error, InvalidRequestError)
    assert error.param == "structured_outputs"
    assert "non-verbose" not in error.message
    sampler.release(one)


@pytest.mark.parametrize(
    ("kind", "value", "param"),
    [
        ("json_schema", "{", "response_format"),
        ("json_schema", "[]", "response_format"),
        ("json_schema", "false", "response_format"),
        ("json_schema", {"type": "strng"}, "response_format"),
        ("json_schema", {"type": "object", "properties": 5}, "response_format"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "response_format"),
        ("json_schema", {"$ref": "http://localhost/schema"}, "response_format"),
        ("json_schema", {"$ref": "#"}, "response_format"),
        ("json_schema", {"type": "string", "pattern": "("}, "response_format"),
        ("json_schema", {"type": "string", "minLength": 3, "maxLength": 1}, "response_format"),
        ("json_schema", {"type": "string", "pattern": "a" * (MAX_REGEX_LENGTH + 1)}, "response_format"),
        ("json_schema", '{"items":' * 3000 + "{}" + "}" * 3000, "response_format"),
        ("regex", "(", "structured_outputs"),
        ("regex", "(?=look)ahead", "structured_outputs"),
        ("regex", "a{1000000}", "structured_outputs"),
        ("json_schema", {"type": "string", "pattern": "^a{3,20000}$"}, "response_format"),
        ("regex", ".*" * MAX_REGEX_LENGTH, "structured_outputs"),
        ("regex", "[^\\x00-\\U0010ffff]", "structured_outputs"),
        ("choice", "[]", "structured_outputs"),
        ("choice", '["a", 1]', "structured_outputs"),
        ("choice", '{"a": 1}', "structured_outputs"),
        ("grammar", "nothing like a grammar", "structured_outputs"),
        ("grammar", "start: missing", "structured_outputs"),
        ("grammar", 'start: start "a"', "structured_outputs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_grammar_is_rejected_by_field_and_leaves_no_state(
    sampler: Sampler, kind: str, value: Any, param: str
) -> None:
    refused = request("refused", kind, value)
    with pytest.raises(InvalidRequestError) as caught:
        sampler.prepare(refused)
    assert caught.value.param == param
    assert len(str(caught.value)) < 400
    assert refused.sampler_state is None


def no_tokenizer() -> Tokenizer:
    raise ModelLoadError("no tokenizer")


@pytest.mark.parametrize("source", [None, no_tokenizer])
def test_sampler_without_a_tokenizer_rejects_only_structured_output(source: Any) -> None:
    sampler = Sampler(100, frozenset({EOS}), tokenizer=source)
    sampler.warm_up()
    with pytest.raises(InvalidRequestError):
        sampler.prepare(request("r", "json_object"))
    plain = Sequence("plain", [1], SamplingParams(temperature=0.0))
    sampler.prepare(plain)
    assert sampler.sample(torch.zeros(1, 100), [plain])[0].token_id == 0


def test_precompiled_grammar_is_not_compiled_again(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = request("ahead", "regex", "ahead-[0-9]{3}")
    sampler.precompile(sequence.sampling_params)
    monkeypatch.setattr(structured_output, "_grammar", None)  # calling it would fail
    sampler.prepare(sequence)
    sampler.release(sequence)
