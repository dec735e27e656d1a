"""RequestQueue: the waiting sequences, which have no blocks, in the order of their admission."""

from __future__ import annotations

from bisect import bisect_left, insort

from minivllm.core.sequence import Sequence, SequenceStatus

QueueRank = tuple[int, bool, float | None, int]


def queue_rank(sequence: Sequence) -> QueueRank:
    """Orders waiting sequences: by priority (lower first), preempted before new, by arrival."""
    return sequence.priority, sequence.num_preemptions == 0, sequence.arrival_time, sequence.arrival_number


class RequestQueue:
    """An ordered queue that delays the later samples of a request (n > 1).

    These `followers` would miss the prefix cache if they were admitted together with the first sample, their leader.
    Once its prompt is computed they join the queue and share its blocks.
    """

    def __init__(self) -> None:
        self._ordered: list[Sequence] = []
        self._followers: dict[Sequence, list[Sequence]] = {}  # by leader
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
        """Returns all waiting sequences in queue order, followers included."""
        followers = [sequence for group in self._followers.values() for sequence in group]
        return sorted([*self._ordered, *followers], key=queue_rank)

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self._ordered, sequence, key=queue_rank)
        self.num_tokens += sequence.num_tokens

    def add_followers(self, leader: Sequence, followers: list[Sequence]) -> None:
        self._followers[leader] = followers
        self.num_tokens += sum(sequence.num_tokens for sequence in followers)

    def release_followers(self, leader: Sequence) -> None:
        """Moves the followers to the queue: the leader's prompt is computed, or the leader has ended."""
        for sequence in self._followers.pop(leader, ()):
            self.num_tokens -= sequence.num_tokens
            self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.num_tokens
        position = bisect_left(self._ordered, queue_rank(sequence), key=queue_rank)
        if position < len(self._ordered) and self._ordered[position] is sequence:
            del self._ordered[position]
            return
        for leader, group in self._followers.items():
            if sequence in group:
                group.remove(sequence)
                if not group:
                    del self._followers[leader]
                return

    def has_room(self, group: list[Sequence], max_requests: int, max_tokens: int) -> bool:
        """Returns whether the queue stays within its limits with `group`. An empty queue takes any group."""
        waiting = len(self)
        num_tokens = self.num_tokens + sum(sequence.num_tokens for sequence in group)
        return waiting == 0 or (waiting + len(group) <= max_requests and num_tokens <= max_tokens)
