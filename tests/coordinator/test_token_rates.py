"""Rates of tokens by tenant, for all sequences of requests, and as a coordinator applies them."""

import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from shared.bus.bus import Bus
from shared.config.schema import Config, DeliveryConfig, ModelConfig
from shared.errors import Cancelled, InvalidMedia, PagemillError, TokenRateExceeded
from shared.protocol import subjects
from shared.protocol.images import PaintParams
from shared.protocol.names import scoped_id
from shared.protocol.records import OutputSummary, Usage, error_info
from shared.protocol.requests import GenerateRequest, decode_request, encode_request
from shared.protocol.sampling import SamplingParams
from shared.stage.job import Job
from shared.stage.retry import AnswerWithError, decide
from shared.stage.runtime import Context
from shared.state.token_log import LogWriter, end_request
from workers.coordinator.admission import Admitted, most_tokens
from workers.coordinator.token_limits import MINUTE_S, TokenRates
from workers.coordinator.worker import Coordinator

PER_MINUTE = 600
STEPS = st.lists(
    st.tuples(
        st.floats(0, 90),  # the seconds since the last request
        st.integers(0, 3000),  # what it may write
        st.integers(0, 3000),  # what it has used
        st.booleans(),  # whether that becomes known
    ),
    max_size=60,
)


@given(STEPS)
def test_tokens_stay_within_the_rate_but_for_one_request(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    rates, now_s, charged = TokenRates({"a": PER_MINUTE}), 0.0, 0.0
    for pause_s, num_reserved, num_used, is_known in steps:
        now_s += pause_s
        if rates.reserve("a", num_reserved, now_s):
            continue
        # The rate since the start covers the earlier charges.
        assert charged < PER_MINUTE * (1 + now_s / MINUTE_S) + 1e-6
        charged += num_used if is_known else num_reserved
        if is_known:
            rates.correct("a", num_reserved, num_used, now_s)


@given(STEPS)
def test_a_refused_tenant_is_admitted_after_the_time_of_the_error(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    rates, now_s = TokenRates({"a": PER_MINUTE}), 0.0
    for pause_s, num_reserved, _, _ in steps:
        now_s += pause_s
        if wait_s := rates.reserve("a", num_reserved, now_s):
            assert wait_s <= (1 + 3000) * MINUTE_S / PER_MINUTE
            now_s += wait_s + 1e-6
            assert rates.reserve("a", 0, now_s) == 0


@given(STEPS, STEPS)
def test_tenants_have_nothing_to_do_with_each_other(
    steps: list[tuple[float, int, int, bool]], others: list[tuple[float, int, int, bool]]
) -> None:
    def waits(beside: list[tuple[float, int, int, bool]]) -> list[float]:
        rates, now_s, waits_s = TokenRates({"a": PER_MINUTE, "b": 7}), 0.0, []
        for number, (pause_s, num_reserved, _, _) in enumerate(steps):
            now_s += pause_s
            if number < len(beside):
                rates.reserve("b", beside[number][1], now_s)
                rates.correct("b", beside[number][1], beside[number][2], now_s)
            waits_s.append(rates.reserve("a", num_reserved, now_s))
        return waits_s

    assert waits(others) == waits([])


@given(st.integers(0, 10_000))
def test_a_request_beyond_the_whole_limit_is_admitted_once(num_tokens: int) -> None:
    rates = TokenRates({"a": PER_MINUTE})
    assert rates.reserve("a", num_tokens, 0.0) == 0
    assert (rates.reserve("a", 1, 0.0) > 0) == (num_tokens >= PER_MINUTE)


@given(st.floats(MINUTE_S, 1e6))
def test_idle_time_saves_up_the_tokens_of_one_minute(idle_s: float) -> None:
    rates = TokenRates({"a": PER_MINUTE})
    rates.reserve("a", PER_MINUTE, 0.0)
    assert rates.reserve("a", PER_MINUTE, idle_s) == 0
    assert rates.reserve("a", 1, idle_s) > 0


def test_time_that_goes_back_earns_nothing() -> None:
    rates = TokenRates({"a": PER_MINUTE})
    rates.reserve("a", PER_MINUTE, 100.0)
    assert rates.reserve("a", 1, 0.0) == rates.reserve("a", 1, 100.0) > 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sampling": SamplingParams(max_tokens=7, n=3)}, 21),
        ({"sampling": SamplingParams()}, 0),
        ({"image": PaintParams("64x64")}, 0),
    ],
)
def test_a_request_reserves_what_it_may_write(changes: dict[str, Any], expected: int) -> None:
    request = GenerateRequest("demo", prompt="a")
    parts: dict[str, Any] = {"sampling": SamplingParams(max_tokens=7), "image": None} | changes
    prompt = decode_request(encode_request(request))
    admitted = Admitted(request=request, prompt=prompt, outputs=[], voice=None, **parts)  # type: ignore[arg-type]
    assert most_tokens(admitted) == expected


