"""The pools of a configuration: their names, their workers, and the order of their stages."""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from itertools import product
from zoneinfo import ZoneInfo

import msgspec

from shared.config.schema import Config, PoolConfig
from shared.errors import ConfigError
from shared.protocol.pipeline import REQUEST, Fault, Pipeline, StageSpec
from shared.scaling.pools import PoolSettings, ScalingSettings, pool_name
from shared.stage.pipelines import ENGINE, pipelines_of
from workers.roles import AUTOSCALER, WorkerSpec, all_roles, default_workers, role_of, worker_of

# Limit of Kubernetes for a label. A pod's name has up to 17 characters more than its Deployment's.
MAX_LABEL_LEN = 63
MAX_NAME_LEN = MAX_LABEL_LEN - 17
_NOT_IN_NAMES = re.compile("[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Pool:
    """Group of identical workers. The autoscaler decides their number."""

    name: str
    """Name by `pool_name`, such as `engine/demo`."""
    spec: WorkerSpec
    settings: PoolSettings
    stage: str
    models: tuple[str, ...]
    """The models whose tasks its workers claim."""

    @property
    def deployment(self) -> str:
        """Name of its Deployment on Kubernetes."""
        return deployment_name(self.spec)


@dataclass(frozen=True, slots=True)
class Pools:
    """All pools of a configuration."""

    by_name: Mapping[str, Pool]
    scaling: ScalingSettings
    timezone: tzinfo
    """Time zone of the schedules."""

    def resolve(self, name: str) -> Pool:
        """Return the pool of this name, or of this stage if only one pool serves it.

        Raises ConfigError.
        """
        pools = [p for p in self.by_name.values() if name in (p.name, p.stage)]
        if len(pools) != 1:
            names = ", ".join(self.by_name) or "none; the configuration has no scale.pools"
            raise ConfigError(f"no pool {name!r}; there are: {names}", field="pool")
        return pools[0]


def deployment_name(worker: WorkerSpec) -> str:
    """Return the name of a worker's Deployment: lower-case letters, digits and hyphens.

    Different workers never share a name: a name that is changed or shortened ends with a digest.
    """
    optional = (worker.model, worker.stage, worker.pool)
    parts = [worker.role, *(part for part in optional if part is not None)]
    full = "-".join(parts)
    name = _NOT_IN_NAMES.sub("-", full.lower()).strip("-")
    if name == full and len(name) <= MAX_NAME_LEN:
        return name
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=4).hexdigest()
    return f"{name[: MAX_NAME_LEN - 9].rstrip('-')}-{digest}"


def pools_of(config: Config, source: str = "scale") -> Pools:
    """Return the pools of a configuration.

    Raises ConfigError for the first fault, with `source`, the file's name, and the key.
    """
    pipelines, pools = pipelines_of(config), dict[str, Pool]()
    divided = {name: model.pools for name, model in config.models.items()}
    for number, entry in enumerate(config.scale.pools):
        pool_or_fault = _make(entry, pipelines, pools, divided)
        if isinstance(pool_or_fault, Fault):
            key = f"scale.pools[{number}].{pool_or_fault.key}"
            raise ConfigError(f"{source}: {key}: {pool_or_fault.message}", field=key)
        pools[pool_or_fault.name] = pool_or_fault
    settings = {name: pool.settings for name, pool in pools.items()}
    try:
        # A stage may have an edge for each modality.
        edges = tuple(dict.fromkeys(_edges(pools, pipelines)))
        scaling = ScalingSettings(settings, edges, config.scale.budget)
    except ConfigError as error:
        key = f"scale.{error.field}"
        raise ConfigError(f"{source}: scale.{error.message}", field=key) from error
    return Pools(pools, scaling, _find_timezone(config.scale.timezone, source))


def _find_timezone(name: str, source: str) -> tzinfo:
    """Return a time zone. Raises ConfigError if this machine does not have it."""
    try:
        # UTC needs no database of time zones.
        return UTC if name == "UTC" else ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        message = f"scale.timezone: this machine has no time zone {name!r}"
        raise ConfigError(f"{source}: {message}", field="scale.timezone") from error


