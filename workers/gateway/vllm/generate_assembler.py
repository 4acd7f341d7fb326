"""The log of a request → the answer of `/inference/v1/generate`, or the events of its stream. Pure.

Whoever reads the log again from its first record arrives at the same events, so that a stream goes
on at any gateway.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct

from shared.protocol.messages import ChoiceDelta, TokenChunk, TokenLogprobs, Usage
from shared.protocol.multimodal import IMAGE
from workers.gateway.core.assembler import Events, TokenBytes
from workers.gateway.core.logprobs import id_logprobs, ranked_tokens, text_logprobs, token_text
from workers.gateway.schemas.generate import (
    GenerateChoice,
    GenerateChunk,
    GenerateResponse,
    IdLogprobs,
    OutputMode,
    PlaceholderInfo,
    PromptLogprob,
    TextContent,
    TextLogprobs,
    TokensContent,
    TotalUsage,
    UsageInfo,
    WeightVersionSpan,
)


class GenerateShape(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the answer depends on besides the log; in the JobRecord's options."""

    wire_id: str
    """By which the client knows the request."""
    num_prompt_tokens: int
    n: int = 1
    output_mode: OutputMode = "tokens"
    logprobs: int | None = None
    prompt_token_ids: list[int] = []
    """Where the answer has them, or their log probabilities."""
    return_token_ids: bool = False
    placeholders: list[PlaceholderInfo] = []
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class _Progress:
    """Of one choice."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.id_logprobs: list[IdLogprobs] = []
        self.text_logprobs: list[TextLogprobs] = []
        self.context: list[bytes] = []


class GenerateAssembler:
    """Of one request, whose choices have events of their own: whoever derenders them carries a
    state for each."""

    def __init__(
        self, shape: GenerateShape, model: str, created_s: int, spelling: TokenBytes
    ) -> None:
        # An abort tells of every choice, and then of usage.
        self.max_events = 1 if shape.n == 1 else shape.n + 1
        self.prompt_token_ids = shape.prompt_token_ids
        self._shape = shape
        self._model = model
        self._created_s = created_s
        self._spelling = spelling
        self.collects_answer = True
        self._choices = [_Progress() for _ in range(shape.n)]
        self._prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
        self._usage: tuple[int, int] | None = None
        self._begun = False

    def add(self, part: int, record: TokenChunk) -> Events:
        """An event for each choice that has something new."""
        if record.prompt_logprobs is not None:
            self._take_prompt(record.prompt_logprobs)
        return Events(
            self._event(delta.index, choice)
            for delta in record.choices
            if (choice := self._take_delta(delta)) is not None
        )

    def finish(self, part: int, usage: Usage) -> Events:
        self._usage = usage.prompt_tokens, usage.completion_tokens
        return self._last()

    def abort(self) -> Events:
        open_choices = [i for i, c in enumerate(self._choices) if c.finish_reason is None]
        return Events([*(self._abort(i) for i in open_choices), *self._last()])

    def answer(self) -> GenerateResponse:
        """The whole, once the last record was taken."""
        shape = self._shape
        return GenerateResponse(
            request_id=shape.wire_id,
            model=self._model,
            created=self._created_s,
            usage=usage_of(*self._totals()),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=shape.prompt_token_ids if shape.return_token_ids else None,
            mm_placeholders=self._placeholders(),
            output_mode=shape.output_mode,
            choices=[self._whole(i, choice) for i, choice in enumerate(self._choices)],
        )

    def _take_delta(self, delta: ChoiceDelta) -> GenerateChoice | None:
        """What is new of a choice; None for nothing that this output mode shows."""
        mine, text_mode = self._choices[delta.index], self._shape.output_mode == "text"
        ids, texts = self._logprobs_of(mine, delta)
        mine.token_ids += delta.token_ids
        mine.text += delta.text
        mine.finish_reason, mine.stop_reason = delta.finish_reason, delta.stop_reason
        if self.collects_answer:
            mine.id_logprobs += ids
            mine.text_logprobs += texts
        if not (delta.token_ids or delta.finish_reason or (text_mode and delta.text)):
            return None
        return GenerateChoice(
            index=delta.index,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids,
            weight_versions=_spans(mine) if delta.finish_reason else None,
            text=delta.text if text_mode else UNSET,
            logprobs=self._content(ids, texts),
        )

    def _abort(self, index: int) -> GenerateChunk:
        mine = self._choices[index]
        mine.finish_reason = "abort"
        return self._event(
            index,
            GenerateChoice(
                index=index,
                finish_reason="abort",
                token_ids=[],
                weight_versions=_spans(mine),
                text="" if self._shape.output_mode == "text" else UNSET,
                logprobs=self._content([], []),
            ),
        )

    def _event(self, index: int, choice: GenerateChoice) -> GenerateChunk:
        shape = self._shape
        shows_prompt = shape.return_token_ids and not self._begun
        self._begun = True
        num_tokens = len(self._choices[index].token_ids)
        return GenerateChunk(
            request_id=shape.wire_id,
            usage=usage_of(shape.num_prompt_tokens, num_tokens) if shape.continuous_usage else None,
            prompt_token_ids=shape.prompt_token_ids if shows_prompt else UNSET,
            mm_placeholders=(self._placeholders() or UNSET) if shows_prompt else UNSET,
            output_mode=shape.output_mode,
            choices=[choice],
        )

    def _last(self) -> Events:
        shape = self._shape
        if not shape.include_usage:
            return Events()
        num_prompt, num_answer = self._totals()
        usage = TotalUsage(
            prompt_tokens=num_prompt,
            total_tokens=num_prompt + num_answer,
            completion_tokens=num_answer,
        )
        last = GenerateChunk(request_id=shape.wire_id, usage=usage, output_mode=shape.output_mode)
        return Events([last])

    def _totals(self) -> tuple[int, int]:
        """As the log's last record has counted, or of an aborted request what was seen."""
        num_seen = sum(len(choice.token_ids) for choice in self._choices)
        return self._usage or (self._shape.num_prompt_tokens, num_seen)

    def _placeholders(self) -> dict[str, list[PlaceholderInfo]] | None:
        shape = self._shape
        shown = shape.return_token_ids and shape.placeholders
        return {IMAGE: shape.placeholders} if shown else None

    def _whole(self, index: int, mine: _Progress) -> GenerateChoice:
        return GenerateChoice(
            index=index,
            finish_reason=mine.finish_reason or "stop",
            stop_reason=mine.stop_reason,
            token_ids=mine.token_ids,
            weight_versions=_spans(mine),
            text=mine.text if self._shape.output_mode == "text" else UNSET,
            logprobs=self._content(mine.id_logprobs, mine.text_logprobs),
        )

    def _content(
        self, ids: list[IdLogprobs], texts: list[TextLogprobs]
    ) -> TokensContent | TextContent | None:
        if self._shape.logprobs is None:
            return None
        if self._shape.output_mode == "text":
            return TextContent(content=texts)
        return TokensContent(content=ids)

    def _logprobs_of(
        self, mine: _Progress, delta: ChoiceDelta
    ) -> tuple[list[IdLogprobs], list[TextLogprobs]]:
        ids = [
            id_logprobs(token_id, logprobs, max(self._shape.logprobs or 0, 1))
            for token_id, logprobs in zip(delta.token_ids, delta.logprobs or [], strict=False)
        ]
        if self._shape.output_mode == "tokens":
            return ids, []
        return [], [text_logprobs(found, mine.context, self._spelling) for found in ids]

    def _take_prompt(self, told: Sequence[TokenLogprobs]) -> None:
        """Nothing comes before the first token."""
        token_ids = self._shape.prompt_token_ids
        self._prompt_logprobs = [None]
        context = [self._spelling[token_ids[0]]]
        for token_id, logprobs in zip(token_ids[1:], told, strict=True):
            self._prompt_logprobs.append(
                {
                    top.token_id: PromptLogprob(
                        logprob=top.logprob,
                        rank=top.rank,
                        decoded_token=token_text(self._spelling[top.token_id], context),
                    )
                    for top in ranked_tokens(token_id, logprobs)
                }
            )
            context.append(self._spelling[token_id])


def usage_of(num_prompt: int, num_answer: int) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=num_prompt,
        total_tokens=num_prompt + num_answer,
        completion_tokens=num_answer,
    )


def _spans(choice: _Progress) -> list[WeightVersionSpan]:
    return [WeightVersionSpan(end=len(choice.token_ids))]
