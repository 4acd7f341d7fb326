"""Log probabilities of tokens and of what might have come instead, under the model's own logits."""

import torch
from torch import Tensor

from shared.protocol.messages import TokenLogprobs
from workers.engine.sampling.row_chunks import in_pieces

IMPOSSIBLE = -9999.0
"""For minus infinity, which JSON does not have."""
DECIMALS = 6


def logprobs_of(
    logits: Tensor, rows: list[int], token_ids: list[int], num_tops: list[int]
) -> list[TokenLogprobs]:
    """Of a token in each of these rows of logits [num_rows, vocab_size], with so many of the most
    probable tokens."""
    wanted = list(zip(rows, token_ids, num_tops, strict=True))
    return [found for piece in in_pieces(wanted, logits) for found in _logprobs_of(logits, piece)]


def _logprobs_of(logits: Tensor, wanted: list[tuple[int, int, int]]) -> list[TokenLogprobs]:
    rows, token_ids, num_tops = zip(*wanted, strict=True)
    scores = logits[list(rows)].float()
    index = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = scores.gather(1, index)
    ranks = (scores > chosen).sum(1) + 1
    top_scores, top_token_ids = scores.topk(min(max(num_tops), scores.shape[1]))
    # The chosen token first, then the others.
    logprobs = torch.cat([chosen, top_scores], 1) - scores.logsumexp(1, keepdim=True)
    values = logprobs.nan_to_num(IMPOSSIBLE, neginf=IMPOSSIBLE).tolist()
    return [
        TokenLogprobs(
            round(chosen_logprob, DECIMALS),
            rank,
            top_ids[:num_top],
            [round(logprob, DECIMALS) for logprob in top[:num_top]],
        )
        for (chosen_logprob, *top), rank, top_ids, num_top in zip(
            values, ranks.tolist(), top_token_ids.tolist(), num_tops, strict=True
        )
    ]
