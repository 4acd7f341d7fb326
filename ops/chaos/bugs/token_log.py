"""Bugs of the token log's writers."""

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute


@bug("engine", "stops", "I2", "I4")
def no_fencing() -> None:
    _append_unfenced()


@bug("coordinator", "deadlines", "I2")
def unfenced_deadline() -> None:
    _append_unfenced()


def _append_unfenced() -> None:
    from shared.bus.bus import Bus

    async def append(self: Bus, subject: str, data: bytes, last_sequence: int) -> int:
        ack = await self._publish(subject, data, {})
        assert ack is not None
        return ack.seq

    replace_attribute(Bus, "append", append)


@bug("engine", "calm", "I2")
def final_record_twice() -> None:
    from shared.protocol.messages import StageSpan, Usage
    from shared.state.token_log import LogWriter

    finish = LogWriter.finish

    async def twice(self: LogWriter, usage: Usage, kv_blocks: int, path: list[StageSpan]) -> None:
        await finish(self, usage, kv_blocks, path)
        await finish(self, usage, kv_blocks, path)

    replace_attribute(LogWriter, "finish", twice)


@bug("engine", "dying before the end", "I1")
def ack_before_final_record() -> None:
    from workers.engine.worker import EngineWorker, OpenRequest

    write_pending = EngineWorker._write_pending

    async def early(self: EngineWorker, flow: OpenRequest) -> bool:
        await flow.changed.wait()
        if flow.pending and flow.pending[-1].usage is not None:
            await self._stage.finish(flow.job)
        return await write_pending(self, flow)

    replace_attribute(EngineWorker, "_write_pending", early)
