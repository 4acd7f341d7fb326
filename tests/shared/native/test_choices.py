"""The choice among implementations as a function of recorded times."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.native import choices
from shared.native.choices import (
    DECODE_ROWS,
    ENOUGH_ROUNDS,
    MARGIN,
    MIN_ROUNDS,
    NEVER,
    Implementation,
    Measurement,
    Operation,
    Option,
    Times,
)

DECODER = choices.decoder_product(576, 960, has_tiles=True)
TOWER = choices.tower_operation("product 384 x 1536 gelu", [256], has_tiles=True)
ATTENTION = choices.tower_operation("attention 6 x 64", [64, 512], has_tiles=False)
operations = st.sampled_from([DECODER, TOWER, ATTENTION])

# Microseconds of two products of SmolLM2-135M on two cores of an Intel Xeon with AMX. Vectors took
# 137 and 274 for 8 rows, tiles 30 and 111 for 9. The other rows follow from the shape of the
# curves: beyond what reading the weights takes, vectors grow with the rows; tiles do not, up to 16.
AMX_QKV: Times = {
    "vector": {1: 28e-6, 2: 38e-6, 4: 70e-6, 8: 137e-6, 16: 270e-6, 32: 540e-6},
    "tiles": {1: 30e-6, 2: 30e-6, 4: 30e-6, 8: 30e-6, 16: 31e-6, 32: 44e-6},
}
AMX_GATE_UP: Times = {
    "vector": {1: 98e-6, 2: 100e-6, 4: 146e-6, 8: 274e-6, 16: 548e-6, 32: 1096e-6},
    "tiles": {1: 111e-6, 2: 111e-6, 4: 111e-6, 8: 111e-6, 16: 111e-6, 32: 150e-6},
}


@st.composite
def times_of(draw: st.DrawFn, operation: Operation) -> Times:
    seconds = st.floats(1e-6, 1.0)
    return {
        implementation: {rows: draw(seconds) for rows in operation.rows}
        for implementation in operation.implementations
    }


def disturb(data: st.DataObject, times: Times, most: float) -> Times:
    """Multiply each time by a separate factor, at most `most` or its inverse."""
    factor = st.floats(1 / most, most)
    return {
        implementation: {rows: s * data.draw(factor) for rows, s in by_rows.items()}
        for implementation, by_rows in times.items()
    }


def cost(operation: Operation, times: Times, option: Option) -> float:
    """Largest ratio of an option's time to the time of the fastest implementation."""
    fastest = {rows: min(by_rows[rows] for by_rows in times.values()) for rows in operation.rows}
    return max(times[option.at(rows)][rows] / fastest[rows] for rows in operation.rows)


@pytest.mark.parametrize(("times", "rows"), [(AMX_QKV, 2), (AMX_GATE_UP, 4)])
def test_recorded_times_with_a_matrix_extension(times: Times, rows: int) -> None:
    """Tiles from 9 rows on, the former constant, would take three and two times as long at 8."""
    measurement = choices.update(DECODER, None, [times] * MIN_ROUNDS)
    assert measurement.option == Option("tiles", rows)
    assert measurement.option.min_tile_rows == rows


def test_recorded_times_of_a_processor_without_tiles() -> None:
    """They are of an AMD EPYC whose two cores had four times as much to do."""
    product = choices.tower_operation("product 1280 x 5120 quick_gelu", [256], has_tiles=False)
    times: Times = {"vector": {256: 792.6e-6}, "torch": {256: 862.2e-6}}
    assert choices.choose(product, times, Option("vector")) == Option("vector")
    assert choices.choose(product, times, Option("torch")) == Option("torch")
    times = {"vector": {256: 1156.0e-6}, "torch": {256: 912.1e-6}}
    assert choices.choose(product, times, Option("vector")) == Option("torch")
    attention = choices.tower_operation("attention 16 x 80", [64, 512], has_tiles=False)
    times = {"vector": {64: 256e-6, 512: 11967e-6}, "torch": {64: 362e-6, 512: 39181e-6}}
    assert choices.choose(attention, times, Option("torch")) == Option("vector")
    assert choices.decoder_product(576, 960, has_tiles=False).options == (Option("vector"),)


