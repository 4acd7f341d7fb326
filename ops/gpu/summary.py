"""Summary of the results of a run: wrong results first, then goals, then measured values.

A result is a JSON object with `section`, `what` and `ok`, which is true or false for a check and
null for a measured value. Its other keys are values. `goal` compares one of them with a number, as
in "of_copy >= 0.8".
"""

import json
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]

PEER = "transformers "
"""Prefix of the name of a workload that transformers ran."""
PEER_GOALS = {"1.5B, 256 streams": "decode_ratio >= 2"}
LEFT_OUT = "left out: no time"
_NAMES = ("section", "what", "ok", "goal")


def read_results(lines: Iterable[str]) -> list[Result]:
    """Decode results, and add the ratios to transformers."""
    results = []
    for line in lines:
        try:
            results.append(json.loads(line))
        except ValueError:
            continue  # a process was killed while it wrote its last line
    return results + _compare_with_peer(results)


def is_wrong(results: Iterable[Result]) -> bool:
    return any(result["ok"] is False for result in results)


def summarise(results: list[Result]) -> str:
    wrong = [result for result in results if result["ok"] is False]
    num_right = sum(result["ok"] is True for result in results)
    num_left_out = sum(result["what"] == LEFT_OUT for result in results)
    goals = [result for result in results if "goal" in result]
    values = [result for result in results if result["ok"] is None and "goal" not in result]
    lines = [f"{num_right} right, {len(wrong)} WRONG, {num_left_out} sections left out"]
    lines += [f"WRONG  {result['section']}: {_describe(result)}" for result in wrong]
    lines += [f"goal {each['goal']}: {_compare(each)}  {_describe(each)}" for each in goals]
    lines += [f"{result['section']}: {_describe(result)}" for result in values]
    return "\n".join(lines) + "\n"


def _compare_with_peer(results: list[Result]) -> list[Result]:
    ours = {result["what"]: result for result in results if "decode_tok_s" in result}
    ratios = []
    for name in [name for name in ours if PEER + name in ours]:
        theirs = ours[PEER + name]
        ratio: Result = {"section": "peer", "what": f"{name} against transformers", "ok": None}
        for kind in ("prefill", "decode"):
            rate = theirs[f"{kind}_tok_s"]
            if rate:
                ratio[f"{kind}_ratio"] = ours[name][f"{kind}_tok_s"] / rate
        if name in PEER_GOALS:
            ratio["goal"] = PEER_GOALS[name]
        ratios.append(ratio)
    return ratios


def _describe(result: Result) -> str:
    """Return the name of a result with its values."""
    values = ", ".join(
        f"{name} {_format(value)}" for name, value in result.items() if name not in _NAMES
    )
    return f"{result['what']}: {values}" if values else str(result["what"])


def _format(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _compare(result: Result) -> str:
    """Return whether a result reaches its goal."""
    name, sign, limit = result["goal"].split()
    value = result.get(name)
    if not isinstance(value, int | float):
        return "no value"
    is_reached = value >= float(limit) if sign == ">=" else value <= float(limit)
    return "reached" if is_reached else "MISSED"
