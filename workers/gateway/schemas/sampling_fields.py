"""Sampling parameters of the OpenAI request bodies, derived from SamplingParams. Pure.

A new field of SamplingParams becomes a field of both bodies, with the same name and range, and goes
into the request on the bus (`core.plan.sampling_of`). Only the exceptions are named here.
"""

from typing import TYPE_CHECKING, Any, get_type_hints

from msgspec import Struct, defstruct

from shared.protocol.sampling import SamplingParams

OWN_FORM = frozenset({"seed", "stop", "top_k", "logprobs", "prompt_logprobs", "structured_outputs"})
"""Parameters whose type in OpenAI's API is another one; the bodies declare them themselves."""
NOT_OFFERED = frozenset({"detokenize", "skip_reading_prefix_cache"})
"""Parameters that the OpenAI bodies do not have."""


def optional_fields(params: type[Struct]) -> list[tuple[str, Any, None]]:
    """Return the fields of `params` that the bodies share with it, each of its type or null."""
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
    # Their values are only passed on, by name. Code that needs one reads `core.plan.sampling_of`,
    # so a parameter has no attribute here for a type checker to know.
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
