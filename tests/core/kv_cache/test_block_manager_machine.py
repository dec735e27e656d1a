"""Random operations on a block manager, compared after every one with a reference model of plain lists.

The model has no hashes and no stored reference counts: the key of a cached block is the tuple of all tokens up to its
end. It predicts every block table, every cache hit, every answer of `can_*` and the exact order of the free blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.core.errors import BlockNotInUseError, NoFreeBlocksError
from minivllm.core.kv_cache import block_pool
from minivllm.core.kv_cache.block_manager import BlockManager, Slot
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import Sequence
from tests.core.kv_cache.helpers import can_admit, free_order

Prefix = tuple[str | None, tuple[int, ...]]

pytestmark = pytest.mark.timeout(900)  # shrinking a failing example takes minutes


@dataclass
class ReferenceModel:
    """The rules of allocation, prefix caching, eviction order and admission, on plain lists."""

    num_blocks: int
    block_size: int
    caching: bool
    watermark_blocks: int
    free: list[int] = field(default_factory=list)
    evictable: list[int] = field(default_factory=list)
    prefix_of: dict[int, Prefix] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    loose: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    @property
    def order(self) -> list[int]:
        return self.free + self.evictable

    def users(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values()) + self.loose.count(block)

    def prefix(self, sequence: Sequence, end: int) -> Prefix:
        return sequence.cache_salt, tuple([*sequence.prompt_token_ids, *sequence.output_token_ids][:end])

    def hits(self, sequence: Sequence, num_tokens: int) -> list[int]:
        block_of = {prefix: block for block, prefix in self.prefix_of.items()}
        found: list[int] = []
        for end in range(self.block_size, num_tokens, self.block_size):
            block = block_of.get(self.prefix(sequence, end))
            if block is None or not self.caching:
                break
            found.append(block)
        return found

    def needed(self, table: list[int], num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(table))

    def take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block = self.free.pop(0) if self.free else self.evictable.pop(0)
            self.prefix_of.pop(block, None)
            taken.append(block)
        return taken

    def unreference(self, block: int) -> None:
        """Moves the block to its free queue if nothing uses it any more."""
        if self.users(block) == 0:
            (self.evictable if block in self.prefix_of else self.free).append(block)

    def fits(self, new_blocks: int) -> bool:
        """Admission of a sequence that takes `new_blocks` free blocks; the watermark needs another block in use."""
        left = len(self.order) - new_blocks
        others_run = len(self.order) < self.num_blocks
        return left >= (self.watermark_blocks if others_run else 0)

    def cost(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that a prefill up to `num_tokens` takes: new blocks, and hits on evictable ones."""
        table = self.tables.get(sequence.request_id, [])
        hits = [] if table else self.hits(sequence, num_tokens)
        return self.needed([*table, *hits], num_tokens) + sum(not self.users(block) for block in hits)

    def cover(self, sequence: Sequence, num_tokens: int) -> int:
        """Extends the block table to `num_tokens` tokens. Returns the number of hit tokens."""
        table = self.tables.setdefault(sequence.request_id, [])
        hits = [] if table else self.hits(sequence, num_tokens)
        self.evictable = [block for block in self.evictable if block not in hits]
        table += hits
        table += self.take(self.needed(table, num_tokens))
        return len(hits) * self.block_size

    def cache(self, sequence: Sequence, start: int, end: int) -> None:
        """Caches the blocks that tokens start..end fill, except duplicates of cached ones."""
        table = self.tables[sequence.request_id]
        for index in range(start // self.block_size, end // self.block_size if self.caching else 0):
            prefix = self.prefix(sequence, (index + 1) * self.block_size)
            if prefix not in self.prefix_of.values():
                self.prefix_of[table[index]] = prefix

    def release(self, sequence: Sequence) -> None:
        table = self.tables.pop(sequence.request_id, [])
        while table:
            self.tables[""] = table  # the remaining blocks stay referenced
            block = table.pop()
            self.unreference(block)
        self.tables.pop("", None)


class BlockManagerMachine(RuleBasedStateMachine):
    """Sequences are prefilled in chunks, decode, are preempted and finish; other blocks belong to no sequence."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 4),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.0, 0.25, 0.5]),
        validate=st.booleans(),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, watermark: float, validate: bool) -> None:
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, watermark=watermark, validate=validate
        )
        self.model = ReferenceModel(num_blocks, block_size, caching, -int(-watermark * num_blocks // 1))
        self.sequences: dict[str, Sequence] = {}
        self.covered_tokens: dict[str, int] = {}
        self.names = 0

    def pick(self, number: int, among: Any = None) -> Sequence:
        choices = list(self.sequences.values()) if among is None else among
        return choices[number % len(choices)]

    # Alphabets of one or two tokens make equal prefixes, equal blocks and repeated blocks likely.
    @rule(
        stem=st.integers(0, 8),
        tail=st.lists(st.integers(0, 1), max_size=6),
        salt=st.sampled_from([None, None, None, "salt"]),
    )
    def add(self, stem: int, tail: list[int], salt: str | None) -> None:
        prompt = [0, 0, 1, 0, 0, 0, 0, 1][:stem] + tail or [0]
        self.names += 1
        name = f"sequence-{self.names}"
        self.sequences[name] = Sequence(name, prompt, SamplingParams(), cache_salt=salt)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 9))
    def prefill_chunk(self, which: int, chunk: int) -> None:
        sequence = self.pick(which)
        end = min(sequence.num_tokens, sequence.num_computed_tokens + chunk)
        if end == sequence.num_computed_tokens:
            return
        cost, free = self.model.cost(sequence, end), len(self.model.order)
        if cost > free:
            before = (free_order(self.manager), list(sequence.block_table), sequence.num_computed_tokens)
            with pytest.raises(NoFreeBlocksError):
                self.manager.allocate_for_prefill(sequence, end)
            assert (free_order(self.manager), list(sequence.block_table), sequence.num_computed_tokens) == before
            return
        was_empty = not sequence.block_table
        self.note_covered_tokens(sequence, end)
        hit_tokens = self.model.cover(sequence, end)
        self.manager.allocate_for_prefill(sequence, end)
        if was_empty:
            assert sequence.num_computed_tokens == hit_tokens
        assert sequence.num_computed_tokens < end
        assert sequence.block_table == self.model.tables[sequence.request_id]

    @precondition(lambda self: any(sequence.block_table for sequence in self.sequences.values()))
    @rule(which=st.integers(0, 99), share=st.integers(0, 4))
    def compute(self, which: int, share: int) -> None:
        """Marks none, a share or all of the covered tokens as computed."""
        sequence = self.pick(which, [sequence for sequence in self.sequences.values() if sequence.block_table])
        covered = min(self.covered(sequence), sequence.num_tokens)
        end = sequence.num_computed_tokens + (covered - sequence.num_computed_tokens) * share // 4
        self.model.cache(sequence, sequence.num_computed_tokens, end)
        self.manager.mark_computed(sequence, end)
        assert sequence.num_computed_tokens == end

    def covered(self, sequence: Sequence) -> int:
        """Tokens that the allocations cover; `mark_computed` beyond them raises."""
        return self.covered_tokens[sequence.request_id]

    def note_covered_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        known = self.covered_tokens.get(sequence.request_id, 0)
        self.covered_tokens[sequence.request_id] = max(known, num_tokens) if sequence.block_table else num_tokens

    @precondition(lambda self: any(s.num_computed_tokens == s.num_tokens for s in self.sequences.values()))
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def decode(self, which: int, token: int) -> None:
        ready = [s for s in self.sequences.values() if s.num_computed_tokens == s.num_tokens]
        sequence = self.pick(which, ready)
        sequence.append_token(token)
        needed = self.model.needed(sequence.block_table, sequence.num_tokens)
        possible = needed <= len(self.model.order)
        assert self.manager.can_append_slot(sequence) is possible
        if not possible:
            before = free_order(self.manager)
            with pytest.raises(NoFreeBlocksError):
                self.manager.append_slot_for_decode(sequence)
            assert free_order(self.manager) == before
            return
        self.note_covered_tokens(sequence, sequence.num_tokens)
        self.model.cover(sequence, sequence.num_tokens)
        slot = self.manager.append_slot_for_decode(sequence)
        position = sequence.num_tokens - 1
        size = self.model.block_size
        assert slot == Slot(self.model.tables[sequence.request_id][position // size], position % size)
        assert self.manager.append_slot_for_decode(sequence) == slot

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        sequence = self.pick(which)
        self.model.release(sequence)
        self.manager.free_sequence(sequence)
        assert (sequence.block_table, sequence.num_computed_tokens) == ([], 0)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def finish(self, which: int) -> None:
        sequence = self.pick(which)
        self.preempt(which)
        del self.sequences[sequence.request_id]

    @rule(count=st.integers(0, 4))
    def allocate_blocks_without_a_sequence(self, count: int) -> None:
        if count > len(self.model.order):
            before = free_order(self.manager)
            with pytest.raises(NoFreeBlocksError):
                self.manager.allocate_blocks(count)
            assert free_order(self.manager) == before
            return
        taken = self.manager.allocate_blocks(count)
        assert taken == self.model.take(count)
        self.model.loose += taken

    @precondition(lambda self: self.model.loose)
    @rule(data=st.data())
    def free_blocks_without_a_sequence(self, data: Any) -> None:
        freed = data.draw(st.lists(st.sampled_from(self.model.loose), unique=True))
        self.manager.free_blocks(freed)
        for block in freed:
            self.model.loose.remove(block)
            self.model.unreference(block)

    @precondition(lambda self: self.model.order)
    @rule(which=st.integers(0, 99))
    def free_blocks_not_in_use(self, which: int) -> None:
        wrong = self.model.order[which % len(self.model.order)]
        with pytest.raises(BlockNotInUseError):
            self.manager.free_blocks([*self.model.loose, wrong])

    @rule()
    def reset(self) -> None:
        allowed = not any(self.model.users(block) for block in self.model.prefix_of)
        assert self.manager.reset_prefix_cache() is allowed
        if allowed:
            self.model.prefix_of.clear()
            self.model.free += self.model.evictable
            self.model.evictable = []
            # A reset may append blocks to the free queue in any order, so the model adopts the manager's.
            order = free_order(self.manager)
            assert sorted(order) == sorted(self.model.free)
            self.model.free = order

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), num_tokens=st.integers(0, 40))
    def ask(self, which: int, num_tokens: int) -> None:
        sequence = self.pick(which)
        assert self.manager.can_allocate(num_tokens) is self.model.fits(-(-num_tokens // self.model.block_size))
        if not sequence.block_table:
            cost = self.model.cost(sequence, sequence.num_tokens)
            assert can_admit(self.manager, sequence) is self.model.fits(cost)
            match = self.manager.match_prefix(sequence)
            assert list(match.block_ids) == self.model.hits(sequence, sequence.num_tokens)
        decoding = [s for s in self.sequences.values() if s.block_table and s.num_computed_tokens == s.num_tokens - 1]
        wanted = sum(self.model.needed(s.block_table, s.num_tokens) for s in decoding)
        assert self.manager.can_append_slots(decoding) is (wanted <= len(self.model.order))

    @invariant()
    def state_is_consistent(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert free_order(self.manager) == self.model.order
        assert self.manager.get_num_free_blocks() == len(self.model.order)
        for name, sequence in self.sequences.items():
            assert sequence.block_table == self.model.tables.get(name, [])
        for block, owner in enumerate(self.manager.owners()):
            names = sorted(name for name, table in self.model.tables.items() if block in table)
            assert sorted(owner.request_ids) == names
            in_use = "owned" if self.model.users(block) else "free"
            assert owner.state == ("cached" if in_use == "free" and block in self.model.prefix_of else in_use)


class CollisionMachine(BlockManagerMachine):
    """The same operations with one constant block hash: hits may be missed, but every hit is of the same prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.real_hash = block_pool.hash_block
        block_pool.hash_block = lambda *_: b"constant"  # type: ignore[assignment]

    def teardown(self) -> None:
        block_pool.hash_block = self.real_hash

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 9))
    def prefill_chunk(self, which: int, chunk: int) -> None:
        sequence = self.pick(which)
        end = min(sequence.num_tokens, sequence.num_computed_tokens + chunk)
        if end == sequence.num_computed_tokens:
            return
        was_empty = not sequence.block_table
        covered_before = dict(self.covered_tokens)
        self.note_covered_tokens(sequence, end)
        try:
            self.manager.allocate_for_prefill(sequence, end)
        except NoFreeBlocksError:
            self.covered_tokens = covered_before
            return
        if was_empty:
            hits = sequence.num_computed_tokens // self.model.block_size
            for index, block in enumerate(sequence.block_table[:hits]):
                end_of_block = (index + 1) * self.model.block_size
                assert self.written[block] == self.model.prefix(sequence, end_of_block), "the hit is of another prefix"

    @initialize()
    def start_recording_writes(self) -> None:
        self.written: dict[int, Prefix] = {}

    @precondition(lambda self: any(sequence.block_table for sequence in self.sequences.values()))
    @rule(which=st.integers(0, 99), share=st.integers(0, 4))
    def compute(self, which: int, share: int) -> None:
        sequence = self.pick(which, [sequence for sequence in self.sequences.values() if sequence.block_table])
        covered = min(self.covered(sequence), sequence.num_tokens)
        start = sequence.num_computed_tokens
        end = start + (covered - start) * share // 4
        size = self.model.block_size
        for index in range(start // size, end // size):
            self.written[sequence.block_table[index]] = self.model.prefix(sequence, (index + 1) * size)
        self.manager.mark_computed(sequence, end)
        for index in range(end // size):
            assert self.written[sequence.block_table[index]] == self.model.prefix(sequence, (index + 1) * size)

    @precondition(lambda self: any(s.num_computed_tokens == s.num_tokens for s in self.sequences.values()))
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def decode(self, which: int, token: int) -> None:
        sequence = self.pick(which, [s for s in self.sequences.values() if s.num_computed_tokens == s.num_tokens])
        sequence.append_token(token)
        if self.manager.can_append_slot(sequence):
            self.note_covered_tokens(sequence, sequence.num_tokens)
            self.manager.append_slot_for_decode(sequence)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        self.manager.free_sequence(self.pick(which))

    @rule(count=st.integers(0, 4))
    def allocate_blocks_without_a_sequence(self, count: int) -> None:
        if count <= self.manager.get_num_free_blocks():
            self.model.loose += self.manager.allocate_blocks(count)

    @precondition(lambda self: self.model.loose)
    @rule(data=st.data())
    def free_blocks_without_a_sequence(self, data: Any) -> None:
        freed = data.draw(st.lists(st.sampled_from(self.model.loose), unique=True))
        self.manager.free_blocks(freed)
        self.model.loose = [block for block in self.model.loose if block not in freed]

    @rule()
    def free_blocks_not_in_use(self) -> None:
        order = free_order(self.manager)
        if order:
            with pytest.raises(BlockNotInUseError):
                self.manager.free_blocks([order[0]])

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @rule()
    def ask(self) -> None:
        for sequence in self.sequences.values():
            can_admit(self.manager, sequence)

    @invariant()
    def state_is_consistent(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        in_use = {block for sequence in self.sequences.values() for block in sequence.block_table} | set(
            self.model.loose
        )
        assert self.manager.get_num_free_blocks() + len(in_use) == self.model.num_blocks


# The same examples in every run, so that a failure comes from the change under test; `make soak` explores new ones.
thorough = settings(
    derandomize=True,
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much],
)

TestBlockManagerMatchesTheReferenceModel = BlockManagerMachine.TestCase
TestBlockManagerMatchesTheReferenceModel.settings = thorough
TestHashCollisionNeverServesAnotherPrefix = CollisionMachine.TestCase
TestHashCollisionNeverServesAnotherPrefix.settings = thorough
