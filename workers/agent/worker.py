"""Agent: carries out responses, step by step, and is the only role that dials out to tools.

A response stays in its queue until it has ended. Whoever takes it reads the log of its steps, and
the log alone decides what is next. So an agent may be killed at any moment.
"""

import asyncio
import contextlib
from weakref import WeakValueDictionary

from shared.bus.consumer import Delivery
from shared.errors import (
    DecodeError,
    Overloaded,
    PagemillError,
    Poisoned,
    Unavailable,
    WorkerFailure,
)
from shared.protocol import subjects
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.records import error_info
from shared.protocol.steps import Ended, ResponseTask, decode_response_task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import serve
from shared.state.step_log import open_log
from workers.agent.core_dumps import forbid_core_dumps
from workers.agent.mcp_client import McpClient
from workers.agent.run import ResponseRun

# An agent that is killed leaves its responses for so long, if `delivery.ack_wait_s` is not shorter.
ACK_WAIT_S = 5.0
RETRY_S = 1.0
MAX_RETRY_S = 30.0
# Long conversations that are in memory at one time, each up to `agent.max_conversation_mib`.
MAX_LONG_CONVERSATIONS = 4
# Attempts of which none has made a step, because their agents have died.
MAX_IDLE_ATTEMPTS = 16


async def main(context: Context) -> None:
    forbid_core_dumps()
    await Agent(context).serve()


class Agent:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._delivery = context.config.delivery
        self._ack_wait_s = min(ACK_WAIT_S, self._delivery.ack_wait_s)
        self._client = McpClient(context.config.agent)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        """One for each response: if this process stands still for too long, the response comes to
        it a second time, and would be taken for that of a dead agent."""
        self._conversations = asyncio.Semaphore(MAX_LONG_CONVERSATIONS)

    async def serve(self) -> None:
        context = self._context
        consumer = await context.bus.consume(
            subjects.RESPONSES_STREAM,
            subjects.RESPONSES_CONSUMER,
            subjects.RESPONSES_FILTER,
            context.config.agent.concurrency,
            self._ack_wait_s,
        )
        models = sorted(context.config.models)
        context.ready(models, lambda: {"held": float(consumer.num_in_flight)})
        try:
            await serve(consumer, self._handle, context.shutdown, self._delivery.drain_s)
        finally:
            await self._client.close()

    async def _handle(self, delivery: Delivery) -> None:
        try:
            task = decode_response_task(delivery.data)
        except UNDECODABLE:
            self._context.log.warning("undecodable_response", subject=delivery.subject)
            await delivery.ack()
            return
        progress = asyncio.create_task(self._keep(delivery))
        run = self._run_of(task)
        lock = self._locks.setdefault(f"{task.tenant} {task.response_id}", asyncio.Lock())
        try:
            async with lock:
                await self._check_attempts(delivery, run)
                has_ended = await self._carry_out(run)
        except asyncio.CancelledError:
            await delivery.retry(0)
            raise
        except Exception as error:
            await self._retry_or_end(delivery, run, error)
        else:
            await (delivery.ack() if has_ended else delivery.retry(0))
        finally:
            progress.cancel()

    def _run_of(self, task: ResponseTask) -> ResponseRun:
        return ResponseRun(self._context, task, self._client, self._conversations)

    async def _carry_out(self, run: ResponseRun) -> bool:
        """Carry out a response, and repeat a step that nothing has room for, or that no part of
        the system answers, for at most as long as a request may take.

        The delivery is kept meanwhile: one that is returned counts as an agent that has died.
        """
        shutdown, clock = self._context.shutdown, asyncio.get_running_loop().time
        num_steps, num_tries, until_s = -1, 0, 0.0
        while True:
            try:
                return await run.carry_out()
            except (Overloaded, Unavailable) as error:
                if run.num_steps != num_steps:
                    num_steps, num_tries = run.num_steps, 0
                    until_s = clock() + self._delivery.default_timeout_s
                pause_s = min(RETRY_S * 2**num_tries, MAX_RETRY_S)
                self._log_interruption(run, num_tries + 1, error)
                if clock() + pause_s > until_s:
                    if not run.num_steps:
                        raise  # The log could not be read.
                    await run.fail(error_info(error))
                    return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(shutdown.asked.wait(), pause_s)
                return False
            num_tries += 1
            run = self._run_of(run.task)

    def _log_interruption(self, run: ResponseRun, attempt: int, error: Exception) -> None:
        expected = isinstance(error, PagemillError)
        self._context.log.warning(
            "response_interrupted",
            response_id=run.task.response_id,
            attempt=attempt,
            error=str(error) if expected else type(error).__name__,
            exc_info=None if expected else error,
        )

    async def _keep(self, delivery: Delivery) -> None:
        """Keep the response while this process lives; a loop that hangs loses it."""
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            await delivery.progress()

    async def _retry_or_end(self, delivery: Delivery, run: ResponseRun, error: Exception) -> None:
        self._log_interruption(run, delivery.attempt, error)
        # The failure of a response could not be stored; a full store may have room later.
        passes = isinstance(error, Overloaded | Unavailable)
        is_over = run.is_late if passes else self._is_last(delivery)
        if is_over or isinstance(error, Poisoned):
            with contextlib.suppress(PagemillError):
                await self._give_up(delivery, run, error)
                await delivery.ack()
                return
        pause_s = min(RETRY_S * 2 ** min(delivery.attempt - 1, 10), MAX_RETRY_S)
        await delivery.retry(pause_s)

    def _is_last(self, delivery: Delivery) -> bool:
        return delivery.attempt >= self._delivery.max_deliver

    async def _check_attempts(self, delivery: Delivery, run: ResponseRun) -> None:
        """Raises Poisoned for a response that agents die of before they have made a step."""
        if delivery.attempt <= MAX_IDLE_ATTEMPTS:
            return
        found = await open_log(self._context.bus, run.task.tenant, run.task.response_id)
        if delivery.attempt > MAX_IDLE_ATTEMPTS + found.state.num_steps:
            raise Poisoned(f"{delivery.attempt} agents have not gone on with the response")

    async def _give_up(self, delivery: Delivery, run: ResponseRun, error: Exception) -> None:
        """End a response that fails again and again, and write a dead letter of it."""
        context, task = self._context, run.task
        cause = error if isinstance(error, PagemillError) else WorkerFailure("internal error")
        found = None
        with contextlib.suppress(DecodeError):  # A log that nobody can read cannot be ended.
            found = await open_log(context.bus, task.tenant, task.response_id)
        if found is not None and (found.state.begun is None or found.state.ended is not None):
            return
        job = Job(delivery, context.bus.now_ms(), task.response_id)
        await context.stage.write_dead_letter(job, cause, error)
        if found is not None:
            now_s = int(context.bus.now_ms() / 1000)
            with contextlib.suppress(Overloaded):  # There is no room to say so.
                await found.append(Ended(0, "failed", now_s, error=error_info(cause)))
