"""Random JSON schemas: every answer of a random model parses and validates."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema

COUNT = 100


def leaf(choose: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": 0, "maximum": choose.randint(1, 500)},
        {"enum": choose.sample(["red", "green", 7, None, True, "ß 你"], 3)},
        {"const": choose.choice(["fixed", 12, False])},
        {"type": "string", "maxLength": choose.randint(1, 6)},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
    ]
    return choose.choice(kinds)


def schema(choose: random.Random, depth: int = 2) -> dict[str, Any]:
    """Returns a small random schema with short answers."""
    kind = choose.random()
    if depth == 0 or kind < 0.25:
        return leaf(choose)
    if kind < 0.45:
        return {"type": "array", "items": schema(choose, depth - 1), "minItems": 0, "maxItems": choose.randint(1, 2)}
    if kind < 0.6:
        return {"anyOf": [schema(choose, depth - 1), leaf(choose)]}
    names = choose.sample(["a", "name", "x y", "größe", "z"], choose.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: schema(choose, depth - 1) for name in names},
        "required": choose.sample(names, choose.randint(0, len(names))),
        "additionalProperties": False,
    }


def test_answers_validate_against_random_schemas(client: httpx.Client) -> None:
    def ask(number: int) -> None:
        wanted = schema(random.Random(number))
        body = {
            "messages": [{"role": "user", "content": "Go."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}},
            "temperature": 1,
            "seed": number,
            "max_tokens": 400,
        }
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (wanted, answer.text)
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop", (wanted, choice)
        jsonschema.validate(json.loads(choice["message"]["content"]), wanted)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(COUNT)))
