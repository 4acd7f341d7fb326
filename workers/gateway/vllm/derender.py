"""Tokens that generate has answered → chat and text completions, whole or event by event. Pure.

Nothing is remembered between the events of a stream: the client carries the StreamState.
"""

import itertools
from collections.abc import Sequence

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.detokenizer import TokenWindow
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.core.logprobs import text_logprobs
from workers.gateway.schemas.generate import TextContent, UsageInfo
from workers.gateway.vllm.derender_schema import (
    CONTEXT_TOKENS,
    DerenderCompletionLogprobs,
    Generated,
    GeneratedChoice,
    StreamState,
)
from workers.gateway.vllm.generate_assembler import usage_of


def check_sizes(answers: Sequence[Generated], max_model_len: int) -> None:
    """Raises InvalidRequest for more tokens than the model can have written."""
    for answer in answers:
        for choice in answer.choices:
            for name, length in (
                ("token_ids", len(choice.token_ids or [])),
                ("logprobs.content", len((choice.logprobs and choice.logprobs.content) or [])),
            ):
                if length > max_model_len:
                    raise InvalidRequest(
                        f"{name} length ({length}) in choice {choice.index} exceeds max_model_len"
                        f" ({max_model_len}).",
                        field=name,
                    )


def check_prompt(token_ids: list[int] | None, max_model_len: int) -> None:
    """Raises InvalidRequest."""
    if token_ids is not None and len(token_ids) > max_model_len:
        raise InvalidRequest(
            f"prompt_token_ids length ({len(token_ids)}) exceeds max_model_len ({max_model_len}).",
            field="prompt_token_ids",
        )


def only_choice(event: Generated) -> GeneratedChoice | None:
    """Of a stream's event, which has one at most. Raises InvalidRequest for more."""
    if len(event.choices) > 1:
        raise InvalidRequest(
            f"expects at most one choice per chunk (got {len(event.choices)}): their states differ",
            field="body.generate_chunk.choices",
        )
    return event.choices[0] if event.choices else None


def whole_tokens(answer: Generated, choice: GeneratedChoice) -> list[int]:
    """Raises InvalidRequest for none."""
    if not choice.token_ids:
        raise InvalidRequest(
            f"choice {choice.index} in response {answer.request_id} has empty or null token_ids",
            field="choices.token_ids",
        )
    return choice.token_ids


def with_window(state: StreamState, window: TokenWindow) -> StreamState:
    token_ids, num_out, num_held = window
    return msgspec.structs.replace(state, token_ids=token_ids, num_out=num_out, num_held=num_held)


def advanced(
    state: StreamState, window: TokenWindow, token_ids: list[int], text: str
) -> StreamState:
    """Return the state after an event with these tokens, which added this text."""
    return msgspec.structs.replace(
        with_window(state, window),
        role_sent=True,
        context=[*state.context, *token_ids][-CONTEXT_TOKENS:],
        text_offset=state.text_offset + len(text),
    )


def named_tokens(choice: GeneratedChoice, context: list[int]) -> set[int]:
    """Whose bytes `logprobs_of` needs."""
    if choice.logprobs is None or choice.logprobs.content is None:
        return set()
    entries = choice.logprobs.content
    tops = itertools.chain.from_iterable(entry.top_logprobs for entry in entries)
    return {*context, *(e.token_id for e in entries), *(top.token_id for top in tops)}


def logprobs_of(
    choice: GeneratedChoice, context: list[int], spelling: TokenBytes
) -> TextContent | None:
    if choice.logprobs is None:
        return None
    before = [spelling[token_id] for token_id in context]
    entries = choice.logprobs.content
    if entries is None:
        return TextContent()
    return TextContent(content=[text_logprobs(entry, before, spelling) for entry in entries])


def flat_logprobs(told: TextContent | None, text_offset: int) -> DerenderCompletionLogprobs | None:
    """`text_offset`: characters that are before the first token."""
    if told is None:
        return None
    entries = told.content or []
    lengths = [len(entry.token) for entry in entries]
    offsets = itertools.accumulate(lengths, initial=text_offset)
    return DerenderCompletionLogprobs(
        text_offset=list(offsets)[: len(entries)],
        token_logprobs=[entry.logprob for entry in entries],
        tokens=[entry.token for entry in entries],
        top_logprobs=[
            {top.token: top.logprob for top in entry.top_logprobs} or None for entry in entries
        ],
    )


def usage_of_event(event: Generated, prompt_tokens: int | None) -> UsageInfo | None:
    if event.usage is None:
        return None
    told = event.usage
    num_prompt = told.prompt_tokens if prompt_tokens is None else prompt_tokens
    return usage_of(num_prompt, told.completion_tokens)


def usage_of_answers(answers: Sequence[Generated], num_prompt: int) -> UsageInfo:
    choices = (choice for answer in answers for choice in answer.choices)
    return usage_of(num_prompt, sum(len(choice.token_ids or []) for choice in choices))
