"""Pooling of hidden states into embeddings: of the last token, or the mean over all tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.requests import EmbeddingParams
from workers.engine.core.sequence import Pooling, ScheduledSequence
from workers.engine.sampling.sampler import check_finite


def check_dimensions(params: EmbeddingParams | None, hidden_size: int) -> None:
    """Raise InvalidRequest for more dimensions than the model has."""
    if params is not None and params.dimensions is not None and params.dimensions > hidden_size:
        raise InvalidRequest(
            f"dimensions {params.dimensions} is more than the model's {hidden_size}",
            field="embedding.dimensions",
        )


def num_pooled_rows(s: ScheduledSequence) -> int:
    """Return the number of trailing rows of the step that the sequence's embedding needs."""
    if s.sequence.pools_all_tokens:
        return s.num_new_tokens
    return int(s.samples and not s.samples_token)


def pool(hidden: Tensor, scheduled: Sequence[ScheduledSequence]) -> None:
    """Store the embeddings of complete prompts, and the sums of incomplete prompts.

    `hidden` is [num_rows, hidden_size] in float32, with the rows of all `scheduled` in turn.
    Repeating it is harmless: the sum before a step is stored until the next one. A prompt that is
    recomputed after a preemption begins with no sum.
    """
    rows_of = torch.split(hidden, [num_pooled_rows(s) for s in scheduled])
    states = torch.stack(
        [
            _add_to_mean(s, rows) if s.sequence.pools_all_tokens else rows[-1]
            for s, rows in zip(scheduled, rows_of, strict=True)
        ]
    )
    # The states verify the blocks of these tokens for the prefix cache, as sampled rows do. A sum
    # is not finite if any of its terms is not, or if it is too large for its type.
    check_finite(states)
    for s, state in zip(scheduled, states, strict=True):
        sequence, params = s.sequence, s.sequence.request.embedding
        if s.samples:
            assert params is not None
            sequence.embedding = _embedding_of(state, params, sequence.pooling)


def _add_to_mean(s: ScheduledSequence, states: Tensor) -> Tensor:
    """Add the hidden states of a chunk to the sequence's sum; return the mean so far."""
    sequence, start = s.sequence, s.start
    stop, total = start + len(states), states.sum(dim=0)
    before = {}
    if start > 0:
        before[start] = sequence.hidden_sums[start]
        total += before[start]
    sequence.hidden_sums = before | {stop: total}
    return total / stop


def _embedding_of(hidden: Tensor, params: EmbeddingParams, pooling: Pooling) -> bytes:
    """Return the first values of a hidden state [hidden_size], as 32-bit floats."""
    values = hidden[: params.dimensions]
    if pooling.normalize if params.normalize is None else params.normalize:
        values = torch.nn.functional.normalize(values, dim=0)
    return values.cpu().numpy().astype("<f4").tobytes()
