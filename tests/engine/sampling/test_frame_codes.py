"""Codes of further codebooks: the code of a request does not depend on the rest of the batch."""

import torch

from shared.protocol.sampling import SamplingParams
from tests.engine.sampling.test_sampler import random_logits, sequence_of
from workers.engine.sampling.frame_codes import HostFrameCodes

NUM_CODES, NUM_CODEBOOKS = 90, 4


def test_a_code_depends_on_the_request_and_not_on_the_batch() -> None:
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.3)]
    sequences = [sequence_of(p, output=range(i), seed=i) for i, p in enumerate(params)]
    together = HostFrameCodes(sequences, NUM_CODEBOOKS)
    chosen = []
    for codebook in range(1, NUM_CODEBOOKS):
        logits = random_logits(codebook, len(sequences), NUM_CODES).bfloat16()
        codes = together.choose(logits, codebook)
        assert codes[0] == logits[0].argmax()
        for row, sequence in enumerate(sequences):
            alone = HostFrameCodes([sequence], NUM_CODEBOOKS)
            assert codes[row] == alone.choose(logits[row : row + 1], codebook)
        chosen.append(codes != logits.argmax(-1))
    assert torch.stack(chosen)[:, 1:].any(), "no code was drawn"
