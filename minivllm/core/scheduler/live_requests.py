"""LiveRequests: every request from its arrival until its terminal output has been handed out."""

from __future__ import annotations

from minivllm.core.errors import InvalidRequestError
from minivllm.core.outputs import RequestOutput
from minivllm.core.sequence import Sequence


class LiveRequests:
    """Requests by id, and their samples. An id is free again once the last of its samples was reported ended."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}  # by the id of the sample
        self._samples: dict[str, list[Sequence]] = {}  # by the id of the request

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
            self._samples.setdefault(sequence.parent_request_id, []).append(sequence)

    def sequence(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def unfinished(self, request_id: str | None = None, index: int | None = None) -> list[Sequence]:
        """Samples that still run or wait: of all requests, of one, or one of its samples."""
        found = self._sequences.values() if request_id is None else self._samples.get(request_id, ())
        return [one for one in found if not one.is_finished and (index is None or one.index == index)]

    def forget(self, output: RequestOutput) -> None:
        """The terminal output of a sample has been handed out."""
        group = self._samples[output.request_id]
        sample = next(sequence for sequence in group if sequence.index == output.index)
        group.remove(sample)
        del self._sequences[sample.request_id]
        if not group:
            del self._samples[output.request_id]
