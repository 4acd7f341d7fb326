"""Assembler of chat completions. Pure."""

from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from shared.protocol.records import ChoiceDelta
from workers.gateway.core.assembler import or_unset
from workers.gateway.core.logprobs import openai_logprobs
from workers.gateway.openai.assembler import AnswerOptions, ChoiceSoFar, OpenAIAssembler
from workers.gateway.openai.tool_calls import ChoiceText
from workers.gateway.schemas.openai_response import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    TokenLogprob,
)


class ChatOptions(AnswerOptions, frozen=True, kw_only=True):
    form: str | None = None
    names: list[str] = msgspec.field(default_factory=list)
    one_call: bool = False


@dataclass(slots=True)
class _Choice(ChoiceSoFar):
    text: ChoiceText
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChatAssembler(OpenAIAssembler[ChatOptions, _Choice]):
    """Assembler of chat completions, with tool calls."""

    options_type, chunk_type, answer_type = ChatOptions, ChatChunk, ChatCompletion

    def _advance(self, part: int, delta: ChoiceDelta) -> ChatChunkChoice | None:
        choice, options = self.choices.get(delta.index), self.options
        if choice is None:
            name = f"{self.request_id}:{delta.index}"
            text = ChoiceText(name, options.form, options.names, one_call=options.one_call)
            choice = self.choices[delta.index] = _Choice(text)
        is_last = delta.finish_reason is not None
        content, calls = choice.text.feed(delta.text, is_last=is_last)
        logprobs = None
        if options.logprobs and delta.logprobs:
            logprobs = list(openai_logprobs(delta.token_ids, delta.logprobs, self.token_bytes))
            if self.collects_answer:
                choice.logprobs += logprobs
        if is_last:
            choice.finish_reason = choice.text.finish_reason(delta.finish_reason)
            choice.stop_reason = delta.stop_reason
        if choice.begun and not (content or calls or logprobs or is_last):
            return None
        first, choice.begun = not choice.begun, True
        return ChatChunkChoice(
            delta.index,
            Delta(
                role="assistant" if first else UNSET,
                content=content if content or (first and not calls) else UNSET,
                tool_calls=calls or UNSET,
            ),
            None if logprobs is None else ChatLogprobs(logprobs),
            choice.finish_reason if is_last else None,
            or_unset(choice.stop_reason),
        )

    def _whole(self, index: int, choice: _Choice) -> ChatChoice:
        content, calls = choice.text.whole()
        return ChatChoice(
            index,
            AnswerMessage(content, tool_calls=calls),
            ChatLogprobs(choice.logprobs) if self.options.logprobs else None,
            choice.finish_reason,
            or_unset(choice.stop_reason),
        )
