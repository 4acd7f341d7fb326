"""vLLM's offline class as a peer: the engine without its HTTP server."""

from typing import Any

from PIL import Image
from vllm import LLM, SamplingParams

from ops.bench.peers.child import serve
from ops.bench.peers.protocol import Answer, Request, Setup


class Vllm:
    def load(self, setup: Setup) -> None:
        self._llm = LLM(
            model=setup.model,
            dtype="bfloat16",
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            # Without statistics, vLLM's answers have no times.
            disable_log_stats=False,
        )

    def prepare(self, requests: list[Request]) -> list[tuple[Request, Any]]:
        return [(r, r.image and Image.open(r.image).convert("RGB")) for r in requests]

    def run(self, work: list[tuple[Request, Any]], began_s: float) -> list[Answer]:
        outputs = self._llm.generate(
            [self._prompt(request, image) for request, image in work],
            [
                SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_tokens)
                for request, _ in work
            ],
            use_tqdm=False,
        )
        return [_answer(output, began_s) for output in outputs]

    def phases(self) -> dict[str, float]:
        return {}

    def _prompt(self, request: Request, image: Any) -> Any:
        if image is None:
            return {"prompt_token_ids": request.token_ids}
        text = self._llm.get_tokenizer().apply_chat_template(
            request.messages, add_generation_prompt=True, tokenize=False
        )
        return {"prompt": text, "multi_modal_data": {"image": image}}


def _answer(output: Any, began_s: float) -> Answer:
    # The engine's process takes times from the monotonic clock, which all processes of a Linux
    # machine share and which time.perf_counter reads.
    times = output.metrics
    return Answer(
        list(output.outputs[0].token_ids),
        times.first_token_ts - began_s,
        times.last_token_ts - began_s,
        len(output.prompt_token_ids),
    )


if __name__ == "__main__":
    serve(Vllm())
