"""`/generate` of vLLM's demo server: plan of a request, and assembler of its answer. Pure."""

from typing import Any

import msgspec
from msgspec.structs import replace

from shared.protocol.records import AnyRecord, TokenChunk
from workers.gateway.core.assembler import Answering, Assembler
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.core.plan import (
    Delivery,
    SubmitPlan,
    UsageOptions,
    client_fields_of,
    generate_request,
    plan_of,
    sampling_of,
    usage_options,
)
from workers.gateway.schemas.demo import DemoAnswer, DemoRequest


class DemoOptions(UsageOptions, frozen=True, kw_only=True):
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    prompt: str = ""
    n: int = 1


def plan_demo(request: DemoRequest, default_n: int) -> SubmitPlan[DemoOptions]:
    """Return the plan of a request. Raises a RequestError naming the field."""
    sampling = sampling_of(request)
    options = DemoOptions(
        **usage_options(request),
        fields=client_fields_of(request),
        prompt=request.prompt,
        n=sampling.get("n", default_n),
    )
    plan = plan_of(request, [generate_request(request, prompt=request.prompt)], sampling, options)
    delivery = Delivery.LINES if request.stream else Delivery.WHOLE
    return replace(plan, delivery=delivery, unrecorded=frozenset({"prompt"}))


class DemoAssembler(Assembler[DemoOptions]):
    """Assembler of answers that repeat the prompt and all text so far in each event."""

    def __init__(self, request: Answering[DemoOptions]) -> None:
        super().__init__(request)
        self.texts = [self.options.prompt] * self.options.n

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        if not isinstance(record, TokenChunk):
            return []
        for delta in record.choices:
            self.texts[delta.index] += delta.text
        return [self.answer()]

    def answer(self) -> DemoAnswer:
        return DemoAnswer([*self.texts])


DEMO = AnswerKind(
    name="demo",
    id_prefix="demo",
    options=DemoOptions,
    assembler=DemoAssembler,
    client_fields=ClientFields(dict.fromkeys(("prompt_token_ids", "tokens"), "prompt")),
)
