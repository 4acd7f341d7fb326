"""How a request wants its tokens chosen; the ranges are part of the type and of its schema."""

from typing import Annotated, Any

from msgspec import Meta, Struct, json

from shared.protocol.json_limits import MAX_SCHEMA_DEPTH, complaint_of

MAX_CHOICES = 8
MAX_STOP_STRINGS = 4
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_REGEX_LEN = 8192
MAX_GRAMMAR_BYTES = 128 * 1024

Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\S")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the answer must be a text of: exactly one of these."""

    json_schema: dict[str, Any] | None = None
    json_object: bool = False
    """Any JSON object."""
    regex: Annotated[str, Meta(min_length=1, max_length=MAX_REGEX_LEN)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    """In llguidance's form of Lark."""

    def __post_init__(self) -> None:
        given = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in given) != 1:
            raise ValueError(
                "Expected exactly one of json_schema, json_object, regex, choice and grammar"
            )
        if complaint := complaint_of(self.json_schema, MAX_SCHEMA_DEPTH):
            raise ValueError(complaint)
        num_bytes = len(json.encode(given))
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(
                f"Expected at most {MAX_GRAMMAR_BYTES} bytes of JSON, got {num_bytes} bytes"
            )


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
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    """The text then ends with what has ended it, a stop string or a stop token."""
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Before these neither the model's own end nor a stop token or stop string ends a choice."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]], Meta(max_length=1024)
    ] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    """No others are chosen."""
    bad_words: Annotated[list[BadWord], Meta(max_length=64)] = []
    """Never completed by a token, whether they begin a word or follow a space."""
    logprobs: NumLogprobs | None = None
    """For each token of the answer its log probability, and so many of the most probable tokens."""
    prompt_logprobs: NumLogprobs | None = None
    """The same for the prompt; all of it is then computed, whatever the prefix cache holds."""
    detokenize: bool = True
    """Without it all text is empty, and there can be no stop strings."""
    skip_special_tokens: bool = True
    """In the text: they are always among the token ids."""
    skip_reading_prefix_cache: bool = False
    structured_outputs: StructuredOutputs | None = None
