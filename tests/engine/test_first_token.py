"""The first token of a prompt does not wait for the draft."""

from typing import Any

import pytest

from saguaro import LLM, SamplingParams
from saguaro.draft.texts import MAX_READ, DraftTexts
from saguaro.engine.engine import Engine
from saguaro.link.inline import Inline
from saguaro.model.tiny import write_tiny
from saguaro.types import RoundEvent

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=3, max_position_embeddings=1024)
    settings: dict[str, Any] = {"draft": "drop:1", "method": "sd", "lookahead": 3, "link": "inline", "threads": 1}
    return LLM(folder, device="cpu", kv_memory="4MiB", **settings)


def texts_of(engine: Engine) -> DraftTexts:
    link = engine.round.draft
    assert isinstance(link, Inline)
    assert isinstance(link.side.drafter, DraftTexts)
    return link.side.drafter


@pytest.mark.parametrize("length", [3, 200, MAX_READ + 80])
def test_a_prompt_is_read_after_its_first_token(llm: LLM, length: int) -> None:
    engine, events = llm.engine, list[RoundEvent]()
    texts = texts_of(engine)
    name = engine.add([5 + (length + n) % 90 for n in range(length)], PARAMS)
    while not engine.step():
        assert all(trunk.n_computed == 0 for trunk in texts.trunks.values())
    assert all(trunk.n_computed == 0 for trunk in texts.trunks.values())
    engine.round.observers.append(events.append)
    while engine.has_work:
        engine.step()
    sources = [event.rows[0].source for event in events]
    n_without = -(-max(0, length - MAX_READ) // MAX_READ)  # rounds in which the rest is read
    assert sources[: n_without + 2] == ["empty"] * n_without + ["draft"] * 2
    assert len(engine.result(name).outputs[0].token_ids) == 12


def test_a_prompt_is_read_while_others_decode(llm: LLM) -> None:
    engine, events = llm.engine, list[RoundEvent]()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    first = engine.add([7, 8, 9], params)
    while not engine.step():
        pass
    second = engine.add([10 + n % 80 for n in range(300)], params)
    engine.round.observers.append(events.append)
    try:
        while engine.has_work:
            engine.step()
    finally:
        engine.round.observers.remove(events.append)
    rows = [row for event in events for row in event.rows]
    of_second = [row.source for row in rows if row.request.startswith(second)]
    assert "draft" in of_second
    for name in (first, second):
        assert len(engine.result(name).outputs[0].token_ids) == 40
