"""Structured output: which tokens a grammar allows next, by llguidance.

A grammar is compiled once and copied for each sequence. A mask takes some microseconds to a few milliseconds and is
computed without the GIL, so it runs beside the forward pass, see `Sampler.start_masks`.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from minivllm.core.errors import InvalidRequestError, MinivllmError, ModelLoadError, RequestFailedError
from minivllm.core.sampling_params import StructuredOutput
from minivllm.core.sequence import Sequence
from minivllm.core.text.tokenizer import Tokenizer

MaskBits = npt.NDArray[np.uint8]

JSON_WHITESPACE = r" |\n {0,16}"
"""What may stand between the parts of a JSON answer. JSON itself allows any amount, which weak models never end."""

MAX_REGEX_LENGTH = 4096
"""Characters of a regular expression. The time to compile one can grow with the square of its length."""

MAX_REPEAT = 10_000
"""Largest count in braces of a regular expression: a million takes a second to compile."""

MAX_GRAMMAR_LENGTH = 256 * 1024
"""Characters of a schema, a grammar or a list of choices."""

MAX_ITEMS_IN_ROW = 20_000
"""Places of a grammar that may be open at once. An object takes four for each property that may come next."""

_MARKS_OF_LIMITS = ("max is", "too many", "too large", "too big", "too complex", "fuel", "limit")
"""In the library's messages, those of a grammar that asks for more than it allows."""

_KEPT_GRAMMARS = 64
_PARAMS = {"json_object": "response_format", "json_schema": "response_format"}


