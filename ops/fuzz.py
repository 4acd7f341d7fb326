"""`make fuzz`: schemathesis against a whole Pagemill, by its own OpenAPI document.

Whatever is sent, the answer is one that the document has, and never an error of ours. A request
that gives itself less time than it takes is answered 504, which is no error.
"""

import argparse
import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ops.demo import PICTURES
from ops.serving import serving
from workers.gateway.openapi.document import document

CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
]
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
# Whatever they are together, they are a request.
PLAIN = ["model", "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"]
PLAIN += ["presence_penalty", "frequency_penalty", "ignore_eos", "user", "durable", "priority"]
# An answer takes seconds where it has as many tokens and choices as there can be.
HANG_S = 60


async def main(seconds: int, more: list[str]) -> int:
    async with serving(max_model_len=256) as (url, folder):
        code = await fuzz(url, folder, seconds, more)
        async with httpx.AsyncClient(trust_env=False) as http:
            told = (await http.get(f"{url}/metrics")).text.splitlines()
        answered = [line for line in told if line.startswith("pagemill_http_requests_total")]
        sys.stdout.write("\n".join([*answered, ""]))
        if code:
            sys.stderr.write((folder / "workers.log").read_text()[-20_000:])
        return code


async def fuzz(url: str, folder: Path, seconds: int, more: list[str]) -> int:
    """schemathesis' exit code: 0 if it has found nothing."""
    (folder / "schemathesis.toml").write_text(SETTINGS)
    (folder / "openapi.json").write_text(json.dumps(aimed(document())))
    command = ["--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url]
    command += ["--max-time", str(seconds), "--checks", ",".join(CHECKS)]
    command += ["--request-timeout", str(HANG_S), "--continue-on-failure", *more]
    # What it takes for lint: that it does not like our data as much as we do.
    command += ["--suppress-health-check", "all", "--warnings", "off"]
    program = Path(sys.executable).with_name("schemathesis")
    process = await asyncio.create_subprocess_exec(program, *command, cwd=folder)
    return await process.wait()


def aimed(told: dict[str, Any]) -> dict[str, Any]:
    """The document, for those who know what is here: with names made up, most of what is sent would
    end at the model's, or at a picture's; with any forty fields, at two that do not go together."""
    picture = base64.b64encode((PICTURES / "red.png").read_bytes()).decode()
    schemas = told["components"]["schemas"]
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["demo"]}
    shown = {"const": f"data:image/png;base64,{picture}"}
    schemas["ImageURL"]["properties"]["url"] = {"anyOf": [shown, {"type": "string"}]}
    image = _exactly(
        {"type": {"const": "image_url"}, "image_url": {"const": {"url": shown["const"]}}}
    )
    said = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 3, "items": image}]}
    message = {"role": {"enum": ["user", "system", "assistant"]}, "content": said}
    prompts = {
        "messages": {"type": "array", "minItems": 1, "maxItems": 4, "items": _exactly(message)},
        "prompt": {"type": "string"},
    }
    for path, name, prompt in (
        ("/v1/chat/completions", "ChatRequest", "messages"),
        ("/v1/completions", "CompletionRequest", "prompt"),
    ):
        fields = schemas[name]["properties"]
        plain = {field: fields[field] for field in PLAIN} | {prompt: prompts[prompt]}
        content = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        some = _exactly(plain) | {"required": ["model", prompt]}
        content["schema"] = {"anyOf": [some, content["schema"]]}
    return told


def _exactly(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a stranger may send.")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("more", nargs="*", help="arguments for schemathesis")
    arguments = parser.parse_args()
    sys.exit(uvloop.run(main(arguments.seconds, arguments.more)))
