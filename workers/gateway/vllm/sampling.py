"""`sampling_params` of rendered requests ↔ ours. Pure.

What is rendered elsewhere has been resolved there: a parameter that is left out has its default,
whatever the model's own configuration here says; `max_tokens` alone is this server's to choose.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.sampling import SamplingParams
from shared.validation import split_validation_error
from workers.gateway.http.errors import UnknownParameter, UnsupportedParameter

_DEFAULTS = {
    name: value
    for name, value in msgspec.structs.asdict(SamplingParams()).items()
    if name != "max_tokens"
}

# Known to other servers; any value but these would change the answer in a way that is not done
# here.
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
# How another server delivers or computes; nothing of it is seen in the answer.
_WITHOUT_EFFECT = frozenset(
    {"output_kind", "skip_clone", "stream_interval", "output_text_buffer_length"}
)
# Derived from other parameters.
_DERIVED = frozenset({"_eos_token_id", "_all_stop_token_ids"})

_GREEDY_EPS = 1e-5
_DELTA, _FINAL_ONLY = 1, 2

_ORDER = (
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
    *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens"),
    *("min_tokens", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "skip_clone", "structured_outputs"),
    *("logit_bias", "allowed_token_ids", "bad_words", "skip_reading_prefix_cache"),
)
_ABSENT = _DEFAULTS | {"logit_bias": None}
"""Left out at these values, but for those that are always written."""
_NOT_IF_GREEDY = frozenset({"top_p", "min_p"})
_WRITTEN = _NOT_IF_GREEDY | {
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "stop"),
    *("stop_token_ids", "max_tokens", "output_kind", "skip_clone", "bad_words"),
    *("skip_reading_prefix_cache",),
}


def read_sampling(wire: Mapping[str, Any]) -> dict[str, Any]:
    """All of our parameters as a request means them, but `max_tokens` where it leaves that open.

    Raises a RequestError that names the parameter.
    """
    given = {name: value for name, value in wire.items() if _is_ours(name, value)}
    sampling = _DEFAULTS | {
        name: _ours(name, value)
        for name, value in given.items()
        if value is not None or name == "max_tokens"
    }
    _check(sampling)
    _check_stop_tokens(wire)
    return sampling


def write_sampling(params: SamplingParams, max_tokens: int, stream: bool) -> dict[str, Any]:
    """In the order, and with those of the defaults, that a rendered request has them."""
    resolved: dict[str, Any] = msgspec.structs.asdict(params) | {
        "max_tokens": max_tokens,
        "output_kind": _DELTA if stream else _FINAL_ONLY,
        "skip_clone": True,
        "structured_outputs": _constraint(params),
        "logit_bias": params.logit_bias or None,
    }
    written = _WRITTEN - _NOT_IF_GREEDY if params.temperature < _GREEDY_EPS else _WRITTEN
    return {
        name: resolved[name]
        for name in _ORDER
        if name in written or resolved[name] != _ABSENT.get(name)
    }


def _constraint(params: SamplingParams) -> dict[str, Any] | None:
    form = params.structured_outputs
    if form is None:
        return None
    names = {"json_schema": "json"}
    return {names.get(name, name): value for name, value in msgspec.to_builtins(form).items()}


def _is_ours(name: str, value: Any) -> bool:
    """Raises UnknownParameter or UnsupportedParameter."""
    if name in _DEFAULTS or name == "max_tokens":
        return True
    if name in _WITHOUT_EFFECT or name in _DERIVED:
        return False
    if name not in _NEUTRAL:
        raise UnknownParameter(f"unknown sampling parameter: {name}", field=name)
    if value not in _NEUTRAL[name]:
        raise UnsupportedParameter(f"{name}: this value is not supported here", field=name)
    return False


def _ours(name: str, value: Any) -> Any:
    match name, value:
        case "stop", str():
            return [value]
        case ("seed", -1):
            return None
        case ("top_k", -1):
            return 0
        case "structured_outputs", dict():
            return _form(value)
    return value


def _form(wire: dict[str, Any]) -> dict[str, Any]:
    """Their names for ours; options that only other libraries have are not taken."""
    form = {name: value for name, value in wire.items() if value is not None and value is not False}
    schema = form.pop("json", None)
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"structured_outputs.json is not JSON: {error}", field="structured_outputs"
            ) from error
    known = ("regex", "choice", "grammar", "json_object")
    for name in form:
        if not name.startswith("_") and name not in known:
            raise UnsupportedParameter(
                f"structured_outputs.{name} is not supported here", field="structured_outputs"
            )
    return {name: form[name] for name in known if name in form} | (
        {} if schema is None else {"json_schema": schema}
    )


def _check_stop_tokens(wire: Mapping[str, Any]) -> None:
    """A renderer has these from `stop_token_ids`, and those of the model the engine knows."""
    derived, eos = wire.get("_all_stop_token_ids") or [], wire.get("_eos_token_id")
    stated = [*(wire.get("stop_token_ids") or []), eos]
    if not isinstance(derived, list) or any(token_id not in stated for token_id in derived):
        raise UnsupportedParameter(
            "_all_stop_token_ids: give them as stop_token_ids", field="_all_stop_token_ids"
        )


def _check(sampling: dict[str, Any]) -> None:
    try:
        params = msgspec.convert(sampling, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        what, path = split_validation_error(error)
        name = path.partition(".")[0].partition("[")[0]
        raise InvalidRequest(f"{name}: {what}", field=name or None) from error
    check_greedy(params)


def check_greedy(params: SamplingParams) -> None:
    """Raises InvalidRequest for choices that would all be the same."""
    if params.n > 1 and params.temperature < _GREEDY_EPS:
        raise InvalidRequest(f"n must be 1 when using greedy sampling, got {params.n}.", field="n")
