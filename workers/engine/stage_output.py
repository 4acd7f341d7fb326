"""What an engine writes for its stage: text here, or the codes of a speech in `code_output`.

The rest of an engine is the same for both. They differ in how a task becomes a prompt, and in the
records of the log.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from shared.protocol.records import AnyRecord, OutputSummary
from shared.protocol.task_messages import EngineBody, Task, TaskBody
from shared.state.token_log import LogWriter
from workers.engine.core.sequence import LoggedChoice, RequestOutput, SpokenText, SpokenTokens
from workers.engine.log_records import logged_choices, merge_deltas

Progress = Callable[[], Awaitable[None]]


class Rendered(NamedTuple):
    """A task with its prompt."""

    task: Task[EngineBody]
    speech: SpokenText | None = None
    """What a talker speaks, of which the prompt's tokens tell nothing."""
    spoken: SpokenTokens | None = None
    """None where that is not known, or nobody asks."""
    growth: AsyncGenerator[SpokenText] | None = None
    """The text again, as often as more of it has come; None if `speech` is whole. It is to be
    followed while the request runs, and raises RequestEnded."""


class StageOutput(Protocol):
    """What depends on the output of the engine's stage."""

    @property
    def body(self) -> type[TaskBody]:
        """The body of the stage's tasks."""

    @property
    def is_answer(self) -> bool:
        """Whether the output is the request's text, so that its times are those of the request."""

    async def render(self, task: Task[Any], progress: Progress) -> Rendered:
        """The task with its prompt. `progress` is awaited now and then, and may end the waiting."""

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        """The tokens of each choice that are in a log; no choices for an empty log."""

    @property
    def appends_per_s(self) -> float:
        """The rate at which a log grows steadily, for readers of what is in between."""

    def is_awaited(self, output: RequestOutput, *, is_first: bool) -> bool:
        """Whether somebody waits for these tokens, which are to be appended at once."""

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], spoken: SpokenTokens | None = None
    ) -> bool:
        """Append the tokens of some steps; returns whether there were any."""

    def summary(self, last: RequestOutput) -> OutputSummary: ...


class TextOutput:
    """The text of a request, which comes with its prompt rendered."""

    body = EngineBody
    is_answer = True
    # A reader sees a text grow steadily at this rate. An append is a synced write, and work for
    # four processes.
    appends_per_s = 25.0

    async def render(self, task: Task[EngineBody], progress: Progress) -> Rendered:
        return Rendered(task)

    def logged(self, records: Sequence[AnyRecord], n: int) -> list[LoggedChoice]:
        return logged_choices(records, n)

    def is_awaited(self, output: RequestOutput, *, is_first: bool) -> bool:
        return is_first

    async def append(
        self, log: LogWriter, outputs: list[RequestOutput], spoken: SpokenTokens | None = None
    ) -> bool:
        choices = merge_deltas(outputs)
        if choices:
            await log.tokens(choices, outputs[0].prompt_logprobs)
        return bool(choices)

    def summary(self, last: RequestOutput) -> OutputSummary:
        return OutputSummary(last.usage, last.kv_blocks)
