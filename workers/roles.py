"""Registry of the roles of workers, for the command line, readiness and the web page.

A module that adds a role calls `register` when it is imported, before the command line runs.
"""

from dataclasses import dataclass, replace
from itertools import chain

from shared.config.schema import Config, DeviceConfig, EngineConfig, with_devices_of
from shared.errors import ConfigError
from shared.gpu.devices import DeviceNeeds
from shared.protocol.pipeline import StageSpec
from shared.stage.pipelines import ENGINE, pipelines_of


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A kind of worker."""

    name: str
    module: str
    """The module whose `main(context)` runs a worker."""
    title: str
    """Display name, as on the web page."""
    does: str
    """A few words on the work that its workers do for a request."""
    serves_stages: bool = True
    """Whether stages of a pipeline may name this role."""
    one_model: bool = True
    """Whether a worker serves one model, not all."""
    uses_torch: bool = True
    """Whether every worker computes with torch. Otherwise workers start without it."""
    may_load_torch: bool = False
    """Whether a worker that starts without torch loads it for some models."""
    min_workers: int = 0
    """Workers that a pool of this role always needs."""
    has_blobs: bool = False
    """Whether its workers serve blobs."""
    section: str = ""
    """Section of the configuration that its workers read, by default the one of the same name."""

    @property
    def can_be_forked(self) -> bool:
        """Whether its workers are forked from a process that has imported torch, if there is one.

        A fork shares that process's memory, and saves the four seconds of processor time that an
        import of torch takes.
        """
        return self.uses_torch or self.may_load_torch


AGENT = "agent"
AUTOSCALER = "autoscaler"
BATCHER = "batcher"
GATEWAY = "gateway"
POOL = "pool"

_ROLES: dict[str, RoleSpec] = {}


def register(spec: RoleSpec) -> None:
    """Add a role. Raises ValueError for a name that is taken."""
    if spec.name in _ROLES:
        raise ValueError(f"role {spec.name!r} is registered already")
    _ROLES[spec.name] = spec


def all_roles() -> list[RoleSpec]:
    """Return all roles, in the order in which a request reaches them."""
    return list(_ROLES.values())


def role_of(name: str) -> RoleSpec:
    """Return the role of this name. Raises KeyError if it is not registered."""
    return _ROLES[name]


def stage_roles() -> list[str]:
    """Return the names of the roles that serve stages."""
    return [spec.name for spec in _ROLES.values() if spec.serves_stages]


for _spec in (
    RoleSpec(
        "coordinator",
        "workers.coordinator.worker",
        "Coordinator",
        "admits the request and plans its stages",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
    RoleSpec(
        "renderer",
        "workers.renderer.worker",
        "Renderer",
        "turns text and images into tokens",
        one_model=False,
        uses_torch=False,
        # The gateway calls renderers directly, without a queue that could hold the call.
        min_workers=1,
        has_blobs=True,
    ),
    RoleSpec(
        "encoder",
        "workers.encoder.worker",
        "Encoder",
        "turns images into embeddings",
        has_blobs=True,
    ),
    RoleSpec(
        "prefill",
        "workers.engine.prefill",
        "Prefill",
        "computes long prompts",
        section="engine",
        has_blobs=True,
    ),
    RoleSpec("engine", "workers.engine.main", "Engine", "writes the answer", has_blobs=True),
    RoleSpec(
        "generator",
        "workers.generator.main",
        "Generator",
        "turns codes into sound, and text into images",
        # The one vocoder that there is computes with numpy; a stage that paints loads torch itself.
        uses_torch=False,
        may_load_torch=True,
        has_blobs=True,
    ),
    RoleSpec(
        AGENT,
        "workers.agent.worker",
        "Agent",
        "carries out responses, and calls tools",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
    RoleSpec(
        BATCHER,
        "workers.gateway.batcher",
        "Batcher",
        "runs the lines of batches",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
    RoleSpec(
        AUTOSCALER,
        "workers.autoscaler.worker",
        "Autoscaler",
        "plans the workers of pools",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
    RoleSpec(
        POOL,
        "workers.supervisor.pool",
        "Pool",
        "starts and stops workers in its container",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
    RoleSpec(
        GATEWAY,
        "workers.gateway.worker",
        "Gateway",
        "speaks HTTP",
        serves_stages=False,
        one_model=False,
        uses_torch=False,
    ),
):
    register(_spec)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Worker process to start: its role, and the model and stage that it serves."""

    role: str
    model: str | None = None
    stage: str | None = None
    pool: str | None = None
    """Pool of the model's engines, in a configuration that has several."""
    device: str | None = None
    """UUIDs of the GPUs that the worker computes on, with commas, once it has places there."""


