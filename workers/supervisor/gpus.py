"""Places of local workers on the GPUs of this machine."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shared.config.schema import Config
from shared.errors import ConfigError, Unavailable
from shared.gpu.devices import DevicePlaces, Gpu, Place, plan_places
from shared.gpu.nvml import read_gpus
from workers.pools import pools_of, workers_of
from workers.roles import WorkerSpec, device_needs
from workers.supervisor.start import titles_of


class WorkerPlaces:
    """Gives each worker that computes on GPUs a part of each; a `Places` of the supervisor."""

    def __init__(self, config: Config, gpus: Sequence[Gpu]) -> None:
        self._config = config
        self._places = DevicePlaces(gpus)

    @contextlib.contextmanager
    def __call__(self, worker: WorkerSpec) -> Iterator[WorkerSpec]:
        """Hold the places of a worker. Raises ConfigError if no device has room for it."""
        if (needs := device_needs(self._config, worker)) is None:
            yield worker
            return
        places = self._places.take_all(needs)
        try:
            yield replace(worker, device=",".join(place.gpu.uuid for place in places))
        finally:
            for place in places:
                self._places.give_back(place)


def read_needed_gpus(config: Config, workers: Sequence[WorkerSpec]) -> list[Gpu]:
    """Return the GPUs of this machine, or none if all workers compute on the processor.

    Raises ConfigError if a worker needs a GPU and the driver reports none.
    """
    needs = (device_needs(config, worker) for worker in workers)
    if (first := next((need for need in needs if need is not None), None)) is None:
        return []
    try:
        return read_gpus()
    except Unavailable as error:
        field = f"{first.section}.device"
        raise ConfigError(f"{field}: {error.message}", field=field) from error


def plan_gpus(
    config: Config, workers: Sequence[WorkerSpec], gpus: Sequence[Gpu]
) -> list[tuple[str, Place]]:
    """Return the titles and places of workers on GPUs. Raises ConfigError, see `plan_places`."""
    needs = [device_needs(config, worker) for worker in workers]
    titled = zip(titles_of(workers), needs, strict=True)
    return plan_places([(title, need) for title, need in titled if need is not None], gpus)


def describe_gpus(config: Config) -> list[str]:
    """Return a line about the place of each worker on a GPU of this machine.

    A machine without a driver may check the configuration of others, and gets one line.
    Raises ConfigError for a plan that does not fit.
    """
    workers = workers_of(config, pools_of(config))
    if all(device_needs(config, worker) is None for worker in workers):
        return []
    try:
        gpus = read_gpus()
    except (ConfigError, Unavailable) as error:
        return [f"GPUs were not checked: {error.message}"]
    return [f"{title}: {place}" for title, place in plan_gpus(config, workers, gpus)]
