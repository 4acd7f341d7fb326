"""One response in an agent: the actions that follow from its log."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from shared import client
from shared.bus.connection import BROKER_DEADLINE_S
from shared.errors import (
    ContextTooLong,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    PagemillError,
    ToolFailure,
    ToolsUnavailable,
    Unavailable,
)
from shared.protocol.records import (
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
    TokenLogprobs,
    Usage,
    error_info,
)
from shared.protocol.renderer_rpc import TokenizeRequest
from shared.protocol.requests import Message
from shared.protocol.steps import Answered, Asked, Ended, ResponseTask, Result, Step, turn_id
from shared.responses.conversation import Entry, entries_of, output_text
from shared.responses.state import UNKNOWN_OUTCOME
from shared.responses.turns import TurnFormat, oldest_group, turn_request
from shared.stage.runtime import Context
from shared.state.step_log import StepLog, StepWatch, open_conversation
from shared.state.token_log import last_record
from workers.agent import plan
from workers.agent.mcp_client import McpClient
from workers.agent.painting import Painter
from workers.agent.plan import Action, next_action
from workers.agent.tools import ToolRunner, inherited_listing, refused, without_content

MAX_KEPT_BYTES = 256 * 2**10
"""Longer conversations are not kept in memory, and are read again for each turn."""
CHECK_S = 5.0
"""Limit on the check of a result. If the agent dies meanwhile, the call's outcome is unknown."""


