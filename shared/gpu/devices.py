"""GPUs of a machine, and their division among workers. Pure.

A worker takes a share of one device's memory from its start to its end. It gets the device on which
the largest part of the memory is left, so workers spread over the devices.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from rich.filesize import decimal

from shared.config.gpu_memory import GpuMemory, memory_bytes
from shared.errors import ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""Variable that CUDA reads when it is initialised. Its numbers may differ from `nvidia-smi`."""
_PROFILE = re.compile(r"mig-(\d+g\.\d+gb(?:[.+][a-z0-9.+]+)?)")


class Gpu(Struct, frozen=True):
    """A GPU, or an instance of a GPU that is divided by MIG."""

    index: str
    """Number as in `nvidia-smi`; for an instance the numbers of the GPU and of the instance, such
    as `0:1`."""
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    """Free memory when the device was read."""

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


class DeviceNeeds(Struct, frozen=True):
    """Share of a device that a worker takes, and the devices on which it may run."""

    section: str
    """Key of its settings in the configuration, for errors."""
    names: tuple[int | str, ...]
    """Numbers, UUIDs or MIG profiles of devices; any device without them."""
    memory: GpuMemory
    num_devices: int = 1
    """Number of different devices, one for each rank of an engine."""


def find_gpus(names: Sequence[int | str], gpus: Sequence[Gpu], field: str) -> list[Gpu]:
    """Return the devices with these numbers, UUIDs or MIG profiles, or all devices without names.

    Raises ConfigError, with `field`, for a name that no device has.
    """
    return [gpu for name in names for gpu in _find(name, gpus, field)] if names else list(gpus)


def find_profile(name: int | str) -> str | None:
    """Return the profile of a name such as `mig-1g.10gb`, or None for the name of one device."""
    profile = _PROFILE.fullmatch(str(name))
    return None if profile is None else profile[1]


def _find(name: int | str, gpus: Sequence[Gpu], field: str) -> list[Gpu]:
    text, profile = str(name), find_profile(name)
    if profile is None:
        matches = [gpu for gpu in gpus if text in (gpu.index, gpu.uuid)]
    else:
        matches = [gpu for gpu in gpus if gpu.name.endswith(f" MIG {profile}")]
    if matches:
        return matches
    instances = [gpu.index for gpu in gpus if gpu.index.startswith(f"{text}:")]
    if instances:
        reason = f"GPU {text} is divided by MIG, so name its instances: {', '.join(instances)}"
    else:
        available = ", ".join(map(str, gpus)) or "none"
        reason = f"this machine has no device {text}; it has: {available}"
    raise ConfigError(f"{field}: {reason}", field=field)


class Place(NamedTuple):
    """Memory of a device that one worker has taken."""

    gpu: Gpu
    num_bytes: int

    def __str__(self) -> str:
        return f"{decimal(self.num_bytes)} of {self.gpu}"


class DevicePlaces:
    """Memory of the devices of a machine, as far as workers have not taken it."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._taken = dict.fromkeys((gpu.uuid for gpu in gpus), 0)

    def take(self, needs: DeviceNeeds) -> Place:
        """Return a place on the device with the most room. Raises ConfigError if none has room."""
        field = f"{needs.section}.gpu_memory"
        gpus = find_gpus(needs.names, self._gpus, f"{needs.section}.devices")
        if not gpus:
            raise ConfigError(f"{needs.section}.device: this machine has no GPU", field=field)
        gpus.sort(key=lambda gpu: self._taken[gpu.uuid] / gpu.total_bytes)
        places = [Place(gpu, memory_bytes(needs.memory, gpu.total_bytes)) for gpu in gpus]
        for place in places:
            if place.num_bytes <= self._left(place.gpu):
                self._taken[place.gpu.uuid] += place.num_bytes
                return place
        first = places[0]
        raise ConfigError(
            f"{field}: a worker takes {first}, and other workers leave"
            f" {decimal(self._left(first.gpu))}: lower gpu_memory of the workers that share the"
            " device, or name further devices",
            field=field,
        )

    def take_all(self, needs: DeviceNeeds) -> list[Place]:
        """Return a place on each device that a worker needs. Raises ConfigError, as `take`."""
        gpus = find_gpus(needs.names, self._gpus, f"{needs.section}.devices")
        places: list[Place] = []
        try:
            for _ in range(needs.num_devices):
                used = {place.gpu.uuid for place in places}
                names = tuple(gpu.uuid for gpu in gpus if gpu.uuid not in used)
                if used and not names:
                    field = f"{needs.section}.tensor_parallel"
                    raise ConfigError(
                        f"{field}: {needs.num_devices} ranks need a device each, and there are"
                        f" {len(used)}",
                        field=field,
                    )
                places.append(self.take(replace(needs, names=names)))
        except ConfigError:
            for place in places:
                self.give_back(place)
            raise
        return places

    def _left(self, gpu: Gpu) -> int:
        return gpu.total_bytes - self._taken[gpu.uuid]

    def give_back(self, place: Place) -> None:
        """Make the place of a worker that has ended free for others."""
        self._taken[place.gpu.uuid] -= place.num_bytes


def plan_places(
    workers: Sequence[tuple[str, DeviceNeeds]], gpus: Sequence[Gpu]
) -> list[tuple[str, Place]]:
    """Return the places that workers will have if they start in this order, by their titles.

    Raises ConfigError for a worker without a place, and for a device with too little free memory.
    """
    places = DevicePlaces(gpus)
    free = {gpu.uuid: gpu.free_bytes for gpu in gpus}
    planned = []
    steps = ((title, needs, place) for title, needs in workers for place in places.take_all(needs))
    for title, needs, place in steps:
        free[place.gpu.uuid] -= place.num_bytes
        if free[place.gpu.uuid] < 0:
            field = f"{needs.section}.gpu_memory"
            raise ConfigError(
                f"{field}: {title} takes {place}, of which other programs leave"
                f" {decimal(place.gpu.free_bytes)} for all workers: end them, lower gpu_memory, or"
                " name other devices",
                field=field,
            )
        planned.append((title, place))
    return planned
