"""The edge functions of the product: each makes the task of an edge's target."""

from msgspec import Struct

from shared.protocol.pipeline import ANY, edge_function
from shared.protocol.requests import Prompt
from shared.protocol.task_messages import FollowBody, RenderBody


@edge_function("prompt", carries="prompt")
def _render(prompt: Prompt) -> RenderBody:
    return RenderBody(prompt)


@edge_function("rendered", carries="tokens")
@edge_function("item", carries=ANY)
def _as_it_is(body: Struct) -> Struct:
    """The stage's result, or its item, is the body of the next stage's task."""
    return body


@edge_function("follow", carries=ANY)
def _follow(inputs: dict[str, str]) -> FollowBody:
    return FollowBody(inputs)
