"""`/generate` of vLLM's demo server: the plan of a request, and its assembler. Pure."""

from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shared.protocol.messages import RequestRecord
from shared.protocol.records import TokenChunk, Usage
from workers.gateway.core.assembler import Assembler, TokenBytes
from workers.gateway.core.plan import (
    SubmitPlan,
    client_fields_of,
    generate_request,
    plan_of,
    sampling_of,
)
from workers.gateway.schemas.demo import DemoAnswer, DemoRequest

_PROMPT = "prompt"


class DemoOptions(Struct, frozen=True, kw_only=True):
    """Options of the answer, stored in the RequestRecord."""

    prompt: str = ""
    n: int = 1


def plan_demo(request: DemoRequest, default_n: int) -> SubmitPlan:
    """Return the plan of a request. Raises a RequestError with the field."""
    sampling = sampling_of(request)
    n = sampling.get("n", default_n)
    options = {"fields": client_fields_of(request), _PROMPT: request.prompt, "n": n}
    plan = plan_of(request, [generate_request(request, prompt=request.prompt)], sampling, options)
    return replace(plan, is_lines=True, unrecorded=frozenset({_PROMPT}))


@dataclass(eq=False)
class DemoAssembler(Assembler):
    """Assembler of the whole texts so far, each behind its prompt."""

    options: DemoOptions
    texts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [self.options.prompt] * self.options.n

    @classmethod
    def of_record(cls, _: str, record: RequestRecord, __: TokenBytes) -> Self:
        return cls(msgspec.convert(record.options, DemoOptions))

    def add(self, part: int, record: TokenChunk) -> list[Any]:
        for delta in record.choices:
            self.texts[delta.index] += delta.text
        return [self.answer()]

    def finish(self, part: int, usage: Usage) -> list[Any]:
        return []

    def answer(self) -> DemoAnswer:
        return DemoAnswer([*self.texts])