class ResponseRun:
    """The work of this process on one response."""

    def __init__(
        self,
        context: Context,
        task: ResponseTask,
        client: McpClient,
        conversations: asyncio.Semaphore,
    ) -> None:
        """`conversations` limits the number of long conversations in memory."""
        self.task = task
        self._context = context
        self._bus = context.bus
        self._log = StepLog(context.bus, task.tenant, task.response_id)
        self._conversations = conversations
        self._before: list[Entry] | None = None
        """Items of the earlier responses; None before they are read, and if they are too long."""
        self._own_turns: set[int] = set()
        self._tools = ToolRunner(context.config.agent, client, self._log)
        self._painter = Painter(self._bus, self._log, context.config.delivery.default_timeout_s)

    async def carry_out(self) -> bool:
        """Return True when the response has ended, in this or another process.

        Return False when this agent shuts down, so that another one continues. Raises Unavailable
        or Overloaded, after which another ResponseRun may carry out the rest.
        """
        async with self._tools, self._log.watch() as watch:
            await self._await_beginning(watch)
            while True:
                # From now on, an append is refused after the watch has read another process's step.
                self._log.overtaken = False
                action = next_action(self._log.state)
                if isinstance(action, plan.Nothing):
                    return True
                if self._context.shutdown.asked.is_set() and not isinstance(action, plan.Conclude):
                    # A call that the end of the drain breaks off would have an unknown outcome.
                    return False
                try:
                    await self._do_unless_overtaken(action, watch)
                except Fenced as error:
                    if error.reported:  # The error is about another log.
                        raise
                    if await self._log.is_gone():
                        return True

    async def _await_beginning(self, watch: StepWatch) -> None:
        """Read the log. The gateway may still be storing its first step."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BROKER_DEADLINE_S):
                while self._log.state.num_steps == 0:
                    await watch.next()

    async def _do_unless_overtaken(self, action: Action, watch: StepWatch) -> None:
        """Carry out an action, but cancel it when another process appends a step."""
        doing = asyncio.create_task(self._do(action))
        watching = asyncio.create_task(_wait_for_step(watch))
        try:
            await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            for task in (doing, watching):
                task.cancel()
            await asyncio.gather(doing, watching, return_exceptions=True)

    @property
    def num_steps(self) -> int:
        return self._log.state.num_steps

    @property
    def is_late(self) -> bool:
        begun = self._log.state.begun
        return begun is not None and begun.deadline_s is not None and self._now_s > begun.deadline_s

    async def _do(self, action: Action) -> None:
        """Carry out an action. End a response that is late, or has an error of the client."""
        try:
            if self.is_late:
                raise DeadlineExceeded("the response has not ended in time")
            await self._carry_out(action)
        except DeadlineExceeded as error:
            await self.fail(error_info(error))
        except PagemillError as error:
            if error.fault == "server":
                raise
            await self.fail(error_info(error))

    async def _carry_out(self, action: Action) -> None:
        match action:
            case plan.AskModel(turn, withdrawn):
                await self._ask(turn, withdrawn=withdrawn)
            case plan.ReadAnswer(turn):
                await self._read_answer(turn)
            case plan.ListTools(label):
                async with self._conversation() as entries:
                    listed = inherited_listing(label, entries)
                await self._append(listed or await self._tools.list_tools(label))
            case plan.CallTools(calls):
                await self._call_tools(calls)
            case plan.RefuseCall(call, why):
                await self._append(refused(call, why))
            case plan.SettleUnknown(call):
                await self._append(self._tools.unknown(call, UNKNOWN_OUTCOME))
            case plan.Conclude():
                await self._conclude(action)

    async def _call_tools(self, calls: list[plan.CallTool]) -> None:
        """Make calls, a few at a time, each with its own steps in the log."""
        room = asyncio.Semaphore(self._context.config.agent.max_parallel_calls)

        async def run_call(action: plan.CallTool) -> None:
            async with room:
                result = await self._call(action)
                await (self._append(result) if isinstance(result, Result) else self.fail(result))

        tasks = [asyncio.create_task(run_call(action)) for action in calls]
        try:
            for done in asyncio.as_completed(tasks):
                await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, action: plan.CallTool) -> Result | ErrorInfo:
        """Make a call, and return its result, or the error that ends the response."""
        if action.call.paints:
            return await self._painter.paint(action.call)
        result = await self._tools.call(action.call, action.attempt)
        return without_content(result) if await self._has_control_tokens(result) else result

    async def _has_control_tokens(self, result: Result) -> bool:
        """Return whether the result has control tokens, which a renderer would refuse in the turn.

        A result that cannot be checked now is stored as it is, because its call was carried out.
        """
        begun = self._log.state.begun
        assert begun is not None
        question = TokenizeRequest([Message("user", output_text(result.output, result.error))])
        try:
            async with asyncio.timeout(CHECK_S):
                await client.tokenize(self._bus, begun.model, question, self.task.tenant)
        except InvalidRequest as error:
            # Another field names a fault of this conversation, not of the result.
            return error.field == "messages[0].content"
        except (PagemillError, TimeoutError):
            pass
        return False

    async def _conclude(self, end: plan.Conclude) -> None:
        error = None
        if end.message is not None:
            kind: type[PagemillError] = ToolsUnavailable if end.retryable else ToolFailure
            if end.field is not None:
                kind = InvalidRequest
            error = error_info(kind(end.message, field=end.field))
        await self._append(Ended(0, end.status, self._now_s, end.reason, error))

    @property
    def _now_s(self) -> int:
        return int(self._bus.now_ms() / 1000)

    async def _append(self, step: Step) -> None:
        await self._log.append(step)

    async def fail(self, error: ErrorInfo) -> None:
        """End the response with an error."""
        await self._append(Ended(0, "failed", self._now_s, error=error))

    # -- turns ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _conversation(self) -> AsyncIterator[list[Entry]]:
        """Return the whole conversation. A long one is released afterwards.

        Raises NotFound if an earlier response was deleted.
        """
        begun = self._log.state.begun
        assert begun is not None
        if not begun.ancestors:
            self._before = []
        if self._before is not None:
            yield self._before + entries_of(self._log.state)
            return
        limit, num_bytes = self._context.config.agent.max_conversation_mib * 2**20, 0
        async with self._conversations:
            before: list[Entry] = []
            tenant, names = self.task.tenant, begun.ancestors
            async for log in open_conversation(self._bus, tenant, names, limit):
                before += entries_of(log.state)
                num_bytes += log.num_bytes
            if num_bytes <= MAX_KEPT_BYTES:
                self._before = before
            yield before + entries_of(self._log.state)

    async def _ask(self, turn: int, *, withdrawn: bool) -> None:
        step = Asked(0, turn, withdrawn=withdrawn)
        begun = self._log.state.begun
        assert begun is not None
        if begun.truncate:
            async with self._conversation() as entries:
                step = await self._truncated(step, entries)
        await self._append(step)
        self._own_turns.add(turn)

    async def _truncated(self, turn: Asked, context: list[Entry]) -> Asked:
        """Return the turn with the oldest items dropped, so that the prompt fits the context.

        Raises ContextTooLong if nothing is left to drop, and the error in a renderer's reply.
        """
        while True:
            request, sampling, _ = turn_request(self._log.state, turn, context)
            question = TokenizeRequest(request.messages, tools=request.tools)
            reply = await client.tokenize(self._bus, request.model, question, self.task.tenant)
            if reply.count + sampling.get("max_tokens", 1) <= reply.max_model_len:
                return turn
            rest = context[turn.num_dropped :]
            dropped = oldest_group(rest)
            if dropped >= len(rest):
                raise ContextTooLong(
                    "the last items alone are longer than the model's context", field="input"
                )
            turn = replace(turn, num_dropped=turn.num_dropped + dropped)

    async def _read_answer(self, turn: int) -> None:
        state = self._log.state
        assert state.begun is not None
        async with self._conversation() as entries:
            request, sampling, syntax = turn_request(state, state.turns[turn], entries)
        name = turn_id(self.task.tenant, self.task.response_id, turn)
        records: AsyncIterator[LogRecord]
        if turn not in self._own_turns and await last_record(self._bus, name) is not None:
            timeout_s = self._context.config.delivery.default_timeout_s
            records = client.follow(self._bus, name, timeout_s=timeout_s)
        else:
            # The gateway or an earlier agent may have published the request.
            is_repeated = turn not in self._own_turns
            trace = state.begun.trace
            records = client.ask(
                self._bus, request, name, sampling or None, trace=trace, is_repeated=is_repeated
            )
        try:
            end = await _collect(records, turn, syntax, keeps_logprobs=_wants_logprobs(sampling))
        except asyncio.CancelledError:
            # Another process has ended the response. A drain leaves the turn to the next agent.
            if not self._context.shutdown.asked.is_set():
                await client.cancel(self._bus, name)
            raise
        if isinstance(end, Failure):
            await self.fail(end.error)
        else:
            await self._append(end)


async def _wait_for_step(watch: StepWatch) -> None:
    while True:
        # Without a broker, no other process can append a step, so the action continues.
        with contextlib.suppress(Unavailable):
            if await watch.next():
                return


def _wants_logprobs(sampling: dict[str, object]) -> bool:
    return sampling.get("logprobs") is not None


async def _collect(
    records: AsyncIterator[LogRecord], turn: int, syntax: TurnFormat, *, keeps_logprobs: bool
) -> Answered | Failure:
    """Read the log of a turn to its end."""
    text, reason = syntax.new_text(), None
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    usage = Usage(0, 0)
    async for record in records:
        match record:
            case Failure():
                return record
            case Finish():
                usage = record.usage
            case TokenChunk():
                for delta in record.choices:
                    reason = delta.finish_reason or reason
                    text.feed(delta.text, is_last=delta.finish_reason is not None)
                    if keeps_logprobs:
                        token_ids += delta.token_ids
                        logprobs += delta.logprobs or []
    return Answered(
        0,
        turn,
        text.content,
        text.calls,
        usage,
        reason or "stop",
        text.num_before,
        token_ids,
        logprobs,
    )
