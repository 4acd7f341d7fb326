"""The benchmark of the gateway: statistics of its times, and results of the load client."""

from rich.table import Table

from ops.bench.gateway.report import Burst, interval_of_median, of_bursts, of_singles, p99
from ops.interop.load import Result, Run


def rows(table: Table) -> dict[str, list[str]]:
    cells = zip(*(column.cells for column in table.columns), strict=True)
    return {str(name): [str(cell) for cell in rest] for name, *rest in cells}


def burst(first_s: list[float], took_s: float, gateway_s: float = 0.0) -> Burst:
    return Burst(first_s, 100, took_s, {"gateway": gateway_s})


def test_differences_are_of_the_same_minute() -> None:
    # The second pair had a slow minute: medians of each alone would say +0.
    table = of_singles("", {"nats": [0.010, 0.030, 0.020], "gateway": [0.012, 0.032, 0.020]})
    assert rows(table)["gateway"] == ["20.0", "31.8", "+0.00", "+2.00 (+0.00 to +2.00)"]
    assert rows(table)["nats"][2:] == ["+0.00", "+0.00 (+0.00 to +0.00)"]


def test_a_share_is_of_each_turn() -> None:
    nats = [burst([0.01, 0.02], 1.0), burst([0.01, 0.02], 2.0)]
    gateway = [burst([0.02, 0.04], 1.25, 0.001), burst([0.02, 0.04], 2.0, 0.003)]
    told = rows(of_bursts("", {"nats": nats, "gateway": gateway}))["gateway"]
    assert told == ["30.0", "40.0", "+15.0", "65.0", "0.900 (0.800 to 1.000)", "gateway 20"]


def test_the_interval_of_a_median_is_that_of_the_table() -> None:
    # Ranks 40 and 61 of 100, 22 and 39 of 60.
    assert interval_of_median(range(1, 101)) == (40, 61)
    assert interval_of_median(range(1, 61)) == (22, 39)
    assert interval_of_median([5.0]) == (5.0, 5.0)


def test_p99() -> None:
    assert p99([3.0]) == 3.0
    assert p99([0.0, *[1.0] * 98, 5.0]) == 1.0 + 0.01 * 4.0


def test_one_error_of_the_load_client_is_too_many() -> None:
    run = Run("openai", 8)
    assert run.passed(Result(32, 0, 1024, 1.0, 1.0, 1.0))
    assert not run.passed(Result(31, 1, 1024, 1.0, 1.0, 1.0))
    assert not run.passed(Result(31, 0, 1024, 1.0, 1.0, 1.0))
