"""JSON Schemas as grammars: what they accept equals what `jsonschema` calls valid, or they are refused by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.actors.openai.protocol.requests import ChatCompletionRequest
from minivllm.actors.openai.tools.tools import ToolUse
from minivllm.core.config import EngineConfig
from minivllm.core.errors import InvalidRequestError
from minivllm.core.json_schema import closed, normalized
from minivllm.core.sampling.structured_output import GrammarCompiler
from minivllm.core.sampling_params import StructuredOutput
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EngineConfig())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, 49152, tokenizer.eos_token_ids)


class Acceptor:
    """Tells whether a grammar accepts a text. Raises InvalidRequestError for a grammar that is refused."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: StructuredOutput) -> None:
        self._tokenizer = tokenizer
        self._matcher = compiler.compile(grammar)

    def __call__(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        matcher = self._matcher.deep_copy()
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def json_schema(schema: Any) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=json.dumps(schema))


def tool_use(choice: Any, *schemas: Any, **fields: Any) -> ToolUse:
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice, **fields}
    return ToolUse(ChatCompletionRequest.model_validate(body), "")


NAMED = {"type": "function", "function": {"name": "f0"}}
OTHER = {"type": "object", "properties": {"z": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"const": "other"}}}
"""Parameters of a second tool, whose `$defs` have the same names as those of the first."""


def forms(compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any) -> dict[str, Any]:
    """Returns, for each way to ask for a value of the schema, whether it is accepted, as a function of its text."""
    respond = Acceptor(compiler, tokenizer, json_schema(schema))
    named = Acceptor(compiler, tokenizer, tool_use(NAMED, schema).grammar())
    required = Acceptor(compiler, tokenizer, tool_use("required", schema, OTHER).grammar())
    return {
        "response_format": respond,
        "named tool": named,
        "required tool": lambda text: required(f'{{"name": "f0", "arguments": {text}}}'),
    }


def an_object(properties: Any = None, **keywords: Any) -> Schema:
    return {"type": "object", "properties": {"a": {"type": "string"}} if properties is None else properties, **keywords}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TREE = an_object({"v": NUMBER, "kids": {"type": "array", "items": {"$ref": "#"}}}, required=["v"])