# -- in a coordinator ---------------------------------------------------------------------------


class Site:
    """A coordinator that is given deliveries of a tenant's requests."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self.bus, self.tenant = bus, tenant
        delivery = DeliveryConfig(tokens_per_minute={"acme": 100})
        config = Config({"demo": ModelConfig(str(Path("nowhere")))}, delivery=delivery)
        context = Context("coordinator", "coordinator-1", "", config, bus, structlog.get_logger())
        self._coordinator = Coordinator(context)

    async def admit(self, max_tokens: int, attempt: int = 1) -> str:
        """Have a request admitted, and return its id."""
        request_id = scoped_id(f"t-{secrets.token_hex(6)}", self.tenant)

        async def settle(*_: object) -> None:
            pass

        request = GenerateRequest("demo", prompt="a")
        delivery: Any = SimpleNamespace(
            subject=subjects.request("demo", request_id),
            data=encode_request(request, {"max_tokens": max_tokens}),
            stored_ms=self.bus.now_ms(),
            attempt=attempt,
            sequence=10**9,
            place=subjects.RequestPlace(subjects.REQUESTS_STREAM, 10**9),
            receipt="r",
            tenant=self.tenant,
            msg_id=request_id,
            headers={},
            retry=settle,
            ack=settle,
            abandon=lambda: None,
        )
        await self._coordinator.admit_or_end(Job(delivery, self.bus.now_ms(), request_id))
        return request_id

    async def finish(self, request_id: str, num_prompt: int, num_written: int) -> None:
        log = await LogWriter.open(self.bus, request_id, 1)
        await log.finish(OutputSummary(Usage(num_prompt, num_written), 1, {}), {})


async def test_the_error_of_a_tenant_has_its_limit_and_a_time_to_retry(bus: Bus) -> None:
    site = Site(bus, "acme")
    await site.admit(60)
    await site.admit(60)
    with pytest.raises(TokenRateExceeded) as refused:
        await site.admit(1)
    info = error_info(refused.value)
    assert "100 tokens a minute (delivery.tokens_per_minute)" in info.message
    assert info.retryable
    assert 0 < (info.retry_after_s or 0) <= 13
    assert isinstance(decide(refused.value, 0, DeliveryConfig()), AnswerWithError)


async def test_what_was_not_written_is_given_back(bus: Bus) -> None:
    site = Site(bus, "acme")
    await site.finish(await site.admit(5000), num_prompt=10, num_written=10)
    await site.admit(1)


async def test_long_prompts_count(bus: Bus) -> None:
    site = Site(bus, "acme")
    await site.finish(await site.admit(1), num_prompt=5000, num_written=1)
    with pytest.raises(TokenRateExceeded):
        await site.admit(1)


@pytest.mark.parametrize(
    ("error", "is_given_back"), [(InvalidMedia("x"), True), (Cancelled("x"), False)]
)
async def test_a_request_that_failed_before_it_wrote_costs_nothing(
    bus: Bus, error: PagemillError, is_given_back: bool
) -> None:
    site = Site(bus, "acme")
    await end_request(bus, await site.admit(5000), 1, error, [])
    if is_given_back:
        await site.admit(1)
    else:
        with pytest.raises(TokenRateExceeded):
            await site.admit(1)


async def test_a_request_that_comes_again_is_counted_once(bus: Bus) -> None:
    site = Site(bus, "acme")
    await site.admit(5000)
    await site.admit(5000, attempt=2)


async def test_other_tenants_have_no_limit(bus: Bus) -> None:
    for tenant in ("globex", ""):
        site = Site(bus, tenant)
        for _ in range(3):
            await site.admit(5000)