@given(st.data(), operations)
def test_the_choice_is_slower_than_the_best_by_the_margin_at_most(
    data: st.DataObject, operation: Operation
) -> None:
    times = data.draw(times_of(operation))
    current = data.draw(st.sampled_from(operation.options))
    chosen = choices.choose(operation, times, current)
    best = min(cost(operation, times, option) for option in operation.options)
    assert cost(operation, times, chosen) <= MARGIN * best * (1 + 1e-9)
    assert choices.choose(operation, times, chosen) == chosen


@given(st.data(), operations, st.floats(0.01, 100))
def test_a_machine_that_is_slower_at_everything_chooses_the_same(
    data: st.DataObject, operation: Operation, factor: float
) -> None:
    times = data.draw(times_of(operation))
    slower: Times = {
        name: {rows: s * factor for rows, s in by_rows.items()} for name, by_rows in times.items()
    }
    chosen, elsewhere = (
        choices.choose(operation, measured, operation.options[0]) for measured in (times, slower)
    )
    # Rounding may decide between options at the margin.
    ratio = cost(operation, times, chosen) / cost(operation, times, elsewhere)
    assert 1 / MARGIN - 1e-6 < ratio < MARGIN + 1e-6


@given(st.data(), operations)
def test_noise_within_the_margin_brings_no_option_back(
    data: st.DataObject, operation: Operation
) -> None:
    """A replaced option is really slower, so choices never repeat in circles."""
    truth = data.draw(times_of(operation))
    option = data.draw(st.sampled_from(operation.options))
    options = [option]
    for _ in range(6):
        noisy = disturb(data, truth, MARGIN**0.249)
        option = choices.choose(operation, noisy, option)
        if option != options[-1]:
            options.append(option)
    assert len(set(options)) == len(options)


@given(st.data(), operations)
def test_interrupted_rounds_change_nothing_when_others_are_undisturbed(
    data: st.DataObject, operation: Operation
) -> None:
    quiet = data.draw(times_of(operation))
    busy = [
        {
            name: {rows: s * data.draw(st.floats(1, 50)) for rows, s in by_rows.items()}
            for name, by_rows in quiet.items()
        }
        for _ in range(ENOUGH_ROUNDS)
    ]
    rounds = data.draw(st.permutations([quiet, *busy]))
    disturbed = choices.update(operation, None, rounds)
    assert disturbed.least_s == quiet
    assert disturbed.option == choices.update(operation, None, [quiet] * MIN_ROUNDS).option


@given(st.data(), operations)
def test_rounds_of_several_starts_count_together(data: st.DataObject, operation: Operation) -> None:
    rounds = [data.draw(times_of(operation)) for _ in range(MIN_ROUNDS)]
    measurement: Measurement | None = None
    for times in rounds:
        assert not choices.is_enough(operation, measurement)
        assert measurement is None or measurement.option == operation.options[0]
        measurement = choices.update(operation, measurement, [times])
    assert measurement == choices.update(operation, None, rounds)
    more = choices.update(operation, measurement, rounds * 2)
    assert choices.is_enough(operation, more)


def test_a_measurement_of_other_options_does_not_count() -> None:
    rounds: list[Times] = [{"vector": {256: 1.0}, "torch": {256: 0.5}}] * ENOUGH_ROUNDS
    without_tiles = choices.tower_operation("product", [256], has_tiles=False)
    measurement = choices.update(without_tiles, None, rounds)
    assert choices.is_enough(without_tiles, measurement)
    with_tiles = choices.tower_operation("product", [256], has_tiles=True)
    assert not choices.is_enough(with_tiles, measurement)
    broken = Measurement(
        {**measurement.least_s, "torch": {256: 0.0}}, measurement.num_rounds, measurement.option
    )
    assert not choices.is_enough(without_tiles, broken)


@pytest.mark.parametrize("operation", [DECODER, TOWER, ATTENTION])
@pytest.mark.parametrize("setting", ["vector", "tiles", "torch"])
def test_a_configuration_decides_without_a_measurement(
    operation: Operation, setting: Implementation
) -> None:
    has_it = setting in operation.implementations
    expected = Option(setting) if has_it else Option("vector")
    assert choices.force(operation, setting) == expected


def test_below_their_limit_options_use_vectors() -> None:
    for option, rows in itertools.product(DECODER.options, DECODE_ROWS):
        uses_tiles = rows >= option.min_tile_rows
        assert option.at(rows) == ("tiles" if uses_tiles else "vector")
    assert Option("torch").min_tile_rows == NEVER
    assert str(Option("tiles", 4)) == "tiles from 4 rows"
