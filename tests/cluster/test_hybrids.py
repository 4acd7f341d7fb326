"""A hybrid model in real processes: its engine is killed, and the next one computes the states."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from shared.bus.bus import Bus
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from tests.cluster.conftest import CONFIG, ROOT, Cluster, answer, run, start_cluster, stop_cluster
from tests.cluster.streams import assert_gapless, attempts_of, read_amid_signal, tokens_of
from tests.engine.model.test_parity import greedy_answer, make_case
from tests.engine.model.test_self_check import write_folder
from tests.models.test_hybrids import ALWAYS, SPECS

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

MAX_TOKENS = 300
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hybrid")
    write_folder(folder / "model", ALWAYS, max_position_embeddings=1024, **SPECS[ALWAYS])
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    text = CONFIG.replace(str(ROOT / "ops" / "demo_model"), str(folder / "model"))
    running = start_cluster(
        folder, text.replace("max_model_len", "dtype: float64\n    max_model_len")
    )
    yield running
    stop_cluster(running)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Bus]:
    bus = await Bus.connect(cluster.url, "test")
    yield bus
    await bus.close()


async def test_an_engine_killed_mid_answer(cluster: Cluster, client: Bus) -> None:
    listed = [line for line in run(cluster, "models").splitlines() if line.startswith("demo ")]
    assert listed[0].split()[1:3] == [ALWAYS, "generic"]
    prompt = make_case("killed", [], 90, MAX_TOKENS).request
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    request = GenerateRequest("demo", None, params, prompt_token_ids=prompt.prompt_token_ids)
    engine = await cluster.pid(client, "engine")
    records = await read_amid_signal(client, request, engine, after=5)
    assert_gapless(records)
    assert len(attempts_of(records)) == 2
    model: Any = AutoModelForCausalLM.from_pretrained(cluster.config.parent / "model").double()
    # `generate` bans the end token before the minimum length.
    model.generation_config.eos_token_id = None
    assert tokens_of(records) == greedy_answer(model, prompt)
    undisturbed = await answer(client, request)
    assert tokens_of(undisturbed) == tokens_of(records)
    assert len(set(tokens_of(records))) > 5
