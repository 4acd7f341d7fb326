"""What must be equal, whoever renders and whoever generates."""

import base64
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import numpy as np

from ops.bench.servers import MODEL
from ops.interop.cases import Case, cases

RENDER, GENERATE = "/v1/chat/completions/render", "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"
SHOWN = 160
# Of log probabilities: both compute in float32, each in an order of its own; a picture of 84 tokens
# makes 0.005 of it.
TOLERANCE = 1e-2
# Of ranks, and 1 more: where a thousand tokens are about as probable, the last digits decide.
RANK_SHARE = 0.01
# Of 8-bit pixels: they resize with torchvision where it is installed, we with Pillow.
PIXEL_STEPS = 2
# Who has made something, and when.
_OF_ITS_OWN = frozenset({"request_id", "created", "id", "system_fingerprint"})


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    equal: bool
    detail: str = ""


def check_all(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    """As they are found, which takes a while."""
    for case in cases():
        yield from _check_case(case, us, them)
    for check in (_check_prompts, _check_tokens, _check_faults):
        yield from check(us, them)


def _check_case(case: Case, us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    rendered = {"ours": _post(us, RENDER, case.chat), "theirs": _post(them, RENDER, case.chat)}
    yield _same(f"{case.name}: rendered to the byte", *map(_without_items, rendered.values()))
    yield from _check_items(case, *rendered.values())
    engines = {"ours": us, "theirs": them}
    answers = {
        (renderer, engine): _post(client, GENERATE, body)
        for (renderer, body), (engine, client) in itertools.product(
            rendered.items(), engines.items()
        )
    }
    right = _tokens(answers["theirs", "theirs"])
    for (renderer, engine), answer in answers.items():
        yield _same(f"{case.name}: {renderer} → {engine}, tokens", _tokens(answer), right)
    yield _same(
        f"{case.name}: the answer's fields and values",
        _own_aside(answers["theirs", "ours"]),
        _own_aside(answers["theirs", "theirs"]),
    )
    yield from _check_modes(case, rendered["theirs"], us, them)
    yield from _check_texts(case, rendered["theirs"], answers["theirs", "theirs"], us, them)


def _without_items(body: dict[str, Any]) -> dict[str, Any]:
    features = body["features"] and body["features"] | {"kwargs_data": None}
    aside: dict[str, Any] = _own_aside(body | {"features": features})
    return aside


def _check_items(case: Case, ours: Any, theirs: Any) -> Iterator[Finding]:
    """The order of fields is each server's own; their engine does not look at the slices."""
    if ours["features"] is None:
        return
    for i, pair in enumerate(
        zip(*(body["features"]["kwargs_data"]["image"] for body in (ours, theirs)), strict=True)
    ):
        mine, other = (_tensors(item) for item in pair)
        shapes = [{name: tensor[:2] for name, tensor in sorted(t.items())} for t in (mine, other)]
        yield _same(f"{case.name}: picture {i}, fields, types and shapes", *shapes)
        steps = max(_steps(mine[name][2], other[name][2]) for name in mine)
        what = f"{case.name}: picture {i}, bytes, {steps} of {PIXEL_STEPS} steps apart"
        yield Finding(what, steps <= PIXEL_STEPS)


def _tensors(item: str) -> dict[str, Any]:
    fields = msgspec.msgpack.decode(base64.b64decode(item))
    return {name: told["data"] for name, told in fields.items()}


def _steps(ours: msgspec.msgpack.Ext, theirs: msgspec.msgpack.Ext) -> int:
    pixels = (np.frombuffer(bytes(raw.data), np.uint8).astype(int) for raw in (ours, theirs))
    mine, other = pixels
    return int(np.abs(mine - other).max())


def _check_modes(
    case: Case, body: dict[str, Any], us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    sampling = body["sampling_params"] | {"logprobs": 1}
    shown = body | {"return_token_ids": True, "sampling_params": sampling}
    for mode in ("tokens", "text"):
        asked = shown | {"output_mode": mode}
        ours, theirs = _post(us, GENERATE, asked), _post(them, GENERATE, asked)
        yield _close(f"{case.name}: {mode} with log probabilities", ours, theirs)
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = asked | {"stream": True, "stream_options": options}
        ours_told, theirs_told = _stream(us, streamed), _stream(them, streamed)
        yield _close(f"{case.name}: {mode}, streamed and put together", ours_told, theirs_told)
    prompt = body | {"sampling_params": body["sampling_params"] | {"prompt_logprobs": 0}}
    ours, theirs = _post(us, GENERATE, prompt), _post(them, GENERATE, prompt)
    yield _close(f"{case.name}: log probabilities of the prompt", ours, theirs)
    if body["features"] is not None:
        features = body["features"] | {"kwargs_data": None, "mm_metadata": None}
        ours, theirs = (
            _tokens(_post(server, GENERATE, body | {"features": features})) for server in (us, them)
        )
        yield _same(f"{case.name}: by the hash alone", ours, theirs)


def _check_texts(
    case: Case, body: Any, answer: Any, us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    asked = {
        "model": MODEL,
        "generate_response": answer,
        "prompt_tokens": len(body["token_ids"]),
        "prompt_token_ids": body["token_ids"],
    }
    ours, theirs = (_own_aside(_post(server, DERENDER, asked)) for server in (us, them))
    yield _same(f"{case.name}: derendered to the byte", ours, theirs)
    ours, theirs = (_derender_events(server, body, answer) for server in (us, them))
    yield _same(f"{case.name}: derendered event by event", ours, theirs)


def _derender_events(server: httpx.Client, body: Any, answer: Any) -> list[Any]:
    (choice,), state, told = answer["choices"], None, []
    for i, token_id in enumerate(choice["token_ids"]):
        last = i == len(choice["token_ids"]) - 1
        one = {"index": 0, "token_ids": [token_id]}
        one["finish_reason"] = choice["finish_reason"] if last else None
        asked = {
            "stream": True,
            "model": MODEL,
            "generate_chunk": {"request_id": "x", "choices": [one]},
            "stream_state": state,
            "prompt_token_ids": body["token_ids"],
        }
        got = _post(server, DERENDER, asked)
        state = got["stream_state"]
        told.append(_own_aside(got["chunk"]))
    return told


def _check_prompts(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    asked = {"model": MODEL, "prompt": ["Hello", "World"], "max_tokens": 4}
    path = "/v1/completions/render"
    ours, theirs = (
        [_own_aside(one) for one in _post(server, path, asked)] for server in (us, them)
    )
    yield _same("prompts: rendered to the byte", ours, theirs)


def _check_tokens(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    messages = [{"role": "user", "content": "Hi, wörld"}]
    for path, asked in (
        ("/tokenize", {"prompt": "Hello world", "return_token_strs": True}),
        ("/tokenize", {"messages": messages, "return_token_strs": True}),
        ("/tokenize", {"messages": messages, "add_generation_prompt": False}),
        ("/detokenize", {"tokens": [72, 101, 4083]}),
    ):
        ours, theirs = (_post(server, path, {"model": MODEL} | asked) for server in (us, them))
        yield _same(f"{path} {json.dumps(asked)}", ours, theirs)


def _check_faults(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    """Where the protocol has a 4xx, we have the same."""
    base: dict[str, Any] = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
    changes: tuple[dict[str, Any], ...] = (
        {"token_ids": []},
        {"token_ids": [1, -5]},
        {"token_ids": [1, 999_999]},
        {"token_ids": [5] * 3000},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"n": 100}},
        {"model": "zzz"},
        {"cache_salt": ""},
        {"output_mode": "text", "sampling_params": {"detokenize": False}},
    )
    for changed in changes:
        ours, theirs = (_refusal(server, base | changed) for server in (us, them))
        if theirs[-1] is None:
            ours[-1] = None  # We may name what they leave open.
        shown = json.dumps(changed)[:60]
        yield _same(f"refused: {shown}: status, type and param", ours, theirs)


def _refusal(server: httpx.Client, body: Any) -> list[Any]:
    answer = server.post(GENERATE, json=body)
    error = answer.json().get("error", {})
    return [answer.status_code, error.get("type"), error.get("param")]


def _post(server: httpx.Client, path: str, body: Any) -> Any:
    answer = server.post(path, json=body)
    if answer.status_code != 200:
        return {"status": answer.status_code, "body": answer.text[:400]}
    return answer.json()


def _stream(server: httpx.Client, body: Any) -> Any:
    """How a step is cut into events is each server's own affair; what they say together is not."""
    told: dict[str, Any] = {"fields": set(), "token_ids": [], "text": "", "logprobs": []}
    for line in server.post(GENERATE, json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        told["fields"].add(tuple(event))
        told["usage"] = event["usage"]
        for choice in event.get("choices", ()):
            told["fields"].add(tuple(choice))
            told["token_ids"] += choice["token_ids"]
            told["text"] += choice.get("text", "")
            told["logprobs"] += choice["logprobs"]["content"]
            told["finish"] = choice["finish_reason"], choice["weight_versions"]
    return told | {"fields": sorted(told["fields"])}


def _tokens(answer: Any) -> Any:
    return answer["choices"][0]["token_ids"] if "choices" in answer else answer


def _own_aside(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in _OF_ITS_OWN}


def _same(what: str, ours: Any, theirs: Any) -> Finding:
    a, b = json.dumps(ours), json.dumps(theirs)
    return Finding(what, a == b, "" if a == b else _first_difference(a, b))


def _close(what: str, ours: Any, theirs: Any) -> Finding:
    """Equal but for the last digits of numbers."""
    where = _differs(_own_aside(ours), _own_aside(theirs), "")
    return Finding(what, where is None, where or "")


def _differs(ours: Any, theirs: Any, path: str) -> str | None:
    if isinstance(ours, float) and isinstance(theirs, float):
        near = abs(ours - theirs) <= TOLERANCE
        return None if near else f"{path}: {ours} and {theirs}"
    if path.endswith(".rank") and isinstance(ours, int) and isinstance(theirs, int):
        near = abs(ours - theirs) <= 1 + RANK_SHARE * theirs
        return None if near else f"{path}: {ours} and {theirs}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and list(ours) == list(theirs):
        pairs = [(f"{path}.{name}", ours[name], theirs[name]) for name in ours]
    elif (
        isinstance(ours, list | tuple)
        and isinstance(theirs, list | tuple)
        and len(ours) == len(theirs)
    ):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if ours == theirs else f"{path}: {_cut(ours)} and {_cut(theirs)}"
    return next((found for p, a, b in pairs if (found := _differs(a, b, p)) is not None), None)


def _first_difference(ours: str, theirs: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(0, place - 60)
    return f"ours …{ours[start : start + SHOWN]}… theirs …{theirs[start : start + SHOWN]}…"


def _cut(value: Any) -> str:
    return json.dumps(value)[:SHOWN]
