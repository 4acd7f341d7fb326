"""Assembler of `/inference/v1/generate`: the answer, or the events of its stream. Pure.

An assembler that reads the log again from its first record produces the same events, so a stream
can continue at any gateway.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from shared.protocol.records import AnyRecord, ChoiceDelta, Finish, TokenChunk, TokenLogprobs
from workers.gateway.core.assembler import Answering, AnswerOptions, Assembler
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind, Budget, Refusal
from workers.gateway.core.logprobs import id_logprobs, ranked_tokens, text_logprobs, token_text
from workers.gateway.schemas.generate import (
    GenerateChoice,
    GenerateChunk,
    GenerateResponse,
    OutputMode,
    PlaceholderInfo,
    PromptLogprob,
    TextContent,
    TokensContent,
    TotalUsage,
    UsageInfo,
    WeightVersionSpan,
)


class GenerateShape(AnswerOptions, frozen=True, kw_only=True, omit_defaults=True):
    """Options of the RequestRecord. The answer depends on them and on the log alone."""

    wire_id: str
    """The id by which the client knows the request."""
    num_prompt_tokens: int
    n: int = 1
    output_mode: OutputMode = "tokens"
    logprobs: int | None = None
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    """Token ids of the prompt; empty unless the answer has them or their log probabilities."""
    return_token_ids: bool = False
    placeholders: dict[str, list[PlaceholderInfo]] = msgspec.field(default_factory=dict)
    """Placeholder ranges of the items, by modality."""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(slots=True)
class _ChoiceState:
    """State of one choice."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    """Entries of IdLogprobs or TokenLogprob, depending on the output mode."""
    context: list[bytes] = dataclasses.field(default_factory=list)
    """Bytes of the tokens before the next token."""


class GenerateAssembler(Assembler[GenerateShape]):
    """Assembler of one request. Every event has one choice, as vLLM's clients expect."""

    def __init__(self, request: Answering[GenerateShape]) -> None:
        super().__init__(request)
        self._shape = self.options
        self._token_bytes = request.token_bytes
        self._prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
        self._usage: tuple[int, int] | None = None
        self._has_begun = False
        # An abort has an event for each choice, and another event for usage.
        self.max_events = 1 if self._shape.n == 1 else self._shape.n + 1
        self.prompt_token_ids = self._shape.prompt_token_ids
        self._choices = [_ChoiceState() for _ in range(self._shape.n)]

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[GenerateChunk]:
        match record:
            case TokenChunk():
                return self._add_tokens(record)
            case Finish(usage=usage):
                self._usage = usage.prompt_tokens, usage.completion_tokens
                return self._usage_event()
            case _:
                return []

    def _add_tokens(self, record: TokenChunk) -> list[GenerateChunk]:
        """Return an event for each choice that the record adds to."""
        if record.prompt_logprobs is not None:
            self._add_prompt_logprobs(record.prompt_logprobs)
        return [
            self._event(delta.index, choice)
            for delta in record.choices
            if (choice := self._add_delta(delta)) is not None
        ]

    def abort(self) -> list[GenerateChunk]:
        open_choices = [i for i, c in enumerate(self._choices) if c.finish_reason is None]
        return [*(self._abort_choice(i) for i in open_choices), *self._usage_event()]

    def answer(self) -> GenerateResponse:
        """Return the whole answer. The last record must have been added."""
        shape = self._shape
        return GenerateResponse(
            request_id=shape.wire_id,
            model=self.request.model,
            created=self.request.created_s,
            usage=usage_of(*self._num_tokens()),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=shape.prompt_token_ids if shape.return_token_ids else None,
            mm_placeholders=self._placeholders(),
            output_mode=shape.output_mode,
            choices=[self._whole_choice(i, choice) for i, choice in enumerate(self._choices)],
        )

    def _add_delta(self, delta: ChoiceDelta) -> GenerateChoice | None:
        """Return what the event of a choice contains, or None if it would be empty."""
        state, shows_text = self._choices[delta.index], self._shape.output_mode == "text"
        logprobs = self._logprobs_of(state, delta)
        state.token_ids += delta.token_ids
        state.text += delta.text
        state.finish_reason, state.stop_reason = delta.finish_reason, delta.stop_reason
        if self.collects_answer:
            state.logprobs += logprobs
        if not (delta.token_ids or delta.finish_reason or (shows_text and delta.text)):
            return None
        return self._choice(delta.index, delta.token_ids, delta.text, logprobs)

    def _abort_choice(self, index: int) -> GenerateChunk:
        self._choices[index].finish_reason = "abort"
        return self._event(index, self._choice(index, [], "", []))

    def _choice(
        self, index: int, token_ids: list[int], text: str, logprobs: list[Any]
    ) -> GenerateChoice:
        """Return a choice with these tokens, and with the reasons for its end if it has ended."""
        shape, state = self._shape, self._choices[index]
        content: TokensContent | TextContent | None = None
        if shape.logprobs is not None:
            content_type = TextContent if shape.output_mode == "text" else TokensContent
            content = content_type(content=logprobs)
        versions = [WeightVersionSpan(end=len(state.token_ids))] if state.finish_reason else None
        return GenerateChoice(
            index=index,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            token_ids=token_ids,
            weight_versions=versions,
            text=text if shape.output_mode == "text" else UNSET,
            logprobs=content,
        )

    def _event(self, index: int, choice: GenerateChoice) -> GenerateChunk:
        shape = self._shape
        shows_prompt = shape.return_token_ids and not self._has_begun
        self._has_begun = True
        num_tokens = len(self._choices[index].token_ids)
        return GenerateChunk(
            request_id=shape.wire_id,
            usage=usage_of(shape.num_prompt_tokens, num_tokens) if shape.continuous_usage else None,
            prompt_token_ids=shape.prompt_token_ids if shows_prompt else UNSET,
            mm_placeholders=(self._placeholders() or UNSET) if shows_prompt else UNSET,
            output_mode=shape.output_mode,
            choices=[choice],
        )

    def _usage_event(self) -> list[GenerateChunk]:
        shape = self._shape
        if not shape.include_usage:
            return []
        usage = msgspec.convert(usage_of(*self._num_tokens()), TotalUsage, from_attributes=True)
        last = GenerateChunk(request_id=shape.wire_id, usage=usage, output_mode=shape.output_mode)
        return [last]

    def _num_tokens(self) -> tuple[int, int]:
        """Return the numbers of prompt and answer tokens from the last record of the log.

        The log of an aborted request has no such record. Then the added tokens are counted.
        """
        num_answer = sum(len(choice.token_ids) for choice in self._choices)
        return self._usage or (self._shape.num_prompt_tokens, num_answer)

    def _placeholders(self) -> dict[str, list[PlaceholderInfo]] | None:
        shape = self._shape
        return (shape.placeholders or None) if shape.return_token_ids else None

    def _whole_choice(self, index: int, state: _ChoiceState) -> GenerateChoice:
        state.finish_reason = state.finish_reason or "stop"
        return self._choice(index, state.token_ids, state.text, state.logprobs)

    def _logprobs_of(self, state: _ChoiceState, delta: ChoiceDelta) -> list[Any]:
        entries = [
            id_logprobs(token_id, logprobs, max(self._shape.logprobs or 0, 1))
            for token_id, logprobs in zip(delta.token_ids, delta.logprobs or [], strict=False)
        ]
        if self._shape.output_mode == "tokens":
            return entries
        return [text_logprobs(entry, state.context, self._token_bytes) for entry in entries]

    def _add_prompt_logprobs(self, logprobs_of_prompt: Sequence[TokenLogprobs]) -> None:
        """Add log probabilities. The first token has none, because no token comes before it."""
        token_ids = self._shape.prompt_token_ids
        self._prompt_logprobs = [None]
        context = [self._token_bytes[token_ids[0]]]
        for token_id, logprobs in zip(token_ids[1:], logprobs_of_prompt, strict=True):
            self._prompt_logprobs.append(
                {
                    top.token_id: PromptLogprob(
                        logprob=top.logprob,
                        rank=top.rank,
                        decoded_token=token_text(self._token_bytes[top.token_id], context),
                    )
                    for top in ranked_tokens(token_id, logprobs)
                }
            )
            context.append(self._token_bytes[token_id])


def usage_of(num_prompt: int, num_answer: int) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=num_prompt, total_tokens=num_prompt + num_answer, completion_tokens=num_answer
    )


GENERATE = AnswerKind(
    name="generate",
    id_prefix="gen",
    options=GenerateShape,
    assembler=GenerateAssembler,
    client_fields=ClientFields(
        {"messages": "token_ids", "prompt_token_ids": "token_ids", "items": "features"},
        has_sampling_params=True,
    ),
    budget=Budget(
        # Log probabilities of prompts are never streamed.
        prompts=Refusal(
            "log probabilities", "prompt_logprobs", "ask for fewer, or for fewer tokens"
        )
    ),
)
