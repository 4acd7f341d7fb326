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
from torch import Tensor

from shared.errors import InvalidRequest
from workers.engine.core.sequence import Operations, Sequence
from workers.engine.sampling.estimates import draw_unfiltered
from workers.engine.sampling.logits_processors import needs_processing, process_logits
from workers.engine.sampling.ranked import draw_filtered, rank
from workers.engine.sampling.row_chunks import iterate_chunks, take_rows
from workers.engine.sampling.truncation import Filters
from workers.engine.transfers import Download, upload

GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow, and are treated as greedy sampling."""
RESOLUTION = 2.0**-52
NUM_OF_COUNTER = 4
NUM_DRAWN = 64
"""Random numbers that are drawn for a sequence at once: 64 take hardly longer than one."""
NOT_FINITE = "the output of the model for a sequence is not finite"


class Drawn:
    """The next token of each row. Until `result`, the tokens may only be known on the device."""

    def __init__(self, token_ids: Tensor, greatest: Tensor) -> None:
        """`token_ids` are int64, `greatest` are the greatest logits: both [num_rows]."""
        self.token_ids = token_ids
        self._download = Download(torch.stack([token_ids, greatest.isfinite().long()]))

    def result(self) -> list[int]:
        """Wait for the tokens. Raises ArithmeticError if logits are not finite."""
        token_ids, are_finite = self._download.result().tolist()
        if not all(are_finite):
            raise ArithmeticError(NOT_FINITE)
        return list(token_ids)


def draw_tokens(logits: Tensor, sequences: list[Sequence]) -> Drawn:
    """Draw the next tokens of one or more sequences, from `logits` [num_sequences, vocab_size].

    The logits may have any floating dtype and are not changed. Raises ArithmeticError if the logits
    of a row with filters or processors are not finite, as after an overflow, and InvalidRequest if
    a request has banned every token.
    """
    groups: dict[Operations, list[int]] = defaultdict(list)
    for row, sequence in enumerate(sequences):
        groups[sequence.operations or _operations_of(sequence)].append(row)
    parts = [
        (chunk, _draw_rows(take_rows(logits, chunk).float(), of_chunk, operations))
        for operations, rows in groups.items()
        for chunk in (iterate_chunks(rows, logits) if operations.is_processed else [rows])
        for of_chunk in ([sequences[row] for row in chunk],)
    ]
    if len(parts) == 1:
        return Drawn(*parts[0][1])
    order = upload([row for chunk, _ in parts for row in chunk], logits.device).argsort()
    token_ids, greatest = (torch.cat([columns[i] for _, columns in parts])[order] for i in range(2))
    return Drawn(token_ids, greatest)


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the tokens of `draw_tokens`. Raises ArithmeticError for any row that is not finite."""
    return draw_tokens(logits, sequences).result()


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a random number in [0, 1), a pure function of the arguments."""
    return _draw_points(seed, choice, position, 1)[0]


def _draw_points(seed: int, choice: int, first: int, num: int) -> list[float]:
    """Return the random numbers of `num` positions in the output from `first` on.

    The generator is Philox4x64 (Salmon et al., 2011), which computes from a key and a counter. The
    first one of the four numbers of each value of the counter is used.
    """
    generator = np.random.Philox(key=[seed, choice], counter=first)
    bits = generator.random_raw(NUM_OF_COUNTER * num)[::NUM_OF_COUNTER]
    points: list[float] = ((bits >> np.uint64(12)) * RESOLUTION).tolist()
    return points


def point_of(sequence: Sequence) -> float:
    """Return the random number of the next token."""
    first, points = sequence.points
    index = len(sequence.token_ids) - sequence.num_prompt_tokens - first
    if not 0 <= index < len(points):
        first, index = first + index, 0
        points = _draw_points(sequence.seed, sequence.choice, first, NUM_DRAWN)
        sequence.points = first, points
    return points[index]


def _operations_of(sequence: Sequence) -> Operations:
    """Return the operations of the next token. They are stored once they no longer change."""
    params = sequence.request.sampling
    is_greedy = params.temperature < GREEDY_BELOW
    has_filter = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
    is_processed = needs_processing(sequence)
    operations = Operations(is_greedy, has_filter and not is_greedy, is_processed)
    if sequence.num_output_tokens >= params.min_tokens:
        sequence.operations = operations
    return operations


def _draw_rows(
    logits: Tensor, sequences: list[Sequence], operations: Operations
) -> tuple[Tensor, Tensor]:
    """Return tokens and greatest logits, from `logits` [num_sequences, vocab_size] float32."""
    if operations.is_processed:
        check_finite(logits.amax(-1))
        logits = process_logits(logits, sequences)
    if operations.is_greedy:
        token_ids = _argmax(logits)
        greatest = logits.gather(1, token_ids[:, None])
        if operations.is_processed:
            _check_greatest(greatest, operations)
    elif operations.is_filtered:
        ranked = rank(logits)
        greatest = ranked.logits[:, :1]
        _check_greatest(greatest, operations)
        token_ids = draw_filtered(logits, ranked, *_parameters_of(sequences, logits))
    else:
        greatest = logits.amax(-1, keepdim=True)
        if operations.is_processed or logits.device.type == "cpu":
            _check_greatest(greatest, operations)
        filters, points = _parameters_of(sequences, logits)
        token_ids = draw_unfiltered(logits, greatest, filters.temperature, points)
    return token_ids, greatest[:, 0]


def _argmax(logits: Tensor) -> Tensor:
    """Return the first index of the greatest logit in each row."""
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorised; PyTorch's compares one by one.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _check_greatest(greatest: Tensor, operations: Operations) -> None:
    """Raise the errors of `draw_tokens`, from the greatest logit of each row."""
    if operations.is_processed and bool(greatest.isneginf().any()):
        raise InvalidRequest(
            "the sampling parameters leave no token to choose", field="sampling_params"
        )
    check_finite(greatest)


def check_finite(values: Tensor) -> None:
    """Raise ArithmeticError if any value is not finite.

    For rows of logits, their maxima suffice: a NaN in a row is its maximum.
    """
    # For so few values, NumPy takes a tenth of the time.
    if not np.isfinite(values.float().numpy(force=True)).all():
        raise ArithmeticError(NOT_FINITE)


def _parameters_of(sequences: list[Sequence], logits: Tensor) -> tuple[Filters, Tensor]:
    """Return the filters, and the point of each sequence at which a token is drawn."""
    params = [sequence.request.sampling for sequence in sequences]
    vocab_size = logits.shape[1]
    points = [point_of(sequence) for sequence in sequences]
    columns = upload(
        [
            [p.temperature for p in params],
            [p.min_p for p in params],
            [min(p.top_k or vocab_size, vocab_size) for p in params],
            [p.top_p for p in params],
            points,
        ],
        logits.device,
        np.float64,
    )
    temperature, min_p, top_k, top_p, points_column = columns[:, :, None]
    return Filters(temperature.float(), min_p, top_k.long(), top_p), points_column[:, 0]
