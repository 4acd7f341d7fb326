"""Tokens that kernels choose, against the definition of the filters and against the host's."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from tests.engine.sampling.test_sampler import random_logits, sequence_of
from workers.engine.core.sequence import SampledToken, ScheduledSequence, Sequence
from workers.engine.cuda import sampler as sampler_module
from workers.engine.cuda.frame_codes import DeviceFrameCodes
from workers.engine.cuda.kernels.sampling import CHOSEN, Parameters, choose_tokens
from workers.engine.cuda.sampler import DeviceSampler
from workers.engine.sampling.frame_codes import HostFrameCodes
from workers.engine.sampling.token_rules import pack_tokens
from workers.engine.sampling.truncation import Filters, draw, truncate
from workers.engine.sampling.verifier import draw_batch
from workers.engine.transfers import upload_parts

# The interpreter computes with numpy, which warns of infinities; to a GPU they are numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

POINTS = [0.37, 1 - 2.0**-52]


def choose(logits: Tensor, kinds: Seq[SamplingParams], points: Seq[float]) -> list[int]:
    """Return the tokens of rows without processors, in the interpreter."""
    vocab_size = logits.shape[1]
    floats = [[p.temperature, p.min_p, 1, 0, 0] for p in kinds]
    ints = [[min(p.top_k or vocab_size, vocab_size), -1, -1, -1, 0, 0] for p in kinds]
    device = logits.device
    none = torch.empty(0, dtype=torch.int32, device=device)
    outcome = choose_tokens(
        logits,
        Parameters(
            torch.tensor(floats, dtype=torch.float32, device=device),
            torch.tensor([p.top_p for p in kinds], dtype=torch.float64, device=device),
            torch.tensor(ints, dtype=torch.int32, device=device),
            none,
            none,
            none.float(),
        ),
        torch.tensor(points, dtype=torch.float64, device=device),
        none,
        num_processed=0,
        is_drawn=True,
        is_filtered=any(p.top_p < 1 or p.top_k or p.min_p for p in kinds),
    )
    assert outcome[:, 1].eq(CHOSEN).all()
    return outcome[:, 0].tolist()


def choose_by_definition(logits: Tensor, params: SamplingParams, point: float) -> int:
    """Return the token of `truncation`, from the weights that the interpreter computes."""
    row = logits.float().numpy()
    exponents = (row - row.max()) / np.float32(params.temperature)
    weights = torch.from_numpy(np.exp(np.maximum(exponents, np.float32(-64))))[None]
    top_k = min(params.top_k or len(row), len(row))
    columns = [
        torch.tensor([[value]], dtype=torch.float64) for value in (params.min_p, params.top_p)
    ]
    filters = Filters(torch.empty(0), columns[0], torch.tensor([[top_k]]), columns[1])
    return int(draw(truncate(weights, filters), torch.tensor([point], dtype=torch.float64)))


def flat(vocab_size: int) -> Tensor:
    """Return logits with many ties, none of which is much more probable than others."""
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randint(0, 9, (vocab_size,), generator=generator) / 8


def steep(vocab_size: int) -> Tensor:
    return random_logits(vocab_size, 1, vocab_size)[0]


@pytest.mark.parametrize(
    ("logits", "params"),
    [
        # Few tokens, which are all candidates.
        (steep(5), [SamplingParams(), SamplingParams(min_p=0.05, top_p=0.9)]),
        # Candidates decide; the vocabulary is no multiple of a chunk.
        (steep(6001), [SamplingParams(top_p=0.9), SamplingParams(top_k=40, temperature=0.7)]),
        (steep(6001), [SamplingParams(min_p=0.01, top_p=0.6), SamplingParams(top_k=1)]),
        # More tokens have the least weight of a candidate than are copied.
        (flat(3001), [SamplingParams(top_k=700, top_p=0.8), SamplingParams(min_p=0.5)]),
        # Candidates have too little of the mass.
        (steep(6001) / 9, [SamplingParams(top_p=0.7), SamplingParams(temperature=2.0)]),
    ],
)
def test_a_kernel_chooses_the_token_of_the_definition(
    logits: Tensor, params: list[SamplingParams], device: torch.device
) -> None:
    rows = logits.to(device).expand(len(params), -1).contiguous()
    expected = [choose_by_definition(logits, p, at) for p, at in zip(params, POINTS, strict=True)]
    assert choose(rows, params, POINTS) == expected


# -- the sampler with its kernels -----------------------------------------------------------------


class Mask:
    """Allows the token after the last one, and the next two."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._next = vocab_size, 0

    def allowed(self) -> NDArray[np.int32]:
        return pack_tokens((self._next, self._next + 1, self._next + 2), self._vocab_size)

    def advance(self, token_id: int) -> None:
        self._next = token_id + 1


