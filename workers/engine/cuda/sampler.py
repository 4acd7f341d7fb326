"""Sampler on a GPU: one copy to the device and one from it, and no wait in between.

The parameters of a batch stay on the device while the batch consists of the same sequences. A step
then sends a random number for each sequence, and new tokens of sequences with penalties.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRequest
from shared.protocol.records import TokenLogprobs
from workers.engine.core.sequence import ScheduledSequence, Sequence
from workers.engine.cuda.kernels.sampling import NO_TOKEN, NOT_FINITE, Parameters, choose_tokens
from workers.engine.cuda.token_counts import TokenCounts
from workers.engine.sampling.logits_processors import adjustments_of, allowed_bits, has_penalties
from workers.engine.sampling.logprobs import PromptRows, score_tokens, to_logprobs
from workers.engine.sampling.sampler import (
    NO_TOKEN_LEFT,
    NOT_FINITE_ERROR,
    NUM_DRAWN,
    operations_of,
    point_of,
)
from workers.engine.sampling.verifier import DrawnBatch, has_logprobs, sequences_of_rows
from workers.engine.transfers import Download, upload_parts

MAX_SCORED_LOGITS = 1 << 26
"""Logits of which log probabilities are computed at once; float32 copies of them take 256 MiB."""
NO_ROW = -1
BITS_PER_WORD = 32


class _Points:
    """Random numbers of the rows of a batch, for the next steps."""

    def __init__(self, rows: list[Sequence]) -> None:
        for sequence in rows:
            point_of(sequence)
        self._values = np.stack([sequence.points[1] for sequence in rows])
        self._firsts = np.array([s.num_prompt_tokens + s.points[0] for s in rows])
        self._index = np.arange(len(rows))

    def next(self, rows: list[Sequence]) -> NDArray[np.float64]:
        """Return the numbers of the next tokens of these sequences."""
        num_tokens = list(map(len, [sequence.token_ids for sequence in rows]))
        offsets = np.array(num_tokens) - self._firsts
        for row in np.flatnonzero((offsets < 0) | (offsets >= NUM_DRAWN)).tolist():
            point_of(rows[row])
            first, self._values[row] = rows[row].points
            self._firsts[row] = rows[row].num_prompt_tokens + first
            offsets[row] = num_tokens[row] - self._firsts[row]
        numbers: NDArray[np.float64] = self._values[self._index, offsets]
        return numbers


@dataclass(frozen=True, slots=True)
class _Table:
    """Parameters of the rows of a batch."""

    sequences: list[ref[Sequence]]
    """References that keep no request alive after its end."""
    arrays: list[NDArray[Any]]
    """Arrays for `Parameters`."""
    counted: list[int]
    """Rows of sequences with penalties."""
    points: _Points | None
    """None if no row is drawn."""
    num_processed: int
    is_filtered: bool
    is_constant: bool
    """Whether the next step has the same parameters, if it has the same sequences."""


class DeviceSampler:
    """Draws tokens on a device, and holds what it needs of the sequences there."""

    def __init__(self, device: torch.device, choose: Callable[..., Tensor] = choose_tokens) -> None:
        """`choose` is called as `choose_tokens` is."""
        self._device = device
        self._choose = choose
        self._counts = TokenCounts(device)
        self._table: _Table | None = None
        self._parameters: Parameters | None = None

    def draw(
        self, logits: Tensor, scheduled: list[ScheduledSequence], prompts: PromptRows | None = None
    ) -> DrawnBatch:
        """Draw tokens; implements `workers.engine.sampling.verifier.Draw`."""
        try:
            scored = _scored_rows(scheduled) if has_logprobs(scheduled) else {}
            drawn = self._draw(logits, scheduled, scored, prompts)
            return DrawnBatch(scheduled, drawn, are_scored=bool(scored))
        except Exception:
            self._counts.forget()
            self._table = None
            raise

    def _draw(
        self,
        logits: Tensor,
        scheduled: list[ScheduledSequence],
        scored: dict[int, int],
        prompts: PromptRows | None,
    ) -> "DeviceRows":
        rows = sequences_of_rows(scheduled, len(logits))
        table, is_new = self._table, False
        if table is None or not table.is_constant or table.sequences != list(map(ref, rows)):
            table, is_new = self._tabulate(rows, logits.shape[1]), True
        points = np.empty(0) if table.points is None else table.points.next(rows)
        parts = [
            points,
            *self._counts.list_new([rows[row] for row in table.counted]),
            np.array(list(scored), np.int64),
            np.array([] if prompts is None else prompts.token_ids(), np.int64),
            *(table.arrays if is_new else ()),
        ]
        on_device = upload_parts(parts, self._device)
        at, cleared, in_prompt, in_output, score_rows, prompt_tokens, *columns = on_device
        self._counts.apply(cleared, in_prompt, in_output)
        if is_new:
            self._parameters = Parameters(*columns)
        self._table = table
        assert self._parameters is not None
        outcome = logits.new_empty(0, 2, dtype=torch.int64)
        if rows:
            outcome = self._choose(
                logits,
                self._parameters,
                at,
                self._counts.table,
                num_processed=table.num_processed,
                is_drawn=table.points is not None,
                is_filtered=table.is_filtered,
            )
        scores = []
        if scored:
            of_rows = logits.index_select(0, score_rows)
            tokens = outcome[:, 0].index_select(0, score_rows)
            scores.append(_score(of_rows, tokens, max(scored.values())))
        if prompts is not None:
            scores.append(_score(prompts.logits, prompt_tokens, max(prompts.num_tops())))
        return DeviceRows(outcome, scores, list(scored), prompts)

    def _tabulate(self, rows: list[Sequence], vocab_size: int) -> _Table:
        """Return the parameters of the rows."""
        operations = [operations_of(sequence) for sequence in rows]
        counted = [i for i, s in enumerate(rows) if has_penalties(s.request.sampling)]
        assigned = self._counts.assign([rows[i] for i in counted], vocab_size)
        counts = dict(zip(counted, assigned, strict=True))
        floats, ints = [], []
        masks: list[NDArray[np.int32]] = []
        biases: list[tuple[int, float]] = []
        num_processed, num_words = 0, -(-vocab_size // BITS_PER_WORD)
        for i, (is_greedy, _, is_processed) in enumerate(operations):
            sequence = rows[i]
            p = sequence.request.sampling
            temperature = 0.0 if is_greedy else p.temperature
            penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
            floats.append((temperature, p.min_p, *penalties))
            top_k = min(p.top_k or vocab_size, vocab_size)
            if not is_processed:
                ints.append((top_k, NO_ROW, NO_ROW, NO_ROW, 0, 0))
                continue
            mask, first = NO_ROW, len(biases)
            if (bits := allowed_bits(sequence, vocab_size)) is not None:
                mask = len(masks)
                masks.append(bits[:num_words])
            biases += adjustments_of(sequence).items()
            ints.append((top_k, num_processed, mask, counts.get(i, NO_ROW), first, len(biases)))
            num_processed += 1
        is_greedy = all(o.is_greedy for o in operations)
        return _Table(
            list(map(ref, rows)),
            [
                np.array(floats, np.float32),
                np.array([s.request.sampling.top_p for s in rows], np.float64),
                np.array(ints, np.int32),
                np.array(masks, np.int32).reshape(len(masks), num_words),
                np.array([token_id for token_id, _ in biases], np.int32),
                np.array([bias for _, bias in biases], np.float32),
            ],
            counted,
            None if is_greedy else _Points(rows),
            num_processed,
            is_filtered=any(o.is_filtered for o in operations),
            is_constant=not any(
                s.operations is None or s.token_mask is not None or s.bad_words for s in rows
            ),
        )


class DeviceRows:
    """Rows that are drawn on a device; implements `workers.engine.sampling.verifier.DrawnRows`."""

    def __init__(
        self,
        outcome: Tensor,
        scores: list[Tensor],
        scored_rows: list[int],
        prompts: PromptRows | None,
    ) -> None:
        """`outcome` is int64 [num_rows, 2], as of `choose_tokens`. `scores` are of the rows whose
        log probabilities are requested, and of rows of prompts."""
        self.token_ids = outcome[:, 0]
        self._num_rows = len(outcome)
        self._prompts = prompts
        self._scored_rows = scored_rows
        self._shapes = [values.shape for values in scores]
        self._logprobs: list[Tensor] = []
        self._states: list[int] = []
        if scores:
            # Token ids and ranks are exact in float64.
            outcome = torch.cat([part.double().flatten() for part in (outcome, *scores)])
        self._download = Download(outcome)

    def result(self) -> list[int]:
        values = self._download.result()
        if self._shapes:
            sizes = [2 * self._num_rows, *(shape.numel() for shape in self._shapes)]
            values, *scores = torch.split(values, sizes)
            self._logprobs = list(map(Tensor.view, scores, self._shapes))
            values = values.long().view(-1, 2)
        token_ids: list[int]
        token_ids, self._states = values.T.tolist()
        if NOT_FINITE in self._states:
            raise ArithmeticError(NOT_FINITE_ERROR)
        if self._prompts is not None:
            self._prompts.record(to_logprobs(self._logprobs[-1], self._prompts.num_tops()))
        return token_ids

    def check(self, rows: Iterable[int]) -> None:
        if NO_TOKEN in [self._states[row] for row in rows]:
            raise InvalidRequest(NO_TOKEN_LEFT, field="sampling_params")

    def logprobs_of(self, rows: list[int], num_tops: list[int]) -> list[TokenLogprobs]:
        place = {row: i for i, row in enumerate(self._scored_rows)}
        return to_logprobs(self._logprobs[0][[place[row] for row in rows]], num_tops)


def _scored_rows(scheduled: list[ScheduledSequence]) -> dict[int, int]:
    """Return the numbers of alternatives by row, where log probabilities are requested."""
    scored: dict[int, int] = {}
    first = 0
    for s in scheduled:
        num_rows = 1 + len(s.draft_token_ids)
        if (num_tops := s.sequence.request.sampling.logprobs) is not None:
            scored |= dict.fromkeys(range(first, first + num_rows), num_tops)
        first += num_rows
    return scored


def _score(logits: Tensor, token_ids: Tensor, num_tops: int) -> Tensor:
    """Return `score_tokens`, in parts that need little memory."""
    size = max(1, MAX_SCORED_LOGITS // logits.shape[1])
    return torch.cat(
        [
            score_tokens(logits[at : at + size], token_ids[at : at + size], num_tops)
            for at in range(0, len(logits), size)
        ]
    )
