"""From logits to one token id for each sequence.

The logits are adjusted (`adjustments`, which has the order); then the greatest is taken, or a
temperature, min_p, top_k and top_p leave tokens to draw from (`filters`), in this order, which is
vLLM's. Rows that need the same go together, and nothing is done for those that do not need it.

A sampled token depends on its own logits and on (seed, choice, position in the answer) and on
nothing else: neither the rest of the batch nor what was sampled before moves it. That is what lets
another worker continue a request where the last one stopped.
"""

import numpy as np
import torch
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from workers.engine.core.sequence import Sequence
from workers.engine.sampling.logits_processors import adjust, is_adjusted
from workers.engine.sampling.row_chunks import in_pieces
from workers.engine.sampling.truncation import draw, keep_probable, weigh

GREEDY_BELOW = 1e-5
"""Temperatures below it would only overflow."""
RESOLUTION = 2.0**-52


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """`logits` [num_sequences, vocab_size], of any floating type; they are left as they are.

    Raises ArithmeticError when there is no choosing among them, as after an overflow, and
    InvalidRequest when a request has banned every token.
    """
    greedy: list[int] = []
    others: list[int] = []
    for row, sequence in enumerate(sequences):
        plain = _is_greedy(sequence) and not is_adjusted(sequence)
        (greedy if plain else others).append(row)
    if not others:
        return _best(logits)
    token_ids = [0] * len(sequences)
    if greedy:
        for row, token_id in zip(greedy, _best(logits[greedy]), strict=True):
            token_ids[row] = token_id
    # What needs the same things comes together, and so into the same pieces.
    others.sort(key=lambda row: (_is_greedy(sequences[row]), _is_filtered(sequences[row])))
    for piece in in_pieces(others, logits):
        chosen = _sample_piece(logits[piece].float(), [sequences[row] for row in piece])
        for row, token_id in zip(piece, chosen, strict=True):
            token_ids[row] = token_id
    return token_ids


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), from a counter and not from a state: Philox is a function of key and counter."""
    bits = int(np.random.Philox(key=[seed, choice], counter=position).random_raw())
    return (bits >> 12) * RESOLUTION


def _is_greedy(sequence: Sequence) -> bool:
    return sequence.request.sampling.temperature < GREEDY_BELOW


def _is_filtered(sequence: Sequence) -> bool:
    params = sequence.request.sampling
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _best(logits: Tensor) -> list[int]:
    """The first of the greatest in each row."""
    if logits.device.type == "cpu":
        # NumPy, for PyTorch compares one by one, and wakes its threads for it.
        rows = logits.float().numpy()
        token_ids = rows.argmax(-1)
        finite = bool(np.isfinite(rows[np.arange(len(rows)), token_ids]).all())
    else:
        greatest, token_ids = logits.max(-1)
        finite = bool(greatest.isfinite().all())
    if not finite:
        raise _no_numbers()
    found: list[int] = token_ids.tolist()
    return found


def check_finite(greatest: Tensor) -> None:
    """Of each row; a NaN anywhere in it is its maximum. Raises ArithmeticError."""
    if not bool(greatest.isfinite().all()):
        raise _no_numbers()


def _no_numbers() -> ArithmeticError:
    return ArithmeticError("a sequence's logits are not numbers")


def _sample_piece(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """`logits` are float32 and our own."""
    if any(is_adjusted(sequence) for sequence in sequences):
        check_finite(logits.amax(-1))
        adjust(logits, sequences)
        if bool(logits.amax(-1).isneginf().any()):
            raise InvalidRequest(
                "the sampling parameters leave no token to choose", field="sampling_params"
            )
    # Those that draw come first.
    num_drawn = sum(not _is_greedy(sequence) for sequence in sequences)
    drawn = _draw(logits[:num_drawn], sequences[:num_drawn]) if num_drawn else []
    return drawn + (_best(logits[num_drawn:]) if num_drawn < len(sequences) else [])


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    params = [sequence.request.sampling for sequence in sequences]
    check_finite(logits.amax(-1))
    weights = weigh(logits, _column([p.temperature for p in params], logits).float())
    if any(_is_filtered(sequence) for sequence in sequences):
        weights = keep_probable(
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
