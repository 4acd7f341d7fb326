"""Sampler: converts logits to one token id per sequence.

Logits are first changed by the logits processors. Then the greatest logit is taken, or temperature,
min_p, top_k and top_p (in this order, which is vLLM's) are applied and a token is drawn. Rows that
need the same operations are processed together, and rows that need none are skipped.

A sampled token depends only on its own logits and on (seed, choice, position in the output), not on
the rest of the batch and not on earlier samples. Another worker can therefore continue a request at
any token.
"""

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRequest
from workers.engine.core.sequence import Operations, Sequence
from workers.engine.sampling.estimates import draw_unfiltered
from workers.engine.sampling.logits_processors import needs_processing, process_logits
from workers.engine.sampling.ranked import draw_filtered, rank
from workers.engine.sampling.row_chunks import iterate_chunks, take_rows
from workers.engine.sampling.truncation import Filters

GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow, and are treated as greedy sampling."""
RESOLUTION = 2.0**-52
NUM_OF_COUNTER = 4
NUM_DRAWN = 64
"""Random numbers that are drawn for a sequence at once: 64 take hardly longer than one."""
NOT_FINITE_ERROR = "the output of the model for a sequence is not finite"
NO_TOKEN_LEFT = "the sampling parameters leave no token to choose"


def draw_tokens(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Return the next tokens of sequences on a CPU, from `logits` [num_sequences, vocab_size].

    The tokens are int64 [num_sequences]. The logits may have any floating dtype and are not
    changed. Raises ArithmeticError if the logits of a row are not finite, as after an overflow, and
    InvalidRequest if a request has banned every token.
    """
    groups: dict[Operations, list[int]] = defaultdict(list)
    for row, sequence in enumerate(sequences):
        groups[operations_of(sequence)].append(row)
    parts = [
        (chunk, _draw_rows(take_rows(logits, chunk).float(), of_chunk, operations))
        for operations, rows in groups.items()
        for chunk in (iterate_chunks(rows, logits) if operations.is_processed else [rows])
        for of_chunk in ([sequences[row] for row in chunk],)
    ]
    if len(parts) == 1:
        return parts[0][1]
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    for rows, of_rows in parts:
        token_ids[rows] = of_rows
    return token_ids


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the tokens of `draw_tokens`."""
    token_ids: list[int] = draw_tokens(logits, sequences).tolist()
    return token_ids


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a random number in [0, 1), a pure function of the arguments."""
    return float(_draw_points(seed, choice, position, 1)[0])


def _draw_points(seed: int, choice: int, first: int, num: int) -> NDArray[np.float64]:
    """Return the random numbers of `num` positions in the output from `first` on.

    The generator is Philox4x64 (Salmon et al., 2011), which computes from a key and a counter. The
    first one of the four numbers of each value of the counter is used.
    """
    generator = np.random.Philox(key=[seed, choice], counter=first)
    bits = generator.random_raw(NUM_OF_COUNTER * num)[::NUM_OF_COUNTER]
    return (bits >> np.uint64(12)).astype(np.float64) * RESOLUTION


def point_of(sequence: Sequence) -> float:
    """Return the random number of the next token."""
    first, points = sequence.points
    index = len(sequence.token_ids) - sequence.num_prompt_tokens - first
    if not 0 <= index < len(points):
        first, index = first + index, 0
        points = _draw_points(sequence.seed, sequence.choice, first, NUM_DRAWN)
        sequence.points = first, points
    return float(points[index])


def operations_of(sequence: Sequence) -> Operations:
    """Return the operations of the next token. They are stored once they no longer change."""
    if sequence.operations is not None:
        return sequence.operations
    params = sequence.request.sampling
    is_greedy = params.temperature < GREEDY_BELOW
    has_filter = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    is_processed = needs_processing(sequence)
    operations = Operations(is_greedy, has_filter and not is_greedy, is_processed)
    if sequence.num_output_tokens >= params.min_tokens:
        sequence.operations = operations
    return operations


def _draw_rows(logits: Tensor, sequences: list[Sequence], operations: Operations) -> Tensor:
    """Return tokens, from `logits` [num_sequences, vocab_size] float32."""
    if operations.is_processed:
        check_finite(logits.amax(-1))
        logits = process_logits(logits, sequences)
    if operations.is_greedy:
        # NumPy's argmax is vectorised; PyTorch's compares one by one.
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))
        _check_greatest(logits.gather(1, token_ids[:, None]), operations)
    elif operations.is_filtered:
        ranked = rank(logits)
        _check_greatest(ranked.logits[:, :1], operations)
        token_ids = draw_filtered(logits, ranked, *_parameters_of(sequences, logits.shape[1]))
    else:
        greatest = logits.amax(-1, keepdim=True)
        _check_greatest(greatest, operations)
        filters, points = _parameters_of(sequences, logits.shape[1])
        token_ids = draw_unfiltered(logits, greatest, filters.temperature, points)
    return token_ids


def _check_greatest(greatest: Tensor, operations: Operations) -> None:
    """Raise the errors of `draw_tokens`, from the greatest logit of each row."""
    if operations.is_processed and bool(greatest.isneginf().any()):
        raise InvalidRequest(NO_TOKEN_LEFT, field="sampling_params")
    check_finite(greatest)


def check_finite(values: Tensor) -> None:
    """Raise ArithmeticError if any value is not finite.

    For rows of logits, their maxima suffice: a NaN in a row is its maximum.
    """
    # For so few values, NumPy takes a tenth of the time.
    if not np.isfinite(values.float().numpy(force=True)).all():
        raise ArithmeticError(NOT_FINITE_ERROR)


def _parameters_of(sequences: list[Sequence], vocab_size: int) -> tuple[Filters, Tensor]:
    """Return the filters, and the point of each sequence at which a token is drawn."""
    params = [sequence.request.sampling for sequence in sequences]
    columns = np.array(
        [
            [p.temperature for p in params],
            [p.min_p for p in params],
            [min(p.top_k or vocab_size, vocab_size) for p in params],
            [p.top_p for p in params],
            [point_of(sequence) for sequence in sequences],
        ]
    )
    temperature, min_p, top_k, top_p, points = torch.from_numpy(columns)[:, :, None]
    return Filters(temperature.float(), min_p, top_k.long(), top_p), points[:, 0]
