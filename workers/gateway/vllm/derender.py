"""Generated tokens → chat and text completions, whole or event by event. Pure.

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
    """Raises InvalidRequest for more tokens than the model can have generated."""
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
    """Return the choice of a stream's event, which has at most one. Raises InvalidRequest."""
    if len(event.choices) > 1:
        raise InvalidRequest(
            f"expects at most one choice per chunk (got {len(event.choices)}): each choice has a"
            " state of its own",
            field="body.generate_chunk.choices",
        )
    return event.choices[0] if event.choices else None


def whole_tokens(answer: Generated, choice: GeneratedChoice) -> list[int]:
    """Return the token ids of a choice. Raises InvalidRequest if there are none."""
    if not choice.token_ids:
        raise InvalidRequest(
            f"choice {choice.index} in response {answer.request_id} has empty or null token_ids",
            field="choices.token_ids",
        )
    return choice.token_ids


def window_of(state: StreamState) -> TokenWindow:
    return TokenWindow(state.token_ids, state.num_out, min(state.num_held, len(state.token_ids)))


def with_window(state: StreamState, window: TokenWindow) -> StreamState:
    token_ids, num_out, num_held = window
    return msgspec.structs.replace(state, token_ids=token_ids, num_out=num_out, num_held=num_held)


def next_state(
    state: StreamState, window: TokenWindow, token_ids: list[int], text: str
) -> StreamState:
    """Return the state after an event with these tokens, which added this text."""
    return msgspec.structs.replace(
        with_window(state, window),
        role_sent=True,
        context=[*state.context, *token_ids][-CONTEXT_TOKENS:],
        text_offset=state.text_offset + len(text),
    )


def logprob_token_ids(choice: GeneratedChoice, context: list[int]) -> set[int]:
    """Return the tokens whose bytes `logprobs_of` needs."""
    if choice.logprobs is None or choice.logprobs.content is None:
        return set()
    entries = choice.logprobs.content
    tops = itertools.chain.from_iterable(entry.top_logprobs for entry in entries)
    return {*context, *(e.token_id for e in entries), *(top.token_id for top in tops)}


def logprobs_of(
    choice: GeneratedChoice, context: list[int], token_bytes: TokenBytes
) -> TextContent | None:
    if choice.logprobs is None:
        return None
    before = [token_bytes[token_id] for token_id in context]
    entries = choice.logprobs.content
    if entries is None:
        return TextContent()
    return TextContent(content=[text_logprobs(entry, before, token_bytes) for entry in entries])


def flat_logprobs(
    logprobs: TextContent | None, text_offset: int
) -> DerenderCompletionLogprobs | None:
    """Return log probabilities as completions have them.

    `text_offset` is the number of characters before the first token.
    """
    if logprobs is None:
        return None
    entries = logprobs.content or []
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
    usage = event.usage
    if usage is None:
        return None
    num_prompt = usage.prompt_tokens if prompt_tokens is None else prompt_tokens
    return usage_of(num_prompt, usage.completion_tokens)


def usage_of_answers(answers: Sequence[Generated], num_prompt: int) -> UsageInfo:
    choices = (choice for answer in answers for choice in answer.choices)
    return usage_of(num_prompt, sum(len(choice.token_ids or []) for choice in choices))
