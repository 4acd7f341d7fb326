"""From what a client sent to what goes on the bus. Pure.

Sampling parameters are a plain mapping of those that were given: they win over the model's
configured defaults, even where they are equal to everybody's defaults.
"""

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shared.errors import InvalidRequest
from shared.protocol.messages import GenerateRequest
from shared.protocol.sampling import MAX_SEED
from workers.gateway.schemas.openai_request import (
    CommonRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    TokenIds,
)

MAX_PROMPTS = 64

_SAME = (
    *("n", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)


class SubmitPlan(Struct, frozen=True):
    """A request to the bus, or several that make one answer together."""

    requests: list[GenerateRequest]
    sampling: dict[str, Any]
    options: dict[str, Any]
    """For the JobRecord: what the answer's shape depends on."""


def sampling_of(asked: CommonRequest) -> dict[str, Any]:
    """What was given, but for log probabilities, by the names of SamplingParams."""
    values = ((name, getattr(asked, name)) for name in _SAME)
    given = {name: value for name, value in values if value is not None}
    if asked.seed is not None:
        given["seed"] = asked.seed & MAX_SEED
    if asked.top_k is not None:
        given["top_k"] = max(0, asked.top_k)
    if asked.stop is not None:
        given["stop"] = [asked.stop] if isinstance(asked.stop, str) else asked.stop
    structure = structure_of(asked)
    if structure is not None:
        given["structured_outputs"] = structure[1]
    return given


STRUCTURE_FIELD = "sampling_params.structured_outputs"


def client_fields_of(asked: CommonRequest) -> dict[str, str]:
    """The client's names of the fields that go on the bus, see `core.field_names`."""
    structure = structure_of(asked)
    return {} if structure is None else {STRUCTURE_FIELD: structure[0]}


def structure_of(asked: CommonRequest) -> tuple[str, dict[str, Any]] | None:
    """By its field, as the mapping of a StructuredOutputs. Raises InvalidRequest for several."""
    found = [*_from_format(asked), *_from_structure(asked), *_from_guided(asked)]
    if len(found) > 1:
        fields = ", ".join(field for field, _ in found)
        raise InvalidRequest(
            f"give one of {fields}: an answer has one structure", field=found[1][0]
        )
    return found[0] if found else None


Found = Iterable[tuple[str, dict[str, Any]]]


def _from_format(asked: CommonRequest) -> Found:
    match asked.response_format:
        case JsonObjectFormat():
            yield "response_format", {"json_object": True}
        case JsonSchemaFormat(json_schema=named):
            schema = named.schema
            yield (
                "response_format",
                {"json_object": True} if schema is None else {"json_schema": schema},
            )


def _from_structure(asked: CommonRequest) -> Found:
    given = asked.structured_outputs
    if given is None:
        return
    if given.json is not None:
        yield "structured_outputs.json", _schema(given.json, "structured_outputs.json")
    if given.json_object:
        yield "structured_outputs.json_object", {"json_object": True}
    for name in ("regex", "choice", "grammar"):
        value = getattr(given, name)
        if value is not None:
            yield f"structured_outputs.{name}", {name: value}


def _from_guided(asked: CommonRequest) -> Found:
    if asked.guided_json is not None:
        yield "guided_json", _schema(asked.guided_json, "guided_json")
    for name in ("regex", "choice", "grammar"):
        value = getattr(asked, f"guided_{name}")
        if value is not None:
            yield f"guided_{name}", {name: value}


def _schema(given: dict[str, Any] | str, field: str) -> dict[str, Any]:
    if isinstance(given, dict):
        return {"json_schema": given}
    try:
        schema = json.loads(given)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} is not a JSON schema", field=field)
    return {"json_schema": schema}


def lane_of(asked: CommonRequest) -> Literal["interactive", "batch"]:
    return "batch" if (asked.priority or 0) > 0 else "interactive"


def usage_options(asked: CommonRequest) -> dict[str, Any]:
    """Raises InvalidRequest for options of a stream that is none."""
    options = asked.stream_options
    if options is None:
        return {}
    if not asked.stream:
        raise InvalidRequest("stream_options go with stream alone", field="stream_options")
    continuous = bool(options.continuous_usage_stats)
    return {"include_usage": bool(options.include_usage), "continuous_usage": continuous}


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """Raises InvalidRequest for what is no prompt, and no list of prompts."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    for kind in (TokenIds, list[str], list[TokenIds]):
        try:
            found: Any = msgspec.convert(given, kind)
        except msgspec.ValidationError:
            continue
        prompts = [found] if kind is TokenIds else found
        if 0 < len(prompts) <= MAX_PROMPTS:
            return prompts
    raise InvalidRequest(
        f"prompt must be text, token ids, or 1 to {MAX_PROMPTS} of either", field="prompt"
    )