LINK = an_object({"n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}})
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

PETS = {
    "Pet": {"discriminator": {"propertyName": "k"}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]},
    "Cat": an_object({"k": {"const": "cat"}, "m": NUMBER}, required=["k", "m"]),
    "Dog": an_object({"k": {"enum": ["dog"]}, "friend": {"$ref": "#/$defs/Pet"}}, required=["k"]),
}

# schema, values that it must accept, values that it must reject
TABLE: list[tuple[Any, list[Any], list[Any]]] = [
    # references
    (TREE, [{"v": 1}, {"v": 1, "kids": [{"v": 2, "kids": []}]}], [{}, {"v": 1, "kids": [{"name": "f0"}]}]),
    (an_object({"a": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": TEXT}}), [{"a": "x"}], [{"a": 1}]),
    (an_object({"a": {"$ref": "#/definitions/A"}}, definitions={"A": TEXT}), [{"a": "x"}], [{"a": 1}]),
    ({"$ref": "#/$defs/N", "$defs": {"N": LINK}}, [{"n": {"n": None}}], [{"n": 1}, {"n": {"n": 2}}]),
    (
        {"$schema": DRAFT_7, "$ref": "#/definitions/N", "definitions": {"N": an_object(required=["a"])}},
        [{"a": "x"}],
        [{}, {"a": 1}],
    ),
    (an_object({"a": NUMBER, "b": {"$ref": "#/properties/a"}}), [{"a": 1, "b": 2}], [{"a": 1, "b": "x"}]),
    (an_object({"a/b": NUMBER, "~": {"$ref": "#/properties/a~1b"}}), [{"a/b": 1, "~": 2}], [{"~": "x"}]),
    (an_object({"a": {"$ref": "#/$defs/x%20y"}}, **{"$defs": {"x y": TEXT}}), [{"a": "x"}], [{"a": 1}]),
    (an_object({"a": {"$ref": "#A"}}, **{"$defs": {"A": {"$anchor": "A", **TEXT}}}), [{"a": "x"}], [{"a": 1}]),
    (
        an_object({"a": {"$ref": "#/components/A"}}, components={"A": {**TEXT, "maxLength": 1.0}}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
    (
        an_object({"a": {"$ref": "https://x/y#/$defs/A"}}, **{"$id": "https://x/y", "$defs": {"A": TEXT}}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
    # objects that other subschemas complete
    (
        an_object(anyOf=[{"properties": {n: NUMBER}, "required": [n]} for n in "bc"]),
        [{"a": "x", "b": 1}, {"b": 1}],
        [{"a": "x"}, {"a": "x", "b": "y"}],
    ),
    (an_object(required=["b"]), [{"a": "x", "b": 1}], [{"a": "x"}]),
    (
        an_object(**{"$ref": "#/$defs/B", "$defs": {"B": an_object({"b": NUMBER}, required=["b"])}}),
        [{"a": "x", "b": 1}],
        [{"a": "x"}, {"b": "x"}],
    ),
    (
        {"allOf": [{"$ref": "#/$defs/B"}, an_object()], "$defs": {"B": an_object({"b": NUMBER}, required=["b"])}},
        [{"b": 1, "a": "x"}],
        [{"a": "x"}],
    ),
    (
        an_object({"s": an_object({"a": NUMBER})}, allOf=[an_object({"s": an_object({"b": NUMBER}, required=["b"])})]),
        [{"s": {"a": 1, "b": 2}}],
        [{"s": {"a": 1}}],
    ),
    (
        an_object({"s": {"anyOf": [an_object(required=["a"]), an_object({"b": NUMBER}, required=["b"])]}}),
        [{"s": {"a": "x"}}, {"s": {"b": 1}}],
        [{"s": {}}, {"s": {"a": 1}}],
    ),
    ({"oneOf": [an_object({"k": {"const": k}}, required=["k"]) for k in "xy"]}, [{"k": "x"}], [{"k": "z"}, {}]),
    (
        an_object({"a": TEXT, "b": NUMBER}, oneOf=[{"required": ["b"]}, {"required": ["a"]}]),
        [{"a": "x"}, {"b": 1}],
        [{}, {"a": "x", "b": 1}, {"a": 1}],
    ),
    (
        an_object({"pet": {"$ref": "#/$defs/Pet"}}, **{"$defs": PETS}),
        [{"pet": {"k": "cat", "m": 1}}, {"pet": {"k": "dog", "friend": {"k": "dog"}}}],
        [{"pet": {"k": "cat"}}, {"pet": {"k": "cow"}}, {"pet": {"k": "dog", "friend": {"k": "cat"}}}],
    ),
    (
        an_object({"a": {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}, **{"$defs": {"A": TEXT}}),
        [{"a": None}, {"a": "x"}],
        [{"a": 1}],
    ),
    (an_object(patternProperties={"^b": NUMBER}), [{"a": "x", "b1": 1}], [{"b1": "x"}]),
    (an_object({"m": {"type": "object", "additionalProperties": NUMBER}}), [{"m": {"x": 1}}], [{"m": {"x": "y"}}]),
    # annotations and what asks for nothing
    (an_object({"a": {**TEXT, "format": "color"}}), [{"a": "x"}], [{"a": 1}]),
    (an_object({"format": {"const": "color"}, "uniqueItems": NUMBER}), [{"format": "color"}], [{"format": "x"}]),
    (an_object({"a": {"type": "array", "items": NUMBER, "uniqueItems": False}}), [{"a": [1, 1]}], [{"a": ["x"]}]),
    (an_object(unevaluatedProperties=True, propertyNames={}, dependentRequired={}), [{"a": "x"}], [{"a": 1}]),
    (an_object({"a": {"not": False}}, then=False), [{"a": 1}], []),
    (an_object({"a": {"if": False}}, dependencies={}, dependentSchemas={}), [{"a": 1}], []),
    (
        an_object({"a": {**TEXT, "enum": None, "pattern": None, "maxLength": None}}, required=None),
        [{"a": "x"}],
        [{"a": 1}],
    ),
    (an_object({"a": {"const": None}}), [{"a": None}], [{"a": 1}]),
    (an_object({"a": {"enum": ["x", None]}}), [{"a": None}, {"a": "x"}], [{"a": 1}]),
    (an_object({"a": {"enum": [{"uniqueItems": False}]}}), [{"a": {"uniqueItems": False}}], [{"a": {}}]),
    (an_object(unevaluatedProperties=False), [{"a": "x"}], [{"b": 1}]),
    (
        an_object({"a": {"prefixItems": [NUMBER], "items": False, "additionalItems": False}}),
        [{"a": [1]}],
        [{"a": ["x"]}],
    ),
    # numbers
    (an_object({"a": {"type": "array", "items": NUMBER, "minItems": 1.0, "maxItems": 2.0}}), [{"a": [1]}], [{"a": []}]),
    (an_object({"a": {**TEXT, "minLength": 2.0, "maxLength": 4.0}}), [{"a": "abcd"}], [{"a": "x"}, {"a": "abcde"}]),
    (an_object({"a": {**NUMBER, "minimum": 1.0, "maximum": 3.0}}), [{"a": 3}], [{"a": 0}, {"a": 4}]),
    (an_object({"a": {**TEXT, "maxLength": 2**53}}), [{"a": "abcd"}], [{"a": 1}]),
    (an_object({"a": {**NUMBER, "multipleOf": 2.0}}), [{"a": 4}], [{"a": 3}]),
    (an_object({"a": {**NUMBER, "const": 4.0}}), [{"a": 4}], [{"a": 5}]),
    (an_object({"a": {**NUMBER, "enum": [1.0, 2]}}), [{"a": 1}, {"a": 2}], [{"a": 3}]),
    (an_object({"a": {**NUMBER, "maximum": 2**63 - 1}}), [{"a": 7}], [{"a": 2**63}]),
    (an_object({"a": {**NUMBER, "exclusiveMinimum": 3}}), [{"a": 4}], [{"a": 3}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), TABLE, ids=lambda value: json.dumps(value)[:60])
def test_schema_means_the_same_as_an_answer_and_as_arguments_of_a_tool(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Schema, good: list[Any], bad: list[Any]
) -> None:
    given_schema = copy.deepcopy(schema)
    for form, accepts in forms(compiler, tokenizer, schema).items():
        for value in good:
            assert accepts(json.dumps(value)), (form, value)
        for value in bad:
            assert not accepts(json.dumps(value)), (form, value)
    assert schema == given_schema


@pytest.mark.parametrize(
    ("keywords", "name"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "integer"}}, "contains"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if"),
        ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"oneOf": [{"required": ["b"]}, {"maxProperties": 1}]}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [an_object({"a": NUMBER}), an_object({"b": NUMBER})]}, "oneOf"),
        ({"$dynamicRef": "#x"}, "dynamicRef"),
        ({"type": None}, "type"),
        ({"maxLength": 1.5}, "maxLength"),
        ({"minItems": -1}, "minItems"),
        ({"const": 2**53 + 1}, "too many digits"),
        ({"enum": [{"deep": [2**60 + 1]}]}, "too many digits"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_unsupported_keyword_is_refused_by_name(
    compiler: GrammarCompiler, tokenizer: Tokenizer, keywords: Schema, name: str
) -> None:
    schema = {"type": "object", "properties": {"p": keywords}}
    for grammar in (
        json_schema(schema),
        tool_use(NAMED, schema).grammar(),
        tool_use("required", schema, OTHER).grammar(),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            Acceptor(compiler, tokenizer, grammar)


KEYWORDS = "$anchor $defs $id $ref additionalProperties allOf anyOf const enum items oneOf properties required type"


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_malformed_schema_is_refused_or_compiled(compiler: GrammarCompiler, tokenizer: Tokenizer, keyword: str) -> None:
    for value in (5, "x", [1], [{}], {"a": 5}, None, True):
        part = {"type": "object", "properties": {"a": TEXT}, keyword: value}
        for schema in (part, an_object({"p": part}), {"oneOf": [part, {"type": "null"}]}):
            with contextlib.suppress(InvalidRequestError):
                forms(compiler, tokenizer, schema)
            with contextlib.suppress(InvalidRequestError):
                answer = tool_use("auto", schema).or_calls(json_schema(schema), lambda _: False)
                Acceptor(compiler, tokenizer, answer)


def test_nested_id_is_refused_for_tools() -> None:
    schema = an_object({"a": {"$id": "https://x/a", "$ref": "#/$defs/A", "$defs": {"A": TEXT}}})
    with pytest.raises(InvalidRequestError, match="f0") as caught:
        tool_use("required", schema).grammar()
    assert caught.value.param == "tools"


def test_objects_of_tools_are_closed_where_that_only_leaves_properties_out() -> None:
    inner = an_object({"b": NUMBER})
    schema = an_object({"s": inner, "l": {"type": "array", "items": inner}, "r": {"$ref": "#/$defs/D"}})
    schema["$defs"] = {"D": copy.deepcopy(inner), "E": copy.deepcopy(inner)}
    result = closed(schema)
    assert result["additionalProperties"] is False
    assert result["properties"]["s"]["additionalProperties"] is False
    assert result["$defs"]["D"]["additionalProperties"] is False
    for keywords in ({"additionalProperties": True}, {"minProperties": 2}, {"const": {"z": 1}}, {"required": ["z"]}):
        assert closed({**inner, **keywords}) == {**inner, **keywords}


# ---- an answer or calls

CALL, LLAMA_CALL = '{"name": "f1", "arguments": {"x": 1}}', '{"name": "f1", "parameters": {"x": 1}}'
ANSWERS: list[tuple[StructuredOutput, str, str]] = [
    (json_schema(an_object(required=["a"], additionalProperties=False)), '{"a": "x"}', '{"b": "x"}'),
    (json_schema(TREE), '{"v": 1, "kids": [{"v": 2}]}', '{"v": 1, "kids": [{"name": "f0"}]}'),
    (StructuredOutput(kind="json_object"), '{"b": 1}', "[]"),
    (StructuredOutput(kind="regex", value=r"a/\d{2}"), "a/12", "a/x"),
    (StructuredOutput(kind="choice", value='["yes", "no \\"x\\""]'), 'no "x"', "maybe"),
]


@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS)
def test_answer_beside_tools_follows_its_grammar_or_is_a_call(
    answer: StructuredOutput, good: str, bad: str, has_tokens: bool
) -> None:
    tokenizer = load_tokenizer(EngineConfig())
    if has_tokens:
        tokenizer.hf_tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
        tokenizer = Tokenizer(tokenizer.hf_tokenizer)
    compiler = GrammarCompiler(lambda: tokenizer, 49152, tokenizer.eos_token_ids)
    schema = an_object()
    accepts = Acceptor(
        compiler, tokenizer, tool_use("auto", schema, schema).or_calls(answer, tokenizer.has_added_token)
    )
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    one = tool_use("auto", schema, schema, parallel_tool_calls=False)
    accepts_one = Acceptor(compiler, tokenizer, one.or_calls(answer, tokenizer.has_added_token))
    for text in (good, call):
        assert accepts(text), text
        assert accepts_one(text), text
    assert accepts(f"{call}\n{call}")
    for text in (
        bad,
        "Hello",
        "",
        f"{good}{call}",
        call.replace("f1", "f9"),
        f"{call}{good}",
        CALL.replace("f1", "f9"),
    ):
        if text != CALL.replace("f1", "f9") or answer.kind != "json_object":
            assert not accepts(text), text
    assert not accepts_one(f"{call}\n{call}")


def test_answer_beside_tools_of_a_llama_template_follows_its_grammar_or_is_a_call(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool_use(NAMED, {}, {}).tools[1]]}  # type: ignore[index]
    use = ToolUse(ChatCompletionRequest.model_validate(fields), "<|python_tag|>")
    answer = json_schema(an_object(required=["a"], additionalProperties=False))
    accepts = Acceptor(compiler, tokenizer, use.or_calls(answer, tokenizer.has_added_token))
    for text in ('{"a": "x"}', LLAMA_CALL, f"<|python_tag|>{LLAMA_CALL}", f"{LLAMA_CALL}; {LLAMA_CALL}"):
        assert accepts(text), text
    for text in ('{"b": "x"}', "Hello", CALL, LLAMA_CALL.replace("f1", "f9")):
        assert not accepts(text), text


def test_answer_without_visible_tools_keeps_its_grammar() -> None:
    answer = StructuredOutput(kind="json_object")
    assert tool_use("none", {}).or_calls(answer, lambda _: False) == answer


# ---- random schemas

NAMES = st.sampled_from(["a", "b", "format"])
VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 7, "a", "ab", "color"]),
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(NAMES, parts, max_size=2),
    max_leaves=4,
)


def objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    optional = {
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": st.booleans() | parts,
        "anyOf": st.lists(parts, min_size=1, max_size=2),
        "oneOf": st.lists(parts, min_size=1, max_size=2),
        "allOf": st.lists(parts, max_size=2),
        "$ref": st.sampled_from(["#", "#/$defs/D", "#/properties/a"]),
        "minProperties": st.sampled_from([0, 1.0, 2]),
        "type": st.just("object"),
    }
    return st.fixed_dictionaries({"properties": st.dictionaries(NAMES, parts, max_size=2)}, optional=optional)


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {},
            True,
            {"type": "integer", "minimum": 1.0},
            {"type": ["string", "null"], "maxLength": 1.0, "format": "color"},
            {"enum": ["a", 1, None]},
            {"$ref": "#/$defs/D"},
            {"$ref": "#"},
        ]
    ),
    lambda parts: objects(parts) | st.fixed_dictionaries({"type": st.just("array"), "items": parts}),
    max_leaves=5,
)


def in_all_orders(value: Any) -> Iterator[Any]:
    """Yields the value with the properties of its objects in every order: a grammar allows the schema's only."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*[list(in_all_orders(item)) for item in value]))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            for items in itertools.product(*[list(in_all_orders(value[name])) for name in names]):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(objects(SCHEMAS), SCHEMAS, st.lists(VALUES | st.dictionaries(NAMES, VALUES, max_size=2), min_size=4, max_size=8))
def test_random_schema_accepts_exactly_the_valid_values_or_is_refused(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Schema, definition: Any, values: list[Any]
) -> None:
    schema = {"$defs": {"D": definition}, **schema}
    validator = jsonschema.Draft202012Validator(schema)
    try:
        accepted_by = forms(compiler, tokenizer, schema)
    except InvalidRequestError:
        return
    for value in values:
        try:
            is_valid = validator.is_valid(value)
        except RecursionError:
            continue
        texts = [json.dumps(same) for same in in_all_orders(value)]
        for form, accepts in accepted_by.items():
            is_accepted = any(accepts(text) for text in texts)
            if form == "response_format" or is_accepted:  # tools may reject properties that the schema does not list
                assert is_accepted == is_valid, (form, schema, value)


def test_normalized_schema_is_valid_for_the_same_values() -> None:
    for schema, good, bad in TABLE:
        if None in schema.values() or "null, " in json.dumps(schema):
            continue
        validator = jsonschema.Draft202012Validator(normalized(schema))
        assert all(validator.is_valid(value) for value in good), schema
        assert not any(validator.is_valid(value) for value in bad), schema
