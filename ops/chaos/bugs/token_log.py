"""Bugs of the token log's writers."""

from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.bugs.scenarios import AGENTS
from ops.chaos.patching import replace_attribute, wrap


@bug("engine", "stops", "I2", "I4", name="no_fencing")
@bug("coordinator", "deadlines", "I2", name="unfenced_deadline")
@bug("code2wav", "frozen vocoders", "I2", "I4", "I16", name="second_writer_of_output")
@bug("agent", AGENTS, "A3", name="step_without_fence")
def append_without_fence() -> None:
    from shared.bus.bus import Bus

    async def append(
        self: Bus,
        subject: str,
        data: bytes,
        last_sequence: int,
        ttl_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> int:
        ack = await self._publish(subject, data, headers or {})
        assert ack is not None
        return ack.seq

    replace_attribute(Bus, "append", append)


@bug("engine", "calm", "I2")
def final_record_twice() -> None:
    from shared.protocol.records import OutputSummary
    from shared.state.token_log import LogWriter

    @wrap(LogWriter, "finish")
    async def twice(
        finish: Any, self: LogWriter, summary: OutputSummary, outputs: dict[str, OutputSummary]
    ) -> None:
        await finish(self, summary, outputs)
        await finish(self, summary, outputs)


@bug("engine", "dying before the end", "I1")
def ack_before_final_record() -> None:
    from shared.stage.job import Job
    from shared.stage.stage import Stage

    @wrap(Stage, "end_output")
    async def early(end_output: Any, self: Stage, job: Job, *args: Any) -> None:
        await self.finish(job)
        await end_output(self, job, *args)
