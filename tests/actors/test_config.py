"""AppArgs and LiveSettings: validation errors name the argument and the reason."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from minivllm.actors.config import AppArgs, LiveSettings
from minivllm.core.config import EngineConfig


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("block_size", 0, "greater than or equal to 1"),
        ("block_size", "many", "valid integer"),
        ("model", "", "at least 1 character"),
        ("dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("watermark", 1.0, "less than 1"),
        ("gpu_memory_utilization", 1.5, "less than or equal to 1"),
        ("consumer_timeout_s", 0, "greater than 0"),
        ("max_request_bytes", 10, "greater than or equal to 1024"),
        ("api_keys", "secret", "valid tuple"),
        ("api_keys", ["good", ""], "at least 1 character"),
        ("api_keys", ["good", "two words"], "match pattern"),
        ("engine_env_vars", {"A": 1}, "valid string"),
        ("device", "cuda:1", "for Ray to choose"),
        ("device", "tpu", "match pattern"),
    ],
)
def test_invalid_value_is_rejected_with_name_and_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({name: value})
    assert name in str(caught.value)
    assert reason in str(caught.value)


def test_unknown_argument_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(ValidationError, match="unknown argument 'blok_size'; did you mean 'block_size'"):
        AppArgs.model_validate({"blok_size": 16})
    with pytest.raises(ValidationError, match="unknown argument 'xyzzy'"):
        AppArgs.model_validate({"xyzzy": 16})


def test_validation_errors_do_not_show_api_keys() -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"api_keys": ["top-secret"], "block_size": 0, "device": "cuda:1"})
    assert "top-secret" not in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"api_keys": ["top-secret"], "blok_size": 16})
    assert "top-secret" not in str(caught.value)


def test_engine_config_and_model_name_derive_from_the_arguments() -> None:
    args = AppArgs(model="folder", block_size=32, consumer_timeout_s=5, api_keys=("key",))
    config = args.engine_config(device="cpu")
    assert type(config) is EngineConfig
    assert (config.model, config.block_size, config.device) == ("folder", 32, "cpu")
    assert args.model_name == "folder"
    assert AppArgs(served_model_name="short").model_name == "short"


def test_arguments_survive_pickling() -> None:
    args = AppArgs(api_keys=("key",), engine_env_vars={"A": "1"})
    assert pickle.loads(pickle.dumps(args)) == args


def test_unknown_live_setting_is_rejected() -> None:
    with pytest.raises(ValidationError, match="consumer_timeout"):
        LiveSettings.model_validate({"consumer_timeout": 3})
