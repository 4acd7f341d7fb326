"""The benchmark of the gateway: statistics of its times, and results of the load client."""

from ops.bench.burst import Burst
from ops.bench.gateway.report import of_bursts, of_singles
from ops.harness.samples import Samples
from ops.interop.load import Result, Run


def burst(first_s: list[float], took_s: float, gateway_s: float = 0.0) -> Burst:
    return Burst(first_s, 100, took_s, {"gateway": gateway_s})


def test_differences_are_of_the_same_minute() -> None:
    # The second pair had a slow minute: medians of each alone would say +0.
    nats, gateway = Samples([0.010, 0.030, 0.020]), Samples([0.012, 0.032, 0.020])
    base, row = of_singles({"nats": nats, "gateway": gateway})
    assert row == ("gateway", "20.0", "31.8", "+0.00", "+2.00 (+0.00 to +2.00)")
    assert base[3:] == ("+0.00", "+0.00 (+0.00 to +0.00)")


def test_a_share_is_of_each_turn() -> None:
    nats = [burst([0.01, 0.02], 1.0), burst([0.01, 0.02], 2.0)]
    gateway = [burst([0.02, 0.04], 1.25, 0.001), burst([0.02, 0.04], 2.0, 0.003)]
    _, row = of_bursts({"nats": nats, "gateway": gateway})
    assert row[1:] == ("30.0", "40.0", "+15.0", "65.0", "0.900 (0.800 to 1.000)", "gateway 20")


def test_one_error_of_the_load_client_is_too_many() -> None:
    run = Run("openai", 8)
    assert run.passed(Result(32, 0, 1024, 1.0, 1.0, 1.0))
    assert not run.passed(Result(31, 1, 1024, 1.0, 1.0, 1.0))
    assert not run.passed(Result(31, 0, 1024, 1.0, 1.0, 1.0))
