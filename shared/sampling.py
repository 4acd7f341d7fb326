"""How a request wants its tokens chosen; the ranges are part of the type and of its schema."""

from typing import Annotated

from msgspec import Meta, Struct

MAX_CHOICES = 8
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 keeps all tokens."""
    min_p: Probability = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """Without one, the request id serves: a resumed request then still continues as it began."""
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] = []
    stop_token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=64)] = []
    ignore_eos: bool = False
