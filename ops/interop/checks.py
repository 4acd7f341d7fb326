"""Checks that both servers give equal answers, in either role of renderer and engine."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ops.bench.servers import MODEL
from ops.interop.cases import Case, cases
from ops.interop.renderings import (
    FieldValue,
    equal_values,
    pairs_of_values,
    perturbed,
    with_own_hashes,
)

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
RENDER = f"{CHAT}/render"
MAX_SHOWN = 160
# Tolerance of log probabilities for equal input. Both compute in float32, but in different orders,
# which made 0.000005. One step of one byte of an image made 0.000035 to 0.001.
TOLERANCE = 2e-5
# Tolerance of ranks for equal input: a neighbour within that tolerance may change places.
RANK_TOLERANCE = 1
# Tolerance of 8-bit pixels: vLLM resizes with torchvision where it is installed, we with Pillow.
PIXEL_STEPS = 2
# If pixels differ, log probabilities may differ as well, at most by PERTURBATION_MARGIN times
# the largest difference in vLLM in NUM_PERTURBATIONS tries. A try moves the differing pixels to
# other places of the image. The largest of 60 tries was 2.3 times the median.
NUM_PERTURBATIONS = 16
PERTURBATION_MARGIN = 2
# Fields that name the server, the time or the request.
_VOLATILE_FIELDS = frozenset({"request_id", "created", "id", "system_fingerprint"})


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one comparison."""

    name: str
    equal: bool
    detail: str = ""


