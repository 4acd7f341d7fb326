"""The connection to the broker: nats-py's client with corrections, and the broker's clock.

The corrections keep the failure of one caller from affecting other callers.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar

import structlog
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.protocol import parser

from shared.bus.login import Login
from shared.bus.replies import ReplyInbox
from shared.errors import Unavailable
from shared.protocol import subjects

T = TypeVar("T")

# Two missed pings of two seconds: a silent peer is noticed after six seconds instead of nats-py's
# default of six minutes.
PING_INTERVAL_S = 2
MAX_OUTSTANDING_PINGS = 2
RECONNECT_WAIT_S = 0.1
CLOSE_S = 2.0

REPLY_TIMEOUT_S = 2.0
# A leader election of a replicated stream takes 4 to 7 seconds. Requests are refused meanwhile.
BROKER_DEADLINE_S = 15.0
FIRST_RETRY_S = 0.05
MAX_RETRY_S = 1.0

_log = structlog.get_logger()


_USER_INFO = "$SYS.REQ.USER.INFO"

# The server's error for a request about a stream that a key does not permit.
_DENIED = re.compile(
    r'permissions violation for publish to "\$js\.(?:[a-z0-9_-]+\.)?(api\.stream\.[^"]+)"'
)


# Clients choose tokens of subjects. nats-py also splits a line at bytes such as a form feed, which
# a subject may contain. It would lose the connection, or pass the message to another subscription.
_WORD = rb"[ \t]+([^ \t\r\n]+)"
_REPLY = rb"[ \t]+(([^ \t\r\n]+)[ \t]+)?"
parser.MSG_RE = re.compile(rb"\AMSG" + _WORD + _WORD + _REPLY + rb"(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG" + _WORD + _WORD + _REPLY + rb"(\d+)[ \t]+(\d+)\r\n")


class CorrectedClient(NatsClient):
    """nats-py's client without the faults that affect workers."""

    denied: frozenset[str] = frozenset()
    """Subjects, in lower case, of requests about streams that the key does not permit.

    The server refuses them without a reply, so they look like requests that it cannot answer."""

    def __init__(self, domain: str | None = None) -> None:
        super().__init__()
        self.domain = domain
        """JetStream domain of the broker, if the server may be a leaf node."""
        self.inbox = ReplyInbox(self, self.subscribe_direct)
        self._receivers: dict[int, Callable[[Msg], None]] = {}
        """Functions that receive messages without a queue, by the number of the subscription."""

    def _connect_command(self) -> bytes:
        # After a key was replaced, nats-py would still send the public part of the old one.
        if self._nkeys_seed is None:
            return super()._connect_command()
        import nkeys

        try:
            self._setup_nkeys_connect()
            return super()._connect_command()
        except (nkeys.NkeysError, ValueError) as error:
            # Any other type of error would end nats-py's attempts to reconnect.
            raise NatsError("nats: the file of the key contains no seed") from error

    async def _process_err(self, err_msg: str) -> None:
        # nats-py would close the client for good, and its worker would wait for messages forever.
        # The server closes the connection itself, and may accept the login later.
        if parser.PERMISSIONS_ERR not in err_msg:
            error = NatsError(f"nats: {err_msg}")
            await _log_error(error)
            await self._process_op_err(error)
        else:
            self.denied |= {f"$js.{subject}" for subject in _DENIED.findall(err_msg.lower())}
            await super()._process_err(err_msg)

    async def _process_pong(self) -> None:
        # The caller of this ping may have been cancelled. nats-py's reader task would fail on the
        # cancelled future, and the connection would receive nothing until it misses pings.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # A client may write any bytes. An error would end nats-py's reader task, and again whenever
        # the message is delivered.
        readable = subject.decode("utf-8", "replace").encode()
        message: Msg = super()._build_message(sid, readable, reply, data, headers)
        return message

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return None

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        # nats-py looks at each character of each name, which takes three times as long.
        lines = (line.partition(":") for line in raw.decode("utf-8", "replace").split("\r\n"))
        return {
            name.strip(): value.strip()
            for name, colon, value in lines
            if colon and name.isascii() and len(name.split()) == 1
        }

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        # When its writer task has ended because the connection was lost, nats-py writes in the
        # caller's task. The error would make `subscribe` fail although the subscription stays
        # registered. The next connection restores subscriptions, and a lost publish gets no ack.
        with contextlib.suppress(OSError, RuntimeError):
            return await _keep_cancellation(super()._flush_pending(force_flush))

    async def _connect_to_server(self, *args: Any, **kwargs: Any) -> None:
        # `close` cancels the task that reconnects. If nats-py lost this cancellation, the task
        # would continue forever with a closed client.
        await _keep_cancellation(super()._connect_to_server(*args, **kwargs))

    async def _process_connect_init(self) -> None:
        self.denied = frozenset()
        await _keep_cancellation(super()._process_connect_init())

    async def publish(self, subject: str, *args: Any, **kwargs: Any) -> None:
        await super().publish(subjects.in_domain(subject, self.domain), *args, **kwargs)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = REPLY_TIMEOUT_S,  # noqa: ASYNC109
        old_style: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        # nats-py draws random bytes for each request, and its replies wait in a queue.
        msg = await self.inbox.ask(subject, payload, timeout, headers)
        if msg.headers and msg.headers.get("Status") == "503":
            raise NoRespondersError
        return msg

    async def subscribe_direct(self, subject: str, receive: Callable[[Msg], None]) -> Subscription:
        """Subscribe to `subject`. `receive` is called while a message is read, before the next.

        It must be fast.
        """
        sid = self._sid + 1  # The number that nats-py gives the next subscription.
        self._receivers[sid] = receive
        try:
            subscription: Subscription = await self.subscribe(subject)
        except BaseException:
            self._receivers.pop(sid, None)
            raise
        return subscription

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if (receive := self._receivers.get(sid)) is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        read = await self._process_headers(headers)
        try:
            receive(self._build_message(sid, subject, reply, data, read))
        except Exception as error:
            # It would end nats-py's reader task.
            await self._error_cb(error)

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._receivers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        await _keep_cancellation(super().flush(*args, **kwargs))