def worker_of(model: str, stage: StageSpec) -> WorkerSpec:
    """Return the worker that serves a stage of a model's pipeline."""
    name = None if stage.name == stage.role else stage.name
    return WorkerSpec(stage.role, model if role_of(stage.role).one_model else None, name)


def device_settings(config: Config, worker: WorkerSpec) -> tuple[str, DeviceConfig] | None:
    """Return the section of a worker's devices with its key, or None for a role without devices."""
    if worker.pool is not None and worker.model is not None:
        pool = config.models[worker.model].pools[worker.pool]
        return f"models.{worker.model}.pools.{worker.pool}", pool
    key = section_of(worker.role)
    section = getattr(config, key, None)
    name, stage = worker.stage or worker.role, None
    if worker.model in config.models:
        stage = config.models[worker.model].stages.get(name)
    if not isinstance(section, DeviceConfig):
        return None
    if stage is not None and stage.device is not None:
        return f"models.{worker.model}.stages.{name}", with_devices_of(stage, section)
    return key, section


def section_of(role: str) -> str:
    """Return the key of the section that workers of a role read."""
    return role_of(role).section or role


def device_needs(config: Config, worker: WorkerSpec) -> DeviceNeeds | None:
    """Return the part of its GPUs that a worker takes, or None if it computes on the processor."""
    settings = device_settings(config, worker)
    if settings is None or settings[1].device == "cpu":
        return None
    key, section = settings
    num_devices = section.tensor_parallel if isinstance(section, EngineConfig) else 1
    return DeviceNeeds(key, tuple(section.devices), section.gpu_memory, num_devices)


def check_stage_devices(config: Config) -> None:
    """Raise ConfigError if a stage has a device, and its role has none."""
    for name, pipeline in pipelines_of(config).items():
        for stage in pipeline.stages:
            changes = config.models[name].stages.get(stage.name)
            section = getattr(config, section_of(stage.role), None)
            has_device = changes is not None and changes.device is not None
            if has_device and not isinstance(section, DeviceConfig):
                key = f"models.{name}.stages.{stage.name}.device"
                reason = f"workers of the role {stage.role} compute on the processor alone"
                raise ConfigError(f"{key}: {reason}", field=key)


def _replicas_of(config: Config, model: str, stage: StageSpec) -> dict[WorkerSpec, int]:
    """Return the workers of a stage with their numbers: of each pool, if there are pools."""
    spec, pools = worker_of(model, stage), config.models[model].pools
    if not pools or stage.name != ENGINE:
        return {spec: stage.replicas}
    return {replace(spec, pool=name): pool.replicas for name, pool in pools.items()}


def default_workers(config: Config) -> list[WorkerSpec]:
    """Return the workers of `pagemill up`: a coordinator, and the workers of all stages."""
    num_workers: dict[WorkerSpec, int] = {}
    for model, pipeline in pipelines_of(config).items():
        for stage in pipeline.stages:
            for spec, replicas in _replicas_of(config, model, stage).items():
                needs = device_needs(config, spec)
                num_places = 1
                if needs is not None:
                    num_places = max(1, len(needs.names) // needs.num_devices)
                # Models share workers of such a role, so the largest configured number counts.
                num_workers[spec] = max(num_workers.get(spec, 0), replicas * num_places)
    specs = [[spec] * num for spec, num in num_workers.items()]
    return [WorkerSpec("coordinator"), *chain.from_iterable(specs)]
