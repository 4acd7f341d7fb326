"""Bugs planted on purpose, each as a wrapper around the product from outside: does the checker see?

A harness that has never found anything may be unable to. Each bug here is one that somebody could
write, with the small scenario that brings it out and the invariants of which one must be reported.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ops.chaos.plan import Mix, Settings

CALM = Mix(cancel=0.0, ask_during=0.0, ask_after=0.0, follow=0.0, deadline=0.0)
BASE = Settings(
    requests=120,
    rate=20.0,
    renderers=1,
    renderer="fake",
    timeout_s=8.0,
    ack_wait_s=1.0,
    mix=CALM,
)
RESUMES = replace(
    BASE, crash="mid_tokens:4=0.1,mid_tokens:8=0.1", max_tokens=(16, 48), timeout_s=60.0
)
SCENARIOS = {
    "calm": BASE,
    # Deaths in mid-answer.
    "resumes": RESUMES,
    # So many that some fall where a stop string has begun.
    "resumes with stops": replace(RESUMES, stops=1.0),
    "stops": replace(BASE, fault_every_s=2.0, faults={"stop:engine": 1.0}, step_ms=20.0),
    "cancels": replace(BASE, mix=replace(CALM, cancel=0.3), requests=60, rate=10.0),
    "deadlines": replace(BASE, mix=replace(CALM, deadline=0.6), requests=120, rate=10.0),
    "killers": replace(
        # A death is known after three seconds of silence: work must not come again sooner.
        BASE,
        mix=replace(CALM, kills=0.02),
        max_deaths=2,
        requests=100,
        timeout_s=40.0,
        ack_wait_s=4.0,
    ),
    "raisers": replace(BASE, mix=replace(CALM, raises=0.05), max_deliver=1, requests=100),
    # So many that whoever shares a batch with one is likely to share another.
    "many raisers": replace(
        BASE, mix=replace(CALM, raises=0.25), max_deliver=2, requests=100, step_ms=20.0
    ),
    "hangs": replace(BASE, mix=replace(CALM, hangs=0.01), requests=100),
    # Some in the message, some beside it.
    "pictures": replace(BASE, mix=replace(CALM, pictures=0.7)),
    # What is lost is made again, and somebody may have made it before.
    "dying with unread payloads": replace(
        BASE,
        mix=replace(CALM, pictures=0.7),
        crash="renderer/after_publish_before_ack=0.06",
        renderers=2,
        timeout_s=30.0,
    ),
    # What they had been given is made by others, and then by themselves.
    "frozen renderers": replace(
        BASE,
        mix=replace(CALM, pictures=0.7),
        renderers=2,
        fault_every_s=2.5,
        faults={"stop:renderer": 1.0},
        # What they come back to has not ended yet.
        max_tokens=(80, 160),
        step_ms=30.0,
        timeout_s=60.0,
    ),
    # Payloads wait for engines while others want their room.
    "small arena": replace(
        BASE,
        mix=replace(CALM, pictures=1.0),
        arena_mib=5,
        engines=1,
        max_num_seqs=4,
        max_tokens=(8, 24),
        step_ms=10.0,
        timeout_s=60.0,
    ),
    # Their clients go on elsewhere, and some go away.
    "dying gateways": replace(
        BASE,
        gateways=2,
        durable=0.3,
        mix=replace(CALM, http=1.0, cancel=0.15, ask_after=0.1),
        fault_every_s=2.0,
        faults={"kill:gateway": 1.0},
        max_tokens=(16, 48),
        step_ms=20.0,
        timeout_s=60.0,
    ),
    # They wake up with the connections of clients who have gone on elsewhere.
    "frozen gateways": replace(
        BASE,
        gateways=2,
        durable=0.0,
        mix=replace(CALM, http=1.0),
        fault_every_s=4.0,
        faults={"stop:gateway": 1.0},
        requests=60,
        rate=6.0,
        max_tokens=(300, 400),
        step_ms=20.0,
        timeout_s=60.0,
    ),
    "dying before publishing": replace(BASE, crash="before_publish=0.05", timeout_s=15.0),
    "dying before the end": replace(BASE, crash="before_final=0.05", timeout_s=10.0),
}


@dataclass(frozen=True, slots=True)
class Bug:
    plant: Callable[[], None]
    role: str
    scenario: str
    seen_as: frozenset[str]
    """Invariants; at least one of them must be reported."""


BUGS: dict[str, Bug] = {}


def bug(
    role: str, scenario: str, *seen_as: str
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def put(plant: Callable[[], None]) -> Callable[[], None]:
        name = plant.__name__.removeprefix("_")
        BUGS[name] = Bug(plant, role, scenario, frozenset(seen_as))
        return plant

    return put


def plant(name: str, role: str) -> None:
    """In a worker of `role`; nothing for an empty name, or for a bug of another role."""
    if name and BUGS[name].role in (role, "any"):
        BUGS[name].plant()


def settings_of(name: str) -> Settings:
    return replace(SCENARIOS[BUGS[name].scenario], bug=name)


# -- between the stages -----------------------------------------------------------------------


@bug("renderer", "dying before publishing", "I1", "I10")
def _ack_before_publish() -> None:
    from shared.stage.stage import Stage

    async def forward(self: Any, job: Any, *args: Any) -> None:
        await job.delivery.ack()
        await self.publish(job, *args)

    _put(Stage, "forward", forward)


@bug("coordinator", "calm", "I1", "I10")
def _message_id_not_unique() -> None:
    from shared.bus.bus import Bus

    publish = Bus.publish

    async def shortened(
        self: Any, subject: str, data: bytes, msg_id: str, tenant: str = ""
    ) -> bool:
        request_id, colon, rest = msg_id.partition(":")
        return await publish(self, subject, data, f"{request_id[:-1]}{colon}{rest[-8:]}", tenant)

    _put(Bus, "publish", shortened)


@bug("any", "raisers", "I5", "I11")
def _dead_letter_dropped() -> None:
    from shared.stage.stage import Stage

    async def dropped(self: Any, *args: Any) -> None:
        pass

    _put(Stage, "_write_dead_letter", dropped)


@bug("any", "killers", "I1", "I10", "I11")
def _deaths_not_counted() -> None:
    from shared.stage import retry

    def verdict(*_: Any) -> None:
        return None

    _put(retry, "verdict", verdict)


# -- the log ----------------------------------------------------------------------------------


@bug("engine", "stops", "I2", "I4")
def _no_fencing() -> None:
    _append_unfenced()


@bug("coordinator", "deadlines", "I2")
def _unfenced_deadline() -> None:
    _append_unfenced()


def _append_unfenced() -> None:
    from shared.bus.bus import Bus

    async def append(self: Any, subject: str, data: bytes, last_sequence: int) -> int:
        ack = await self._publish(subject, data, {})
        return int(ack.seq)

    _put(Bus, "append", append)


@bug("engine", "calm", "I2")
def _final_record_twice() -> None:
    from shared.state.token_log import LogWriter

    finish = LogWriter.finish

    async def twice(self: Any, *args: Any) -> None:
        await finish(self, *args)
        await finish(self, *args)

    _put(LogWriter, "finish", twice)


@bug("engine", "dying before the end", "I1")
def _ack_before_the_end() -> None:
    from workers.engine.worker import EngineWorker

    write_pending = EngineWorker._write_pending

    async def early(self: Any, flow: Any) -> bool:
        await flow.changed.wait()
        if flow.pending and flow.pending[-1].usage is not None:
            await self._stage.finish(flow.job)
        return await write_pending(self, flow)

    _put(EngineWorker, "_write_pending", early)


# -- a resume ---------------------------------------------------------------------------------


@bug("engine", "resumes", "I2", "I3")
def _resume_off_by_one() -> None:
    from workers.engine import log_records, worker

    logged_choices = log_records.logged_choices

    def short(records: Any, n: int) -> Any:
        found = logged_choices(records, n)
        return [replace_ids(c, c.token_ids if c.finished else c.token_ids[:-1]) for c in found]

    def replace_ids(choice: Any, token_ids: list[int]) -> Any:
        return type(choice)(token_ids, choice.finished)

    _put(worker, "logged_choices", short)


@bug("engine", "resumes", "I2", "I3")
def _resume_from_scratch() -> None:
    from workers.engine import worker

    _put(worker, "logged_choices", lambda records, n: [])


@bug("engine", "resumes", "I3")
def _other_seed_on_resume() -> None:
    from workers.engine.core import request_state

    seed_of = request_state._seed
    _put(request_state, "_seed", lambda request: seed_of(request) + bool(request.logged))


@bug("engine", "resumes with stops", "I3")
def _stop_strings_not_replayed() -> None:
    from shared.protocol.detokenizer import Detokenizer
    from workers.engine.core.request_state import ChoiceState

    replay = ChoiceState.replay

    def forgetful(self: Any, token_ids: Any) -> Any:
        ending = replay(self, token_ids)
        stop = self.sequence.request.sampling.stop
        self.detokenizer = Detokenizer(self.detokenizer._decode, stop)
        return ending

    _put(ChoiceState, "replay", forgetful)


# -- in the engine ----------------------------------------------------------------------------


@bug("engine", "hangs", "I1", "I10", "I11")
def _heartbeat_by_timer() -> None:
    from workers.engine.worker import EngineWorker

    serve = EngineWorker.serve

    async def with_timer(self: Any) -> None:
        async def beat() -> None:
            while True:
                await asyncio.sleep(0.2)
                for flow in list(self._flows.values()):
                    await flow.job.delivery.progress()

        beating = asyncio.create_task(beat())
        try:
            await serve(self)
        finally:
            beating.cancel()

    _put(EngineWorker, "serve", with_timer)


@bug("engine", "cancels", "I6")
def _block_lost_on_cancel() -> None:
    from workers.engine.core.engine import EngineCore

    cancel = EngineCore.cancel

    def leaky(self: Any, request_id: str) -> None:
        entry = self._entries.get(request_id)
        for choice in entry.choices if entry else []:
            if choice.sequence.block_table:
                choice.sequence.block_table.pop()
        cancel(self, request_id)

    _put(EngineCore, "cancel", leaky)


@bug("engine", "many raisers", "I10")
def _batch_fails_together() -> None:
    from shared.errors import WorkerFailure
    from workers.engine.core.engine import EngineCore

    def fail_all(self: Any, batch: Any) -> Any:
        return [self._fail(entry, WorkerFailure("the batch")) for entry in self._entries_of(batch)]

    _put(EngineCore, "_run_apart", fail_all)


@bug("engine", "calm", "I8")
def _task_left_behind() -> None:
    from shared.stage.stage import Stage

    claim = Stage.claim
    kept: list[Any] = []

    async def littering(self: Any, job: Any) -> Any:
        kept.append(asyncio.create_task(asyncio.sleep(3600)))
        return await claim(self, job)

    _put(Stage, "claim", littering)


@bug("coordinator", "cancels", "I1")
def _cancel_ignored() -> None:
    from workers.coordinator.worker import Coordinator

    async def ignored(self: Any, delivery: Any) -> None:
        await delivery.ack()

    _put(Coordinator, "_cancel", ignored)


# -- large payloads ---------------------------------------------------------------------------


@bug("engine", "pictures", "I7")
def _payload_not_released() -> None:
    from shared.blobs.store import Blobs

    async def forgotten(self: Any, ref: Any) -> None:
        pass

    _put(Blobs, "release", forgotten)


@bug("engine", "pictures", "I7")
def _reader_pin_leaks() -> None:
    from shared.blobs.transports import SharedMemoryTransport

    def untold(self: Any, *_: Any) -> None:
        pass

    _put(SharedMemoryTransport, "_finish_reading", untold)


@bug("engine", "dying with unread payloads", "I1", "I10")
def _lost_payload_fails_request() -> None:
    from shared.errors import WorkerFailure
    from shared.stage.stage import Stage

    async def given_up(self: Any, *_: Any) -> None:
        raise WorkerFailure("a payload is gone")

    _put(Stage, "rerender", given_up)


@bug("engine", "dying with unread payloads", "I7")
def _dead_owner_stays_mapped() -> None:
    from shared.blobs.store import Blobs

    async def never(self: Any) -> None:
        pass

    _put(Blobs, "_sweep", never)


@bug("renderer", "frozen renderers", "I7")
def _payload_not_taken_back() -> None:
    from shared.stage.stage import Stage

    async def kept(self: Any, job: Any) -> None:
        pass

    _put(Stage, "discard_outputs", kept)


@bug("renderer", "small arena", "I3", "I10")
def _pinned_room_is_given_away() -> None:
    from shared.blobs.slot_allocator import SlotPool

    _put(SlotPool, "_pin", lambda *_: None)


@bug("renderer", "small arena", "I10")
def _full_arena_is_an_error() -> None:
    from shared.blobs import mm_items
    from shared.errors import MediaTooLarge

    put = mm_items.put_item

    def or_fail(*args: Any) -> Any:
        if (ref := put(*args)) is None:
            raise MediaTooLarge("there is no room for this picture")
        return ref

    _put(mm_items, "put_item", or_fail)


# -- the HTTP gateway ------------------------------------------------------------------------


@bug("gateway", "dying gateways", "I2")
def _last_event_id_forgotten() -> None:
    from workers.gateway.backend import submit

    _put(submit, "read_start", lambda request, parts: [0] * parts)


@bug("gateway", "dying gateways", "I2", "I5", "I12")
def _asked_again_is_another_request() -> None:
    from workers.gateway.backend import submit

    read_request_id = submit.read_request_id

    def another(request: Any, kind: str, tenant: str) -> tuple[str, bool]:
        request_id, named = read_request_id(request, kind, tenant)
        return f"{request_id[:-8]}{secrets.token_hex(4)}", named

    _put(submit, "read_request_id", another)


@bug("gateway", "dying gateways", "I1")
def _goes_on_without_its_client() -> None:
    from workers.gateway.backend.active_request import ActiveRequest

    _put(ActiveRequest, "on_disconnect", lambda self: None)


@bug("gateway", "frozen gateways", "I10")
def _cancels_what_went_on_elsewhere() -> None:
    from shared.state import request_registry

    async def always(*_: Any) -> bool:
        return True

    _put(request_registry, "unregister", always)


@bug("gateway", "frozen gateways", "I8")
def _listens_on() -> None:
    from shared.bus.bus import Bus

    async def never(*_: Any) -> None:
        pass

    _put(Bus, "unsubscribe", never)


def _put(owner: Any, name: str, value: Any) -> None:
    """Replace what is there; a name that the product has given up must not pass in silence."""
    assert hasattr(owner, name), f"{owner} has no {name} any more: adapt this bug"
    setattr(owner, name, value)