class Connection:
    """A connection to the broker, which the parts of a `Bus` share.

    All deadlines are set by the broker's clock, because the clocks of workers may differ by hours.
    """

    def __init__(self, nc: CorrectedClient) -> None:
        self.nc = nc
        self.js: JetStreamContext = nc.jetstream(timeout=REPLY_TIMEOUT_S)
        self.inbox = nc.inbox
        self._clock_offset_ms = 0.0
        self.is_alone = True
        """Whether the broker is in no cluster, so that no stream has replicas."""

    @property
    def domain(self) -> str | None:
        """JetStream domain of the broker, by default the domain of the connected server."""
        return self.nc.domain or self.nc._server_info.get("domain")

    @property
    def server_version(self) -> str:
        version = self.nc.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"

    async def check_jetstream(self) -> None:
        """Raise Unavailable if the server is a leaf node, and no server with JetStream answers."""
        server = self.nc._server_info
        if self.nc.domain is None and (server.get("jetstream") or not server.get("cluster")):
            return
        try:
            await self.nc.request("$JS.API.INFO", b"", timeout=REPLY_TIMEOUT_S)
        except NoRespondersError:
            raise Unavailable(_no_jetstream(self.nc.domain)) from None
        except NatsError as error:
            raise Unavailable(f"JetStream does not answer: {error}") from error

    async def sync_clock(self) -> None:
        """Measure the offset to the broker's clock.

        Raises Unavailable when the broker does not answer.
        """
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        try:
            server = await self._ask_server()
        except NatsError as error:
            raise Unavailable(f"the broker did not report its time: {error}") from error
        half_way_s = (sent_s + loop.time()) / 2
        broker_time = datetime.fromisoformat(server["time"])
        self._clock_offset_ms = 1000 * (broker_time.timestamp() - half_way_s)
        self.is_alone = not server.get("cluster")

    async def _ask_server(self) -> dict[str, Any]:
        """Return what a server of the domain, by default the connected one, reports of itself."""
        async with self.inbox.request(_USER_INFO, b"") as replies:
            while True:
                reply = await replies.next(REPLY_TIMEOUT_S)
                server: dict[str, Any] = json.loads(reply.data)["server"]
                if server.get("domain") == self.domain:
                    return server

    def now_ms(self) -> float:
        """Return the time of the broker's clock in Unix milliseconds."""
        return self.to_broker_ms(asyncio.get_running_loop().time())

    def to_broker_ms(self, monotonic_s: float) -> float:
        """Convert a time of this machine's monotonic clock to the broker's clock."""
        return 1000 * monotonic_s + self._clock_offset_ms


