"""Agent: carries out responses step by step. It is the only role that connects to MCP servers.

A response stays in its queue until it has ended. The agent that takes it reads the log of its
steps, and the log alone decides on the next step. So an agent may be killed at any moment.
"""

import asyncio
import contextlib
import random

from shared.bus.consumer import Delivery
from shared.errors import DeadlineExceeded, DecodeError, Overloaded, PagemillError, Unavailable
from shared.protocol import names, subjects
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.records import error_info
from shared.protocol.steps import Ended, ResponseTask, decode_response_task
from shared.stage import retry
from shared.stage.job import Job
from shared.stage.long_jobs import LongJobs
from shared.stage.runtime import Context
from shared.stage.worker_loop import WorkerLoop
from shared.state.step_log import open_log
from workers.agent.core_dumps import forbid_core_dumps
from workers.agent.mcp_client import McpClient
from workers.agent.run import ResponseRun

# Limit on the number of long conversations in memory, each up to `agent.max_conversation_mib`.
MAX_LONG_CONVERSATIONS = 4


async def main(context: Context) -> None:
    forbid_core_dumps()
    await Agent(context).serve()


class Agent:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._stage = context.stage
        self._delivery = context.config.delivery
        self._jobs = LongJobs(context, context.config.agent.max_deaths)
        self._client = McpClient(context.config.agent)
        self._conversations = asyncio.Semaphore(MAX_LONG_CONVERSATIONS)

    async def serve(self) -> None:
        context, loop = self._context, WorkerLoop(self._context)
        consumer = await context.bus.queues.consume(
            subjects.RESPONSES_STREAM,
            subjects.RESPONSES_CONSUMER,
            subjects.RESPONSES_FILTER,
            context.config.agent.concurrency,
            self._jobs.ack_wait_s,
        )
        loop.add_queue(consumer, self._response_of, self._handle)
        models = sorted(context.config.models)
        context.ready(models, lambda: {"held": float(loop.num_claimed)})
        try:
            await loop.run()
        finally:
            await self._client.close()

    def _response_of(self, delivery: Delivery) -> Job | None:
        task = _task_of(delivery)
        job_id = None if task is None else _id_of(task)
        job = Job(delivery, self._context.bus.now_ms(), job_id, end=self._end)
        return self._stage.receive_job(job)

    async def _handle(self, job: Job) -> None:
        task = _task_of(job.delivery)
        if task is None:
            raise DecodeError("the message does not name a response", field="response_id")
        self._stage.claims.add(job)
        progress = asyncio.create_task(self._jobs.keep(job))
        try:
            if not await self._may_begin(job, task):
                return
            has_ended = await self._carry_out(task)
        finally:
            progress.cancel()
        await (self._stage.finish(job) if has_ended else self._stage.requeue(job))

    async def _may_begin(self, job: Job, task: ResponseTask) -> bool:
        """Record this attempt. Raises Poisoned for a response that has ended too many agents.

        Return False, with the job back in its queue, if an earlier agent may still be alive.
        """
        num_steps = 1
        if job.delivery.attempt > 1:
            log = await open_log(self._context.bus, task.tenant, task.response_id)
            num_steps = log.state.num_steps
        return await self._jobs.may_begin(job, num_steps)

    async def _carry_out(self, task: ResponseTask) -> bool:
        """Carry out a response, and return whether it has ended.

        A step that fails with Overloaded or Unavailable is repeated, at most for the time that a
        request may take. The delivery is kept meanwhile. If each of these attempts were a delivery
        with a record, waiting responses would fill the stream of attempts.
        """
        shutdown, clock = self._context.shutdown, asyncio.get_running_loop().time
        num_steps, num_tries, until_s = -1, 0, 0.0
        while True:
            run = ResponseRun(self._context, task, self._client, self._conversations)
            try:
                return await run.carry_out()
            except (Overloaded, Unavailable) as error:
                if run.num_steps != num_steps:
                    num_steps, num_tries = run.num_steps, 0
                    until_s = clock() + self._delivery.default_timeout_s
                decision = retry.decide(error, num_tries, self._delivery, random.random())
                if not isinstance(decision, retry.RetryLater) or not run.num_steps:
                    raise  # The log could not be read.
                self._log_interruption(task, num_tries + 1, error)
                if run.is_late:
                    raise DeadlineExceeded("the response has not ended in time") from error
                if clock() + decision.after_s > until_s:
                    await run.fail(error_info(error))
                    return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(shutdown.asked.wait(), decision.after_s)
                return False
            num_tries += 1

    def _log_interruption(self, task: ResponseTask, attempt: int, error: PagemillError) -> None:
        self._context.log.warning(
            "response_interrupted",
            response_id=task.response_id,
            attempt=attempt,
            error=error.message,
        )

    async def _end(self, job: Job, error: PagemillError) -> None:
        """End a response with an error, unless it has ended or its log cannot be read.

        If the broker has no room for this step, a gateway ends the response when it is late.
        """
        task = _task_of(job.delivery)
        if task is None:
            return
        bus = self._context.bus
        with contextlib.suppress(DecodeError, Overloaded):
            log = await open_log(bus, task.tenant, task.response_id)
            if log.state.begun is not None and log.state.ended is None:
                now_s = int(bus.now_ms() / 1000)
                await log.append(Ended(0, "failed", now_s, error=error_info(error)))


def _task_of(delivery: Delivery) -> ResponseTask | None:
    """Return None for a message that does not name a response."""
    try:
        task = decode_response_task(delivery.data)
    except UNDECODABLE:
        return None
    return task if names.is_job_id(_id_of(task)) else None


def _id_of(task: ResponseTask) -> str:
    return names.job_id("response", task.response_id, task.tenant)