class GrammarState:
    """Where one sequence stands in its grammar. Follows the generated tokens; asking twice changes nothing."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param
        self._consumed = 0

    def follow(self, output_token_ids: list[int]) -> LLMatcher:
        """Takes in the tokens generated since the last call.

        Raises:
            InvalidRequestError: the grammar is too complex to follow.
            RequestFailedError: a token does not fit it.
        """
        new = output_token_ids[self._consumed :]
        self._consumed = len(output_token_ids)
        # After the end of the grammar only EOS is allowed; with ignore_eos it comes again and again.
        if new and not self._matcher.is_stopped():
            self._matcher.consume_tokens(new)
        error = self.error()
        if error is not None:
            raise error
        return self._matcher

    def error(self) -> MinivllmError | None:
        """What is wrong, once something is. Some grammars show only on the way that they ask for too much."""
        if not self._matcher.is_error():
            return None
        reason = _first_line(self._matcher.get_error())
        if any(mark in reason for mark in _MARKS_OF_LIMITS):
            return InvalidRequestError(f"the grammar is too complex: {reason}", param=self._param)
        return RequestFailedError(f"the grammar cannot be followed: {reason}")


@dataclass(frozen=True, slots=True)
class _Mask:
    position: int
    bits: MaskBits | None
    is_complete: bool = False
    error: MinivllmError | None = None


class GrammarMasks:
    """The allowed tokens of some sequences, for the positions at which they stood."""

    def __init__(self) -> None:
        self._masks: dict[Sequence, _Mask] = {}

    def record(self, sequence: Sequence, mask: _Mask) -> None:
        self._masks[sequence] = mask

    def hold(self, sequence: Sequence) -> bool:
        """True when there is a mask for the token that this sequence samples next."""
        mask = self._masks.get(sequence)
        return mask is not None and mask.position == len(sequence.output_token_ids)

    def is_complete(self, sequence: Sequence) -> bool:
        """True when nothing but EOS may follow."""
        return sequence in self._masks and self._masks[sequence].is_complete

    def bits(self, sequence: Sequence) -> MaskBits:
        """One bit a token, lowest bit first, 1 where the token may come next.

        Raises:
            InvalidRequestError, RequestFailedError: this sequence's grammar cannot be followed.
        """
        mask = self._masks[sequence]
        if mask.error is not None:
            raise mask.error
        if mask.bits is None:
            raise RequestFailedError("there is no mask for this request")
        return mask.bits


class GrammarCompiler:
    """Turns `StructuredOutput` into grammar states, and states into masks.

    Args:
        tokenizer: the tokenizer, or a function that makes it at first use; None if there is none.
        vocab_size: width of the logits.
        eos_token_ids: what may follow a complete answer.
    """

    def __init__(
        self, tokenizer: Tokenizer | Callable[[], Tokenizer] | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, structured_output: StructuredOutput) -> GrammarState:
        """Raises InvalidRequestError, with what is wrong, for a grammar that cannot be compiled."""
        key = (structured_output.kind, structured_output.value)
        with self._lock:
            matcher = self._compiled.get(key)
        if matcher is None:  # outside of the lock: a slow grammar must not hold up those that are compiled
            matcher = self._compile_new(structured_output)
        with self._lock:
            self._compiled[key] = matcher
            self._compiled.move_to_end(key)
            while len(self._compiled) > _KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            return GrammarState(matcher.deep_copy(), _param_of(structured_output))

    def _compile_new(self, structured_output: StructuredOutput) -> LLMatcher:
        param = _param_of(structured_output)
        try:
            grammar = _grammar_text(structured_output)
            matcher = LLMatcher(self.load(), grammar, log_level=0, limits=_limits())
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise _refusal(structured_output, param, str(error)) from error
        if not matcher.is_error():
            # Some faults show only with the first mask: that nothing can be matched, or only at too great a cost.
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            if not probe.is_error() and not (probe.is_stopped() and not probe.is_accepting()):
                return matcher
            matcher = probe
        reason = matcher.get_error()
        raise _refusal(structured_output, param, "no text satisfies it" if "NoExtension" in reason else reason)

    def load(self) -> LLTokenizer:
        """The vocabulary in the form that grammars need; made once.

        Raises:
            InvalidRequestError: the model has no tokenizer that it can be made from.
        """
        if self._vocabulary is None:
            try:
                self._vocabulary = self._make_vocabulary()
            except (ModelLoadError, ValueError) as error:
                raise InvalidRequestError(
                    f"this model cannot do structured output: {_first_line(str(error))}", param="response_format"
                ) from error
        return self._vocabulary

    def _make_vocabulary(self) -> LLTokenizer:
        tokenizer = self._tokenizer() if callable(self._tokenizer) else self._tokenizer
        text = tokenizer.backend_json() if tokenizer is not None else None
        if tokenizer is None or text is None:
            raise ModelLoadError("it has no fast tokenizer")
        eos = self._eos_token_ids or sorted(tokenizer.eos_token_ids)
        width = max(self._vocab_size, tokenizer.vocab_size)
        return LLTokenizer(text, n_vocab=width, eos_token=eos or None)

    def masks(self, entries: Iterable[tuple[Sequence, GrammarState]]) -> GrammarMasks:
        """Masks of several sequences, computed in parallel and without the GIL.

        A grammar that fails is noted in the result, which raises when that mask is asked for.
        """
        masks = GrammarMasks()
        live: list[tuple[Sequence, int, GrammarState, LLMatcher]] = []
        for sequence, state in entries:
            generated = list(sequence.output_token_ids)
            try:
                live.append((sequence, len(generated), state, state.follow(generated)))
            except MinivllmError as error:
                masks.record(sequence, _Mask(len(generated), None, error=error))
        if live:
            bits = self._fill([matcher for *_, matcher in live])
            for row, (sequence, position, state, matcher) in enumerate(live):
                masks.record(sequence, _Mask(position, bits[row], matcher.is_stopped(), state.error()))
        return masks

    def _fill(self, matchers: list[LLMatcher]) -> MaskBits:
        """(len(matchers), bytes of one mask): one bit a token, lowest bit first."""
        if self._executor is None:
            self._executor = LLExecutor()
        num_bytes = (self.load().vocab_size + 31) // 32 * 4
        bits = np.zeros((len(matchers), num_bytes), dtype=np.uint8)
        rows: list[tuple[LLMatcher, int]] = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, bits.ctypes.data, num_bytes, len(matchers))
        return bits


def _limits() -> LLParserLimits:
    return LLParserLimits(max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False)


def _param_of(structured_output: StructuredOutput) -> str:
    return _PARAMS.get(structured_output.kind, "structured_outputs")


def _grammar_text(structured_output: StructuredOutput) -> str:
    """llguidance's form of the grammar. Raises ValueError for what is not even well formed."""
    value = structured_output.value
    if len(value) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"it is longer than {MAX_GRAMMAR_LENGTH} characters")
    match structured_output.kind:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            schema = json.loads(value)
            if schema is True:
                schema = {}
            if not isinstance(schema, dict):
                raise ValueError("a JSON schema must be an object")
            for pattern in _patterns(schema):
                _check_regex(pattern)
            return _json_grammar(schema)
        case "regex":
            _check_regex(value)
            # \d as [0-9]: "any digit of Unicode" is hardly what is meant, and not what JavaScript's does.
            return str(LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/"))
        case "choice":
            return str(LLMatcher.grammar_from_lark(_choice_grammar(value)))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(value))


def _check_regex(pattern: str) -> None:
    if len(pattern) > MAX_REGEX_LENGTH:
        raise ValueError(f"a regular expression is longer than {MAX_REGEX_LENGTH} characters")
    for count in re.findall(r"\{(?:[0-9]*,)?([0-9]+)\}", pattern):
        if len(count) > len(str(MAX_REPEAT)) or int(count) > MAX_REPEAT:
            raise ValueError(f"a regular expression repeats something more than {MAX_REPEAT} times")


def _patterns(schema: Any) -> Iterator[str]:
    """All regular expressions in a schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _patterns(part)


def _json_grammar(schema: dict[str, Any]) -> str:
    defaults = {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITESPACE}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults))


def _choice_grammar(value: str) -> str:
    choices = json.loads(value)
    if not isinstance(choices, list) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise ValueError("choices must be a list of at least one text, none of them empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))


def _refusal(structured_output: StructuredOutput, param: str, reason: str) -> InvalidRequestError:
    kind = structured_output.kind.replace("_", " ")
    return InvalidRequestError(f"the {kind} cannot be used: {_first_line(reason)}", param=param)


def _first_line(reason: str) -> str:
    """Library messages can span screens: their first lines, cut."""
    return " ".join(reason.replace("<non-verbose/>", "").partition(";")[0].split())[:200]
