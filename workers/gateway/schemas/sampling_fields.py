"""Sampling parameters of the OpenAI request bodies, derived from SamplingParams. Pure.

A new field of SamplingParams becomes a field of both bodies, with the same name and range, and
`core.plan.sampling_of` copies it to the request on the bus. This module names the exceptions.
"""

from typing import TYPE_CHECKING, Any, get_type_hints

from msgspec import Struct, defstruct

from shared.protocol.sampling import SamplingParams

OWN_FORM = frozenset({"seed", "stop", "top_k", "logprobs", "prompt_logprobs", "structured_outputs"})
"""Parameters that have another type in OpenAI's API. The bodies declare them."""
NOT_OFFERED = frozenset({"detokenize", "skip_reading_prefix_cache"})
"""Parameters that the OpenAI bodies do not have."""


def optional_fields(params: type[Struct]) -> list[tuple[str, Any, None]]:
    """Return the fields of `params` that the bodies share with it. Each may also be null."""
    types = get_type_hints(params, include_extras=True)
    names = (name for name in params.__struct_fields__ if name not in OWN_FORM | NOT_OFFERED)
    return [(name, types[name] | None, None) for name in names]


class RequestHeader(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields that do not depend on the endpoint or on sampling."""

    model: str
    stream: bool | None = None


SAME_FORM = tuple(name for name, _, _ in optional_fields(SamplingParams))
"""Names of the parameters that the bodies share with SamplingParams."""

if TYPE_CHECKING:
    # The parameters are only copied, by name. Code that needs a value reads the result of
    # `core.plan.sampling_of`, so type checkers need no attribute for each parameter.
    class SamplingFields(RequestHeader, frozen=True):
        pass
else:
    SamplingFields = defstruct(
        "SamplingFields",
        optional_fields(SamplingParams),
        bases=(RequestHeader,),
        module=__name__,
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
