"""`/v1/embeddings`."""

from starlette.requests import Request
from starlette.responses import Response

from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.http.auth import Caller
from workers.gateway.openai.embeddings import EMBEDDING, plan_embedding
from workers.gateway.route_table import ANSWER_ERRORS, ID_PARAMETERS, RouteTable
from workers.gateway.schemas.embeddings import EmbeddingList, EmbeddingRequest

ROUTES = RouteTable("Answers", refuses=ANSWER_ERRORS, parameters=ID_PARAMETERS, counted=True)


@ROUTES.endpoint(
    "POST",
    "/v1/embeddings",
    "Embed texts or prompts of token ids",
    answer=EmbeddingList,
    body=EmbeddingRequest,
)
async def embed(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, EMBEDDING, caller.tenant)
    asked = await context.bodies.decode(request, EmbeddingRequest)
    context.check_model(asked.model)
    return await submit(context, request, caller, EMBEDDING, plan_embedding(asked))
