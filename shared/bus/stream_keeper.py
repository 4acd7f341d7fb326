"""Streams of a cluster: workers create them, and only `pagemill migrate` changes them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import structlog
from nats.errors import Error as NatsError
from nats.js import api

from shared.bus import stream_changes, streams
from shared.bus.connection import FIRST_RETRY_S, Connection, retry_until
from shared.bus.server_settings import check_limits, check_server, read_tenants
from shared.bus.store_probes import Refusal, probe_streams
from shared.bus.stream_changes import Difference, StreamChange
from shared.config.schema import AgentConfig, BatchConfig, DeliveryConfig, NatsConfig
from shared.errors import ConfigError, Unavailable
from shared.helpers.task_set import run_for_each
from shared.protocol import subjects

# A disk under load can take 11 seconds to create the files of one stream.
PREPARE_DEADLINE_S = 60.0
# A broker that starts, ends or frees the space of a stream answers as one without JetStream or
# without space. A refusal that lasts for longer is a fault of the settings.
PASSING_S = 3.0
WARN_EVERY_S = 15.0
# In a cluster each stream elects a leader first.
CREATED_AT_ONCE = 16
# In a cluster each probe is a message to all replicas.
PROBED_AT_ONCE = 8
HOW_TO_CHANGE = "`pagemill migrate` changes streams"
NOT_CHANGED = "only a new stream can have it"

_log = structlog.get_logger()


class TaskStream(NamedTuple):
    """Identity of the stream of tasks. A single broker gets a new stream when it restarts."""

    since_ms: float = 0.0
    """Time of its creation, in Unix milliseconds of the broker's clock."""
    first_sequence: int = 0
    """First sequence, which is higher than all sequences of earlier streams of tasks: the time of
    its creation in microseconds."""

    @property
    def created_ms(self) -> float:
        """Time of its creation. Unlike `since_ms`, it is known while tasks may be lost."""
        return self.first_sequence / 1000


