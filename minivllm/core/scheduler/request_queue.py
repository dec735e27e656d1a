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
        self.admissible: list[Sequence] = []  # in queue order, without the followers
        self._followers: dict[Sequence, list[Sequence]] = {}  # by leader
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self.admissible) + sum(map(len, self._followers.values()))

    def in_order(self) -> list[Sequence]:
        """Returns all waiting sequences in queue order, followers included."""
        followers = [sequence for group in self._followers.values() for sequence in group]
        return sorted([*self.admissible, *followers], key=queue_rank)

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self.admissible, sequence, key=queue_rank)
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
        position = bisect_left(self.admissible, queue_rank(sequence), key=queue_rank)
        if self.admissible[position : position + 1] == [sequence]:
            del self.admissible[position]
            return
        for group in self._followers.values():
            if sequence in group:
                group.remove(sequence)

    def has_room(self, group: list[Sequence], max_requests: int, max_tokens: int) -> bool:
        """Returns whether the queue stays within its limits with `group`. An empty queue takes any group."""
        num_tokens = self.num_tokens + sum(sequence.num_tokens for sequence in group)
        return not len(self) or (len(self) + len(group) <= max_requests and num_tokens <= max_tokens)
