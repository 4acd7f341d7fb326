"""The command `pagemill upgrade`: the order of an upgrade, and the steps that are left."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from shared.bus.stream_changes import StreamChange
from shared.config.schema import Config
from shared.protocol.messages import Heartbeat
from shared.protocol.pipeline import Pipeline
from shared.stage.pipelines import pipelines_of
from shared.stage.runtime import VERSION
from workers import settings
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, Json, NatsUrl, load
from workers.cli.terminal import print_columns, print_json
from workers.keyring import Keyring
from workers.roles import all_roles
from workers.supervisor.start import read_signs


class Step(NamedTuple):
    number: int
    """Steps with the same number may be done in any order."""
    target: str
    state: Literal["done", "left"]
    text: str


async def upgrade(*, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Print the steps of an upgrade of running workers to this version, in their order.

    Nothing is changed. Run it again after each step. The exit code is 1 while steps are left.
    """
    loaded = load(config)
    async with connected(settings.login_of(loaded, given_url=nats), "upgrade") as bus:
        bus.streams.configure(loaded.nats, loaded.delivery, loaded.agent, loaded.batch)
        changes = await bus.streams.find_changes(bus.now_ms())
        beats, _ = await read_signs(bus)
    steps = list(plan_upgrade(loaded, changes, beats))
    if json:
        for step in steps:
            print_json(step._asdict())
    else:
        print_columns([("step", "target", "state", "what to do"), *map(_cells, steps)])
    return int(any(step.state == "left" for step in steps))


def plan_upgrade(
    config: Config, changes: Sequence[StreamChange], beats: Sequence[Heartbeat]
) -> Iterator[Step]:
    """Yield the steps: keys, streams, and workers from the last stage to the first.

    So a task reaches a worker that is at least as new as the task's writer.
    """
    number = 1
    if config.nats.keys is not None:
        if Keyring(settings.keys_folder(config), config.nats).has_current_accounts():
            yield Step(number, "keys", "done", "accounts.conf is of this version")
        else:
            text = "run `pagemill keys make`, and reload the broker"
            yield Step(number, "keys", "left", text)
        number += 1
    differences = [change.difference for change in changes if not change.difference.is_fixed]
    if streams := ", ".join(sorted({difference.stream for difference in differences})):
        yield Step(number, "streams", "left", f"run `pagemill migrate`, which changes {streams}")
    else:
        yield Step(number, "streams", "done", "as configured")
    by_rank = sorted(beats, key=lambda beat: (_restart_rank(config, beat), beat.worker))
    for _, group in itertools.groupby(by_rank, lambda beat: _restart_rank(config, beat)):
        number += 1
        for beat in group:
            target = " ".join(filter(None, (beat.role, beat.stage)))
            place = f"{beat.worker} on {beat.hostname or 'an unknown host'}"
            if beat.version == VERSION:
                yield Step(number, target, "done", f"{place} runs {VERSION}")
            else:
                yield Step(number, target, "left", f"restart {place}, which runs {beat.version}")


def _restart_rank(config: Config, beat: Heartbeat) -> tuple[int, int]:
    """Return the position of a worker in the order of restarts."""
    stage, pipelines = beat.stage or beat.role, pipelines_of(config)
    served = [pipelines[name] for name in beat.models if name in pipelines]
    if depths := [_stages_after(each, stage) for each in served if each.stage(stage) is not None]:
        return 0, max(depths)
    # The other roles only publish requests and tasks, or watch.
    names = [role.name for role in all_roles()]
    return 1, names.index(beat.role) if beat.role in names else len(names)


def _stages_after(pipeline: Pipeline, stage: str, before: frozenset[str] = frozenset()) -> int:
    """Return the length of the longest chain of stages that read the output of `stage`."""
    path = before | {stage}
    readers = pipeline.readers_of(stage) - path
    return max((1 + _stages_after(pipeline, reader, path) for reader in readers), default=0)


def _cells(step: Step) -> tuple[str, ...]:
    return str(step.number), step.target, step.state, step.text
