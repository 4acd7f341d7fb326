"""From logits to one token id for each sequence.

A sampled token depends on its own logits and on (seed, choice, position in the answer) and on
nothing else: neither the rest of the batch nor what was sampled before moves it. That is what lets
another worker continue a request where the last one stopped.
"""

import numpy as np
import torch
from torch import Tensor

from shared.sampling import SamplingParams
from workers.engine.sequence import Sequence

# The most probable tokens that are ranked first; the whole vocabulary is sorted only when these
# do not hold `top_p` of the mass, which is rare, and 152,000 entries take milliseconds to sort.
NUM_RANKED_FIRST = 1024


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """`logits` [num_sequences, vocab_size].

    Raises ArithmeticError when there is no choosing among them, as after an overflow.
    """
    if bool(logits.sum(dim=-1).isnan().any()):
        raise ArithmeticError("a sequence's logits are not numbers")
    best: list[int] = logits.argmax(dim=-1).tolist()
    return [
        token_id if _is_argmax(sequence.request.sampling) else _sample_one(row, sequence)
        for token_id, row, sequence in zip(best, logits, sequences, strict=True)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), from a counter and not from a state: Philox is a function of key and counter."""
    bits = int(np.random.Philox(key=[seed, choice], counter=position).random_raw())
    # 52 bits: with 53, point * mass could be rounded up to the whole mass, where no token is.
    return (bits >> 12) * 2.0**-52


def _is_argmax(params: SamplingParams) -> bool:
    return params.temperature == 0 and not _has_penalties(params)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )


def _sample_one(logits: Tensor, sequence: Sequence) -> int:
    params = sequence.request.sampling
    if logits.dtype != torch.float64:
        logits = logits.float()
    if _has_penalties(params):
        logits = penalize(logits, sequence)
    if params.temperature == 0:
        return int(logits.argmax())
    # The greatest logit becomes 0 first, so that no temperature however small overflows.
    probs = torch.softmax((logits - logits.max()).double() / params.temperature, dim=-1)
    token_ids, probs = keep_probable(probs, params)
    point = uniform(sequence.seed, sequence.choice, sequence.num_output_tokens)
    return _invert(token_ids, probs, point)


def penalize(logits: Tensor, sequence: Sequence) -> Tensor:
    """Repetition over prompt and answer, as in transformers; presence and frequency: the answer."""
    params = sequence.request.sampling
    token_ids = torch.tensor(sequence.token_ids, device=logits.device)
    seen = torch.unique(token_ids)
    scores = logits[seen]
    factor = params.repetition_penalty
    logits = logits.index_copy(0, seen, torch.where(scores < 0, scores * factor, scores / factor))
    answer = token_ids[sequence.num_prompt_tokens :]
    counts = torch.bincount(answer, minlength=len(logits))
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def keep_probable(probs: Tensor, params: SamplingParams) -> tuple[Tensor | None, Tensor]:
    """Ids and probabilities of the tokens left by top_k, then top_p, then min_p.

    The probabilities need not sum to one; ids are None where all tokens are left.
    """
    token_ids: Tensor | None = None
    if params.top_k or params.top_p < 1:
        probs, token_ids = _rank(probs, params)
        # A token stays when those before it do not yet hold top_p of what top_k left.
        before = probs.cumsum(0) - probs
        kept = before < params.top_p * (probs.sum() if params.top_k else 1.0)
        probs, token_ids = probs[kept], token_ids[kept]
    if params.min_p:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    return token_ids, probs


def _rank(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The most probable tokens first, at least as many as the filters can leave."""
    if params.top_k:
        return torch.topk(probs, min(params.top_k, len(probs)))
    ranked = torch.topk(probs, min(NUM_RANKED_FIRST, len(probs)))
    if ranked.values.sum() >= params.top_p:
        return ranked
    return torch.sort(probs, descending=True)


def _invert(token_ids: Tensor | None, probs: Tensor, point: float) -> int:
    """The token in whose share of the mass `point` falls, the shares laid out by token id.

    By id and not by rank: two nearly equal logits may change ranks with the rounding of another
    batch, and with them all shares between.
    """
    if token_ids is not None:
        token_ids, order = token_ids.sort()
        probs = probs[order]
    mass = probs.cumsum(0)
    if not bool(mass[-1].isfinite()):
        raise ArithmeticError("the penalties leave no probabilities")
    index = int(torch.searchsorted(mass, point * mass[-1], right=True))
    return index if token_ids is None else int(token_ids[index])
