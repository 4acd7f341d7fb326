"""Division of the devices of a machine among workers."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.config.gpu_memory import GpuMemory, fault_of_memory, memory_bytes
from shared.errors import ConfigError
from shared.gpu.devices import (
    DeviceNeeds,
    DevicePlaces,
    Gpu,
    Place,
    find_gpus,
    find_profile,
    plan_places,
)

GIB = 2**30
FIRST = Gpu("0", "GPU-aaaa", "NVIDIA H100", 80 * GIB, 79 * GIB)
SECOND = Gpu("1", "GPU-bbbb", "NVIDIA H100", 80 * GIB, 20 * GIB)
LARGE = Gpu("2:0", "MIG-1111", "NVIDIA A100 MIG 2g.10gb", 10 * GIB, 10 * GIB)
SMALL = [
    Gpu("2:1", "MIG-2222", "NVIDIA A100 MIG 1g.5gb", 5 * GIB, 5 * GIB),
    Gpu("2:2", "MIG-3333", "NVIDIA A100 MIG 1g.5gb", 5 * GIB, 5 * GIB),
]
ALL = [FIRST, SECOND, LARGE, *SMALL]


def needs(memory: GpuMemory = 0.9, *names: int | str) -> DeviceNeeds:
    return DeviceNeeds("engine", names, memory)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], ALL),
        ([1, "GPU-aaaa"], [SECOND, FIRST]),
        (["MIG-1111", "2:1"], [LARGE, SMALL[0]]),
        (["mig-1g.5gb"], SMALL),
    ],
)
def test_devices_are_named_by_number_uuid_or_profile(
    names: Sequence[int | str], found: list[Gpu]
) -> None:
    assert find_gpus(names, ALL, "engine.devices") == found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (3, r"no device 3; it has: GPU 0 \(NVIDIA H100, GPU-aaaa\), GPU 1 .*, GPU 2:2 "),
        (2, "GPU 2 is divided by MIG, so name its instances: 2:0, 2:1, 2:2"),
        ("mig-7g.40gb", "no device mig-7g.40gb"),
    ],
)
def test_an_unknown_device_is_refused_with_the_known_ones(name: int | str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^engine.devices: .*{reason}"):
        find_gpus([name], ALL, "engine.devices")


def test_profiles_are_told_from_uuids() -> None:
    profiles = ["1g.10gb", "1g.10gb.me", "1g.10gb+gfx"]
    assert [find_profile(f"mig-{profile}") for profile in profiles] == profiles
    assert find_profile("MIG-1111") is find_profile(0) is None


def test_workers_spread_and_keep_their_places_until_they_end() -> None:
    places = DevicePlaces([FIRST, SECOND])
    first, second = places.take(needs(0.9)), places.take(needs(0.9))
    assert [first.gpu, second.gpu] == [FIRST, SECOND]
    with pytest.raises(ConfigError, match=r"takes 77.3 GB of GPU 0 .* leave 8.6 GB: lower"):
        places.take(needs(0.9))
    places.give_back(second)
    assert places.take(needs(0.9)).gpu == SECOND


def test_parts_of_one_device_add_up() -> None:
    places = DevicePlaces([FIRST])
    assert [places.take(needs(memory)).num_bytes for memory in (0.5, "20 GiB", 0.25)] == [
        40 * GIB, 20 * GIB, 20 * GIB
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="leave 0 bytes"):
        places.take(needs("1 MiB"))


def test_a_plan_names_the_worker_that_finds_too_little_free_memory() -> None:
    assert plan_places([("encoder", needs("4 GiB", 1)), ("engine", needs(0.2, 1))], ALL)
    with pytest.raises(ConfigError, match=r"gpu_memory: engine takes 25.8 GB of GPU 1 .* 21.5 GB"):
        plan_places([("encoder", needs("4 GiB", 1)), ("engine", needs(0.3, 1))], ALL)


def test_a_machine_without_devices_refuses_workers_on_them() -> None:
    with pytest.raises(ConfigError, match=r"^engine.device: this machine has no GPU"):
        plan_places([("engine", needs())], [])


@example([("7 GiB", True)] * 13)
@given(st.lists(st.tuples(st.sampled_from([0.2, 0.45, 0.9, "7 GiB"]), st.booleans()), max_size=24))
def test_no_device_ever_holds_more_than_it_has(steps: list[tuple[GpuMemory, bool]]) -> None:
    places = DevicePlaces([FIRST, LARGE])
    held: list[Place] = []
    for memory, starts in steps:
        if not starts and held:
            places.give_back(held.pop())
            continue
        try:
            held.append(places.take(needs(memory)))
        except ConfigError:
            # It is only refused where no device has room.
            for gpu in (FIRST, LARGE):
                num_bytes = memory_bytes(memory, gpu.total_bytes)
                assert sum(p.num_bytes for p in held if p.gpu is gpu) + num_bytes > gpu.total_bytes
        for gpu in (FIRST, LARGE):
            assert sum(p.num_bytes for p in held if p.gpu is gpu) <= gpu.total_bytes


@pytest.mark.parametrize("value", [0.0, 1.5, -1, "0 GiB", "20", "20 TB", "GiB", "1e3 MB"])
def test_a_part_of_memory_is_a_share_or_a_size(value: GpuMemory) -> None:
    assert fault_of_memory(value) == (
        f"{value!r} is neither a share above 0 and up to 1 nor a size such as '20 GiB'"
    )


def test_sizes_have_decimal_and_binary_units() -> None:
    assert fault_of_memory("1.5 GB") is fault_of_memory("20GiB") is fault_of_memory(1.0) is None
    assert [memory_bytes(value, 80 * GIB) for value in ("1.5 GB", "20GiB", 1.0)] == [
        1_500_000_000, 20 * GIB, 80 * GIB
    ]  # fmt: skip


def test_each_rank_gets_a_device_or_none_does() -> None:
    places = DevicePlaces([FIRST, SECOND])
    pair = DeviceNeeds("engine", (), 0.5, num_devices=2)
    assert {place.gpu for place in places.take_all(pair)} == {FIRST, SECOND}
    with pytest.raises(ConfigError, match="3 ranks need a device each, and there are 2"):
        places.take_all(DeviceNeeds("engine", (), 0.5, num_devices=3))
    second = places.take_all(pair)
    with pytest.raises(ConfigError, match="a worker takes"):
        places.take_all(pair)
    for place in second:
        places.give_back(place)
    assert len(places.take_all(pair)) == 2
