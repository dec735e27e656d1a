"""Structured output: llguidance matchers, and the token bitmasks that they allow.

A grammar is compiled once and its matcher copied per sequence. A bitmask takes some microseconds to a few milliseconds
and is computed without the GIL, beside the forward pass, see `Sampler.start_bitmasks`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from minivllm.core.errors import InvalidRequestError, ModelLoadError, RequestFailedError
from minivllm.core.json_schema import JSON_OPTIONS, normalized
from minivllm.core.sampling_params import StructuredOutput
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer

TokenBitmask = npt.NDArray[np.int32]
"""One bit per token, lowest bit first, 1 where the token is allowed."""

MAX_REGEX_LENGTH = 4096
"""Characters of a regular expression. The time to compile one can grow with the square of its length."""

MAX_REPEAT = 10_000
"""Largest count in braces of a regular expression: a million takes a second to compile."""

MAX_GRAMMAR_LENGTH = 256 * 1024
"""Characters of a schema, a grammar or a list of choices."""

MAX_ITEMS_IN_ROW = 20_000
"""Parser items per position (Earley). An object takes four for each property that may come next."""

_LIMITS = LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)
_LIMIT_MESSAGES = ("max is", "too many", "too large", "too big", "too complex", "fuel", "limit")
"""Parts of llguidance's messages about a grammar that exceeds a limit."""

_MAX_CACHED_GRAMMARS = 64
_executor = cache(LLExecutor)
"""The threads that compute bitmasks, started by the first one."""


class GrammarMatcher:
    """The position of one sequence in its grammar, and the bitmask of the token that it samples next."""

    def __init__(self, sequence: Sequence, structured_output: StructuredOutput, matcher: LLMatcher) -> None:
        self._sequence = sequence
        self._param = _param(structured_output)
        self.matcher = matcher
        self._num_accepted = 0
        self._bitmask: TokenBitmask = np.zeros(0, dtype=np.int32)
        self._bitmask_position = -1
        self.is_terminated = False
        """Whether the grammar allows nothing but EOS."""

    @property
    def has_bitmask(self) -> bool:
        """Whether the bitmask of the next token is computed."""
        return self._bitmask_position == len(self._sequence.output_token_ids)

    def accept_tokens(self) -> bool:
        """Accepts the new output tokens. Returns whether the grammar allows them."""
        output = list(self._sequence.output_token_ids)
        new = output[self._num_accepted :]
        self._num_accepted = len(output)
        # After the end of the grammar only EOS is allowed, and repeated with ignore_eos.
        if new and not self.matcher.is_stopped():
            self.matcher.consume_tokens(new)
        return not self.matcher.is_error()

    def set_bitmask(self, bitmask: TokenBitmask) -> None:
        self._bitmask = bitmask
        self._bitmask_position = self._num_accepted
        self.is_terminated = self.matcher.is_stopped()

    def bitmask(self) -> TokenBitmask:
        """Returns the bitmask of the next token, once `GrammarCompiler.fill_bitmasks` has computed it.

        Raises:
            InvalidRequestError: the grammar exceeds a limit. Some do so only at a later token.
            RequestFailedError: the output does not follow the grammar.
        """
        if self.matcher.is_error():
            reason = _first_line(self.matcher.get_error())
            if any(message in reason for message in _LIMIT_MESSAGES):
                raise InvalidRequestError(f"the grammar is too complex: {reason}", param=self._param)
            raise RequestFailedError(f"the output cannot follow the grammar: {reason}")
        return self._bitmask


