"""Generated tokens → chat and text completions, whole or event by event. Pure.

Nothing is remembered between the events of a stream: the client carries the StreamState. It has the
text in which tool calls are looked for. Each event parses that text again, and returns only the new
pieces.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from shared.errors import InvalidRequest
from shared.protocol.detokenizer import TokenWindow
from shared.protocol.renderer_rpc import ModelCard
from shared.validation import split_validation_error
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.core.logprobs import text_logprobs
from workers.gateway.openai.chat import ToolPlan, tool_plan
from workers.gateway.openai.tool_calls import ChoiceText
from workers.gateway.schemas.generate import TextContent, UsageInfo
from workers.gateway.schemas.openai_request import ChatRequest
from workers.gateway.schemas.openai_response import CompletionLogprobs
from workers.gateway.vllm import derender_schema as schema
from workers.gateway.vllm.derender_schema import Generated, GeneratedChoice, StreamState
from workers.gateway.vllm.errors import body_error
from workers.gateway.vllm.generate_assembler import usage_of

# Fields of the rendered request that decide how its answer is read. Its other fields have had their
# effect, and may be as any server writes them.
_FORMAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoded tokens of a choice, or those that an event adds to it."""

    text: str
    logprobs: TextContent | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """The format of a completion."""

    skips_special: bool
    keeps_text = False
    """Whether the StreamState has the text, in which there may be tool calls."""
    chunk_type = schema.DerenderCompletionChunk

    def choice(
        self, request_id: str, choice: GeneratedChoice, new: Decoded, before: StreamState | None
    ) -> schema.DerenderCompletionChoice | schema.DerenderCompletionStreamChoice:
        """Return a choice of a whole answer, or of an event that comes after `before`."""
        fields: dict[str, Any] = {
            "index": choice.index,
            "text": new.text,
            "logprobs": _flat_logprobs(new.logprobs, before.text_offset if before else 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if before is None:
            return schema.DerenderCompletionChoice(**fields)
        return schema.DerenderCompletionStreamChoice(**fields)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of a chat completion, as the request that was rendered asks for it."""

    plan: ToolPlan
    skips_special: bool
    shows_ids: bool
    chunk_type = schema.DerenderChatChunk

    @property
    def keeps_text(self) -> bool:
        return self.plan.form is not None

    def choice(
        self, request_id: str, choice: GeneratedChoice, new: Decoded, before: StreamState | None
    ) -> schema.DerenderChatChoice | schema.DerenderChatStreamChoice:
        """Return a choice of a whole answer, or of an event that comes after `before`."""
        plan, name = self.plan, f"{request_id}:{choice.index}"
        text = ChoiceText(name, plan.form, plan.names, one_call=plan.one_call)
        if before is not None:
            text.feed(before.text)
        is_last = before is None or choice.finish_reason is not None
        content, calls = text.feed(new.text, is_last=is_last)
        fields: dict[str, Any] = {
            "index": choice.index,
            "logprobs": new.logprobs,
            "finish_reason": text.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            "token_ids": new.token_ids if self.shows_ids else None,
        }
        if before is None:
            whole, whole_calls = text.whole()
            message = schema.DerenderChatMessage(content=whole, tool_calls=whole_calls)
            return schema.DerenderChatChoice(message=message, **fields)
        delta = schema.DerenderChatDelta(
            role=None if before.role_sent else "assistant",
            content=content or None,
            tool_calls=calls or UNSET,
        )
        return schema.DerenderChatStreamChoice(delta=delta, **fields)


def completion_format_of(request: dict[str, Any]) -> CompletionFormat:
    return CompletionFormat(_skips_special(request))


def chat_format_of(model: str, request: dict[str, Any], card: ModelCard) -> ChatFormat:
    """Raises a RequestError with the field."""
    given = {name: request[name] for name in _FORMAT_FIELDS if request.get(name) is not None}
    try:
        asked = msgspec.convert(
            {"model": model, "messages": [{"role": "user", "content": ""}]} | given, ChatRequest
        )
    except msgspec.ValidationError as error:
        complaint, path = split_validation_error(error)
        raise body_error(f"chat_request.{path}", complaint) from error
    plan = tool_plan(asked, card, own_form=False)
    # The marks by which calls are found may be special tokens.
    needs_marks = plan.form is not None and plan.structure is None
    return ChatFormat(
        plan,
        skips_special=not needs_marks and _skips_special(request),
        shows_ids=bool(request.get("return_token_ids")),
    )


def _skips_special(request: dict[str, Any]) -> bool:
    given = request.get("skip_special_tokens")
    return given is None or bool(given)


def check_lengths(asked: schema.DerenderCompletion) -> None:
    """Raises InvalidRequest unless there are answers, and a prompt for each where any are given."""
    num_answers = len(asked.generate_responses)
    if not num_answers:
        raise body_error("generate_responses", "generate_responses must not be empty")
    for name in ("prompt_tokens", "prompt_token_ids"):
        given = getattr(asked, name)
        if given is not None and len(given) != num_answers:
            raise body_error(name, f"{name} length ({len(given)}) must equal {num_answers}")


def check_sizes(
    answers: Iterable[Generated], prompts: Iterable[list[int] | None], max_model_len: int
) -> None:
    """Raises InvalidRequest for more tokens than the model can have generated or read."""
    lengths: list[tuple[str, str, int]] = []
    for choice in (choice for answer in answers for choice in answer.choices):
        place, logprobs = f" in choice {choice.index}", choice.logprobs
        lengths.append(("token_ids", place, len(choice.token_ids or [])))
        lengths.append(("logprobs.content", place, len((logprobs and logprobs.content) or [])))
    lengths += [("prompt_token_ids", "", len(prompt or [])) for prompt in prompts]
    for name, place, length in lengths:
        if length > max_model_len:
            raise InvalidRequest(
                f"{name} length ({length}){place} exceeds max_model_len ({max_model_len}).",
                field=name,
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


def next_state(
    state: StreamState, window: TokenWindow, choice: GeneratedChoice | None, text: str
) -> StreamState:
    """Return the state after an event with this choice, which added this text."""
    token_ids = (choice and choice.token_ids) or []
    return msgspec.structs.replace(
        state,
        **window._asdict(),
        role_sent=state.role_sent or choice is not None,
        context=[*state.context, *token_ids][-schema.CONTEXT_TOKENS :],
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


def _flat_logprobs(logprobs: TextContent | None, text_offset: int) -> CompletionLogprobs | None:
    """Return log probabilities as completions have them.

    `text_offset` is the number of characters before the first token.
    """
    if logprobs is None:
        return None
    entries = logprobs.content or []
    lengths = [len(entry.token) for entry in entries]
    offsets = itertools.accumulate(lengths, initial=text_offset)
    return CompletionLogprobs(
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
