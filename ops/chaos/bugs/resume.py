"""Bugs of an engine that resumes a request from its token log."""

from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap


@bug("engine", "resumes", "I2", "I3")
def resume_off_by_one() -> None:
    from shared.protocol.records import LogRecord
    from workers.engine import log_records, stage_output
    from workers.engine.core.sequence import LoggedChoice

    logged_choices = log_records.logged_choices

    def without_last_token(records: list[LogRecord], n: int) -> list[LoggedChoice]:
        return [
            choice if choice.finished else LoggedChoice(choice.token_ids[:-1], False)
            for choice in logged_choices(records, n)
        ]

    replace_attribute(stage_output, "logged_choices", without_last_token)


@bug("engine", "resumes", "I2", "I3")
def resume_from_scratch() -> None:
    from workers.engine import stage_output

    replace_attribute(stage_output, "logged_choices", lambda records, n: [])


@bug("engine", "resumes", "I3")
def other_seed_on_resume() -> None:
    from workers.engine.core import request_state

    seed_of = request_state._derive_seed
    replace_attribute(
        request_state, "_derive_seed", lambda request: seed_of(request) + bool(request.logged)
    )


@bug("engine", "hearing, resumes", "I3")
def media_rows_off_by_one_on_resume() -> None:
    """After a resume, each embedding of a medium is in the row after its place."""
    from collections.abc import Sequence

    from workers.engine.core.sequence import EngineRequest
    from workers.engine.runner import ModelRunner

    @wrap(ModelRunner, "encode")
    def encode_shifted(
        encode: Any, self: ModelRunner, requests: Sequence[tuple[EngineRequest, Sequence[int]]]
    ) -> Any:
        num_encoded = encode(self, requests)
        for request, _ in requests:
            embeddings = self._prepared[request.request_id].embeddings
            if request.logged:
                embeddings[:] = [(place, embedding.roll(1, 0)) for place, embedding in embeddings]
        return num_encoded


@bug("engine", "resumes with stops", "I3")
def stop_strings_not_replayed() -> None:
    from shared.protocol.detokenizer import Detokenizer
    from workers.engine.core.request_state import ChoiceState
    from workers.engine.core.sequence import LoggedChoice

    @wrap(ChoiceState, "replay")
    def forgetful(replay: Any, self: ChoiceState, logged: LoggedChoice) -> Any:
        ending = replay(self, logged)
        stop = self.sequence.request.sampling.stop
        self.detokenizer = Detokenizer(self.detokenizer._decode, stop)
        return ending
