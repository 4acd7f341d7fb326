"""The interface between the engine core and the code that runs the model."""

from collections.abc import Sequence
from typing import Any, Protocol

from workers.engine.core.sequence import Batch, EngineRequest, Item, SampledToken, Span


class Launched(Protocol):
    """A batch whose forward pass has been launched. On a device it may still be computed."""

    def sample(self, indexes: Sequence[int]) -> None:
        """Sample the next tokens of some sequences, by their ascending indexes in the batch.

        All tokens up to the last computed one are known by now. Must be called once at most, before
        the next batch is launched.
        """

    def result(self) -> list[list[SampledToken]]:
        """Wait for the new tokens of each of these sequences; an empty list if it does not sample.

        Log probabilities of prompt tokens are stored in `Sequence.prompt_logprobs`, embeddings in
        `Sequence.embedding`.
        """


class StepRunner(Protocol):
    """Runs batches through a model.

    A runner may hold state for a request from `prepare` until `release`.
    """

    @property
    def encoded_items(self) -> int:
        """Number of items that have gone through the vision tower so far."""

    @property
    def mm_cache_queries(self) -> int:
        """Number of items looked up in the embedding cache so far."""

    @property
    def mm_cache_hits(self) -> int: ...

    def check(self, request: EngineRequest) -> int:
        """Return the number of positions that the model has after the request's prompt.

        Each token of an answer takes one. Raises a RequestError if the model cannot run the
        request; the runner holds no state for it yet.
        """

    def spans_of(self, request: EngineRequest) -> list[Span]:
        """Return the runs of tokens in a checked prompt that attend to each other."""

    def prepare(self, request: EngineRequest) -> None:
        """Set up a checked request before its first batch."""

    def begin_encoding(self, request: EngineRequest, indexes: Sequence[int]) -> set[int]:
        """Let a tower thread encode items of a checked request, and return the awaited ones.

        Other items have embeddings, or `encode` computes them. An embedding that is cached becomes
        the item's at once.
        """

    def take_embedding(self, item: Item, embedding: Any) -> None:
        """Give an awaited item its embedding, [num_embeds, width], and cache it."""

    def encode(self, requests: Sequence[tuple[EngineRequest, Sequence[int]]]) -> int:
        """Compute or look up the embeddings of items and hold them for the next batches.

        Each request comes with the indexes of its items. Returns the number of prompt tokens of the
        items that the tower has encoded. If it raises an error, no request has got embeddings, and
        the call may be repeated with some of the requests.
        """

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy KV blocks, given as (source, destination), before the batch that reads them."""

    def launch(self, batch: Batch) -> Launched:
        """Launch the forward pass of a batch, after the work launched before.

        The last token of a sequence may be awaited from the batch before, see `Sequence.token_ids`.
        It has been sampled there, but its value may only be known on the device.
        """

    def recover_memory(self, error: Exception) -> bool:
        """Return whether an error means that the device has too little memory.

        If so, the runner has given back the memory that it holds and does not use.
        """

    def release(self, request_id: str) -> None:
        """Drop the state held for the request, if there is any."""

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite blocks that may hold NaN: even a masked NaN would spoil later attention."""
