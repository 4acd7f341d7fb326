"""Sampling parameters of a request. Their ranges are part of their types and schemas. Pure.

`SamplingParams` is the only declaration of a parameter: the OpenAI request bodies and vLLM's
`sampling_params` are derived from its fields.
"""

import hashlib
from typing import Annotated, Any

from msgspec import Meta, Struct, json

from shared.helpers import patterns
from shared.protocol.json_limits import MAX_SCHEMA_DEPTH, json_limit_error

MAX_CHOICES = 8
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_REGEX_LEN = 8192
MAX_GRAMMAR_BYTES = 128 * 1024

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256, pattern=patterns.NOT_BLANK)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Constraint on the text of an answer: exactly one of these fields."""

    json_schema: dict[str, Any] | None = None
    json_object: bool = False
    """Any JSON object."""
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_LEN)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    """Grammar in llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        forms = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in forms) != 1:
            raise ValueError(
                "must have exactly one of json_schema, json_object, regex, choice and grammar"
            )
        # A value and its comma take two bytes, so a schema with more values is too long as well.
        max_values = MAX_GRAMMAR_BYTES // 2
        if message := json_limit_error(self.json_schema, MAX_SCHEMA_DEPTH, max_values):
            raise ValueError(message)
        num_bytes = len(json.encode(forms))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"must have at most {MAX_GRAMMAR_BYTES} bytes of JSON, not {num_bytes}"
            )


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters for the choice of an answer's tokens, and for the returned data.

    The fields are in the order in which vLLM writes them.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Number of choices."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """0 keeps all tokens."""
    min_p: Probability = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    """By default derived from the request id, so that a resumed request continues as it began."""
    stop: StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Before this many tokens, neither the model's end token nor a stop token or stop string ends a
    choice."""
    logprobs: NumLogprobs | None = None
    """Return the log probability of each token of the answer, and of this many most probable
    tokens."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the prompt. Then the whole prompt is computed, without the prefix cache."""
    detokenize: bool = True
    """False: all text is empty, and stop strings are not allowed."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text. The token ids always include them."""
    include_stop_str_in_output: bool = False
    """End the text with the stop string or stop token that ended it."""
    structured_outputs: StructuredOutputs | None = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)
    ] = {}
    """Bias by token id, added to the logits."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    """The only token ids that may be chosen."""
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] = []
    """Words that no token may complete, whether they begin a word or follow a space."""
    skip_reading_prefix_cache: bool = False


def seed_of(seed: int | None, request_id: str) -> int:
    """Return the seed of a request, by default a hash of its id, the same in all attempts."""
    if seed is not None:
        return seed
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
