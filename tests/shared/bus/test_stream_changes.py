"""A start never changes a stream; the differences are logged, and their effects are counted."""

import pytest
from nats.js import JetStreamContext, api
from nats.js.errors import NoStreamResponseError
from structlog.testing import capture_logs

from shared.bus import streams
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.stream_changes import StreamChange, differences, words_of
from shared.bus.stream_keeper import HOW_TO_CHANGE, NOT_CHANGED
from shared.config.schema import AgentConfig, BatchConfig, DeliveryConfig, NatsConfig
from shared.errors import ConfigError
from shared.protocol import subjects

NATS = NatsConfig(unchecked=True)
KIB = bytes(1024)


async def fill(bus: Bus, number: int) -> None:
    for n in range(number):
        await bus.publish(subjects.append(f"r-{n}"), KIB, f"r-{n}")


async def changes_to(bus: Bus, delivery: DeliveryConfig) -> list[StreamChange]:
    bus.streams.configure(NATS, delivery, AgentConfig(), BatchConfig())
    return await bus.streams.find_changes(bus.now_ms())


async def num_stored(bus: Bus) -> int:
    return (await bus.figures.size(subjects.TOKENS_STREAM))[0]


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_configuration_differs_from_itself_in_nothing(replicas: int) -> None:
    for config in streams.durable_streams(DeliveryConfig(), AgentConfig(), BatchConfig(), replicas):
        assert differences(config, config) == []


async def test_streams_as_they_were_just_created_differ_in_nothing(own_bus: Bus) -> None:
    assert await changes_to(own_bus, DeliveryConfig()) == []


async def test_a_start_with_a_smaller_limit_removes_nothing_and_says_so(
    own_bus: Bus, own_broker: EmbeddedServer
) -> None:
    await fill(own_bus, 1500)
    other = await Bus.connect(own_broker.url, "coordinator-2")
    with capture_logs() as logs:
        await other.streams.prepare(NATS, DeliveryConfig(max_token_log_mib=1))
    assert await num_stored(own_bus) == 1500
    (event,) = [entry for entry in logs if entry["event"] == "stream_differs"]
    difference = {key: event[key] for key in ("stream", "setting", "value", "cluster_value")}
    assert difference == {
        "stream": "TOKENS",
        "setting": "max_bytes",
        "value": "1 MiB",
        "cluster_value": "2,048 MiB",
    }
    await other.close()


async def test_a_start_does_not_advise_a_change_that_no_command_can_make(
    own_bus: Bus, own_broker: EmbeddedServer, jetstream: JetStreamContext
) -> None:
    """Tasks stay on disk where an older version has created their stream."""
    config = (await jetstream.stream_info(subjects.STAGES_STREAM)).config
    await jetstream.delete_stream(subjects.STAGES_STREAM)
    await jetstream.add_stream(config.evolve(storage=api.StorageType.FILE, first_seq=None))
    other = await Bus.connect(own_broker.url, "coordinator-2")
    with capture_logs() as logs:
        await other.streams.prepare(NATS, DeliveryConfig(max_token_log_mib=1))
    hints = {e["setting"]: e["hint"] for e in logs if e["event"] == "stream_differs"}
    assert hints == {"storage": NOT_CHANGED, "max_bytes": HOW_TO_CHANGE}
    await other.close()


async def test_a_smaller_limit_names_what_it_would_delete_and_deletes_that(own_bus: Bus) -> None:
    await fill(own_bus, 1500)
    (change,) = await changes_to(own_bus, DeliveryConfig(max_token_log_mib=1))
    assert change.shrinks
    named = int(change.effect.removeprefix("would delete ").removesuffix(" messages"))
    assert await num_stored(own_bus) == 1500
    await own_bus.streams.change([change])
    assert abs(1500 - named - await num_stored(own_bus)) <= 2


async def test_a_greater_limit_keeps_everything(own_bus: Bus) -> None:
    await fill(own_bus, 3)
    (change,) = await changes_to(own_bus, DeliveryConfig(max_token_log_mib=4096))
    assert (change.effect, change.shrinks) == ("keeps all 3 messages", False)
    await own_bus.streams.change([change])
    assert await changes_to(own_bus, DeliveryConfig(max_token_log_mib=4096)) == []


async def test_a_shorter_age_counts_what_is_older(own_bus: Bus) -> None:
    await fill(own_bus, 20)
    now_ms = own_bus.now_ms()
    own_bus.streams.configure(
        NATS, DeliveryConfig(token_log_age_s=60), AgentConfig(), BatchConfig()
    )
    assert not any(c.shrinks for c in await own_bus.streams.find_changes(now_ms))
    later = await own_bus.streams.find_changes(now_ms + 61_000)
    assert [c.effect for c in later if c.shrinks] == ["would delete 20 messages"]


async def test_a_full_work_queue_takes_nothing_new_and_loses_nothing(own_bus: Bus) -> None:
    for number in range(5):
        await own_bus.publish_without_id(subjects.request("demo", str(number)), b"x")
    changes = await changes_to(own_bus, DeliveryConfig(max_queued=2))
    (shrinking,) = [change for change in changes if change.shrinks]
    assert shrinking.effect == "would refuse new messages until 3 messages have been removed"


