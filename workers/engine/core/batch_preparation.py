"""Preparation of a scheduled batch: positions of new requests, and embeddings of items."""

from collections.abc import Mapping

from shared.errors import PagemillError
from workers.engine.core.request_errors import error_of_request, out_of_memory
from workers.engine.core.request_state import RequestState
from workers.engine.core.sequence import Batch, ScheduledSequence
from workers.engine.core.step_runner import StepRunner


class BatchPreparation:
    """Prepares the requests of batches. A request that fails is left out of its batch.

    All methods raise the error of a device that is lost.
    """

    def __init__(self, runner: StepRunner, requests: Mapping[str, RequestState]) -> None:
        self._runner = runner
        self._requests = requests
        self._failed: dict[str, tuple[RequestState, PagemillError]] = {}
        self.first_scheduled: list[str] = []
        """Requests that have been prepared in this step."""

    @property
    def has_failed(self) -> bool:
        return bool(self._failed)

    def take_failed(self) -> list[tuple[RequestState, PagemillError]]:
        """Return the requests that could not be prepared since the last call, with their errors."""
        failed, self._failed = self._failed, {}
        return list(failed.values())

    def prepare(self, batch: Batch) -> tuple[Batch, int]:
        """Return the batch without failed requests, and the prompt tokens of encoded items."""
        missing: dict[str, set[int]] = {}
        for s in batch.scheduled:
            if s.sequence.is_prepared or s.sequence.request_id in self._failed:
                continue
            state = self._requests[s.sequence.request_id]
            try:
                self._prepare_request(state)
            except Exception as error:
                self._fail(state, error_of_request(error))
                continue
            if indexes := _missing_items(state, s):
                missing.setdefault(s.sequence.request_id, set()).update(indexes)
            s.sequence.is_prepared = not state.request.items
        num_item_tokens = self._encode(missing)
        remaining = batch.scheduled
        if self._failed:
            remaining = [s for s in remaining if s.sequence.request_id not in self._failed]
        adapters = {s.sequence.request.adapter for s in remaining}
        if len(adapters) > 1:
            # Adjacent sequences of one adapter go through it in one product.
            remaining = sorted(remaining, key=lambda s: s.sequence.request.adapter or "")
        return Batch(remaining), num_item_tokens

    def _prepare_request(self, state: RequestState) -> None:
        if not state.prepared:
            self._runner.prepare(state.request)
            state.prepared = True
            self.first_scheduled.append(state.request.request_id)

    def _fail(self, state: RequestState, error: PagemillError) -> None:
        self._failed[state.request.request_id] = state, error

    def fail_encoding(self, state: RequestState, error: Exception) -> None:
        """Fail a request by the error of its items alone."""
        if self._runner.recover_memory(error):
            error = out_of_memory(error)
        self._fail(state, error_of_request(error))

    def _encode(self, missing: Mapping[str, set[int]]) -> int:
        """Encode items by the indexes in their requests: in one call, or each request alone if that
        fails. Returns the prompt tokens of the encoded items."""
        states = [self._requests[name] for name in missing if name not in self._failed]
        if not states:
            return 0
        try:
            num_tokens = self._runner.encode(
                [(state.request, sorted(missing[state.request.request_id])) for state in states]
            )
        except Exception as error:
            if len(states) == 1:
                self.fail_encoding(states[0], error)
                return 0
            if not self._runner.recover_memory(error):
                error_of_request(error)  # Raises the error of a device that is lost.
            return sum(self._encode({name: indexes}) for name, indexes in missing.items())
        for state in states:
            state.encoded.update(missing[state.request.request_id])
        return num_tokens


def _missing_items(state: RequestState, s: ScheduledSequence) -> list[int]:
    """Return the indexes of the items that the tokens depend on and that are not encoded yet."""
    needed = state.request.items_within(s.start, s.end)
    return [index for index in needed if index not in state.encoded]
