"""Third-party clients against a running server: check.py BASE_URL [NAME ...]

Runs in .venv-compat; see run.py. Each check prints a line; the exit status is 0 when all pass.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
TASKS = Path(__file__).with_name("lm_eval_tasks")
FUZZING_S = int(os.environ.get("COMPAT_FUZZING_S", "60"))


def require(condition: object, what: object) -> None:
    if not condition:
        raise RuntimeError(f"does not hold: {what}")


def litellm_works(base_url: str) -> None:
    import litellm

    common: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{base_url}/v1", "api_key": "none"}
    answer = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=20, **common)
    require("Paris" in answer.choices[0].message.content, answer)
    require(answer.usage.total_tokens > 5, answer)
    chunks = litellm.completion(messages=MESSAGES, temperature=0, max_tokens=20, stream=True, **common)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    require(text == answer.choices[0].message.content, text)
    several = asyncio.run(litellm.acompletion(messages=MESSAGES, n=2, max_tokens=4, temperature=1, **common))
    require(len(several.choices) == 2, several)
    text_answer = litellm.text_completion(prompt="Once upon a time", max_tokens=5, **common)
    require(text_answer.choices[0].text, text_answer)
    try:
        litellm.completion(messages=MESSAGES, temperature=5, **common)
    except litellm.BadRequestError as error:
        require("temperature" in str(error), error)
    else:
        require(False, "a bad request is a BadRequestError")


def langchain_works(base_url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    class Capital(BaseModel):
        """A capital city and how large it is."""

        city: Literal["Paris", "Rome"]
        size: Literal["small", "large"]

    common: dict[str, Any] = {"model": MODEL, "base_url": f"{base_url}/v1", "api_key": "none", "temperature": 0}
    chat = ChatOpenAI(max_tokens=60, **common)
    answer = chat.invoke(QUESTION)
    require("Paris" in answer.content, answer)
    require(answer.usage_metadata and answer.usage_metadata["total_tokens"] > 5, answer)
    require("".join(chunk.content for chunk in chat.stream(QUESTION)) == answer.content, "stream joins to the answer")
    require(len(chat.batch([QUESTION, "Name a colour."])) == 2, "batches")
    by_schema = chat.with_structured_output(Capital, method="json_schema").invoke(QUESTION)
    require(isinstance(by_schema, Capital), by_schema)
    by_function = chat.with_structured_output(Capital, method="function_calling").invoke(QUESTION)
    require(isinstance(by_function, Capital), by_function)
    called = chat.bind_tools([Capital], tool_choice="any").invoke(QUESTION)
    require(called.tool_calls and called.tool_calls[0]["name"] == "Capital", called)
    require(OpenAI(max_tokens=5, **common).invoke("Once upon a time"), "completions")


def lm_eval_works(base_url: str) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        for task in TASKS.glob("*.yaml"):
            text = task.read_text().replace("DATA_FILE", str(TASKS / "capitals.jsonl"))
            (Path(folder) / task.name).write_text(text)
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": MODEL,
                "base_url": f"{base_url}/v1/completions",
                "num_concurrent": 3,
                "max_length": 256,
            },
            tasks=["capitals_choice", "capitals_generate"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            batch_size=2,
            bootstrap_iters=0,
        )
    scores = results["results"]
    print({task: {name: value for name, value in found.items() if "," in name} for task, found in scores.items()})
    # Misread log probabilities would score at chance level, one third.
    require(scores["capitals_choice"]["acc,none"] >= 0.6, scores)
    require(scores["capitals_generate"]["exact_match,stripped"] > 0, scores)


def schemathesis_finds_no_server_error(base_url: str) -> None:
    command = [
        str(Path(sys.executable).with_name("st")),
        "run",
        f"{base_url}/openapi.json",
        "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=60",
        f"--max-time={FUZZING_S}",
        "--request-timeout=120",
        "--continue-on-failure",
        "--suppress-health-check=all",
        "--warnings=off",
    ]
    require(subprocess.run(command, check=False).returncode == 0, "schemathesis finds nothing")


CHECKS: dict[str, Callable[[str], None]] = {
    "litellm": litellm_works,
    "langchain-openai": langchain_works,
    "lm-eval": lm_eval_works,
    "schemathesis": schemathesis_finds_no_server_error,
}


def main() -> int:
    base_url, *names = sys.argv[1:]
    failed = 0
    for name in names or CHECKS:
        start = time.monotonic()
        try:
            CHECKS[name](base_url)
            verdict = "PASS"
        except Exception:
            traceback.print_exc()
            verdict = "FAIL"
            failed += 1
        print(f"{verdict} {name} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    # The checks reach no host but the server.
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True", DO_NOT_TRACK="1"
    )
    os.environ.setdefault("OPENAI_API_KEY", "none")
    sys.exit(main())
