"""Sampler: converts logits to one token id per sequence.

Logits are first changed by the logits processors. Then the greatest logit is taken, or temperature,
min_p, top_k and top_p (in this order, which is vLLM's) are applied and a token is drawn. Rows that
need the same operations are processed together, and rows that need none are skipped.

A sampled token depends only on its own logits and on (seed, choice, position in the output), not on
the rest of the batch and not on earlier samples. Another worker can therefore continue a request at
any token.
"""

import numpy as np
import torch
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Sequence
from workers.engine.sampling.logits_processors import needs_processing, process_logits
from workers.engine.sampling.row_chunks import iterate_chunks
from workers.engine.sampling.truncation import draw, truncate, unnormalized_probs

GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow, and are treated as greedy sampling."""
RESOLUTION = 2.0**-52


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the next token id of each sequence, from `logits` [num_sequences, vocab_size].

    The logits may have any floating dtype and are not changed.

    Raises ArithmeticError if logits are not finite, as after an overflow, and InvalidRequest if a
    request has banned every token.
    """
    greedy: list[int] = []
    nontrivial: list[int] = []
    for row, sequence in enumerate(sequences):
        is_plain_greedy = _is_greedy(sequence) and not needs_processing(sequence)
        (greedy if is_plain_greedy else nontrivial).append(row)
    if not nontrivial:
        return _argmax(logits)
    token_ids = [0] * len(sequences)
    if greedy:
        for row, token_id in zip(greedy, _argmax(logits[greedy]), strict=True):
            token_ids[row] = token_id
    # Rows that need the same operations become adjacent, and share chunks.
    nontrivial.sort(key=lambda row: (_is_greedy(sequences[row]), _is_filtered(sequences[row])))
    for chunk in iterate_chunks(nontrivial, logits):
        chosen = _sample_chunk(logits[chunk].float(), [sequences[row] for row in chunk])
        for row, token_id in zip(chunk, chosen, strict=True):
            token_ids[row] = token_id
    return token_ids


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a random number in [0, 1), a pure function of the arguments.

    The generator is Philox4x64 (Salmon et al., 2011), which computes from a key and a counter.
    """
    bits = int(np.random.Philox(key=[seed, choice], counter=position).random_raw())
    return (bits >> 12) * RESOLUTION


def _is_greedy(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature < GREEDY_BELOW


def _is_filtered(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _argmax(logits: Tensor) -> list[int]:
    """Return the first index of the greatest logit in each row; raises ArithmeticError."""
    if logits.device.type == "cpu":
        # NumPy's argmax is vectorised; PyTorch's compares one by one and wakes its threads.
        rows = logits.float().numpy()
        token_ids = rows.argmax(-1)
        finite = bool(np.isfinite(rows[np.arange(len(rows)), token_ids]).all())
    else:
        greatest, token_ids = logits.max(-1)
        finite = bool(greatest.isfinite().all())
    if not finite:
        raise _non_finite_error()
    best: list[int] = token_ids.tolist()
    return best


def check_finite(values: Tensor) -> None:
    """Raise ArithmeticError if any value is not finite.

    The maxima of rows of logits will do: a NaN in a row is its maximum.
    """
    if not bool(values.isfinite().all()):
        raise _non_finite_error()


def _non_finite_error() -> ArithmeticError:
    return ArithmeticError("the output of the model for a sequence is not finite")


def _sample_chunk(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Sample from `logits` [num_sequences, vocab_size] float32, which may be overwritten."""
    if any(needs_processing(sequence) for sequence in sequences):
        check_finite(logits.amax(-1))
        process_logits(logits, sequences)
        if bool(logits.amax(-1).isneginf().any()):
            raise InvalidRequest(
                "the sampling parameters leave no token to choose", field="sampling_params"
            )
    # Sequences that draw come before greedy ones.
    num_drawn = sum(not _is_greedy(sequence) for sequence in sequences)
    drawn = _draw(logits[:num_drawn], sequences[:num_drawn]) if num_drawn else []
    return drawn + (_argmax(logits[num_drawn:]) if num_drawn < len(sequences) else [])


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    params = [sequence.request.sampling for sequence in sequences]
    check_finite(logits.amax(-1))
    weights = unnormalized_probs(logits, _column([p.temperature for p in params], logits).float())
    if any(_is_filtered(sequence) for sequence in sequences):
        weights = truncate(
            weights,
            _column([p.min_p for p in params], logits),
            _column([_num_kept(p, logits.shape[1]) for p in params], logits).long(),
            _column([p.top_p for p in params], logits),
        )
    points = [uniform(s.seed, s.choice, s.num_output_tokens) for s in sequences]
    token_ids: list[int] = draw(weights, _column(points, logits)[:, 0]).tolist()
    return token_ids


def _num_kept(params: SamplingParams, vocab_size: int) -> int:
    return min(params.top_k or vocab_size, vocab_size)


def _column(values: list[float] | list[int], logits: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]
