"""Conversion between vLLM's `sampling_params` and SamplingParams. Pure.

The server that rendered a request has applied the defaults of its configuration. So a missing
parameter has vLLM's default, and the sampling defaults of this server's configuration do not apply.
Only `max_tokens` may be left for this server to choose.

SamplingParams has vLLM's parameters, with the same names, order and defaults. This module names the
exceptions.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import ContextTooLong, InvalidRequest
from shared.helpers.validation import invalid_request, reason_of
from shared.protocol.sampling import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutputs
from shared.protocol.value_limits import check_json
from workers.gateway.http.errors import UnknownParameter, UnsupportedParameter

_DEFAULTS = {
    name: value
    for name, value in msgspec.structs.asdict(SamplingParams()).items()
    if name != "max_tokens"
}

# Parameters of other servers, with the values that have no effect. Other values would change the
# answer in a way that is not implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "watermarking": (None, False),
    "flat_logprobs": (False,),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None, 0),
    "logprob_token_ids": (None,),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "_bad_words_token_ids": (None,),
    "_watermarking_skipped": (False,),
}
# Parameters for the delivery or computation at other servers, without an effect on the answer.
_WITHOUT_EFFECT = frozenset(
    {"output_kind", "skip_clone", "stream_interval", "output_text_buffer_length"}
)
# Parameters that are derived from others.
_DERIVED = frozenset({"_eos_token_id", "_all_stop_token_ids"})

_GREEDY_EPS = 1e-5
_DELTA, _FINAL_ONLY = 1, 2

# vLLM omits a parameter that has its default, except for these.
_NOT_IF_GREEDY = frozenset({"top_p", "min_p"})
_ALWAYS_WRITTEN = frozenset(
    {
        "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "stop",
        "stop_token_ids", "max_tokens", "bad_words", "skip_reading_prefix_cache",
    }
)  # fmt: skip


def read_sampling(rendered: Mapping[str, Any]) -> dict[str, Any]:
    """Return all parameters by their names in SamplingParams; `max_tokens` only if it is set.

    Raises a RequestError that names the parameter.
    """
    supported = {name: value for name, value in rendered.items() if _is_supported(name, value)}
    sampling = _DEFAULTS | {
        name: _read_value(name, value)
        for name, value in supported.items()
        if value is not None or name == "max_tokens"
    }
    _check(sampling)
    _check_stop_tokens(rendered)
    return sampling


def write_sampling(params: SamplingParams, max_tokens: int, stream: bool) -> dict[str, object]:
    """Return the parameters byte for byte as vLLM renders them.

    They have vLLM's order, and some are included even with their defaults.
    """
    always = _ALWAYS_WRITTEN
    if params.temperature >= _GREEDY_EPS:
        always |= _NOT_IF_GREEDY
    written: dict[str, object] = {}
    for name, value in msgspec.structs.asdict(params).items():
        if name == "structured_outputs":
            written |= {"output_kind": _DELTA if stream else _FINAL_ONLY, "skip_clone": True}
        if name in always or value != _DEFAULTS.get(name):
            written[name] = value
    written["max_tokens"] = max_tokens
    if params.structured_outputs is not None:
        written["structured_outputs"] = _constraint(params.structured_outputs)
    return written


def _constraint(structure: StructuredOutputs) -> dict[str, object]:
    names = {"json_schema": "json"}
    return {names.get(name, name): value for name, value in msgspec.to_builtins(structure).items()}


def _is_supported(name: str, value: Any) -> bool:
    """Return whether SamplingParams has the parameter. False: it can be ignored.

    Raises UnknownParameter or UnsupportedParameter.
    """
    if name in _DEFAULTS or name == "max_tokens":
        return True
    if name in _WITHOUT_EFFECT or name in _DERIVED:
        return False
    if name not in _NEUTRAL:
        raise UnknownParameter(f"unknown sampling parameter: {name}", field=name)
    if value not in _NEUTRAL[name]:
        raise UnsupportedParameter(f"{name}: this value is not supported here", field=name)
    return False


def _read_value(name: str, value: Any) -> Any:
    match name, value:
        case "stop", str():
            return [value]
        case ("seed", -1):
            return None
        case ("top_k", -1):
            return 0
        case "structured_outputs", dict():
            return _read_structure(value)
    return value


def _read_structure(rendered: Mapping[str, object]) -> dict[str, object]:
    """Return vLLM's `structured_outputs` as a StructuredOutputs mapping.

    Raises InvalidRequest for a schema that is not JSON, and UnsupportedParameter for options of
    other grammar libraries.
    """
    form = {
        name: value for name, value in rendered.items() if value is not None and value is not False
    }
    schema = form.pop("json", None)
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"structured_outputs.json has {len(schema)} characters, the limit is"
                f" {MAX_GRAMMAR_BYTES}",
                field="structured_outputs",
            )
        try:
            check_json(schema.encode())
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"structured_outputs.json is not JSON: {reason_of(error)}",
                field="structured_outputs",
            ) from error
    supported = ("regex", "choice", "grammar", "json_object")
    for name in form:
        if not name.startswith("_") and name not in supported:
            raise UnsupportedParameter(
                f"structured_outputs.{name} is not supported here", field="structured_outputs"
            )
    return {name: form[name] for name in supported if name in form} | (
        {} if schema is None else {"json_schema": schema}
    )


def _check_stop_tokens(rendered: Mapping[str, Any]) -> None:
    """Raises UnsupportedParameter for a stop token that is not in `stop_token_ids`.

    vLLM's renderer derives `_all_stop_token_ids` from that field and the model's end token. The
    engine stops at the end token without a parameter.
    """
    derived, eos = rendered.get("_all_stop_token_ids") or [], rendered.get("_eos_token_id")
    allowed = [*(rendered.get("stop_token_ids") or []), eos]
    if not isinstance(derived, list) or any(token_id not in allowed for token_id in derived):
        raise UnsupportedParameter(
            "_all_stop_token_ids has other token ids than stop_token_ids: add them to the latter",
            field="_all_stop_token_ids",
        )


def _check(sampling: Mapping[str, object]) -> None:
    try:
        params = msgspec.convert(sampling, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        refusal = invalid_request(error, SamplingParams)
        refusal.field = (refusal.field or "").partition(".")[0].partition("[")[0] or None
        raise refusal from error
    check_greedy(params)


def check_greedy(params: SamplingParams) -> None:
    """Raises InvalidRequest for several greedy choices, because all would be the same."""
    if params.n > 1 and params.temperature < _GREEDY_EPS:
        raise InvalidRequest(f"n must be 1 when using greedy sampling, got {params.n}.", field="n")


def resolve_sampling(
    defaults: Mapping[str, object], overrides: Mapping[str, object]
) -> SamplingParams:
    """Return the request's sampling parameters, and the model's defaults for the others.

    Raises InvalidRequest for a value out of range.
    """
    try:
        params = msgspec.convert({**defaults, **overrides}, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_request(error, SamplingParams, "sampling_params") from error
    check_greedy(params)
    return params


def resolve_max_tokens(max_tokens: int | None, num_prompt: int, max_model_len: int) -> int:
    """Return `max_tokens`, by default all that the context has room for. Raises ContextTooLong."""
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextTooLong(
            f"The decoder prompt (length {num_prompt}) is longer than the maximum model length of"
            f" {max_model_len}, which includes at least one token of the answer.",
            field="messages",
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextTooLong(
            f"{num_prompt} tokens of the prompt and {max_tokens} of the answer are over the maximum"
            f" model length of {max_model_len}",
            field="sampling_params.max_tokens",
        )
    return room if max_tokens is None else max_tokens
