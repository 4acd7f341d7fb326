"""What another server is given for a request: the answer of render. Pure."""

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


def resolved(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """Parameters as this model has them by default, and as they were given.

    Raises InvalidRequest for what no request may have.
    """
    try:
        params = msgspec.convert({**defaults, **given}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        what, field = split_validation_error(error)
        field = f"sampling_params.{field}"
        raise InvalidRequest(f"{field}: {what}", field=field) from error
    check_greedy(params)
    return params


def num_to_answer(asked: int | None, num_prompt: int, max_model_len: int) -> int:
    """`max_tokens`, or all that there is room for. Raises ContextTooLong."""
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextTooLong(
            f"The decoder prompt (length {num_prompt}) is longer than the maximum model length of"
            f" {max_model_len}, which an answer must fit into too.",
            field="messages",
        )
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"{num_prompt} tokens of the prompt and {asked} of the answer are over the maximum"
            f" model length of {max_model_len}",
            field="sampling_params.max_tokens",
        )
    return room if asked is None else asked


def rendered_request(
    request_id: str,
    told: RenderedFeatures,
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
        token_ids=told.prompt_token_ids,
        features=_features(told.features, with_tensors) if told.features else None,
        sampling_params=write_sampling(sampling, max_tokens, stream),
        model=model,
        stream=stream,
        stream_options=stream_options if stream else None,
        cache_salt=cache_salt,
        priority=priority,
    )


def _features(told: Sequence[RenderedFeature], with_tensors: bool) -> FeaturesInfo:
    by_modality: dict[str, list[RenderedFeature]] = {}
    for feature in told:
        by_modality.setdefault(feature.modality, []).append(feature)
    return FeaturesInfo(
        mm_hashes={m: [f.mm_hash for f in found] for m, found in by_modality.items()},
        mm_placeholders={
            m: [PlaceholderInfo(f.placeholder.offset, f.placeholder.length) for f in found]
            for m, found in by_modality.items()
        },
        kwargs_data=(
            {m: [_text(f.kwargs_data) for f in found] for m, found in by_modality.items()}
            if with_tensors
            else None
        ),
        mm_metadata=(
            {m: [_text(f.mm_metadata) for f in found] for m, found in by_modality.items()}
            if with_tensors
            else None
        ),
    )


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