def check_all(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    """Run all checks; yield each finding as soon as it is known."""
    yield from check_cases(cases, us, them)
    for check in (_check_prompts, _check_tokens, _check_refusals):
        yield from check(us, them)


def check_cases(
    make: Callable[[], list[Case]], us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    for case in make():
        yield from _check_case(case, us, them)


def check_masked(
    make: Callable[[], list[Case]], us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    """Compare videos with text among their tokens.

    The body of vLLM's generate endpoint has no mask of a range, and even a body that vLLM has
    rendered ends its engine. So our engine answers vLLM's rendering, and vLLM answers the chat.
    """
    for case in make():
        ours, theirs = (post(server, RENDER, case.chat) for server in (us, them))
        hashes = (sorted(body["features"]["mm_hashes"].items()) for body in (ours, theirs))
        yield compare(f"{case.name}: hashes", *hashes)
        yield from _check_items(case, ours, theirs)
        right = post(them, CHAT, case.chat | {"return_token_ids": True})
        answer = post(us, GENERATE, theirs)
        yield compare(f"{case.name}: theirs → ours, tokens", tokens_of(answer), tokens_of(right))


def _check_case(case: Case, us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    ours, theirs = (post(server, RENDER, case.chat) for server in (us, them))
    yield compare(f"{case.name}: rendered to the byte", *map(without_items, (ours, theirs)))
    yield from _check_items(case, ours, theirs)
    right = post(them, GENERATE, theirs)
    if equal_values(ours, theirs):
        answers = {
            "ours → ours": post(us, GENERATE, ours),
            "ours → theirs": post(them, GENERATE, ours),
        }
        for way, answer in answers.items():
            yield compare(f"{case.name}: {way}, tokens", tokens_of(answer), tokens_of(right))
    else:
        yield from _check_own_pixels(case, with_own_hashes(ours, "ours"), theirs, us, them)
    answer = post(us, GENERATE, theirs)
    yield compare(f"{case.name}: theirs → ours, tokens", tokens_of(answer), tokens_of(right))
    yield compare(
        f"{case.name}: the answer's fields and values",
        _without_volatile(answer),
        _without_volatile(right),
    )
    yield from _check_modes(case, theirs, us, them)


def _check_own_pixels(
    case: Case, ours: Any, theirs: Any, us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    """Compare both engines on our pixels, and both renderings in vLLM's engine.

    `ours` has other hashes than `theirs`. With equal hashes, vLLM would use its cached pixels.
    """
    answers = [tokens_of(post(server, GENERATE, ours)) for server in (us, them)]
    yield compare(f"{case.name}: ours → ours and theirs, tokens", *answers)
    prompts = [post(server, GENERATE, _with_prompt_logprobs(ours)) for server in (us, them)]
    yield _compare_roughly(f"{case.name}: ours, log probabilities of the prompt", *prompts)
    apart = _logprobs_apart(them, ours, theirs)
    bound = PERTURBATION_MARGIN * max(
        _logprobs_apart(them, perturbed(theirs, ours, seed), theirs)
        for seed in range(NUM_PERTURBATIONS)
    )
    name = f"{case.name}: log probabilities of both renderings, {apart:.4f} of {bound:.4f} apart"
    yield Finding(name, 0 < apart <= bound)


def _with_prompt_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    # vLLM leaves this out for such requests by itself, but rendered bodies say false. Then it reads
    # its cache, has no log probabilities for what is in it, and its server ends.
    sampling = {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
    return body | {"sampling_params": body["sampling_params"] | sampling}


def _logprobs_apart(server: httpx.Client, body: Any, other: Any) -> float:
    """Return the most by which a token's log probability differs between two prompts."""
    answers = (post(server, GENERATE, _with_prompt_logprobs(prompt)) for prompt in (body, other))
    pairs = zip(*(answer["prompt_logprobs"][1:] for answer in answers), strict=True)
    apart: float = max(abs(a[name]["logprob"] - b[name]["logprob"]) for a, b in pairs for name in a)
    return apart


def without_items(body: dict[str, Any]) -> dict[str, Any]:
    """Return a rendered body without its items, and with the modalities in one order."""
    features = body["features"] and {
        name: sorted(ones or ()) if name in ("kwargs_data", "mm_metadata") else sorted(ones.items())
        for name, ones in body["features"].items()
    }
    aside: dict[str, Any] = _without_volatile(body | {"features": features})
    return aside


def _check_items(case: Case, ours: Any, theirs: Any) -> Iterator[Finding]:
    """Compare the rendered media, except for the order of fields and the slices of batches.

    Servers may choose the order, and vLLM's engine does not read the slices.
    """
    for item, mine, other in pairs_of_values(ours, theirs, "mm_metadata"):
        yield compare(f"{case.name}: {item}, metadata", *map(_comparable, (mine, other)))
    for item, mine, other in pairs_of_values(ours, theirs):
        shapes = [
            {name: (value.dtype, value.shape, _batching(value)) for name, value in values.items()}
            for values in (mine, other)
        ]
        finding = compare(f"{case.name}: {item}, fields, types, shapes and batching", *shapes)
        yield finding
        if finding.equal:
            apart = max(mine[name].steps(other[name]) for name in mine)
            most = PIXEL_STEPS if item.startswith("image") else 0
            yield Finding(f"{case.name}: {item}, values, {apart:g} of {most} apart", apart <= most)


def _comparable(values: dict[str, FieldValue]) -> list[Any]:
    return [[name, field.dtype, field.shape, field.data.hex()] for name, field in values.items()]


def _batching(value: FieldValue) -> list[Any]:
    name, arguments = value.kind
    return [name, {key: value for key, value in arguments.items() if key != "slices"}]


def _check_modes(
    case: Case, body: dict[str, Any], us: httpx.Client, them: httpx.Client
) -> Iterator[Finding]:
    sampling = body["sampling_params"] | {"logprobs": 1}
    options = {"return_token_ids": True, "sampling_params": sampling}
    for mode in ("tokens", "text") if case.compares_text else ("tokens",):
        request = body | options | {"output_mode": mode}
        ours, theirs = post(us, GENERATE, request), post(them, GENERATE, request)
        yield _compare_roughly(f"{case.name}: {mode} with log probabilities", ours, theirs)
        stream_options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = request | {"stream": True, "stream_options": stream_options}
        ours_stream, theirs_stream = _stream(us, streamed), _stream(them, streamed)
        yield _compare_roughly(
            f"{case.name}: {mode}, streamed and combined", ours_stream, theirs_stream
        )
    prompt = _with_prompt_logprobs(body)
    ours, theirs = post(us, GENERATE, prompt), post(them, GENERATE, prompt)
    yield _compare_roughly(f"{case.name}: log probabilities of the prompt", ours, theirs)
    if body["features"] is not None:
        features = body["features"] | {"kwargs_data": None, "mm_metadata": None}
        ours, theirs = (
            tokens_of(post(server, GENERATE, body | {"features": features}))
            for server in (us, them)
        )
        yield compare(f"{case.name}: by hash alone", ours, theirs)


def _check_prompts(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    request = {"model": MODEL, "prompt": ["Hello", "World"], "max_tokens": 4}
    path = "/v1/completions/render"
    ours, theirs = (
        [_without_volatile(body) for body in post(server, path, request)] for server in (us, them)
    )
    yield compare("prompts: rendered to the byte", ours, theirs)


def _check_tokens(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    messages = [{"role": "user", "content": "Hi, wörld"}]
    for path, request in (
        ("/tokenize", {"prompt": "Hello world", "return_token_strs": True}),
        ("/tokenize", {"messages": messages, "return_token_strs": True}),
        ("/tokenize", {"messages": messages, "add_generation_prompt": False}),
        ("/detokenize", {"tokens": [72, 101, 4083]}),
    ):
        ours, theirs = (post(server, path, {"model": MODEL} | request) for server in (us, them))
        yield compare(f"{path} {json.dumps(request)}", ours, theirs)


def _check_refusals(us: httpx.Client, them: httpx.Client) -> Iterator[Finding]:
    """Check that both servers refuse the same requests with the same status and error."""
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
            ours[-1] = None  # Pagemill may name a field where vLLM names none.
        change = json.dumps(changed)[:60]
        yield compare(f"refused: {change}: status, type and param", ours, theirs)


def _refusal(server: httpx.Client, body: Any) -> list[Any]:
    answer = server.post(GENERATE, json=body)
    error = answer.json().get("error", {})
    return [answer.status_code, error.get("type"), error.get("param")]


def post(server: httpx.Client, path: str, body: Any) -> Any:
    answer = server.post(path, json=body)
    if answer.status_code != 200:
        return {"status": answer.status_code, "body": answer.text[:400]}
    return answer.json()


def _stream(server: httpx.Client, body: Any) -> Any:
    """Combine the events of a stream; servers may divide an answer into events differently."""
    combined: dict[str, Any] = {"fields": set(), "token_ids": [], "text": "", "logprobs": []}
    for line in server.post(GENERATE, json=body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        combined["fields"].add(tuple(event))
        combined["usage"] = event["usage"]
        for choice in event.get("choices", ()):
            combined["fields"].add(tuple(choice))
            combined["token_ids"] += choice["token_ids"]
            combined["text"] += choice.get("text", "")
            combined["logprobs"] += choice["logprobs"]["content"]
            combined["finish"] = choice["finish_reason"], choice["weight_versions"]
    return combined | {"fields": sorted(combined["fields"])}


def tokens_of(answer: Any) -> Any:
    return answer["choices"][0]["token_ids"] if "choices" in answer else answer


def _without_volatile(answer: Any) -> Any:
    return {name: value for name, value in answer.items() if name not in _VOLATILE_FIELDS}


def compare(name: str, ours: Any, theirs: Any) -> Finding:
    a, b = json.dumps(ours), json.dumps(theirs)
    return Finding(name, a == b, "" if a == b else _first_difference(a, b))


def _compare_roughly(name: str, ours: Any, theirs: Any) -> Finding:
    """Compare up to the tolerances of numbers."""
    where = _find_difference(_without_volatile(ours), _without_volatile(theirs), "")
    return Finding(name, where is None, where or "")


def _find_difference(ours: Any, theirs: Any, path: str) -> str | None:
    if isinstance(ours, float) and isinstance(theirs, float):
        near = abs(ours - theirs) <= TOLERANCE
        return None if near else f"{path}: {ours} and {theirs}"
    if path.endswith(".rank") and isinstance(ours, int) and isinstance(theirs, int):
        near = abs(ours - theirs) <= RANK_TOLERANCE
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
        return None if ours == theirs else f"{path}: {_shortened(ours)} and {_shortened(theirs)}"
    differences = (_find_difference(a, b, p) for p, a, b in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _first_difference(ours: str, theirs: str) -> str:
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    start = max(0, place - 60)
    return f"ours …{ours[start : start + MAX_SHOWN]}… theirs …{theirs[start : start + MAX_SHOWN]}…"


def _shortened(value: Any) -> str:
    return json.dumps(value)[:MAX_SHOWN]