def workers_of(config: Config, pools: Pools) -> list[WorkerSpec]:
    """Return the workers that `pagemill up` starts at once, without a gateway.

    Pools begin with their `min`. If there are any, an autoscaler is among the workers.
    """
    scaled = {pool.spec for pool in pools.by_name.values()}
    specs = [spec for spec in default_workers(config) if spec not in scaled]
    for pool in pools.by_name.values():
        specs += [pool.spec] * pool.settings.min
    return [*specs, WorkerSpec(AUTOSCALER)] if scaled else specs


def _make(
    entry: PoolConfig,
    pipelines: Mapping[str, Pipeline],
    pools: Mapping[str, Pool],
    divided: Mapping[str, Collection[str]],
) -> Pool | Fault:
    """Return the pool of an entry. `divided` has the names of the pools of engines by model."""
    roles = {spec.name: spec for spec in all_roles() if spec.serves_stages}
    if (role := roles.get(entry.role)) is None:
        return Fault("role", f"no role {entry.role!r} that serves a stage; there are {_all(roles)}")
    model = entry.model
    if not role.one_model and model is not None:
        return Fault("model", f"a {role.name} serves all models, so its pool names none")
    if model is not None and model not in pipelines:
        return Fault("model", f"no model {model!r} is configured; there are {_all(pipelines)}")
    if role.one_model and model is None:
        if len(pipelines) > 1:
            return Fault("model", f"name one of the configured models: {_all(pipelines)}")
        model = next(iter(pipelines))
    stage = entry.stage or role.name
    served = _stages(pipelines if model is None else {model: pipelines[model]}, stage, role.name)
    if not served:
        of_model = "" if model is None else f" of model {model!r}"
        return Fault("stage", f"no stage {stage!r} of role {role.name!r}{of_model}")
    names = divided.get(model or "", ()) if stage == ENGINE else ()
    if (entry.pool is None) == bool(names) or (names and entry.pool not in names):
        available = _all([*names]) if names else "none"
        return Fault("pool", f"name a pool of models.{model}.pools here; there are: {available}")
    name = pool_name(stage, model, entry.pool)
    if name in pools:
        return Fault("role", f"the pool {name} is listed twice")
    if entry.min < role.min_workers:
        return Fault("min", f"{entry.min} is less than {role.min_workers}, which {role.name} needs")
    settings = msgspec.convert(
        {field: getattr(entry, field) for field in PoolSettings.__struct_fields__}, PoolSettings
    )
    spec = replace(worker_of(*next(iter(served.items()))), pool=entry.pool)
    return Pool(name, spec, settings, stage, tuple(served))


def _stages(pipelines: Mapping[str, Pipeline], name: str, role: str) -> dict[str, StageSpec]:
    """Return the stage of this name and role, by the models that have it."""
    stages = {model: pipeline.stage(name) for model, pipeline in pipelines.items()}
    return {m: stage for m, stage in stages.items() if stage is not None and stage.role == role}


def _edges(
    pools: Mapping[str, Pool], pipelines: Mapping[str, Pipeline]
) -> Iterator[tuple[str, str]]:
    """Yield the edges between pools that serve one model each.

    Tasks that wait for workers of all models wake the pools of their model, see `num_arrived`.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for pool in pools.values():
        for model in pool.models if role_of(pool.spec.role).one_model else ():
            names.setdefault((model, pool.stage), []).append(pool.name)
    for model, pipeline in pipelines.items():
        for edge in pipeline.edges:
            for source, target in (
                (edge.source, edge.target),
                (edge.target, edge.gathered_by or edge.target),
            ):
                if source not in (REQUEST, target):
                    ends = names.get((model, source), ()), names.get((model, target), ())
                    yield from product(*ends)


def _all(names: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(map(repr, names))
