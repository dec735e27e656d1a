"""RequestQueue: sequences that hold no blocks yet (or no more), in the order in which they may be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort

from minivllm.core.errors import EngineOverloadedError
from minivllm.core.sequence import Sequence, SequenceStatus

QueueRank = tuple[int, bool, float, int]


def queue_rank(sequence: Sequence) -> QueueRank:
    """By priority (lower first); of one priority the preempted before the new; then by arrival."""
    return sequence.priority, sequence.num_preemptions == 0, sequence.arrival_time, sequence.arrival_number


class RequestQueue:
    """An ordered queue, with a side room for the later samples of a request (n > 1).

    Those `followers` would all miss the prefix cache if they were admitted beside the first sample, their leader. One
    step later its prompt's blocks are computed, and theirs to share.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._followers: dict[str, list[Sequence]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        followers = sum(map(len, self._followers.values())) if self._followers else 0
        return len(self._ordered) + followers

    @property
    def num_admissible(self) -> int:
        """Sequences that `at` reaches: all but the followers."""
        return len(self._ordered)

    def at(self, position: int) -> Sequence:
        return self._ordered[position]

    def in_order(self) -> list[Sequence]:
        """All of them, followers too, in queue order."""
        followers = [sequence for group in self._followers.values() for sequence in group]
        return sorted([*self._ordered, *followers], key=queue_rank)

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self._ordered, sequence, key=queue_rank)
        self.num_tokens += sequence.num_tokens

    def add_followers(self, leader: Sequence, followers: list[Sequence]) -> None:
        self._followers[leader.request_id] = followers
        self.num_tokens += sum(sequence.num_tokens for sequence in followers)

    def release_followers(self, leader: Sequence) -> None:
        """The leader's prompt is computed, or the leader is gone: its followers may come."""
        for sequence in self._followers.pop(leader.request_id, ()):
            self.num_tokens -= sequence.num_tokens
            self.add(sequence)

    def has_followers(self, leader: Sequence) -> bool:
        return leader.request_id in self._followers

    def remove(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.num_tokens
        position = bisect_left(self._ordered, queue_rank(sequence), key=queue_rank)
        if position < len(self._ordered) and self._ordered[position] is sequence:
            del self._ordered[position]
            return
        for leader_id, group in self._followers.items():
            if sequence in group:
                group.remove(sequence)
                if not group:
                    del self._followers[leader_id]
                return

    def check_room(self, group: list[Sequence], most_requests: int | None, most_tokens: int | None) -> None:
        """Raises EngineOverloadedError if `group` would make the queue too long. An empty queue takes anything."""
        waiting = len(self)
        if waiting == 0:
            return
        new_tokens = sum(sequence.num_tokens for sequence in group)
        too_many = most_requests is not None and waiting + len(group) > most_requests
        too_long = most_tokens is not None and self.num_tokens + new_tokens > most_tokens
        if too_many or too_long:
            raise EngineOverloadedError(
                f"the server is overloaded: {waiting} requests of {self.num_tokens} tokens wait", retry_after_s=1.0
            )
