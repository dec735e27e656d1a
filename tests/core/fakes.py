"""A model runner without a model. Its KV pool records what each slot contains and raises on a wrong read.

`FakeRunner` records per slot the token, its position and the identity of its prefix: a digest chained over salt and
token ids, which shares no code with the product's block hash. Before a step it checks that every slot a sequence reads
was written for exactly that prefix; after the writes of the step, that no slot was overwritten. The next token depends
on the prefix alone, so an oracle without blocks predicts the output of each request, however it is batched, cached,
chunked or preempted.

Nothing here uses `assert`, so the checks also run under `python -O`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minivllm.core.errors import InvalidRequestError, RequestFailedError
from minivllm.core.outputs import SampleResult, TokenLogprobs
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason, Sequence

EOS = 0
VOCABULARY = 97

_MASK = (1 << 64) - 1


class KVFaultError(Exception):
    """The KV pool was used incorrectly. Not a ValueError, so that no error handling of the product catches it."""


def require(condition: object, message: str) -> None:
    """Raises KVFaultError unless `condition` is true; unlike `assert`, also under `python -O`."""
    if not condition:
        raise KVFaultError(message)


def mix(state: int, value: int) -> int:
    """Hashes a state and a value to 64 bits (the finalizer of splitmix64)."""
    mixed = (state * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def salted_start(cache_salt: str | None) -> int:
    """Returns the initial state of `chain` for a salt, so that prefixes with different salts have different digests."""
    state = 1
    for byte in b"" if cache_salt is None else b"\x01" + cache_salt.encode():
        state = mix(state, byte)
    return state


def chain(token_ids: Iterable[int], state: int = 1) -> list[int]:
    """Returns one digest per token, over all tokens up to and including it."""
    digests = []
    for token_id in token_ids:
        state = mix(state, token_id)
        digests.append(state)
    return digests


@dataclass(frozen=True, slots=True)
class FakeModel:
    """Samples a next token that depends only on the token ids of the prefix and on the index of the sample."""

    vocab_size: int = VOCABULARY
    eos_per_mille: int = 0
    eos_token_ids: frozenset[int] = frozenset({EOS})

    def next_token(self, prefix_digest: int, index: int = 0) -> int:
        """Returns the next token after a prefix; `prefix_digest` is the last digest of `chain(token_ids)`, unsalted."""
        bits = mix(prefix_digest, index + 0x5EED)
        if bits % 1000 < self.eos_per_mille:
            return min(self.eos_token_ids)
        candidate = (bits >> 20) % self.vocab_size
        while candidate in self.eos_token_ids:
            candidate = (candidate + 1) % self.vocab_size
        return candidate

    def complete(
        self, prompt_token_ids: list[int], params: SamplingParams, *, max_model_len: int, index: int = 0
    ) -> tuple[list[int], FinishReason]:
        """The oracle: returns the expected output tokens and finish reason of one sample of a request."""
        room = max_model_len - len(prompt_token_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        state = chain(prompt_token_ids)[-1]
        output: list[int] = []
        while len(output) < limit:
            token_id = self.next_token(state, index)
            output.append(token_id)
            state = mix(state, token_id)
            if len(output) < params.min_tokens:
                continue
            if token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos):
                return output, FinishReason.STOP
        return output, FinishReason.LENGTH


class _Prefix:
    """Token ids of one live sequence and their two digest chains: salted (identity) and unsalted (next token)."""

    __slots__ = ("identities", "plain", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.identities: list[int] = []
        self.plain: list[int] = []

    def follow(self, sequence: Sequence) -> None:
        """Extends the chains by the new tokens of the sequence. Raises KVFaultError if an earlier token has changed."""
        token_ids = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        known = len(self.token_ids)
        require(token_ids[:known] == self.token_ids, f"{sequence.seq_id}: earlier tokens have changed")
        require(len(token_ids) == sequence.num_tokens, f"{sequence.seq_id}: num_tokens is wrong")
        fresh = token_ids[known:]
        self.identities += chain(fresh, self.identities[-1] if known else salted_start(sequence.cache_salt))
        self.plain += chain(fresh, self.plain[-1] if known else 1)
        self.token_ids = token_ids


class FakeRunner:
    """Runs `FakeModel` on a KV pool that checks every read and write.

    `fail_after[request_id] = n` makes the sampling of that request fail with `failure` after n output tokens,
    `fail_next_step` makes one forward pass raise, and `during_execute` is called while a step is in flight.

    Args:
        max_num_batched_tokens, max_num_seqs: limits that every step must keep; None disables the check.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int = 1 << 20,
        model: FakeModel | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.model = model or FakeModel()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = self.model.vocab_size
        self.eos_token_ids = self.model.eos_token_ids
        self.max_model_len = max_model_len
        self.generation_defaults: dict[str, Any] = {}
        self.default_token_budget = 512
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.fail_after: dict[str, int] = {}
        self.failure: type[RequestFailedError] = RequestFailedError
        self.fail_next_step: Exception | None = None
        self.during_execute: Callable[[Any], None] | None = None
        self.fault: KVFaultError | None = None
        self.steps_executed = 0
        self.tokens_computed = 0
        self.last_step: Any = None
        self.released_total = 0
        self._manager: Any = None
        self._live: dict[str, _Prefix] = {}
        # Per slot: digest of the prefix that ends there, and (token, position) for messages. None is poison.
        self._identities: list[int | None] = [None] * (num_blocks * block_size)
        self._written: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self._unclean: set[int] = set()

    def attach(self, block_manager: Any) -> None:
        """Poisons free blocks before each step from now on, and compares slots with those of the block manager."""
        self._manager = block_manager

    @property
    def live_request_ids(self) -> set[str]:
        return set(self._live)

    # What the engine calls

    def prepare(self, sequence: Sequence) -> None:
        require(sequence.seq_id not in self._live, f"{sequence.seq_id} was prepared twice")
        for token_id in sequence.sampling_params.stop_token_ids:
            if token_id >= self.vocab_size:
                raise InvalidRequestError(f"token id {token_id} is beyond the vocabulary", param="stop_token_ids")
        self._live[sequence.seq_id] = _Prefix()

    def precompile(self, sampling_params: SamplingParams) -> None:
        """Nothing is compiled."""

    def release(self, sequence: Sequence) -> None:
        if self._live.pop(sequence.seq_id, None) is None:
            self.fault = KVFaultError(f"{sequence.seq_id} was released twice or never prepared")
            raise self.fault
        self.released_total += 1

    def execute(self, step: Any) -> list[SampleResult]:
        if self.fail_next_step is not None:
            error, self.fail_next_step = self.fail_next_step, None
            raise error
        try:
            self._check_step(step)
            self.poison_free_blocks()
            for scheduled in step.sequences:
                self._check_reads(scheduled, scheduled.start, "before the step")
            self._write(step)
            for scheduled in step.sequences:
                self._check_reads(scheduled, scheduled.end, "after the writes of the step")
        except KVFaultError as fault:
            self.fault = fault
            raise
        self.steps_executed += 1
        self.tokens_computed += step.num_tokens
        self.last_step = step
        results = [self._result(scheduled) for scheduled in step.sequences]
        if self.during_execute is not None:
            self.during_execute(step)
        return results

    # Checks

    def _check_step(self, step: Any) -> None:
        require(step.sequences, "an empty step was executed")
        scheduled_ids = [scheduled.sequence.seq_id for scheduled in step.sequences]
        require(len(set(scheduled_ids)) == len(scheduled_ids), f"a sequence is scheduled twice: {scheduled_ids}")
        total = sum(scheduled.end - scheduled.start for scheduled in step.sequences)
        require(step.num_tokens == total, f"step.num_tokens is {step.num_tokens}, its sequences have {total}")
        if self.max_num_batched_tokens is not None:
            require(total <= self.max_num_batched_tokens, f"{total} tokens exceed the token budget")
        if self.max_num_seqs is not None:
            require(len(scheduled_ids) <= self.max_num_seqs, f"{len(scheduled_ids)} sequences exceed max_num_seqs")
        for scheduled in step.sequences:
            self._check_scheduled(scheduled)

    def _check_scheduled(self, scheduled: Any) -> None:
        sequence, start, end = scheduled.sequence, scheduled.start, scheduled.end
        name = sequence.seq_id
        prefix = self._live.get(name)
        require(prefix is not None, f"{name} is scheduled but was not prepared or is released")
        prefix.follow(sequence)
        require(not sequence.is_finished, f"{name} is finished and scheduled")
        require(0 <= start < end <= sequence.num_tokens, f"{name}: tokens {start}..{end} of {sequence.num_tokens}")
        require(
            start == sequence.num_computed_tokens, f"{name}: starts at {start}, {sequence.num_computed_tokens} computed"
        )
        due = end == sequence.num_tokens and sequence.sampling_params.max_tokens != 0
        require(scheduled.samples == due, f"{name}: samples is {scheduled.samples}")
        table = sequence.block_table
        needed = -(-end // self.block_size)
        require(len(table) == needed, f"{name}: table {table} for {end} tokens, which need {needed} blocks")
        require(len(set(table)) == len(table), f"{name}: a block occurs twice in {table}")
        require(all(0 <= block < self.num_blocks for block in table), f"{name}: unknown block in {table}")
        if self._manager is not None:
            self._check_slots(scheduled)

    def _check_slots(self, scheduled: Any) -> None:
        """Checks the slots of the block manager against the block table, and that asking again takes no block."""
        sequence, size = scheduled.sequence, self.block_size
        expected = [sequence.block_table[i // size] * size + i % size for i in range(scheduled.start, scheduled.end)]
        answered = self._manager.slot_mapping(sequence, scheduled.start, scheduled.end)
        require(list(answered) == expected, f"{sequence.seq_id}: slots {answered}, but the table says {expected}")
        if scheduled.samples:
            free = self._manager.get_num_free_blocks()
            slot = self._manager.append_slot_for_decode(sequence)
            require(free == self._manager.get_num_free_blocks(), f"{sequence.seq_id}: asking again took a block")
            flat = slot.physical_block_id * size + slot.offset
            require(flat == expected[-1], f"{sequence.seq_id}: {slot} is not the slot of its last token")

    def _check_reads(self, scheduled: Any, end: int, when: str) -> None:
        """Checks that every slot of tokens 0..end was written for this token and this prefix."""
        sequence, size = scheduled.sequence, self.block_size
        identities = self._live[sequence.seq_id].identities
        for first in range(0, end, size):
            block = sequence.block_table[first // size]
            count = min(size, end - first)
            if self._identities[block * size : block * size + count] != identities[first : first + count]:
                self._explain_read(sequence, block, first, count, when)

    def _explain_read(self, sequence: Sequence, block: int, first: int, count: int, when: str) -> None:
        prefix = self._live[sequence.seq_id]
        for offset in range(count):
            slot, position = block * self.block_size + offset, first + offset
            if self._identities[slot] != prefix.identities[position]:
                found = self._written[slot]
                what = "poison" if found is None else f"token {found[0]} of position {found[1]} of another prefix"
                if found == (prefix.token_ids[position], position):
                    what = "the same token after another prefix"
                raise KVFaultError(
                    f"{sequence.seq_id} reads token {prefix.token_ids[position]} of position {position} in block "
                    f"{block} at offset {offset} {when}, and finds {what}; its table is {sequence.block_table}"
                )

    # Effects

    def _write(self, step: Any) -> None:
        writers: dict[int, Sequence] = {}
        for scheduled in step.sequences:
            sequence, size = scheduled.sequence, self.block_size
            prefix = self._live[sequence.seq_id]
            for position in range(scheduled.start, scheduled.end):
                slot = sequence.block_table[position // size] * size + position % size
                identity = prefix.identities[position]
                other = writers.setdefault(slot, sequence)
                if other is not sequence and self._identities[slot] != identity:
                    raise KVFaultError(f"{other.seq_id} and {sequence.seq_id} both write slot {slot} in one step")
                self._identities[slot] = identity
                self._written[slot] = (prefix.token_ids[position], position)
            self._forget_rest_of_block(sequence, scheduled.end)
            first, last = scheduled.start // size, (scheduled.end - 1) // size
            self._unclean.update(sequence.block_table[first : last + 1])

    def _forget_rest_of_block(self, sequence: Sequence, end: int) -> None:
        """Poisons the slots after the last token, so that no stale value of an earlier owner passes a later check."""
        used = end % self.block_size
        if used:
            first = sequence.block_table[(end - 1) // self.block_size] * self.block_size + used
            self._identities[first : first + self.block_size - used] = [None] * (self.block_size - used)
            self._written[first : first + self.block_size - used] = [None] * (self.block_size - used)

    def poison_free_blocks(self) -> None:
        """Poisons free blocks without cached content: their next owner may overwrite them at any time."""
        if self._manager is None or not self._unclean:
            return
        owners = self._manager.owners()
        for block in [block for block in self._unclean if owners[block].state == "free"]:
            self.poison([block])

    def poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            first, last = block * self.block_size, (block + 1) * self.block_size
            self._identities[first:last] = [None] * self.block_size
            self._written[first:last] = [None] * self.block_size
            self._unclean.discard(block)

    def _result(self, scheduled: Any) -> SampleResult:
        sequence = scheduled.sequence
        params = sequence.sampling_params
        prefix = self._live[sequence.seq_id]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            last = min(scheduled.end, sequence.num_prompt_tokens - 1)
            prompt_logprobs = [
                TokenLogprobs(prefix.token_ids[position], -float(position))
                for position in range(scheduled.start + 1, last + 1)
            ]
        if not scheduled.samples:
            return SampleResult(prompt_logprobs=prompt_logprobs)
        fails_after = self.fail_after.get(sequence.request_id)
        if fails_after is not None and len(sequence.output_token_ids) >= fails_after:
            return SampleResult(error=self.failure(f"{sequence.seq_id} is set to fail"))
        token_id = self.model.next_token(prefix.plain[-1], sequence.index)
        logprobs = None if params.logprobs is None else TokenLogprobs(token_id, -0.5)
        return SampleResult(token_id=token_id, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
