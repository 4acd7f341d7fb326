"""Fixtures and hooks for all tests: a broker per session, rules about errors, skips and order."""

import contextlib
import functools
import gc
import os
import re
import secrets
import shlex
import shutil
import signal
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import httpcore2
import hypothesis
import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import ConfigError, PagemillError
from tests import preloaded
from tests.support.broker import running_broker

# transformers imports Triton, which reads this variable at its import. Without a GPU, the kernels
# run in Triton's interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# `nohup` and a shell's `&` ignore these signals, and so would all processes of the tests.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Read by torch at its import; workers set it as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Brokers sync each message to their files. In memory that takes a third less of the processor time
# of such tests. A whole run writes 2 GB.
MEMORY, MIN_FREE_BYTES = "/dev/shm", 8 * 2**30
if (
    os.path.isdir(MEMORY)
    and shutil.disk_usage(MEMORY).free >= MIN_FREE_BYTES
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# Clients trust the same certificate authorities, which take 20 ms of processor time to parse.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# Examples of each property test, by profile: CI has the first, `make tests-long` the other.
for profile, num_examples in (("short", 15), ("long", 200)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,  # No test measures time, because it would fail on a busy machine.
        max_examples=num_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("short")

INTERNALS = re.compile(r"0x[0-9a-f]{6,}|/site-packages/|Traceback|BytesIO|object at ")

# Files that take minutes, most of them waiting. A long file that starts last would keep one worker
# of pytest-xdist busy alone, so they begin early, and between them those that keep the processors
# busy meanwhile. Workers take files in the order of items.
LONG = (
    "tests/gateway/http/",
    "tests/gateway/routes/",
    "tests/chaos/test_bugs.py",
    "tests/cluster/",
    "tests/bench/test_peers.py",
)
COMPUTING = "tests/engine/"
# Files with the beginnings of one group share a cluster, and the files of the page a browser. Even
# an idle cluster takes 3 % of a processor until the end of its process.
GROUPS = (
    ("tests/gateway/http/",),
    ("tests/gateway/routes/test_page",),
    ("tests/gateway/routes/", "tests/gateway/openapi/", "tests/gateway/test_readme.py"),
    ("tests/agent/",),
    (
        "tests/cluster/test_redelivery.py",
        "tests/cluster/test_chat.py",
        "tests/cluster/test_lost_tasks.py",
        "tests/cluster/test_read_again.py",
        "tests/cluster/test_request.py",
        "tests/cluster/test_tenant_ids.py",
        "tests/cluster/test_traces.py",
    ),
)

# Most skipped tests by reason, of those that no setting of a CI machine can avoid. A reason that is
# not listed fails the run unless it begins with a line of the environment variable
# TESTS_MAY_SKIP.
ALLOWED_SKIPS = {
    "needs a CUDA device": 1,
    "there is a GPU": 2,
    "needs Debian's packages chromium and chromium-driver": 88,
    "needs Debian's package fonts-liberation": 1,
    "needs Debian's package prometheus": 2,
    "needs curl": 3,
    "needs docker compose": 2,
    "needs bash, jq and openssl": 3,
    "needs node and npm": 17,
    "needs Landlock": 2,
    "needs scopes of Landlock": 1,
    "needs seccomp on a known processor": 3,
    "needs systemd-analyze": 1,
    "needs the right to mount a file system": 1,
    "no compiler, or no AVX-512": 244,
}
MAY_SKIP = "TESTS_MAY_SKIP"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "needs_folder(variable): needs a folder that this environment variable names, and is"
        " deselected without it",
    )
    if config.getoption("numprocesses", None):
        # A fork with torch in memory might not be able to use a GPU.
        if shutil.which("nvidia-smi") is not None:
            preloaded.serve()
            return
        arguments = [f"--ignore={path}" for path in config.option.ignore or ()]
        if (name := config.option.hypothesis_profile) is not None:
            arguments.append(f"--hypothesis-profile={name}")  # Decorators read it at the import.
        preloaded.serve([*arguments, *config.args])
        python = shlex.join(preloaded.COLLECTED_PYTHON)
        config.option.tx = [f"popen//python={python}"] * len(config.option.tx)


class _Groups(LoadFileScheduling):  # type: ignore[misc]  # xdist has no annotations.
    """A scheduler by which files that share a cluster or a browser run in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((group[0] for group in GROUPS if file.startswith(group)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Groups:
    return _Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = [item for item in items if _lacks_folder(item)]
    config.hook.pytest_deselected(items=without)
    items[:] = [item for item in items if item not in without]
    files = [*dict.fromkeys(item.nodeid.partition("::")[0] for item in items)]
    long = [file for file in files if file.startswith(LONG)]
    computing = [file for file in files if file.startswith(COMPUTING)]
    order = [file for pair in zip(long, computing, strict=False) for file in pair]
    order = [*dict.fromkeys(order + long + files)]
    items.sort(key=lambda item: order.index(item.nodeid.partition("::")[0]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without collections of garbage, which would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave the modules and the collected tests out of the collections of garbage.

    Otherwise these take a tenth of the processor time of tests that run in this process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failure without collecting garbage meanwhile.

    A report parses the source of the test. When a collection runs a finalizer that parses too, as
    the warning of a lost task does, CPython 3.11 raises SystemError, and pytest ends the whole run
    with an internal error (https://github.com/python/cpython/issues/106905).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def _lacks_folder(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("needs_folder")
    return marker is not None and not os.environ.get(marker.args[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _excess_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for reason, count in sorted(_excess_skips(config).items()):
        terminalreporter.write_line(
            f"FAILED: {count} tests were skipped for a reason that {__name__}.ALLOWED_SKIPS does"
            f" not allow so often: {reason!r} ({MAY_SKIP} may allow it)",
            red=True,
        )


def _excess_skips(config: pytest.Config) -> Counter[str]:
    """Return the number of skipped tests by each reason that exceeds its allowance.

    Empty in a worker of pytest-xdist, because only the controller prints reports.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return Counter()
    reasons = Counter(_reason_of(report) for report in reporter.stats.get("skipped", []))
    permitted = tuple(filter(None, os.environ.get(MAY_SKIP, "").splitlines()))
    return Counter(
        {
            reason: count
            for reason, count in reasons.items()
            if count > ALLOWED_SKIPS.get(reason, 0) and not reason.startswith(permitted)
        }
    )


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


@pytest.fixture(autouse=True)
def no_error_shows_internals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check every error made during a test: a client may see it, so it must not show internals."""
    messages: list[str] = []
    make = PagemillError.__init__

    def recorded(self: PagemillError, message: str, *, field: str | None = None) -> None:
        make(self, message, field=field)
        # The operator reads a ConfigError, which names files.
        if not isinstance(self, ConfigError):
            messages.append(f"{field}: {message}")

    monkeypatch.setattr(PagemillError, "__init__", recorded)
    yield
    assert [message for message in messages if INTERNALS.search(message)] == []


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models spend more time on waking threads than on numbers."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def model() -> str:
    """A model name that no other test uses, and so separate queues."""
    return f"m-{secrets.token_hex(4)}"


@pytest.fixture
def request_id() -> str:
    return f"t-{secrets.token_hex(6)}"


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A nats-server on a free port."""
    with running_broker(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that no other test uses."""
    with running_broker(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def own_bus(own_broker: EmbeddedServer) -> AsyncIterator[Bus]:
    """A connection to the server that no other test uses."""
    connection = await Bus.connect(own_broker.url, "test")
    await connection.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield connection
    await connection.close()


@pytest.fixture
async def nats_client(request: pytest.FixtureRequest) -> AsyncIterator[NatsClient]:
    """A client of the test's broker that does not use the product's connection."""
    name = "own_broker" if "own_broker" in request.fixturenames else "broker"
    client = await nats.connect(request.getfixturevalue(name).url)
    yield client
    with contextlib.suppress(OSError):  # The test may have ended the broker.
        await client.close()


@pytest.fixture
def jetstream(nats_client: NatsClient) -> JetStreamContext:
    """Streams and consumers of the test's broker, for changes that the product does not make."""
    return nats_client.jetstream()


@pytest.fixture
async def bus(broker: EmbeddedServer) -> AsyncIterator[Bus]:
    """A connection of the test's own to the broker."""
    connection = await Bus.connect(broker.url, "test")
    # The check of the server's durability waits for answers of all servers, which takes long.
    await connection.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield connection
    await connection.close()
