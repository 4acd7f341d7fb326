"""A conversation in the terminal: its turns, its settings and its unfinished request. Pure."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.helpers.validation import invalid_request
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.multimodal import IMAGE
from shared.protocol.requests import (
    ContentPart,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from shared.protocol.sampling import SamplingParams


class Entry(Struct, frozen=True, omit_defaults=True):
    """A message of the conversation."""

    message: Message
    request_id: str | None = None
    """The request whose answer it is; None for messages of the user."""
    is_interrupted: bool = False
    """Whether the answer was ended before the model had ended it."""


class Conversation(Struct, omit_defaults=True):
    """The state of a conversation, which is also what the state file holds."""

    model: str
    system: str | None = None
    params: dict[str, Any] = {}
    """Sampling parameters; those that are left out have the model's configured defaults."""
    entries: list[Entry] = []
    images: list[str] = []
    """URLs of the images that belong to the next message."""
    request_ids: list[str] = []
    unfinished: str | None = None
    """The request whose answer has not been read to its end."""

    def say(self, text: str, images: list[str]) -> None:
        """Add a message of the user. One before it that has no answer is left out.

        Most chat templates refuse two messages of a user in a row.
        """
        if self.entries and self.entries[-1].message.role == "user":
            self.entries.pop()
        parts: list[ContentPart] = [ImagePart(ImageURL(url)) for url in [*self.images, *images]]
        content = [*parts, TextPart(text)] if parts else text
        self.entries.append(Entry(Message("user", content)))
        self.images = []

    def begin(self, request_id: str) -> None:
        """Record the request that asks for the next answer."""
        self.request_ids.append(request_id)
        self.unfinished = request_id

    def end(self, text: str, *, is_interrupted: bool = False) -> None:
        """Record the end of the unfinished request. An interrupted one without text is left out."""
        if text or not is_interrupted:
            message = Message("assistant", text)
            self.entries.append(Entry(message, self.unfinished, is_interrupted))
        self.unfinished = None

    def request(self) -> GenerateRequest:
        """Return the request for the next answer, without its sampling parameters."""
        return GenerateRequest(self.model, self.messages())

    def messages(self) -> list[Message]:
        system = [] if self.system is None else [Message("system", self.system)]
        return [*system, *(entry.message for entry in self.entries)]

    def undo(self) -> bool:
        """Remove the last message of the user and all after it. Return whether there was one."""
        if not self.rewind():
            return False
        self.entries.pop()
        return True

    def rewind(self) -> bool:
        """Remove all after the last message of the user. Return whether there was one."""
        roles = [entry.message.role for entry in self.entries]
        if "user" not in roles:
            return False
        del self.entries[len(roles) - roles[::-1].index("user") :]
        return True

    def set_params(self, given: Mapping[str, Any]) -> None:
        """Change sampling parameters; None removes one.

        Raises InvalidRequest and changes nothing.
        """
        merged = self.params | dict(given)
        params = {name: value for name, value in merged.items() if value is not None}
        try:
            checked = msgspec.convert(params, SamplingParams)
        except msgspec.ValidationError as error:
            raise invalid_request(error) from error
        if checked.n != 1:
            raise InvalidRequest("n: a conversation has one answer to each message", field="n")
        self.params = params

    def to_json(self) -> bytes:
        """Return the messages in OpenAI's format."""
        described = [
            {name: value for name, value in msgspec.to_builtins(message).items() if value}
            | {"content": msgspec.to_builtins(message.content)}
            for message in self.messages()
        ]
        return msgspec.json.format(msgspec.json.encode(described), indent=2) + b"\n"

    def load_json(self, data: bytes) -> None:
        """Replace the messages with those of `to_json`, or of a request's body.

        Raises InvalidRequest and changes nothing.
        """
        try:
            tree = msgspec.json.decode(data)
            found = tree.get("messages") if isinstance(tree, dict) else tree
            messages = msgspec.convert(found, list[Message])
        except msgspec.ValidationError as error:
            raise invalid_request(error, "messages") from error
        except UNDECODABLE as error:
            raise InvalidRequest(f"the file is not JSON: {error}", field="messages") from error
        first = messages[0] if messages else None
        self.system = None
        if first is not None and first.role == "system" and isinstance(first.content, str):
            self.system = first.content
            messages = messages[1:]
        self.entries = [Entry(message) for message in messages]
        self.images, self.unfinished = [], None


def describe(entry: Entry) -> str:
    """Return a message as text, with a mark for each image and for an interrupted answer."""
    content = entry.message.content or ""
    parts = content if isinstance(content, list) else [TextPart(content)]
    text = " ".join(p.text if isinstance(p, TextPart) else f"[{_short(p.url)}]" for p in parts)
    return f"{entry.message.role}: {text}{' (interrupted)' if entry.is_interrupted else ''}"


def _short(url: str) -> str:
    return IMAGE if url.startswith("data:") else f"{IMAGE} {url}"
