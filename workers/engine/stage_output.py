"""Output of an engine for its stage: text here, or the codes of a speech in `code_output`.

The rest of an engine is the same for both. They differ in the rendering of a task to a prompt, and
in the records of the log.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from shared.protocol.records import AnyRecord, OutputSummary
from shared.protocol.task_messages import EngineBody, Task, TaskBody
from shared.state.token_log import LogWriter
from workers.engine.core.sequence import LoggedChoice, RequestOutput, SpokenText, SpokenTokens
from workers.engine.core.speech_pieces import Piece
from workers.engine.log_records import logged_choices, merge_deltas

Progress = Callable[[], Awaitable[None]]


class Rendered(NamedTuple):
    """A task with its prompt."""

    task: Task[EngineBody]
    speech: SpokenText | None = None
    """Text that a talker speaks. The prompt's tokens are only placeholders for it, and the items of
    the task belong to it."""
    spoken: SpokenTokens | None = None
    """None if the numbers of spoken tokens are unknown or not needed."""
    growth: AsyncGenerator[SpokenText] | None = None
    """Yields the text whenever more of it has arrived; None if `speech` is whole. It must be
    iterated while the request runs, and raises RequestEnded."""
    piece: Piece = Piece()
    """Piece of the text that is the prompt."""
    num_prompt_tokens: int | None = None
    """Number of tokens of all pieces; None for one piece."""


class StageOutput(Protocol):
    """Interface to the output of the engine's stage: rendering, log records and summary."""

    @property
    def body(self) -> type[TaskBody]:
        """Type of the stage's task bodies."""

    @property
    def is_answer(self) -> bool:
        """Whether the output is the request's text, so that its times count for the request."""

    async def render(
        self, task: Task[Any], records: Sequence[AnyRecord], progress: Progress
    ) -> Rendered:
        """Return the task with its prompt; `records` are in its log.

        `progress` is awaited repeatedly, and may end a wait.
        """

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        """Return the tokens of each choice that are in a log; no choices for an empty log."""

    @property
    def appends_per_s(self) -> float:
        """Rate at which a log grows, so that its readers receive a steady stream."""

    @property
    def record_tokens(self) -> int:
        """Number of which the tokens in a record are a multiple, except at the end."""

    def is_awaited(self, output: RequestOutput, rendered: Rendered, *, is_first: bool) -> bool:
        """Whether a reader waits for these tokens, so that they are appended at once."""

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], rendered: Rendered
    ) -> bool:
        """Append the tokens of some steps, and return whether there were any."""

    def num_frames(self, last: RequestOutput, rendered: Rendered) -> int:
        """Return the length of a speech after a step; 0 for a text."""

    def summary(self, last: RequestOutput, rendered: Rendered) -> OutputSummary: ...


class TextOutput:
    """Text of a request. Its task comes with a rendered prompt."""

    body = EngineBody
    is_answer = True
    # A reader sees a text grow steadily at this rate. An append is a synced write, and work for
    # four processes.
    appends_per_s = 25.0
    record_tokens = 1

    async def render(
        self, task: Task[EngineBody], records: Sequence[AnyRecord], progress: Progress
    ) -> Rendered:
        return Rendered(task)

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        return logged_choices(records, n)

    def is_awaited(self, output: RequestOutput, rendered: Rendered, *, is_first: bool) -> bool:
        return is_first

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], rendered: Rendered
    ) -> bool:
        choices = merge_deltas(outputs)
        if choices:
            await log.tokens(choices, outputs[0].prompt_logprobs)
        return bool(choices)

    def num_frames(self, last: RequestOutput, rendered: Rendered) -> int:
        return 0

    def summary(self, last: RequestOutput, rendered: Rendered) -> OutputSummary:
        return OutputSummary(last.usage, last.kv_blocks)