class GrammarCompiler:
    """Compiles grammars and computes token bitmasks.

    Args:
        tokenizer: loads the tokenizer at first use; None if there is none.
        eos_token_ids: the tokens that may follow a complete answer.
    """

    def __init__(
        self, tokenizer: Callable[[], Tokenizer] | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self.load_tokenizer = cache(self._load_tokenizer)
        self._compile_cached = lru_cache(_MAX_CACHED_GRAMMARS)(self._compile)

    def compile(self, structured_output: StructuredOutput) -> LLMatcher:
        """Returns a matcher at the start of the grammar. Compiled grammars are cached; callable from any thread.

        Raises:
            InvalidRequestError: the grammar cannot be compiled; the message gives the reason.
        """
        return self._compile_cached(structured_output).deep_copy()

    def _compile(self, structured_output: StructuredOutput) -> LLMatcher:
        try:
            grammar = _grammar(structured_output)
            matcher = LLMatcher(self.load_tokenizer(), grammar, log_level=0, limits=_LIMITS)
        except InvalidRequestError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise _refusal(structured_output, str(error)) from error
        if not matcher.is_error():
            # Some faults appear only with the first bitmask: nothing matches, or only at too high a cost.
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            if not probe.is_error() and not (probe.is_stopped() and not probe.is_accepting()):
                return matcher
            matcher = probe
        reason = matcher.get_error()
        raise _refusal(structured_output, "no text satisfies it" if "NoExtension" in reason else reason)

    def _load_tokenizer(self) -> LLTokenizer:
        """Returns llguidance's form of the tokenizer.

        Raises:
            InvalidRequestError: the model has no tokenizer that llguidance supports.
        """
        try:
            tokenizer = None if self._tokenizer is None else self._tokenizer()
            text = None if tokenizer is None else tokenizer.backend_json()
            if tokenizer is None or text is None:
                raise ModelLoadError("it has no fast tokenizer")
            eos = self._eos_token_ids or sorted(tokenizer.eos_token_ids)
            width = max(self._vocab_size, tokenizer.vocab_size)
            return LLTokenizer(text, n_vocab=width, eos_token=eos or None)
        except (ModelLoadError, ValueError) as error:
            reason = f"this model does not support structured output: {_first_line(str(error))}"
            raise InvalidRequestError(reason, param="response_format") from error

    def fill_bitmasks(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Computes the missing bitmasks of the next tokens, in parallel and without the GIL.

        A matcher that fails raises when its bitmask is read.
        """
        live = [one for one in matchers if not one.has_bitmask and one.accept_tokens()]
        if not live:
            return
        bitmask = allocate_token_bitmask(len(live), self.load_tokenizer().vocab_size)
        fill_next_token_bitmask_par(_executor(), [(one.matcher, row) for row, one in enumerate(live)], bitmask)
        for one, row in zip(live, bitmask, strict=True):
            one.set_bitmask(row)


def _param(structured_output: StructuredOutput) -> str:
    """Returns the request field to name in errors."""
    return "response_format" if structured_output.kind.startswith("json") else "structured_outputs"


def _grammar(structured_output: StructuredOutput) -> str:
    """Returns llguidance's form of the grammar.

    Raises:
        ValueError: it is not well formed or exceeds a limit.
    """
    value = structured_output.value
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"it is longer than {MAX_GRAMMAR_LENGTH} characters")
    if structured_output.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(value))
    schema = _schema(structured_output)
    if structured_output.calls:
        return str(LLMatcher.grammar_from_lark(_or_calls(structured_output, schema)))
    if schema is not None:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_OPTIONS))
    return str(LLMatcher.grammar_from_lark(f"start: {_lark(structured_output)}"))


def _schema(structured_output: StructuredOutput) -> dict[str, Any] | None:
    """Returns the JSON schema as llguidance reads it, None if the grammar is of another kind."""
    if structured_output.kind == "json_object":
        return {"type": "object"}
    if structured_output.kind != "json_schema":
        return None
    schema = json.loads(structured_output.value)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema must be an object")
    for pattern in _patterns(schema):
        _check_regex(pattern)
    return normalized(schema)


def _lark(structured_output: StructuredOutput) -> str:
    """Returns the Lark expression of a regular expression or of choices."""
    value = structured_output.value
    if structured_output.kind == "choice":
        return _choice_expression(value)
    _check_regex(value)
    # \d matches ASCII digits only, as in JavaScript.
    return f"/{regex_to_lark(value, 'd')}/"


def _or_calls(structured_output: StructuredOutput, schema: dict[str, Any] | None) -> str:
    """Returns the Lark grammar of the answer or the calls."""
    if schema is None:
        answer = _lark(structured_output)
    else:
        options = {**JSON_OPTIONS, **schema.get("x-guidance", {})}
        answer = f"%json {json.dumps({**schema, 'x-guidance': options})}"
    return f"start: answer | calls\nanswer: {answer}\n{structured_output.calls}"


def _check_regex(pattern: str) -> None:
    if len(pattern) > MAX_REGEX_LENGTH:
        raise ValueError(f"a regular expression is longer than {MAX_REGEX_LENGTH} characters")
    for count in re.findall(r"\{(?:[0-9]*,)?([0-9]+)\}", pattern):
        if len(count) > len(str(MAX_REPEAT)) or int(count) > MAX_REPEAT:
            raise ValueError(f"a regular expression repeats something more than {MAX_REPEAT} times")


def _patterns(schema: Any) -> Iterator[str]:
    """Yields all regular expressions in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _patterns(part)


def _choice_expression(value: str) -> str:
    choices = json.loads(value)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise ValueError("choices must be a non-empty list of non-empty strings")
    return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))


def _refusal(structured_output: StructuredOutput, reason: str) -> InvalidRequestError:
    kind = structured_output.kind.replace("_", " ")
    return InvalidRequestError(f"the {kind} cannot be used: {_first_line(reason)}", param=_param(structured_output))


def _first_line(reason: str) -> str:
    """Returns the first clause of a library's message, at most 200 characters of it."""
    return " ".join(reason.replace("<non-verbose/>", "").partition(";")[0].split())[:200]