class StreamKeeper:
    """Creates streams, and compares them with a configuration."""

    def __init__(self, connection: Connection, *, creates_streams: bool) -> None:
        self._connection = connection
        self._nc, self._js = connection.nc, connection.js
        self.creates_streams = creates_streams
        """Whether this identity may create streams. Otherwise it waits for them."""
        self._durable: list[api.StreamConfig] = []
        self._volatile: list[api.StreamConfig] = []
        self._of_tenants: list[api.StreamConfig] = []
        self._existing: list[api.StreamConfig] = []
        """The streams among `_of_tenants` that exist."""
        self._next_probed = 0
        """Position in `_existing`."""
        self._suspects: set[str] = set()
        """Streams that have failed their last probe."""
        self._settings = NatsConfig(), DeliveryConfig()
        self.tasks = TaskStream()

    @property
    def is_prepared(self) -> bool:
        return bool(self._volatile)

    async def prepare(
        self,
        nats: NatsConfig,
        delivery: DeliveryConfig,
        agent: AgentConfig | None = None,
        batch: BatchConfig | None = None,
    ) -> None:
        """Check the server's settings, and create the missing streams.

        Existing streams are not changed. Their differences from the configuration are logged, and
        so are unsuitable limits of the server.
        Raises ConfigError if the server cannot give the delivery guarantees or if a stream lacks an
        essential setting, and Unavailable if it does not answer within PREPARE_DEADLINE_S.
        """
        self.configure(nats, delivery, agent or AgentConfig(), batch or BatchConfig())

        async def attempt() -> list[Difference]:
            await check_server(self._connection, nats)
            if self.creates_streams:
                await self._create_missing(self.configs)
            differences = await stream_changes.find_differences(self._nc, self.configs)
            missing = [difference.stream for difference in differences if not difference.setting]
            if missing:
                raise Unavailable(f"no coordinator has created stream {missing[0]}")
            self.tasks = await self.find_tasks()
            return differences

        # A cluster that has just started, or has lost its leader, needs more than one attempt.
        differences = await retry_until(
            PREPARE_DEADLINE_S,
            _Confirmed(attempt),
            (NatsError, Unavailable),
            "the broker did not create the streams",
            FIRST_RETRY_S,
        )
        _report(differences)
        if self.creates_streams and not nats.unchecked:
            await check_limits(self._connection, nats)

    async def check_server(self, nats: NatsConfig) -> None:
        """Check the server's settings once. Raises ConfigError and Unavailable."""
        try:
            await check_server(self._connection, nats)
        except NatsError as error:
            raise Unavailable(f"the broker did not report its settings: {error}") from error

    def configure(
        self, nats: NatsConfig, delivery: DeliveryConfig, agent: AgentConfig, batch: BatchConfig
    ) -> None:
        """Set the configuration of the streams."""
        self._settings = nats, delivery
        self._durable = streams.durable_streams(delivery, agent, batch, nats.replicas)
        self._volatile = streams.volatile_streams(
            delivery, nats.replicas, is_alone=self._connection.is_alone
        )

    async def find_tenants(self) -> None:
        """Configure queues for the tenants that have an account at the broker now.

        Raises Unavailable.
        """
        nats, delivery = self._settings
        try:
            tenants = await read_tenants(self._connection, nats.replicas)
        except NatsError as error:
            raise Unavailable(f"the broker did not list its accounts: {error}") from error
        of_tenants = (streams.streams_of_tenant(tenant, nats, delivery) for tenant in tenants)
        self._of_tenants = [config for configs in of_tenants for config in configs]

    async def create_for_tenants(self, existing: Iterable[str]) -> list[str]:
        """Create the queues of tenants that are not among the `existing` streams; return them.

        A failure of one leaves the others. Raises the first one: ConfigError, Unavailable or an
        error of nats-py.
        """
        names: set[str | None] = {*existing}
        self._existing = [config for config in self._of_tenants if config.name in names]
        missing = [config for config in self._of_tenants if config.name not in names]
        created = await run_for_each(
            lambda config: self._create_missing([config]), missing, CREATED_AT_ONCE
        )
        return [name for names_of_one in created for name in names_of_one]

    async def restore(self) -> None:
        """Create the streams that a single broker has lost with its memory, and lost queues.

        A lost log on disk is not created again, because requests in flight would write another text
        than clients have read. An operator has to restore it.
        """
        if self.creates_streams:
            restored = [
                config
                for config in self._durable
                if config.storage is api.StorageType.MEMORY
                or config.retention is api.RetentionPolicy.WORK_QUEUE
            ]
            if created := await self._create_missing(restored + self._volatile):
                _log.warning("streams_restored", streams=created)

    async def _create_missing(self, configs: list[api.StreamConfig]) -> list[str]:
        # A time in microseconds is higher than any earlier sequence: no broker stores a message in
        # each microsecond.
        first_sequence = int(1000 * self._connection.now_ms())
        return await streams.create_missing(self._nc, configs, first_sequence)

    async def find_tasks(self) -> TaskStream:
        """Return the current stream of tasks. Raises NotFoundError."""
        info = await self._js.stream_info(subjects.STAGES_STREAM)
        since_ms = 0.0 if info.created is None else 1000 * info.created.timestamp()
        return TaskStream(since_ms, info.config.first_seq or 0)

    async def find_changes(self, now_ms: float) -> list[StreamChange]:
        """Return the changes that make the streams equal to the configuration, and their effects.

        Raises Unavailable.
        """
        await self.find_tenants()
        try:
            configs = self.configs + self._of_tenants
            return await stream_changes.find_changes(self._nc, configs, now_ms)
        except NatsError as error:
            raise Unavailable(f"the broker did not describe its streams: {error}") from error

    async def change(self, changes: Iterable[StreamChange]) -> None:
        """Apply changes that `find_changes` has returned.

        Raises ConfigError for a change that the broker refuses, and Unavailable.
        """
        changes, configs = list(changes), self.configs + self._of_tenants
        try:
            others = [change for change in changes if change.difference.setting]
            await stream_changes.apply_changes(self._nc, configs, others)
            # A new stream may have subjects that another one has had before its change.
            if any(not change.difference.setting for change in changes):
                await self._create_missing(configs)
        except NatsError as error:
            raise Unavailable(f"the broker did not change its streams: {error}") from error

    async def probe(self) -> dict[str, Refusal]:
        """Return the streams on disk that refuse to store, see `store_probes`.

        The queues of tenants are probed in turns, PROBED_AT_ONCE of them in each call. A probe that
        has failed is repeated in the next call.
        """
        end = self._next_probed + PROBED_AT_ONCE
        due = {config.name for config in self._existing[self._next_probed : end]} | self._suspects
        self._next_probed = end if end < len(self._existing) else 0
        of_tenants = [config for config in self._existing if config.name in due]
        refusals = await probe_streams(self._nc, self.configs + of_tenants)
        self._suspects = {*refusals}
        return refusals

    @property
    def queues_of_tenants(self) -> set[str]:
        """Names of the queues of the tenants that `find_tenants` has found."""
        return {config.name or "" for config in self._of_tenants}

    @property
    def configs(self) -> list[api.StreamConfig]:
        """The configured streams, without the queues of tenants."""
        return self._durable + self._volatile


class _Confirmed:
    """Attempts to prepare the broker: a ConfigError counts after it has lasted for PASSING_S."""

    def __init__(self, attempt: Callable[[], Awaitable[list[Difference]]]) -> None:
        self._attempt = attempt
        self._refused_since_s: float | None = None
        self._warns_at_s = asyncio.get_running_loop().time() + PASSING_S

    async def __call__(self) -> list[Difference]:
        """Return the result of an attempt. Raises Unavailable for a refusal that may pass."""
        now_s = asyncio.get_running_loop().time()
        try:
            return await self._attempt()
        except ConfigError as error:
            if self._refused_since_s is None:
                self._refused_since_s = now_s
            if now_s - self._refused_since_s >= PASSING_S:
                raise
            raise Unavailable(error.message) from error
        except (NatsError, Unavailable) as error:
            self._refused_since_s = None
            if now_s >= self._warns_at_s:
                _log.warning("waits_for_streams", reason=str(error) or type(error).__name__)
                self._warns_at_s = now_s + WARN_EVERY_S
            raise


def _report(differences: Sequence[Difference]) -> None:
    """Log each difference. Raises ConfigError for an essential one."""
    for difference in differences:
        _log.warning(
            "stream_differs",
            stream=difference.stream,
            setting=difference.setting,
            value=difference.target_words,
            cluster_value=difference.current_words,
            hint=NOT_CHANGED if difference.is_fixed else HOW_TO_CHANGE,
        )
    for difference in differences:
        if difference.is_essential:
            raise ConfigError(
                f"stream {difference.stream} has {difference.setting} {difference.current_words},"
                f" and this version needs {difference.target_words}: run `pagemill migrate`",
                field="nats.url",
            )
