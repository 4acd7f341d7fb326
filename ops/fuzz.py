"""`make fuzz`: run schemathesis against a complete system, with the gateway's OpenAPI document.

Every answer must conform to the document, and none may be a server error, except for 504: a request
may set itself a deadline that is too short.
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

from ops.demo import IMAGES
from ops.harness.deployment import demo_tree, deployment
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
# Fields that are valid in any combination.
PLAIN = ["model", "stream", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"]
PLAIN += ["presence_penalty", "frequency_penalty", "ignore_eos", "user", "durable", "priority"]
# An answer with the largest number of tokens and choices takes seconds.
HANG_S = 60


async def main(seconds: int, more: list[str]) -> int:
    async with deployment(demo_tree(max_model_len=256)) as site:
        code = await fuzz(site.http, site.folder, seconds, more)
        async with httpx.AsyncClient(trust_env=False) as http:
            metrics = (await http.get(f"{site.http}/metrics")).text.splitlines()
        answered = [line for line in metrics if line.startswith("pagemill_http_requests_total")]
        sys.stdout.write("\n".join([*answered, ""]))
        if code:
            sys.stderr.write(site.log.read_text()[-20_000:])
        return code


async def fuzz(url: str, folder: Path, seconds: int, more: list[str]) -> int:
    """Return schemathesis' exit code, which is 0 if it has found nothing."""
    (folder / "schemathesis.toml").write_text(SETTINGS)
    (folder / "openapi.json").write_text(json.dumps(with_known_names(document())))
    command = ["--config-file", "schemathesis.toml", "run", "openapi.json", "--url", url]
    command += ["--max-time", str(seconds), "--checks", ",".join(CHECKS)]
    command += ["--request-timeout", str(HANG_S), "--continue-on-failure", *more]
    # Health checks and warnings concern the amount and variety of test data, not the server.
    command += ["--suppress-health-check", "all", "--warnings", "off"]
    program = Path(sys.executable).with_name("schemathesis")
    process = await asyncio.create_subprocess_exec(program, *command, cwd=folder)
    return await process.wait()


def with_known_names(openapi: dict[str, Any]) -> dict[str, Any]:
    """Return the document with names that exist, and with a variant of the requests that is valid.

    With random names, most requests would be refused for their model or their image, and with any
    of forty fields, for two that cannot be combined.
    """
    image_data = base64.b64encode((IMAGES / "red.png").read_bytes()).decode()
    schemas = openapi["components"]["schemas"]
    for schema in schemas.values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["demo"]}
    image_url = {"const": f"data:image/png;base64,{image_data}"}
    schemas["ImageURL"]["properties"]["url"] = {"anyOf": [image_url, {"type": "string"}]}
    image = _exactly(
        {"type": {"const": "image_url"}, "image_url": {"const": {"url": image_url["const"]}}}
    )
    message_content = {
        "anyOf": [{"type": "string"}, {"type": "array", "maxItems": 3, "items": image}]
    }
    message = {"role": {"enum": ["user", "system", "assistant"]}, "content": message_content}
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
        content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        some = _exactly(plain) | {"required": ["model", prompt]}
        content["schema"] = {"anyOf": [some, content["schema"]]}
    return openapi


def _exactly(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fuzz the HTTP API.")
    parser.add_argument("--seconds", type=int, default=600, help="length of the run")
    parser.add_argument("more", nargs="*", help="arguments for schemathesis")
    arguments = parser.parse_args()
    sys.exit(uvloop.run(main(arguments.seconds, arguments.more)))
