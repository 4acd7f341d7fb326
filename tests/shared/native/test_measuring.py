"""Choices that are measured and kept: by one process at a time, and never at a start's expense."""

import threading
from pathlib import Path

import msgspec
import pytest
import torch

from shared.native import choices, library, measuring, tower_kernels, trials
from shared.native.choices import ENOUGH_ROUNDS, Implementation, Option
from shared.native.measuring import ChoiceRecord, MachineKey, Run, Trial, read_records, select
from shared.vision.layers import attend_segments
from tests.shared.native.test_tower_kernels import needs_kernels
from workers.cli.commands.configure import check

KEY = MachineKey("a processor", "native-1.so", "2.13", 2)
# No machine that runs tests is too busy for six rounds of nothing in this time.
LONG_S = 60.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagemill"


class Counted:
    """A trial that counts how often it is prepared and run."""

    def __init__(self, name: str = "product 2 x 2 none", has_tiles: bool = False) -> None:
        self.operation = choices.tower_operation(name, [16, 256], has_tiles)
        self.trial = Trial(self.operation, self._prepare)
        self.num_prepared = 0
        self.runs: list[tuple[Implementation, int]] = []

    def _prepare(self) -> Run:
        self.num_prepared += 1
        return lambda implementation, rows: self.runs.append((implementation, rows))


def write_record(cache: Path, key: MachineKey, chosen: dict[Trial, Option]) -> None:
    """Keep options as if they had been measured."""
    cache.mkdir(mode=0o700, exist_ok=True)
    measured = {}
    for (operation, _), option in chosen.items():
        least_s: choices.Times = {
            name: dict.fromkeys(operation.rows, 1.0) for name in operation.implementations
        }
        measured[operation.name] = choices.Measurement(least_s, ENOUGH_ROUNDS, option)
    (cache / key.file_name).write_bytes(msgspec.json.encode(ChoiceRecord(key, measured)))


def test_a_machine_measures_once(cache: Path) -> None:
    counted, other = Counted(), Counted("attention 2 x 8")
    first = select([counted.trial, counted.trial], "measured", KEY, LONG_S)
    assert first.keys() == {counted.operation.name}
    # Each implementation and number of rows in each round, in turns.
    assert counted.num_prepared == 1
    assert len(counted.runs) == ENOUGH_ROUNDS * 4
    assert set(counted.runs[:4]) == {(i, r) for i in ("vector", "torch") for r in (16, 256)}
    again = select([counted.trial, other.trial], "measured", KEY, LONG_S)
    assert again[counted.operation.name] == first[counted.operation.name]
    assert (counted.num_prepared, other.num_prepared) == (1, 1)
    (record,) = read_records(cache)
    assert record.key == KEY
    assert record.measured.keys() == {counted.operation.name, other.operation.name}


@pytest.mark.parametrize("field", ["processor", "kernels", "torch", "num_threads"])
def test_everything_that_times_depend_on_has_separate_choices(cache: Path, field: str) -> None:
    counted = Counted()
    select([counted.trial], "measured", KEY, LONG_S)
    changed = {**msgspec.to_builtins(KEY), field: 3 if field == "num_threads" else "another"}
    select([counted.trial], "measured", msgspec.convert(changed, MachineKey), LONG_S)
    assert counted.num_prepared == 2


def test_without_time_a_start_uses_the_defaults_and_the_next_one_measures(cache: Path) -> None:
    counted = Counted(has_tiles=True)
    default = {counted.operation.name: counted.operation.options[0]}
    assert select([counted.trial], "measured", KEY, budget_s=-1) == default
    assert counted.runs == []
    select([counted.trial], "measured", KEY, LONG_S)
    assert len(counted.runs) == ENOUGH_ROUNDS * 6


def test_a_round_that_is_cut_off_counts_for_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by a second with each look at it."""
    now = iter(range(10_000))
    monkeypatch.setattr("shared.native.measuring.time.perf_counter", lambda: float(next(now)))
    counted = Counted()
    select([counted.trial], "measured", KEY, budget_s=14.0)
    assert 4 < len(counted.runs) < 8
    (record,) = read_records(cache)
    assert record.measured[counted.operation.name].num_rounds == 1
    assert record.measured[counted.operation.name].option == counted.operation.options[0]


def test_a_configured_choice_is_not_measured(cache: Path) -> None:
    counted = Counted(has_tiles=True)
    for setting in ("vector", "tiles", "torch"):
        assert select([counted.trial], setting, KEY) == {counted.operation.name: Option(setting)}
    assert counted.num_prepared == 0
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": 3}', b"\xff" * 100, b"[]"])
def test_a_damaged_file_is_measured_again(cache: Path, damage: bytes) -> None:
    counted = Counted()
    cache.mkdir(mode=0o700)
    (cache / KEY.file_name).write_bytes(damage)
    select([counted.trial], "measured", KEY, LONG_S)
    assert counted.num_prepared == 1
    assert len(read_records(cache)) == 1


def test_without_a_folder_choices_are_measured_and_not_kept(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)  # Others could write to it, so it is not used.
    counted = Counted()
    select([counted.trial], "measured", KEY, LONG_S)
    assert counted.num_prepared == 1
    assert list(cache.iterdir()) == []


def test_a_process_waits_for_the_one_that_measures_and_takes_its_choice(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    counted = Counted()
    results: list[dict[str, Option]] = []

    def run() -> None:
        results.append(select([counted.trial], "measured", KEY, LONG_S))

    thread = threading.Thread(target=run)
    with library.only_process(cache):
        thread.start()
        thread.join(0.2)
        assert results == []
        write_record(cache, KEY, {counted.trial: Option("torch")})
    thread.join(60)
    assert results == [{counted.operation.name: Option("torch")}]
    assert counted.num_prepared == 0


@needs_kernels
def test_implementations_of_a_trial_compute_the_same() -> None:
    kernels = tower_kernels.find_kernels(torch.zeros(1, dtype=torch.bfloat16))
    assert kernels is not None
    product = trials.tower_product(kernels, 64, 100, "gelu", torch.nn.functional.gelu)
    attention = trials.tower_attention(kernels, 2, 16, attend_segments)
    for operation, prepare in (product, attention):
        run = prepare()
        for rows in operation.rows:
            vector, in_torch = (run(name, rows) for name in ("vector", "torch"))
            assert isinstance(vector, torch.Tensor)
            torch.testing.assert_close(vector, in_torch)


@needs_kernels
def test_the_choices_of_this_machine_are_printed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(kernels=True) == 0
    assert "nothing has been measured" in capsys.readouterr().out
    kernels = tower_kernels.find_kernels(torch.zeros(1, dtype=torch.bfloat16))
    assert kernels is not None
    product = trials.tower_product(kernels, 64, 96, "none", lambda x: x)
    other_machine = msgspec.structs.replace(kernels.key, processor="another")
    write_record(cache, kernels.key, {product: Option("vector")})
    write_record(cache, other_machine, {product: Option("torch")})
    assert check(kernels=True) == 0
    printed = capsys.readouterr().out
    assert "tower product 64 x 96 none" in printed
    assert "chosen: vector" in printed
    assert "another" not in printed


def test_measuring_takes_at_most_half_a_second_of_a_start() -> None:
    """An engine has a decoder and a tower."""
    assert 2 * measuring.BUDGET_S <= 0.5
