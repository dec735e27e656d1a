"""LiveRequests: every request from its arrival until its terminal output has been handed out."""

from __future__ import annotations

from minivllm.core.errors import InvalidRequestError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sequence import Sequence


class LiveRequests:
    """Requests by id, and their samples. An id is free again once the last of its samples was reported ended."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._samples: dict[str, list[Sequence]] = {}  # request id -> its samples, for n > 1

    def __len__(self) -> int:
        return len(self._sequences)

    def check_new(self, group: list[Sequence]) -> None:
        """Raises InvalidRequestError if a prompt is empty or an id is alive."""
        for sequence in group:
            if not sequence.prompt_token_ids:
                raise InvalidRequestError("the prompt is empty: it needs at least one token", param="prompt")
            for request_id in (sequence.request_id, sequence.parent_request_id):
                if request_id in self._sequences or request_id in self._samples:
                    raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")

    def add(self, group: list[Sequence]) -> None:
        for sequence in group:
            self._sequences[sequence.request_id] = sequence
        if len(group) > 1:
            self._samples[group[0].parent_request_id] = list(group)

    def sequence(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def unfinished(self, request_id: str | None = None, index: int | None = None) -> list[Sequence]:
        """Samples that still run or wait: of all requests, of one, or one of its samples."""
        if request_id is None:
            found = list(self._sequences.values())
        elif request_id in self._samples:
            found = self._samples[request_id]
        else:
            found = [self._sequences[request_id]] if request_id in self._sequences else []
        return [one for one in found if not one.is_finished and (index is None or one.index == index)]

    def forget(self, output: RequestOutput) -> None:
        """The terminal output of a sample has been handed out."""
        group = self._samples.get(output.request_id)
        if group is None:
            self._sequences.pop(output.request_id, None)
            return
        sample = next(sequence for sequence in group if sequence.index == output.index)
        group.remove(sample)
        del self._sequences[sample.request_id]
        if not group:
            del self._samples[output.request_id]
