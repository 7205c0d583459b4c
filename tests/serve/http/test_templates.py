"""A chat template is a program that comes with a model: one that does not end ends its own request alone."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from saguaro import LLM
from saguaro.serve import vetted
from saguaro.serve.http.limits import ServerLimits
from saguaro.serve.http.service import Service
from saguaro.serve.isolated import Budget
from saguaro.serve.vetted import VettedTemplates
from tests.link.target import AGES, is_running, until
from tests.serve.http.driver import LONG, NAME, Running, running

N = "range(99999)"
LOOPS = "{% for a in " + N + " %}{% for b in " + N + " %}{% for c in " + N + " %}{% endfor %}{% endfor %}{% endfor %}"
SOME_LOOP = "{% for m in messages %}{{ m.content }}{% if m.content == 'loop' %}" + LOOPS + "{% endif %}{% endfor %}"
SLOW = "{% for a in range(9) %}{% for b in " + N + " %}{% endfor %}{% endfor %}"
GROWS = "{{ 'a' * 9999999999 }}"


def chat(server: Running, content: str = "the") -> tuple[int, str]:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 4})
    return answer.status_code, answer.text


@pytest.mark.parametrize(
    ("template", "message"),
    [(LOOPS, "more than 0.1 seconds of processor time"), (GROWS, "more than 128 MiB of memory")],
)
def test_a_template_that_takes_too_much_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr(llm.engine.tokenizer.inner, "chat_template", template)
    with running(llm) as server, ThreadPoolExecutor(4) as clients:
        _limit(server.service, replace(vetted.TEMPLATE, core_seconds=0.1, seconds=AGES))
        alone = server.complete(**LONG)["choices"][0]["text"]
        asked = [clients.submit(chat, server) for _ in range(4)]
        n_beside = 0
        while n_beside == 0 or not all(one.done() for one in asked):
            assert server.complete(**LONG)["choices"][0]["text"] == alone
            n_beside += 1
        for status, text in (one.result() for one in asked):
            assert status == 400
            assert f"the chat template of {llm.engine.tokenizer.name}" in text
            assert message in text
        pids = server.service.templates.pids
        assert pids
    assert not any(is_running(pid) for pid in pids)


def test_templates_that_loop_delay_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve chats loop until the server ends. Requests that need no template, and ordinary chats, are answered."""
    monkeypatch.setattr(llm.engine.tokenizer.inner, "chat_template", SOME_LOOP)
    with running(llm, ServerLimits(drain_seconds=0.5)) as server, ThreadPoolExecutor(12) as clients:
        _limit(server.service, replace(vetted.TEMPLATE, core_seconds=3600, seconds=3600))
        asked = [clients.submit(chat, server, "loop") for _ in range(12)]
        try:
            until(lambda: server.front.n_requests == 12)
            server.complete(max_tokens=4)
            assert server.post("/tokenize", {"prompt": "the"}).status_code == 200
            assert chat(server)[0] == 200
            pids = server.service.templates.pids
            assert len(pids) == 2, "one for ordinary chats, and one that the others wait for"
            messages = [{"role": "user", "content": "the"}]
            assert server.post("/tokenize", {"messages": messages}).status_code == 200
            asking = {"model": NAME, "messages": messages}
            assert server.post("/v1/messages/count_tokens", asking).status_code == 200
            assert server.service.templates.pids == pids, "an interrupted rendering needs no new process"
            assert not any(one.done() for one in asked)
        finally:
            server.server.handle_exit(signal.SIGTERM, None)
        assert [one.result()[0] for one in asked] == [503] * 12
    assert not any(is_running(pid) for pid in pids)


def test_a_slow_template_is_rendered_to_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.tokenizer.inner, "chat_template", SOME_LOOP.replace(LOOPS, SLOW))
    monkeypatch.setattr(vetted, "QUICK_SECONDS", 0.001)
    with running(llm) as server:
        _limit(server.service, replace(vetted.TEMPLATE, core_seconds=60, seconds=60))
        assert chat(server, "loop")[0] == 200
        assert len(server.service.templates.pids) == 2, "it was not slow"


def test_templates_run_in_a_process_of_their_own(llm: LLM) -> None:
    with running(llm) as server:
        assert server.service.templates.pids == [], "it is started when it is asked for"
        assert chat(server)[0] == 200
        (pid,) = server.service.templates.pids
        assert pid != os.getpid()
        messages = [{"role": "user", "content": "the <|im_start|> end"}]
        answer = server.post("/tokenize", {"messages": messages})
        assert answer.json()["tokens"] == llm.engine.tokenizer.encode_chat(messages)


def test_what_a_template_refuses_is_said(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(llm.engine.tokenizer.inner, "chat_template", refuses)
    with running(llm) as server:
        status, text = chat(server)
        assert status == 400
        assert "refuses this conversation: roles must alternate" in text


def _limit(service: Service, limits: Budget) -> None:
    service.templates = VettedTemplates(limits)
    service.tokenizer.run_template = service.templates.quick
