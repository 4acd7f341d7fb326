"""The response object, from the state of a response. Pure."""

from collections.abc import Iterable

from msgspec.structs import replace

from shared.protocol.items import (
    FunctionOutputItem,
    InputFilePart,
    InputImagePart,
    Item,
    MessageItem,
    MessagePart,
    OutputItem,
    OutputTextPart,
)
from shared.protocol.records import ErrorInfo, TokenLogprobs
from shared.protocol.steps import Answered
from shared.responses.state import ResponseState
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.core.logprobs import openai_logprobs
from workers.gateway.http import errors
from workers.gateway.schemas.openai_response import TokenLogprob
from workers.gateway.schemas.responses import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseBody,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
)

# Codes in the types of OpenAI's clients, by Pagemill's codes.
_CODES = {
    "overloaded": "rate_limit_exceeded",
    "token_rate_exceeded": "rate_limit_exceeded",
    "invalid_media": "invalid_image",
    "media_too_large": "image_too_large",
    "media_url_blocked": "failed_to_download_image",
    "media_not_found": "image_file_not_found",
}


def response_of(state: ResponseState, token_bytes: TokenBytes) -> ResponseBody:
    """Return the response. `token_bytes` are only needed for log probabilities."""
    begun, ended = state.begun, state.ended
    assert begun is not None
    return ResponseBody(
        id=state.response_id,
        created_at=begun.created_s,
        status=status_of(state),
        model=begun.model,
        output=list(_with_logprobs(state, token_bytes)),
        completed_at=ended.ended_s if ended is not None and ended.status == "completed" else None,
        error=None if ended is None or ended.error is None else error_of(ended.error),
        incomplete_details=(
            None if ended is None or ended.reason is None else IncompleteDetails(ended.reason)
        ),
        usage=None if ended is None else _usage_of(state),
        background=begun.background,
        store=begun.store,
        **begun.echo,
    )


def status_of(state: ResponseState) -> ResponseStatus:
    assert state.begun is not None
    if state.ended is not None:
        return state.ended.status
    return "queued" if state.begun.background and state.num_steps == 1 else "in_progress"


def error_of(error: ErrorInfo) -> ResponseError:
    """Return an error with a code of OpenAI's API, and with Pagemill's code in the message."""
    body = errors.body_of(error).error
    default = "invalid_prompt" if error.fault == "client" else "server_error"
    return ResponseError(_CODES.get(body.code, default), f"{body.message} ({body.code})")


def _usage_of(state: ResponseState) -> ResponseUsage:
    usage = state.usage
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(),
        usage.prompt_tokens + usage.completion_tokens,
    )


def _with_logprobs(state: ResponseState, token_bytes: TokenBytes) -> Iterable[OutputItem]:
    if state.begun is None or not state.begun.logprobs:
        return state.output
    answers = {answer.turn: answer for answer in state.answers}
    return [
        _message_with_logprobs(item, answers[turn], token_bytes)
        if isinstance(item, MessageItem) and turn is not None
        else item
        for item, turn in zip(state.output, state.output_turns, strict=True)
    ]


def _message_with_logprobs(
    item: MessageItem, answer: Answered, token_bytes: TokenBytes
) -> MessageItem:
    logprobs = message_logprobs(answer.token_ids, answer.logprobs, token_bytes)
    return replace(item, content=[OutputTextPart(answer.content, logprobs=list(logprobs))])


def message_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs] | None, token_bytes: TokenBytes
) -> list[TokenLogprob]:
    return list(openai_logprobs(token_ids, logprobs, token_bytes)) if logprobs else []


def without_images(item: Item) -> Item:
    """Return an input item without the images and documents in its parts."""
    match item:
        case MessageItem(content=list(parts)):
            return replace(item, content=[_without_image(part) for part in parts])
        case FunctionOutputItem(output=list(parts)):
            return replace(item, output=[_without_image(part) for part in parts])
        case _:
            return item


def _without_image(part: MessagePart) -> MessagePart:
    match part:
        case InputImagePart():
            return replace(part, image_url=None)
        case InputFilePart():
            return replace(part, file_data=None)
        case _:
            return part
