"""A batch whose forward pass has been launched: its logits, and the tokens sampled from them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.engine.core.sequence import SampledToken, ScheduledSequence
from workers.engine.model.states import StateStep
from workers.engine.model.talker import Talker
from workers.engine.pooling import pool
from workers.engine.sampling.logprobs import PromptRows
from workers.engine.sampling.verifier import Draw, DrawnBatch
from workers.engine.step_clock import StepClock
from workers.engine.step_rows import StepRows
from workers.engine.transfers import Download, upload


class LaunchedBatch:
    """Implements `workers.engine.core.step_runner.Launched`."""

    def __init__(
        self,
        scheduled: list[ScheduledSequence],
        rows: StepRows,
        logits: Tensor,
        hidden: Tensor | None,
        states: StateStep,
        talker: Talker | None,
        draw: Draw,
        on_sampled: Callable[[Tensor], object],
        clock: StepClock,
    ) -> None:
        """`logits` are [num_logits, vocab_size], `hidden` [num_hidden, hidden_size], in the order
        of `rows`. `on_sampled` is called with the sampled tokens on the device, [num_sampled]."""
        self._scheduled = scheduled
        self._rows = rows
        self._logits: Tensor | None = logits
        self._hidden = hidden
        self._states = states
        self._talker = talker
        self._draw = draw
        self._on_sampled = on_sampled
        self._clock = clock
        self._kept: list[ScheduledSequence] = []
        self._drawn: DrawnBatch | None = None
        self._residuals: Download | None = None

    @torch.inference_mode()
    def sample(self, indexes: Sequence[int]) -> None:
        with self._clock.computing():
            self._sample(indexes)

    def _sample(self, indexes: Sequence[int]) -> None:
        assert self._logits is not None
        self._kept = [self._scheduled[i] for i in indexes]
        num_sampled = self._rows.num_sampled
        logits, hidden, prompts = self._logits[:num_sampled], self._hidden, None
        if len(indexes) < len(self._scheduled):
            of_kept = upload(self._rows.sampled_of(indexes), logits.device)
            logits = logits.index_select(0, of_kept)
            if hidden is not None and self._talker is not None:
                hidden = hidden.index_select(0, of_kept)
        if len(self._logits) > num_sampled:
            prompts = PromptRows.of(self._logits[num_sampled:], self._scheduled)
        sampling = [s for s in self._kept if s.samples_token]
        if sampling or prompts is not None:
            self._drawn = self._draw(logits, sampling, prompts)
        if sampling and self._drawn is not None:
            self._on_sampled(self._drawn.token_ids)
            if self._talker is not None and hidden is not None:
                sequences = [s.sequence for s in sampling]
                residuals = self._talker.residuals(hidden, self._drawn.token_ids, sequences)
                self._residuals = Download(residuals)
        if self._rows.pooled and self._hidden is not None:
            pool(self._hidden, [self._scheduled[i] for i in self._rows.pooled])
        # The memory is free for the next batch.
        self._logits = self._hidden = None

    @torch.inference_mode()
    def result(self) -> list[list[SampledToken]]:
        residuals: list[list[int]] = []
        with self._clock.waiting():
            if self._residuals is not None:
                # They are computed after the tokens, so the host does not wait for these again.
                residuals = self._residuals.result().tolist()
            tokens = [] if self._drawn is None else self._drawn.result()
        if residuals:
            tokens = [
                [SampledToken(token.token_id, token.logprobs, tuple(residual))]
                for (token,), residual in zip(tokens, residuals, strict=True)
            ]
        # A step that fails has changed no states.
        self._states.commit()
        if len(tokens) == len(self._kept):
            return tokens
        of_sampling = iter(tokens)
        return [next(of_sampling) if s.samples_token else [] for s in self._kept]