async def test_the_streams_of_an_older_version_work_until_they_are_changed(
    own_bus: Bus, jetstream: JetStreamContext
) -> None:
    """The streams of the commit before tenants have no tenants' subjects, and no steps."""
    await jetstream.delete_stream(subjects.STEPS_STREAM)
    settings = (await jetstream.stream_info(subjects.CANCELS_STREAM)).config
    await jetstream.update_stream(settings.evolve(subjects=["pm.cancel.*"]))
    with capture_logs() as logs:
        await own_bus.streams.prepare(NATS, DeliveryConfig())
    assert [
        (e["stream"], e["cluster_value"], e["value"]) for e in logs if "cluster_value" in e
    ] == [("CANCELS", "pm.cancel.*", "pm.cancel.*, pm.cancel.*.*")]
    await own_bus.publish_without_id(subjects.cancel("r-1"), b"")
    (change,) = await changes_to(own_bus, DeliveryConfig())
    await own_bus.streams.change([change])
    await own_bus.publish_without_id(subjects.cancel("r-1@tenant"), b"")


async def test_requests_of_an_older_version_without_ids_are_deleted_by_a_change_that_shows_it(
    own_bus: Bus, jetstream: JetStreamContext
) -> None:
    settings = (await jetstream.stream_info(subjects.REQUESTS_STREAM)).config
    await jetstream.delete_stream(subjects.REQUESTS_STREAM)
    older = {"max_msgs_per_subject": -1, "discard_new_per_subject": False}
    await jetstream.add_stream(settings.evolve(subjects=[subjects.REQUESTS_FILTER], **older))
    await own_bus.queues.create(
        subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER, subjects.REQUESTS_FILTER, 1.0
    )
    for _ in range(3):
        await jetstream.publish("pm.request.demo")
    with pytest.raises(ConfigError, match=r"REQUESTS has .*run `pagemill migrate`"):
        await own_bus.streams.prepare(NATS, DeliveryConfig())
    changes = await changes_to(own_bus, DeliveryConfig())
    assert [c.effect for c in changes if c.shrinks] == ["would delete 2 messages"]
    await own_bus.streams.change(changes)
    assert (await jetstream.stream_info(subjects.REQUESTS_STREAM)).state.messages == 1
    await own_bus.streams.prepare(NATS, DeliveryConfig())
    with pytest.raises(NoStreamResponseError):
        await jetstream.publish("pm.request.demo")
    await own_bus.publish_without_id(subjects.request("demo", "r"), b"")


async def test_a_duplicate_window_of_an_older_version_is_removed(
    own_bus: Bus, jetstream: JetStreamContext
) -> None:
    for stream in (subjects.REQUESTS_STREAM, subjects.CANCELS_STREAM):
        config = (await jetstream.stream_info(stream)).config
        await jetstream.update_stream(config.evolve(sources=[], duplicate_window=120.0))
    await own_bus.streams.prepare(NATS, DeliveryConfig())
    ids = {"Nats-Msg-Id": "r-1"}
    await jetstream.publish(subjects.request("demo", "r-1@a"), headers=ids)
    assert (await jetstream.publish(subjects.request("demo", "r-1@b"), headers=ids)).duplicate
    await own_bus.streams.change(await changes_to(own_bus, DeliveryConfig()))
    assert await changes_to(own_bus, DeliveryConfig()) == []
    assert not (await jetstream.publish(subjects.request("demo", "r-1@b"), headers=ids)).duplicate


@pytest.mark.parametrize(
    ("stream", "less"),
    [
        (subjects.TOKENS_STREAM, {"republish": None}),
        (subjects.STEPS_STREAM, {"discard": api.DiscardPolicy.OLD}),
        (subjects.STAGES_STREAM, {"discard_new_per_subject": False}),
    ],
    ids=["republish", "discard", "discard per subject"],
)
async def test_a_stream_without_what_workers_need_is_refused_until_it_is_changed(
    own_bus: Bus, stream: str, less: dict[str, object], jetstream: JetStreamContext
) -> None:
    config = (await jetstream.stream_info(stream)).config
    await jetstream.update_stream(config.evolve(**less))
    with pytest.raises(ConfigError, match=rf"stream {stream} has .*run `pagemill migrate`"):
        await own_bus.streams.prepare(NATS, DeliveryConfig())
    await own_bus.streams.change(await own_bus.streams.find_changes(own_bus.now_ms()))
    await own_bus.streams.prepare(NATS, DeliveryConfig())


async def test_a_setting_that_no_stream_can_change_stays(own_bus: Bus) -> None:
    changes = await changes_to(own_bus, DeliveryConfig(token_log_storage="memory"))
    assert [(c.difference.setting, c.effect) for c in changes] == [
        ("storage", "none: only a new stream can have it")
    ]
    await own_bus.streams.change(changes)
    await own_bus.streams.prepare(NATS, DeliveryConfig(token_log_storage="memory"))
    assert await changes_to(own_bus, DeliveryConfig()) == []


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("max_bytes", -1, "unlimited"),
        ("max_bytes", 2**30, "1,024 MiB"),
        ("max_age", 3600.0, "3,600 s"),
        ("max_age", 0.0, "unlimited"),
        ("duplicate_window", 120.0, "120 s"),
        ("duplicate_window", 0.0, "none"),
        ("sources", ["AUDIT"], "AUDIT"),
        ("sources", [], "none"),
        ("max_msgs", 10_000, "10,000"),
        ("allow_direct", True, "yes"),
        ("republish", None, "none"),
        ("republish", ("a.>", "b.>"), "a.> → b.>"),
        ("retention", api.RetentionPolicy.WORK_QUEUE, "workqueue"),
    ],
)
def test_values_in_words(setting: str, value: object, words: str) -> None:
    assert words_of(setting, value) == words
