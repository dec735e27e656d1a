"""An engine on the fake runner whose invariants are checked after every step.

`WatchedEngine` adds, aborts and steps requests and records the outputs of each. After each step it checks the block
accounting with `check_integrity()` and independently, every output against the oracle, that a step with runnable
requests computes tokens, and that each request ends once with the right finish reason. No `assert`, so that the checks
also run under `python -O`.
"""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.config import EngineConfig
from minivllm.core.engine import LLMEngine
from minivllm.core.outputs import RequestOutput
from minivllm.core.sampling_params import SamplingParams
from minivllm.core.sequence import FinishReason, Sequence
from tests.core.fakes import FakeModel, FakeRunner, KVFaultError, require


@dataclass
class Watched:
    """Expected and received output of one sample of one request."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    expected: list[int]
    expected_reason: FinishReason
    abort_asked: bool = False
    set_to_fail: bool = False
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.request_id}[{self.index}]"


class WatchedEngine:
    """Runs requests on a `FakeRunner` and checks the invariants after every step.

    Args:
        expects_death: the engine dies in this test, so every request may end with an error.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 4,
        model: FakeModel | None = None,
        model_max_len: int | None = None,
        expects_death: bool = False,
        full_checks: bool = True,
        **options: Any,
    ) -> None:
        options.setdefault("validate_blocks", True)
        options.setdefault("watermark", 0.0)
        options.setdefault("max_num_batched_tokens", 64)
        self.model = model or FakeModel()
        self.runner = FakeRunner(
            num_blocks,
            block_size,
            max_model_len=model_max_len or num_blocks * block_size,
            model=self.model,
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_num_seqs=options.get("max_num_seqs"),
        )
        self.engine = LLMEngine(EngineConfig(block_size=block_size, **options), self.runner)
        self.runner.attach(self.engine.block_manager)
        self.max_model_len: int = self.engine.config.max_model_len or 0
        self.expects_death = expects_death
        self.full_checks = full_checks
        self.live: dict[tuple[str, int], Watched] = {}
        self.ended: list[Watched] = []
        self.keep_ended = True
        self.finish_counts: Counter[str] = Counter()
        self.steps = 0
        self.names = 0

    # Requests

    def add(
        self,
        prompt: list[int],
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        fail_after: int | None = None,
        **params: Any,
    ) -> str:
        """Adds a request and returns its id. An error of the engine propagates, and the request is not watched."""
        if request_id is None:
            self.names += 1
            request_id = f"request-{self.names}"
        sampling = SamplingParams(**params)
        if fail_after is not None:
            self.runner.fail_after[request_id] = fail_after
        try:
            self.engine.add_request(request_id, list(prompt), sampling, priority=priority, cache_salt=cache_salt)
        except BaseException:
            self.runner.fail_after.pop(request_id, None)
            self.raise_fault()
            raise
        for index in range(sampling.n):
            expected, reason = self.model.complete(prompt, sampling, max_model_len=self.max_model_len, index=index)
            fails = fail_after is not None and fail_after < max(1, len(expected))
            watched = Watched(request_id, index, list(prompt), sampling, expected, reason, set_to_fail=fails)
            self.live[request_id, index] = watched
        return request_id

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.engine.abort_request(request_id, index)
        for watched in self.live.values():
            if watched.request_id == request_id and index in (None, watched.index):
                watched.abort_asked = True

    def during_next_step(self, action: Any) -> None:
        """Calls `action` once, between schedule() and update() of the next step that computes tokens."""

        def act(step: Any) -> None:
            self.runner.during_execute = None
            try:
                action()
            except Exception as error:
                self.runner.fault = KVFaultError(f"an action during a step failed: {error!r}")

        self.runner.during_execute = act

    # Steps

    def step(self) -> list[RequestOutput]:
        computable = any(not watched.abort_asked for watched in self.live.values())
        computed = self.runner.tokens_computed
        outputs = self.engine.step()
        self.steps += 1
        self.raise_fault()
        require(
            not computable or self.runner.tokens_computed > computed or self.engine.is_dead,
            "a step computed no token although a request is unfinished",
        )
        for output in outputs:
            self._take(output)
        self.check()
        return outputs

    def drain(self, limit: int | None = None) -> None:
        """Steps until every request has ended, and checks that no layer keeps any state of them."""
        if limit is None:
            tokens = sum(len(watched.prompt) + len(watched.expected) for watched in self.live.values())
            limit = 100 + 4 * tokens * max(1, len(self.live))
        for _ in range(limit):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        require(not self.engine.has_unfinished_requests(), f"still unfinished after {limit} steps")
        self.check_drained()

    def run(self) -> dict[tuple[str, int], list[int]]:
        """Drains, and returns the output tokens of every ended sample."""
        self.drain()
        return {(watched.request_id, watched.index): watched.tokens for watched in self.ended}

    def _take(self, output: RequestOutput) -> None:
        watched = self.live.get((output.request_id, output.index))
        if watched is None:
            raise KVFaultError(f"an output of {output.request_id}[{output.index}], which is not live: {output}")
        watched.tokens += output.new_token_ids
        if watched.num_cached_tokens is None and output.new_token_ids:
            watched.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            watched.prompt_logprobs += [entry.token_id for entry in output.prompt_logprobs]
        if watched.params.logprobs is not None:
            ids = [entry.token_id for entry in output.logprobs or ()]
            require(ids == output.new_token_ids, f"{watched.name}: logprobs of {ids}, tokens {output.new_token_ids}")
        require(
            watched.tokens == watched.expected[: len(watched.tokens)],
            f"{watched.name}: got {watched.tokens}, expected the beginning of {watched.expected}",
        )
        require(output.finished == (output.finish_reason is not None), f"{watched.name}: {output}")
        require(output.finished or output.new_token_ids or output.prompt_logprobs, f"{watched.name}: an empty output")
        if output.finished:
            self._end(watched, output)

    def _end(self, watched: Watched, output: RequestOutput) -> None:
        reason = watched.finish_reason = output.finish_reason
        complete = watched.tokens == watched.expected
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            require(not watched.set_to_fail, f"{watched.name} is set to fail and ended with {reason}")
            require(complete, f"{watched.name} ended with {reason} after {watched.tokens} of {watched.expected}")
            require(reason == watched.expected_reason, f"{watched.name}: {reason}, not {watched.expected_reason}")
            self._check_prompt_logprobs(watched)
            last = watched.tokens[-1] if reason == FinishReason.STOP else None
            require(output.stop_token_id == last, f"{watched.name}: stop_token_id is {output.stop_token_id}")
        elif reason == FinishReason.ABORT:
            require(watched.abort_asked, f"{watched.name} ended with abort without an abort request")
            require(not complete or watched.set_to_fail, f"{watched.name} was complete and ended with abort")
        else:
            may_fail = watched.set_to_fail or self.expects_death
            require(may_fail, f"{watched.name} failed: {output.error}")
            require(output.error is not None, f"{watched.name} failed without an error")
        require((output.error is None) == (reason != FinishReason.ERROR), f"{watched.name}: {reason}, {output.error}")
        del self.live[watched.request_id, watched.index]
        self.finish_counts[str(reason)] += 1
        if self.keep_ended:
            self.ended.append(watched)
        if all(request_id != watched.request_id for request_id, _ in self.live):
            self.runner.fail_after.pop(watched.request_id, None)

    def _check_prompt_logprobs(self, watched: Watched) -> None:
        if watched.params.prompt_logprobs is None or watched.index:
            return
        found, due = watched.prompt_logprobs, watched.prompt[1:]
        require(found == due, f"{watched.name}: prompt logprobs of {found}, expected {due}")

    # Checks

    def raise_fault(self) -> None:
        if self.runner.fault is not None:
            raise self.runner.fault

    def check(self) -> None:
        engine, manager = self.engine, self.engine.block_manager
        if not engine.is_dead:
            manager.check_integrity()
        require(
            engine.has_unfinished_requests() or not self.live,
            "has_unfinished_requests() is false with live requests",
        )
        if not self.full_checks:
            return
        running, waiting = engine.scheduler.running, engine.scheduler.waiting
        limit = engine.config.max_num_seqs
        require(len(running) <= limit, f"{len(running)} sequences run, max_num_seqs is {limit}")
        self._check_tables(running)
        for sequence in waiting:
            require(not sequence.block_table, f"{sequence.seq_id} waits and has blocks {sequence.block_table}")
            require(sequence.num_computed_tokens == 0, f"{sequence.seq_id} waits with computed tokens")
        stats = engine.stats()
        require(stats.num_running == len(running), f"num_running is {stats.num_running}, not {len(running)}")
        require(stats.num_waiting == len(waiting), f"num_waiting is {stats.num_waiting}, not {len(waiting)}")
        require(stats.num_free_blocks + stats.num_used_blocks == manager.num_blocks, "free + used != total")
        require(stats.num_free_blocks == manager.get_num_free_blocks(), "num_free_blocks of the stats is wrong")
        seen = {id(sequence) for sequence in running} & {id(sequence) for sequence in waiting}
        require(not seen, "a sequence is both running and waiting")

    def _check_tables(self, running: list[Sequence]) -> None:
        """Checks `owners()` against the block tables of the running sequences."""
        manager = self.engine.block_manager
        holders: dict[int, list[str]] = {}
        for sequence in running:
            for block in sequence.block_table:
                holders.setdefault(block, []).append(sequence.seq_id)
        used = 0
        for block, owner in enumerate(manager.owners()):
            names = sorted(holders.get(block, []))
            require(sorted(owner.request_ids) == names, f"block {block}: owners {owner.request_ids}, tables of {names}")
            require((owner.state == "owned") == bool(names), f"block {block} is {owner.state}, in tables of {names}")
            used += bool(names)
        free = manager.get_num_free_blocks()
        require(free + used == manager.num_blocks, f"{free} free + {used} used != {manager.num_blocks}")

    def check_drained(self) -> None:
        """Checks that no request, no block in use and no state of a request is left in any layer."""
        engine = self.engine
        require(not self.live, f"no terminal output of {[watched.name for watched in self.live.values()]}")
        require(not engine.scheduler.running and not engine.scheduler.waiting, "a queue is not empty")
        require(engine.block_manager.get_num_free_blocks() == engine.block_manager.num_blocks, "blocks are missing")
        require(not self.runner.live_request_ids, f"the runner still has {self.runner.live_request_ids}")
        engine.block_manager.check_integrity()
        self.raise_fault()


def reachable(root: Any) -> Iterator[Any]:
    """Yields every object that `root` keeps alive, except through classes, modules and frames."""
    seen = {id(root)}
    queue = [root]
    barriers = (type, types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType)
    while queue:
        item = queue.pop()
        yield item
        if isinstance(item, types.FunctionType):
            neighbours = [*(item.__defaults__ or ()), *(cell.cell_contents for cell in item.__closure__ or ())]
        else:
            neighbours = gc.get_referents(item)
        for neighbour in neighbours:
            if isinstance(neighbour, barriers) or id(neighbour) in seen:
                continue
            seen.add(id(neighbour))
            queue.append(neighbour)


def leftovers(root: Any, request_ids: set[str]) -> list[str]:
    """Returns what `root` still references of these requests: sequences, params, outputs and their ids."""
    found = []
    for item in reachable(root):
        if isinstance(item, (Sequence, SamplingParams, RequestOutput)):
            found.append(repr(item))
        elif isinstance(item, str) and (item in request_ids or item.rpartition("/")[0] in request_ids):
            found.append(f"the id {item!r}")
    return found
