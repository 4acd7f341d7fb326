"""`/generate`, which clients of vLLM's demo server call."""

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.http.auth import Caller
from workers.gateway.openai.demo import DEMO, plan_demo
from workers.gateway.route_table import ANSWER_ERRORS, ID_PARAMETERS, RouteTable
from workers.gateway.schemas.demo import DemoAnswer, DemoRequest
from workers.gateway.schemas.openai_request import UNSUPPORTED

ROUTES = RouteTable("Answers", refuses=ANSWER_ERRORS, parameters=ID_PARAMETERS, counted=True)


@ROUTES.endpoint(
    "POST",
    "/generate",
    "Continue a prompt, as vLLM's demo server does; a stream is a line of JSON for each change",
    answer=DemoAnswer,
    body=DemoRequest,
)
async def demo(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, DEMO, caller.tenant)
    asked = await context.bodies.decode(request, DemoRequest, UNSUPPORTED)
    models = context.config.models
    asked = replace(asked, model=asked.model or next(iter(models)))
    context.check_model(asked.model)
    default_n = models[asked.model].sampling_defaults.get("n", 1)
    plan = plan_demo(asked, default_n)
    return await submit(context, request, caller, DEMO, plan)
