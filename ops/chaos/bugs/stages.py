"""Bugs on the way of a task from one stage to the next."""

from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, skip, wrap


@bug("renderer", "dying before publishing", "I1", "I10")
def ack_before_publish() -> None:
    from shared.stage.job import Job
    from shared.stage.stage import Stage

    @wrap(Stage, "forward")
    async def hasty(forward: Any, self: Stage, job: Job, *args: Any, detour: bool = False) -> None:
        await job.delivery.ack()
        await forward(self, job, *args, detour=detour)


@bug("coordinator", "broker deaths", "I1", "I10")
def lost_tasks_not_made_again() -> None:
    """The coordinator keeps a consumer that has put requests off until their deadlines."""
    from shared.bus.queues import Queues

    skip(Queues, "_reset_if_fed_another")


@bug("coordinator", "calm", "I1", "I10")
def message_id_not_unique() -> None:
    from shared.bus.bus import Bus

    @wrap(Bus, "publish")
    async def shortened(
        publish: Any,
        self: Bus,
        subject: str,
        data: bytes,
        msg_id: str,
        tenant: str = "",
    ) -> Any:
        request_id, colon, rest = msg_id.partition(":")
        short = f"{request_id[:-1]}{colon}{rest[-8:]}"
        return await publish(self, subject, data, short, tenant)


@bug("any", "raisers", "I5", "I11")
def dead_letter_dropped() -> None:
    from shared.stage.stage import Stage

    skip(Stage, "write_dead_letter")


@bug("any", "killers", "I1", "I10", "I11")
def deaths_not_counted() -> None:
    from shared.stage import retry

    replace_attribute(retry, "verdict", lambda history, policy: None)


@bug("coordinator", "cancels", "I1")
def cancel_ignored() -> None:
    from shared.bus.consumer import Delivery
    from workers.coordinator.worker import Coordinator

    async def ignored(self: Coordinator, delivery: Delivery) -> None:
        await delivery.ack()

    replace_attribute(Coordinator, "_cancel", ignored)
