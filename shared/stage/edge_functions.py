"""Edge functions of the product. Each creates the task of an edge's target."""

from typing import Any, NamedTuple

from msgspec import Struct

from shared.protocol.pipeline import (
    ANSWER,
    ANY,
    EDGE_FUNCTIONS,
    TEXT,
    Edge,
    Pipeline,
    edge_function,
)
from shared.protocol.requests import Prompt
from shared.protocol.task_messages import FollowBody, PaintBody, RenderBody, SpeechBody


class FollowedTask(NamedTuple):
    """Outputs that a stage follows, and the body of the task that writes them."""

    inputs: dict[str, str]
    """Kind of each input's data → name of the output to follow."""
    body: Any


def input_of_follower(pipeline: Pipeline, edge: Edge, body: Any) -> Any:
    """Return the argument of a stream edge's function; `body` is the body of the source's task."""
    inputs = pipeline.inputs_of(edge.target)
    return FollowedTask(inputs, body) if EDGE_FUNCTIONS[edge.function].takes_body else inputs


@edge_function("prompt", carries="prompt")
def _render(prompt: Prompt) -> RenderBody:
    return RenderBody(prompt)


@edge_function("paint", carries="prompt")
def _paint(prompt: Prompt) -> PaintBody:
    """The prompt has a text, because admission refuses requests for images without one."""
    return PaintBody(prompt.text or "")


@edge_function("rendered", carries="tokens")
@edge_function("item", carries=ANY)
def _as_it_is(body: Struct) -> Struct:
    """Use the stage's result, or its item, as the body of the next stage's task."""
    return body


@edge_function("follow", carries=ANY)
def _follow(inputs: dict[str, str]) -> FollowBody:
    return FollowBody(inputs)


@edge_function(ANSWER, carries=TEXT, takes_body=True)
def _speak_answer(source: FollowedTask) -> SpeechBody:
    """Speak the text of an engine. The talker also reads the prompt and its items."""
    body = source.body
    return SpeechBody(prompt_token_ids=body.prompt_token_ids, items=body.items)


@edge_function("speech", carries=TEXT, takes_text=True)
def _speak(source: dict[str, str] | Prompt) -> SpeechBody:
    """Speak the text of the request, or of an output once it is complete."""
    return SpeechBody(source.text) if isinstance(source, Prompt) else SpeechBody()
