"""`/score` as in vLLM, and `/rerank` as in vLLM, Jina and Cohere."""

from starlette.requests import Request
from starlette.responses import Response

from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.http.auth import Caller
from workers.gateway.openai.scores import RERANK, SCORE, plan_rerank, plan_score
from workers.gateway.route_table import ANSWER_ERRORS, ID_PARAMETERS, RouteTable
from workers.gateway.schemas.scores import (
    UNSUPPORTED,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)

ROUTES = RouteTable("Answers", refuses=ANSWER_ERRORS, parameters=ID_PARAMETERS, counted=True)

SCORE_PAIRS = "Score pairs of texts by the similarity of their embeddings"
ORDER_DOCUMENTS = "Order documents by the similarity of their embeddings with a query's"


@ROUTES.endpoint(
    "POST", "/v1/score", SCORE_PAIRS, answer=ScoreList, body=ScoreRequest, name="post_v1_score"
)
@ROUTES.endpoint("POST", "/score", SCORE_PAIRS, answer=ScoreList, body=ScoreRequest)
async def score(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, SCORE, caller.tenant)
    asked = await context.bodies.decode(request, ScoreRequest, UNSUPPORTED)
    context.check_model(asked.model)
    return await submit(context, request, caller, SCORE, plan_score(asked))


@ROUTES.endpoint("POST", "/v2/rerank", ORDER_DOCUMENTS, answer=RerankList, body=RerankRequest)
@ROUTES.endpoint(
    "POST",
    "/v1/rerank",
    ORDER_DOCUMENTS,
    answer=RerankList,
    body=RerankRequest,
    name="post_v1_rerank",
)
@ROUTES.endpoint("POST", "/rerank", ORDER_DOCUMENTS, answer=RerankList, body=RerankRequest)
async def rerank(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, RERANK, caller.tenant)
    asked = await context.bodies.decode(request, RerankRequest, UNSUPPORTED)
    context.check_model(asked.model)
    return await submit(context, request, caller, RERANK, plan_rerank(asked))
