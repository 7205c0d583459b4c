"""The page with the default pair, the draft in a process of its own, as `make demo` has them."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from saguaro import LLM
from saguaro.model.default import DRAFT
from tests.serve.http.driver import running
from tests.serve.page.driver import Pages, ask, finished, origins, settle

pytestmark = [pytest.mark.browser, pytest.mark.network]

PROMPT = "Explain in a few sentences how a saguaro cactus survives in the desert."


def test_an_answer_and_the_same_side_by_side(default_folder: Path, pages: Pages) -> None:
    settings: dict[str, Any] = {"draft": str(DRAFT), "prepare": "always", "fallback": "draft"}
    llm = LLM(default_folder, device="cpu", max_model_len=512, link="process", draft_timeout=60.0, **settings)
    with running(llm) as server:
        page = pages.open(server.url)
        page.set_default_timeout(120_000)
        settle(page, Max_tokens="24")
        ask(page, PROMPT)
        expect(page.locator(".token.cache")).not_to_have_count(0)
        text = finished(page).text_content()
        assert "cact" in (text or "").lower()
        page.get_by_role("button", name="New chat").click()
        ask(page, PROMPT, "Side by side")
        expect(page.locator(".verdict.good")).to_contain_text("✓ identical output: 24 tokens", timeout=120_000)
        assert page.locator(".trio .answer").all_text_contents() == [text] * 3
        marks = [origins(answer) for answer in page.locator(".trio .answer").all()]
        assert marks[0] == {"target"}
        assert "cache" not in marks[1] >= {"draft", "target"}
        assert {"target"} < marks[2] <= {"cache", "draft", "target"}  # how many hits depends on the machine's load
        page.close()
