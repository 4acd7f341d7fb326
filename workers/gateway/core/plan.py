"""Requests to the bus, made from OpenAI request bodies. Pure.

Sampling parameters are a mapping that has only the client's parameters. They override the model's
configured defaults, even where they are equal to the defaults of SamplingParams.
"""

import json
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Any, Generic, NamedTuple, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shared.errors import InvalidRequest
from shared.helpers.closed_schemas import closed
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import MAX_GRAMMAR_BYTES, MAX_SEED
from workers.gateway.core.assembler import AnswerOptions, Options
from workers.gateway.schemas.embeddings import PooledRequest
from workers.gateway.schemas.openai_request import (
    CommonRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    TokenIds,
)
from workers.gateway.schemas.sampling_fields import SAME_FORM

MAX_PROMPTS = 64

_GUIDED = ("json", "regex", "choice", "grammar")


class Delivery(Enum):
    """Form of the response with an answer."""

    WHOLE = auto()
    """One JSON body at the end."""
    EVENTS = auto()
    """Server-sent events."""
    LINES = auto()
    """A line of JSON for each event, without ids."""
    SOUND = auto()
    """The sound alone, as the bytes of a file."""


class UsageOptions(AnswerOptions, frozen=True, kw_only=True):
    """Base class of options of an answer that reports usage in a stream."""

    include_usage: bool | UnsetType = UNSET
    continuous_usage: bool | UnsetType = UNSET

    @property
    def prompt_tokens(self) -> int | UnsetType:
        """Number of prompt tokens, for `continuous_usage`."""
        return UNSET


class SubmitPlan(Struct, Generic[Options], frozen=True):
    """One request to the bus, or several that together make one answer."""

    requests: list[GenerateRequest]
    sampling: dict[str, Any]
    options: Options
    delivery: Delivery = Delivery.WHOLE
    durable: bool = False
    unrecorded: frozenset[str] = frozenset()
    """Options that the stored record leaves out if the request is answered only once: it is not
    durable, and its client has not named it."""


def sampling_of(request: CommonRequest) -> dict[str, Any]:
    """Return the client's sampling parameters, except log probabilities.

    Their names are the fields of SamplingParams.
    """
    values = ((name, getattr(request, name)) for name in SAME_FORM)
    params = {name: value for name, value in values if value is not None}
    if request.seed is not None:
        params["seed"] = request.seed & MAX_SEED
    if request.top_k is not None:
        params["top_k"] = max(0, request.top_k)
    if request.stop is not None:
        params["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    structure = structure_of(request)
    if structure is not None:
        params["structured_outputs"] = structure.outputs
    return params


STRUCTURE_FIELD = "sampling_params.structured_outputs"


def client_fields_of(request: CommonRequest) -> dict[str, str]:
    """Return the client's names of bus fields that depend on this request, see
    `core.field_names`."""
    structure = structure_of(request)
    return {} if structure is None else {STRUCTURE_FIELD: structure.field}


class Constraint(NamedTuple):
    """A constraint on the text of an answer."""

    field: str
    """The field of the body that has it."""
    outputs: dict[str, Any]
    """The constraint as a mapping of StructuredOutputs."""


def structure_of(request: CommonRequest) -> Constraint | None:
    """Return the constraint on the answer. Raises InvalidRequest if there are several."""
    constraints = list(_constraints_of(request))
    if len(constraints) > 1:
        fields = ", ".join(constraint.field for constraint in constraints)
        raise InvalidRequest(f"give only one of {fields}", field=constraints[1].field)
    return constraints[0] if constraints else None


def _constraints_of(request: CommonRequest) -> Iterator[Constraint]:
    match request.response_format:
        case JsonObjectFormat() | JsonSchemaFormat(json_schema=NamedSchema(schema=None)):
            yield Constraint("response_format", {"json_object": True})
        case JsonSchemaFormat(json_schema=NamedSchema(schema=dict(schema), strict=strict)):
            if strict:
                schema = closed(schema, "response_format", strict=True)
            yield Constraint("response_format", {"json_schema": schema})
    guided = {name: getattr(request, f"guided_{name}") for name in _GUIDED}
    outputs = request.structured_outputs
    for prefix, fields in (
        ("structured_outputs.", {} if outputs is None else msgspec.structs.asdict(outputs)),
        ("guided_", guided),
    ):
        for name, value in fields.items():
            if value is not None and value is not False:
                field = f"{prefix}{name}"
                constraint = _schema(value, field) if name == "json" else {name: value}
                yield Constraint(field, constraint)


def _schema(value: dict[str, Any] | str, field: str) -> dict[str, Any]:
    schema: Any = value
    if isinstance(value, str):
        if len(value) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{field} has {len(value)} characters, the limit is {MAX_GRAMMAR_BYTES}",
                field=field,
            )
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError):
            schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} is not a JSON schema", field=field)
    return {"json_schema": schema}


def is_batch(request: CommonRequest | PooledRequest) -> bool:
    """Return whether a request is for the batch lane."""
    is_flex = isinstance(request, CommonRequest) and request.service_tier == "flex"
    return is_flex or (request.priority or 0) > 0


def generate_request(request: CommonRequest | PooledRequest, **prompt: Any) -> GenerateRequest:
    """Return the request for the bus. `prompt` are its fields for the prompt, which depend on the
    endpoint."""
    return GenerateRequest(
        model=request.model,
        cache_salt=request.cache_salt,
        prompt_cache_key=request.prompt_cache_key if isinstance(request, CommonRequest) else None,
        lane="batch" if is_batch(request) else "interactive",
        timeout_s=request.timeout_s,
        adapter=request.adapter,
        **{"add_special_tokens": request.add_special_tokens} | prompt,
    )


def plan_of(
    request: CommonRequest,
    requests: list[GenerateRequest],
    sampling: dict[str, Any],
    options: Options,
) -> SubmitPlan[Options]:
    """Return the plan of a request. Its fields `stream` and `durable` decide the delivery."""
    return SubmitPlan(
        requests,
        sampling,
        options,
        delivery=Delivery.EVENTS if request.stream else Delivery.WHOLE,
        durable=bool(request.durable),
    )


class UsageFields(TypedDict, total=False):
    """Fields of UsageOptions."""

    include_usage: bool
    continuous_usage: bool


def usage_options(request: CommonRequest) -> UsageFields:
    """Return the options for usage in a stream. Raises InvalidRequest for stream options without a
    stream."""
    options = request.stream_options
    if options is None:
        return {}
    if not request.stream:
        raise InvalidRequest("stream_options require stream", field="stream_options")
    continuous = bool(options.continuous_usage_stats)
    return {"include_usage": bool(options.include_usage), "continuous_usage": continuous}


def prompts_of(value: Any, field: str, limit: int) -> list[str] | list[list[int]]:
    """Return the prompts. Raises InvalidRequest for a value that is neither a prompt nor a list."""
    if isinstance(value, str):
        return [value]
    for kind in (TokenIds, list[str], list[TokenIds]):
        try:
            converted: Any = msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
        prompts = [converted] if kind is TokenIds else converted
        if 0 < len(prompts) <= limit:
            return prompts
    raise InvalidRequest(f"{field} must be text, token ids, or 1 to {limit} of either", field=field)


def check_choice(field: str, value: str, available: Iterable[str]) -> None:
    """Raise InvalidRequest, with the available values, for any other value."""
    if value not in available:
        choices = ", ".join(available) or "none"
        raise InvalidRequest(
            f"{field}: {value!r} is not available; available: {choices}", field=field
        )
