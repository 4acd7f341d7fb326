"""Limit on the text of a prompt, checked before it is tokenized. Pure."""

from collections.abc import Iterator

import msgspec

from shared.errors import ContextTooLong
from shared.protocol.requests import GenerateRequest, Message, Prompt, TextPart

# English text has 4 to 5 bytes per token, other scripts fewer. Only text such as long runs of
# blanks has more than 16, and an attacker could send 50 MB of it to keep a tokenizer busy.
MAX_BYTES_PER_TOKEN = 16
"""Limit on the text of a prompt, in bytes for each token of the context."""


def check_text_len(request: Prompt | GenerateRequest, max_model_len: int) -> None:
    """Raise ContextTooLong for text that cannot fit, without tokenizing it."""
    text = request.text if isinstance(request, Prompt) else request.prompt
    texts = client_texts(request) if text is None else [text]
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > MAX_BYTES_PER_TOKEN * max_model_len:
        raise ContextTooLong(
            f"{num_bytes} bytes of text are over the limit of {MAX_BYTES_PER_TOKEN} bytes for"
            f" each of the model's {max_model_len} tokens",
            field="messages" if text is None else "prompt",
        )


def client_texts(request: Prompt | GenerateRequest) -> Iterator[str]:
    """Yield all text of the client that a chat template may include."""
    for message in request.messages or []:
        yield from texts_of(message)
        for call in message.tool_calls:
            yield from (call.id, call.function.name, call.function.arguments)
        yield from (message.tool_call_id or "", message.name or "")
    if request.tools or request.template_kwargs:
        yield msgspec.json.encode((request.tools, request.template_kwargs)).decode()


def texts_of(message: Message) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [part.text for part in message.content or [] if isinstance(part, TextPart)]
