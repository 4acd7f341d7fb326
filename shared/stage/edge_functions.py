"""The edge functions of the product: each makes the task of an edge's target."""

from msgspec import Struct

from shared.protocol.pipeline import ANY, TEXT, edge_function
from shared.protocol.requests import Prompt
from shared.protocol.task_messages import FollowBody, PaintBody, RenderBody, SpeechBody


@edge_function("prompt", carries="prompt")
def _render(prompt: Prompt) -> RenderBody:
    return RenderBody(prompt)


@edge_function("paint", carries="prompt")
def _paint(prompt: Prompt) -> PaintBody:
    """Admission lets no request without a text through to a stage that paints."""
    return PaintBody(prompt.text or "")


@edge_function("rendered", carries="tokens")
@edge_function("item", carries=ANY)
def _as_it_is(body: Struct) -> Struct:
    """The stage's result, or its item, is the body of the next stage's task."""
    return body


@edge_function("follow", carries=ANY)
def _follow(inputs: dict[str, str]) -> FollowBody:
    return FollowBody(inputs)


@edge_function("speech", carries=TEXT, takes_text=True)
def _speak(source: dict[str, str] | Prompt) -> SpeechBody:
    """The text to speak: that of an output, as soon as it is whole, or that of the request."""
    return SpeechBody(source.text) if isinstance(source, Prompt) else SpeechBody()
