"""Parser of the body of `/inference/v1/generate`. Pure.

The checks have the order of vLLM's checks: the types of the fields, the sampling parameters, then
the combination of all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.generate import FeaturesInfo, PlaceholderInfo, RenderedRequest
from workers.gateway.vllm.errors import body_error
from workers.gateway.vllm.features import WireItem, check_features, items_of
from workers.gateway.vllm.generate_assembler import GenerateShape
from workers.gateway.vllm.sampling import read_sampling

MAX_SALT_LEN = 128
_FORBIDDEN_IN_SALT = frozenset("@/\\\x00")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    body: RenderedRequest
    sampling: dict[str, Any]
    """Every parameter, see `vllm.sampling.read_sampling`."""
    items: list[WireItem]


def parse(body: RenderedRequest) -> ParsedRequest:
    """Raises a RequestError with the name of the parameter, or with `body.` and its path."""
    _check_salt(body.cache_salt)
    if not body.token_ids:
        raise body_error("token_ids", "token_ids: must have at least 1 item")
    if min(body.token_ids) < 0:
        raise body_error("token_ids", "token_ids: must be at least 0")
    if body.features is not None:
        check_features(body.features)
    sampling = read_sampling(body.sampling_params)
    _check_combination(body, sampling)
    return ParsedRequest(body, sampling, [] if body.features is None else items_of(body.features))


def shape_of(parsed: ParsedRequest, wire_id: str) -> GenerateShape:
    body, sampling = parsed.body, parsed.sampling
    options = body.stream_options
    usage = bool(body.stream and options is not None and options.include_usage)
    shows_ids = bool(body.return_token_ids) or sampling["prompt_logprobs"] is not None
    return GenerateShape(
        wire_id=wire_id,
        num_prompt_tokens=len(body.token_ids),
        n=sampling["n"],
        output_mode=body.output_mode,
        logprobs=sampling["logprobs"],
        prompt_token_ids=body.token_ids if shows_ids else [],
        return_token_ids=bool(body.return_token_ids),
        placeholders=_places_of(parsed.items) if body.return_token_ids else {},
        stream=bool(body.stream),
        include_usage=usage,
        continuous_usage=bool(usage and options and options.continuous_usage_stats),
    )


def _places_of(items: Sequence[WireItem]) -> dict[str, list[PlaceholderInfo]]:
    places: dict[str, list[PlaceholderInfo]] = {}
    for item in items:
        places.setdefault(item.modality, []).append(item.place)
    return places


def _check_salt(salt: str | None) -> None:
    if salt == "":
        raise InvalidRequest(
            "Parameter 'cache_salt' must be a non-empty string if provided.", field="cache_salt"
        )
    if salt is not None and (len(salt) > MAX_SALT_LEN or not _FORBIDDEN_IN_SALT.isdisjoint(salt)):
        raise InvalidRequest(
            f"Parameter 'cache_salt' must be at most {MAX_SALT_LEN} characters and must not contain"
            " '@', '/', '\\', or NUL.",
            field="cache_salt",
        )


def _check_combination(body: RenderedRequest, sampling: Mapping[str, object]) -> None:
    if body.content_parts and body.features is not None:
        raise body_error("", "content_parts and features are mutually exclusive")
    # A server that supports these parameters would answer differently.
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(body, name):
            raise UnsupportedParameter(f"{name} are not supported here", field=f"body.{name}")
    if body.reasoning_ended is False and sampling["structured_outputs"] is not None:
        raise UnsupportedParameter(
            "reasoning_ended=false is not supported with structured_outputs, because there is no"
            " reasoning parser",
            field="body.reasoning_ended",
        )
    _check_metadata(body.features)
    if body.output_mode == "text" and not sampling["detokenize"]:
        raise body_error("", "output_mode='text' requires sampling_params.detokenize to be true")
    for places in body.features.mm_placeholders.values() if body.features else ():
        if any(place.offset + place.length > len(body.token_ids) for place in places):
            raise body_error("", "mm_placeholders must remain within the token_ids sequence")
    if body.stream and sampling["prompt_logprobs"] is not None:
        raise UnsupportedParameter(
            "prompt_logprobs are not available when stream=true", field="prompt_logprobs"
        )


def _check_metadata(features: FeaturesInfo | None) -> None:
    for modality, metadata in ((features and features.mm_metadata) or {}).items():
        assert features is not None
        items = (features.kwargs_data or {}).get(modality, [None] * len(metadata))
        if any(m is not None and k is None for m, k in zip(metadata, items, strict=True)):
            raise body_error("", "metadata-only multimodal items require ec_transfer_params")
