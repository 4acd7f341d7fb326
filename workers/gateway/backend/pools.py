"""Stages of a model that have no workers."""

from typing import NamedTuple

from workers.gateway.app import AppContext
from workers.roles import role_of


class ModelPools(NamedTuple):
    """State of the stages that a model's requests need."""

    accepts: bool
    """Whether requests are accepted; they may have to wait for a stage without workers."""
    missing: dict[str, str]
    """Message on each stage without workers, such as `no engine` or `engine is starting`, or with
    the reason if its workers refuse their configuration or model."""


async def read_pools(context: AppContext, model: str) -> ModelPools:
    """Raises Unavailable or TimeoutError."""
    heartbeats = await context.heartbeats.read()
    serving = {
        beat.stage or beat.role
        for beat in heartbeats
        if model in beat.models and not beat.load.get("refused")
    }
    roles = {stage.name: stage.role for stage in context.pipelines[model].stages}
    required = {"coordinator": "coordinator"} | {
        stage: roles[stage] for stage in context.pipelines[model].required_stages
    }
    missing = [stage for stage in required if stage not in serving]
    if not missing:
        return ModelPools(True, {})
    reports = await context.start_reports.read()
    starting = {report.stage or report.role for report in reports if report.model in ("", model)}
    refusals = await context.refusals.read()
    refused = {r.stage: r.refused for r in refusals if r.model == model and not r.pid}
    return ModelPools(
        all(_may_be_empty(required[stage]) for stage in missing),
        {stage: _state_of(stage, stage in starting, refused.get(stage)) for stage in missing},
    )


def _state_of(stage: str, is_starting: bool, refused: str | None) -> str:
    if refused is not None:
        return f"no {stage}: {refused}"
    return f"{stage} is starting" if is_starting else f"no {stage}"


def _may_be_empty(role: str) -> bool:
    """Return whether requests are accepted while no worker of this role runs.

    They wait in its queue, and a queue that is not empty lets its pool grow. Coordinators and
    renderers are always needed, because gateways query them directly.
    """
    return role_of(role).one_model