VOCAB_SIZE = 99
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.7,
}
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, **PENALTIES),
    SamplingParams(repetition_penalty=2.0),
    SamplingParams(temperature=0, presence_penalty=9.0, logit_bias={5: 9.0, 7: -1.5}),
    SamplingParams(temperature=0, allowed_token_ids=[1, 5, 7, 98], frequency_penalty=1.0),
    SamplingParams(temperature=0.5, min_tokens=3, logit_bias={0: 50.0}, logprobs=2),
    SamplingParams(temperature=0, logprobs=0),
]


def schedule(sequence: Sequence, drafts: tuple[int, ...] = ()) -> ScheduledSequence:
    return ScheduledSequence(sequence, 1 + len(drafts), True, draft_token_ids=drafts)


def mixed_sequences() -> list[Sequence]:
    sequences = [
        sequence_of(params, prompt=[i, 3, 3], output=[i, 4][: i % 3], seed=i)
        for i, params in enumerate(MIXED)
    ]
    for sequence in sequences:
        sequence.end_token_ids = (0, 5)
    sequences[3].bad_words = ((4,), (9, 8))
    sequences[6].token_mask = Mask(VOCAB_SIZE)
    return sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_draws_the_tokens_of_the_host_in_every_step(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Sequences start, end and come back, and some steps have drafts."""
    sampler = DeviceSampler(device)
    on_device, on_host = mixed_sequences(), mixed_sequences()
    drafts: dict[int, tuple[int, ...]] = {}
    for step, indexes in enumerate([[1], [2, 3], range(7), [6, 3, 0], range(1, 7)]):
        if step == 4:
            drafts = {1: (7, 7), 5: (4,)}
        num_rows = len(indexes) + sum(map(len, drafts.values()))
        rows = random_logits(step, num_rows, VOCAB_SIZE).to(dtype)
        tokens, expected = (
            draw(logits, [schedule(of[i], drafts.get(i, ())) for i in indexes]).result()
            for draw, of, logits in (
                (sampler.draw, on_device, rows.to(device)),
                (draw_batch, on_host, rows),
            )
        )
        assert describe(tokens) == describe(expected)
        for i, sampled in zip(indexes, tokens, strict=True):
            for sequence in (on_device[i], on_host[i]):
                sequence.token_ids += [token.token_id for token in sampled]
                if sequence.token_mask is not None:
                    sequence.token_mask.advance(sampled[-1].token_id)


def describe(sampled: list[list[SampledToken]]) -> list[object]:
    """Return tokens and log probabilities, as far as these are equal on a device."""
    return [
        (token.token_id, logprobs and (logprobs.rank, logprobs.top_token_ids))
        for tokens in sampled
        for token in tokens
        for logprobs in [token.logprobs]
    ]


def test_further_codes_of_a_frame_are_the_codes_of_the_host(device: torch.device) -> None:
    sequences = [sequence_of(p) for p in (SamplingParams(temperature=0), SamplingParams())]
    logits = random_logits(1, 2, VOCAB_SIZE).bfloat16() / 9
    codes = DeviceFrameCodes(device, sequences, 3).choose(logits.to(device), 2)
    assert codes.tolist() == HostFrameCodes(sequences, 3).choose(logits, 2).tolist()


def test_rows_of_counts_are_built_again_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    params = SamplingParams(temperature=0, presence_penalty=9.0)
    sequence, sampler = sequence_of(params), DeviceSampler(device)
    logits = random_logits(1, 1, VOCAB_SIZE).to(device)
    best, second = logits[0].topk(2).indices.tolist()
    assert sampler.draw(logits, [schedule(sequence)]).result() == [[SampledToken(best)]]
    sequence.token_ids.append(best)
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "upload_parts", None)
        with pytest.raises(TypeError):
            sampler.draw(logits, [schedule(sequence)])
    assert sampler.draw(logits, [schedule(sequence)]).result() == [[SampledToken(second)]]


def test_a_sequence_that_comes_back_has_its_counts(device: torch.device) -> None:
    """The table has as many rows as a step needs, so other sequences have taken its row."""
    params = SamplingParams(temperature=0, presence_penalty=9.0)
    first, *others = (sequence_of(params) for _ in range(3))
    sampler = DeviceSampler(device)
    logits = random_logits(1, 1, VOCAB_SIZE).to(device)
    tokens = logits[0].topk(3).indices.tolist()
    for batch in ([first], [first], others, [first]):
        drawn = sampler.draw(logits.repeat(len(batch), 1), [schedule(s) for s in batch]).result()
        for sequence, (sampled,) in zip(batch, drawn, strict=True):
            sequence.token_ids.append(sampled.token_id)
    assert first.token_ids[first.num_prompt_tokens :] == tokens
    assert len(sampler._counts.table) == 2


def test_parameters_are_sent_when_the_batch_changes(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Each step sends random numbers and the new tokens of sequences with penalties."""
    num_parts: list[int] = []

    def count(parts: Seq[NDArray[Any]], device: torch.device) -> list[Tensor]:
        num_parts.append(len(parts))
        return upload_parts(parts, device)

    monkeypatch.setattr(sampler_module, "upload_parts", count)
    sampler = DeviceSampler(device)
    sequences = [sequence_of(SamplingParams(**PENALTIES), seed=i) for i in range(2)]
    for batch in (sequences, sequences, sequences[:1], sequences[:1]):
        tokens = sampler.draw(
            random_logits(1, len(batch), VOCAB_SIZE).to(device), [schedule(s) for s in batch]
        ).result()
        for sequence, sampled in zip(batch, tokens, strict=True):
            sequence.token_ids.append(sampled[0].token_id)
    whole, few, *rest = num_parts
    assert few < whole
    assert rest == [whole, few]


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5, allowed_token_ids=[5])]
)
def test_logits_that_are_not_finite_raise(
    spoilt: float, params: SamplingParams, device: torch.device
) -> None:
    logits = random_logits(9, 2, VOCAB_SIZE).to(device)
    logits[1, 17] = spoilt
    drawn = DeviceSampler(device).draw(logits, [schedule(sequence_of(params))] * 2)
    with pytest.raises(ArithmeticError):
        drawn.result()


def test_a_request_that_bans_every_token_gets_invalid_request(device: torch.device) -> None:
    """The row after a rejected draft may have no token."""
    params = SamplingParams(temperature=1.0, allowed_token_ids=[5, 6], logit_bias={6: 100.0})
    sequence, sampler = sequence_of(params), DeviceSampler(device)
    sequence.bad_words = ((5, 5), (5, 6))
    logits = random_logits(9, 2, VOCAB_SIZE).to(device)
    assert sampler.draw(logits, [schedule(sequence, (5,))]).result() == [[SampledToken(6)]]
    sequence.token_ids.append(5)
    with pytest.raises(InvalidRequest) as raised:
        sampler.draw(logits[:1], [schedule(sequence)]).result()
    assert raised.value.field == "sampling_params"