def _no_jetstream(domain: str | None) -> str:
    if domain is not None:
        return f"no JetStream with the domain {domain!r} answers (nats.domain)"
    return (
        "this nats-server has no JetStream, and reaches none: on a leaf node, set nats.domain to"
        " the jetstream.domain of the brokers"
    )


def is_denied(nc: NatsClient, subject: str) -> bool:
    """Return whether the key of a connection does not permit a request about a stream."""
    return isinstance(nc, CorrectedClient) and subject.lower() in nc.denied


async def next_message(subscription: Subscription, timeout_s: float) -> Msg:
    """Return the next message. Raises the errors of nats-py, such as its own TimeoutError."""
    return await _keep_cancellation(subscription.next_msg(timeout=timeout_s))


@contextlib.asynccontextmanager
async def pull(nc: NatsClient, subject: str, data: bytes) -> AsyncIterator[Subscription]:
    """Publish a pull request, and yield the subscription that receives the messages.

    The messages keep their own subjects, so a ReplyInbox cannot assign them to a request.
    """
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    try:
        await nc.publish(subject, data, reply=inbox)
        yield subscription
    finally:
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()


async def _keep_cancellation(work: Awaitable[T]) -> T:
    """Return the result of `work`, or raise CancelledError if the task was cancelled meanwhile.

    nats-py waits with `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
    arrives together with the result. A task that repeats its requests would then never end. While
    nats-py waits until its own queue is written, it drops every cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await work
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


async def _complete_within(timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
    """Raise TimeoutError if `work` takes longer.

    It is cancelled repeatedly until it ends, because nats-py loses cancellations during a TLS
    handshake.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=RECONNECT_WAIT_S)
    if task.cancelled():
        raise TimeoutError
    task.result()


async def retry_until(
    deadline_s: float,
    attempt: Callable[[], Awaitable[T]],
    failures: tuple[type[Exception], ...],
    description: str,
    pause_s: float = MAX_RETRY_S,
) -> T:
    """Repeat `attempt` while it raises one of `failures`.

    The first pause is `pause_s`, and each further pause is twice as long, up to MAX_RETRY_S. Raises
    Unavailable with `description` after `deadline_s` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        try:
            return await attempt()
        except failures as error:
            if loop.time() + pause_s > deadline:
                raise Unavailable(f"{description}: {error}") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RETRY_S)


async def connect(
    login: Login,
    name: str,
    timeout_s: float,
    on_disconnect: Callable[[], Awaitable[None]],
    on_reconnect: Callable[[], Awaitable[None]],
) -> CorrectedClient:
    """Open a connection that reconnects without a limit on attempts.

    Raises Unavailable if no server answers or accepts the login, and ConfigError for an unusable
    key or certificate.
    """
    nc = CorrectedClient(login.domain)
    refused = False

    async def on_error(error: Exception) -> None:
        nonlocal refused
        refused |= "authorization" in str(error).lower()
        await _log_error(error)

    async def disconnected() -> None:
        nc.inbox.on_disconnect()
        await on_disconnect()

    async def reconnected() -> None:
        nc.inbox.on_reconnect()
        await on_reconnect()

    options: dict[str, Any] = {}
    if login.seed_file is not None:
        login.check_seed()
        options |= {"nkeys_seed": str(login.seed_file), "inbox_prefix": login.inbox}
    if login.tls is not None:
        options["tls"] = login.tls.context()
    try:
        connecting = nc.connect(
            [part.strip() for part in login.url.split(",")],
            name=name,
            disconnected_cb=disconnected,
            reconnected_cb=reconnected,
            error_cb=on_error,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            # nats-py declares whole seconds but uses the value as a delay.
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            pending_size=64 * 2**20,
            **options,
        )
        await _complete_within(timeout_s, connecting)
    except (TimeoutError, OSError, NatsError) as error:
        with contextlib.suppress(TimeoutError):
            await _complete_within(CLOSE_S, nc.close())
        if refused:
            raise Unavailable(f"the nats-server at {login} refuses this login") from error
        raise Unavailable(f"no nats-server answers at {login}") from error
    return nc


def local_address(nc: NatsClient) -> str:
    """Return the address of this machine in the network of the broker."""
    transport: Any = nc._transport
    address: str = transport._io_writer.get_extra_info("sockname")[0]
    return address


async def _log_error(error: Exception) -> None:
    # Refused attempts to reconnect are not logged again: `on_disconnect` has logged the outage.
    if not isinstance(error, OSError):
        _log.warning("nats_error", error=str(error) or type(error).__name__)
