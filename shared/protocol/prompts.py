"""Validation of a request's prompt, which has one of three forms. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.json_limits import json_limit_error
from shared.protocol.renderer_rpc import TokenizeRequest
from shared.protocol.requests import GenerateRequest, Message, Prompt


def prompt_of(request: GenerateRequest) -> Prompt:
    """Return the prompt or the given text of a request.

    Raises InvalidRequest if there is not exactly one, or for a field that is incompatible with it.
    """
    if request.given_text is not None:
        return _given_text(request, request.given_text)
    forms = {
        "messages": request.messages,
        "prompt": request.prompt,
        "prompt_token_ids": request.prompt_token_ids,
    }
    _check_one(forms)
    if request.features and request.prompt_token_ids is None:
        raise InvalidRequest("features require prompt_token_ids", field="features")
    if request.prompt_token_ids is not None and request.add_special_tokens is not None:
        raise InvalidRequest(
            "add_special_tokens cannot be combined with prompt_token_ids",
            field="add_special_tokens",
        )
    _check_template(request)
    return replace(
        _shared_fields(request), token_ids=request.prompt_token_ids, features=request.features
    )


_OF_A_PROMPT = (
    "messages", "prompt", "prompt_token_ids", "features", "tools", "template_kwargs",
    "add_special_tokens", "sampling_params", "adapter", "embedding",
)  # fmt: skip
"""Fields that apply only to a request with a prompt."""


def _given_text(request: GenerateRequest, text: str) -> Prompt:
    for field in _OF_A_PROMPT:
        if getattr(request, field) not in (None, UNSET, [], {}):
            raise InvalidRequest(f"{field} cannot be combined with given_text", field=field)
    return Prompt(text=text)


def prompt_to_tokenize(request: TokenizeRequest) -> Prompt:
    """Return the prompt of a tokenize request. Raises what `prompt_of` raises."""
    _check_one({"messages": request.messages, "prompt": request.prompt})
    _check_template(request)
    prompt = _shared_fields(request)
    if request.messages is None:
        return prompt
    kwargs = {"add_generation_prompt": request.add_generation_prompt} | request.template_kwargs
    return replace(prompt, template_kwargs=kwargs)


def _shared_fields(request: GenerateRequest | TokenizeRequest) -> Prompt:
    return Prompt(
        messages=request.messages or [],
        text=request.prompt,
        tools=request.tools,
        template_kwargs=request.template_kwargs,
        add_special_tokens=request.add_special_tokens,
    )


def _check_one(forms: Mapping[str, object]) -> None:
    fields = [name for name, value in forms.items() if value is not None]
    if len(fields) != 1:
        raise InvalidRequest(
            f"give exactly one of {', '.join(forms)}", field=fields[-1] if fields else "messages"
        )


def _check_template(request: GenerateRequest | TokenizeRequest) -> None:
    if request.messages is not None:
        _check_messages(request.messages)
        _check_values(request)
        return
    for field in ("tools", "template_kwargs"):
        if getattr(request, field):
            raise InvalidRequest(f"{field} requires messages", field=field)


def _check_values(request: GenerateRequest | TokenizeRequest) -> None:
    values = {"template_kwargs": request.template_kwargs} | {
        f"tools[{i}].function.parameters": tool.function.parameters
        for i, tool in enumerate(request.tools)
    }
    for field, value in values.items():
        if message := json_limit_error(value):
            raise InvalidRequest(f"{field}: {message}", field=field)


def _check_messages(messages: Sequence[Message]) -> None:
    for i, message in enumerate(messages):
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                "only an assistant message may have tool calls", field=f"messages[{i}].tool_calls"
            )
        if message.tool_call_id is not None and message.role != "tool":
            raise InvalidRequest(
                "only a tool message may have a tool_call_id", field=f"messages[{i}].tool_call_id"
            )
        if message.content is None and not message.tool_calls:
            raise InvalidRequest("a message needs content", field=f"messages[{i}].content")
