"""Parts of the request that a prompt is rendered to, for another server. Pure."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from shared.errors import ContextTooLong, InvalidRequest
from shared.protocol.renderer_rpc import RenderedFeature
from shared.protocol.sampling import SamplingParams
from shared.validation import split_validation_error
from workers.gateway.schemas.generate import FeaturesInfo, PlaceholderInfo
from workers.gateway.vllm.sampling import check_greedy

T = TypeVar("T")


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


def features_of(rendered: Sequence[RenderedFeature], *, with_tensors: bool) -> FeaturesInfo | None:
    """Return the items of a rendered prompt by modality, or None if there are none."""
    if not rendered:
        return None
    by_modality: dict[str, list[RenderedFeature]] = {}
    for feature in rendered:
        by_modality.setdefault(feature.modality, []).append(feature)

    def column(read: Callable[[RenderedFeature], T]) -> dict[str, list[T]]:
        return {modality: [read(f) for f in items] for modality, items in by_modality.items()}

    return FeaturesInfo(
        mm_hashes=column(lambda f: f.mm_hash),
        mm_placeholders=column(
            lambda f: PlaceholderInfo(f.placeholder.offset, f.placeholder.length)
        ),
        kwargs_data=column(lambda f: _encode_base64(f.kwargs_data)) if with_tensors else None,
        mm_metadata=column(lambda f: _encode_base64(f.mm_metadata)) if with_tensors else None,
    )


def _encode_base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
