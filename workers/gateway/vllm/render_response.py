"""Responses of render: the request that another server is to be sent. Pure."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.errors import ContextTooLong, InvalidRequest
from shared.protocol.renderer_rpc import RenderedFeature, RenderedFeatures
from shared.protocol.sampling import SamplingParams
from shared.validation import split_validation_error
from workers.gateway.schemas.generate import (
    FeaturesInfo,
    GenerateStreamOptions,
    PlaceholderInfo,
    RenderedRequest,
)
from workers.gateway.vllm.sampling import check_greedy, write_sampling


def resolve_sampling(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters: the given ones over the model's defaults.

    Raises InvalidRequest for values that no request may have.
    """
    try:
        params = msgspec.convert({**defaults, **given}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        complaint, field = split_validation_error(error)
        field = f"sampling_params.{field}"
        raise InvalidRequest(f"{field}: {complaint}", field=field) from error
    check_greedy(params)
    return params


def resolve_max_tokens(max_tokens: int | None, num_prompt: int, max_model_len: int) -> int:
    """Return `max_tokens`, or as many tokens as there is room for. Raises ContextTooLong."""
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextTooLong(
            f"The decoder prompt (length {num_prompt}) is longer than the maximum model length of"
            f" {max_model_len}, which an answer must fit into too.",
            field="messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextTooLong(
            f"{num_prompt} tokens of the prompt and {max_tokens} of the answer are over the maximum"
            f" model length of {max_model_len}",
            field="sampling_params.max_tokens",
        )
    return room if max_tokens is None else max_tokens


def rendered_request(
    request_id: str,
    rendered: RenderedFeatures,
    sampling: SamplingParams,
    max_tokens: int,
    *,
    model: str,
    with_tensors: bool,
    stream: bool = False,
    stream_options: GenerateStreamOptions | None = None,
    cache_salt: str | None = None,
    priority: int = 0,
) -> RenderedRequest:
    return RenderedRequest(
        request_id=request_id,
        token_ids=rendered.prompt_token_ids,
        features=_features(rendered.features, with_tensors) if rendered.features else None,
        sampling_params=write_sampling(sampling, max_tokens, stream),
        model=model,
        stream=stream,
        stream_options=stream_options if stream else None,
        cache_salt=cache_salt,
        priority=priority,
    )


def _features(rendered: Sequence[RenderedFeature], with_tensors: bool) -> FeaturesInfo:
    by_modality: dict[str, list[RenderedFeature]] = {}
    for feature in rendered:
        by_modality.setdefault(feature.modality, []).append(feature)
    return FeaturesInfo(
        mm_hashes={m: [f.mm_hash for f in items] for m, items in by_modality.items()},
        mm_placeholders={
            m: [PlaceholderInfo(f.placeholder.offset, f.placeholder.length) for f in items]
            for m, items in by_modality.items()
        },
        kwargs_data=(
            {m: [_encode_base64(f.kwargs_data) for f in items] for m, items in by_modality.items()}
            if with_tensors
            else None
        ),
        mm_metadata=(
            {m: [_encode_base64(f.mm_metadata) for f in items] for m, items in by_modality.items()}
            if with_tensors
            else None
        ),
    )


def _encode_base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
