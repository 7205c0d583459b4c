"""A chat template is a program that comes with a model: one that does not end ends its own request alone."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from saguaro import LLM
from saguaro.serve import vetted
from saguaro.serve.http.service import Service
from saguaro.serve.vetted import VettedTemplates
from tests.link.target import is_running
from tests.serve.http.driver import LONG, Running, running

N = "range(99999)"
LOOPS = "{% for a in " + N + " %}{% for b in " + N + " %}{% for c in " + N + " %}{% endfor %}{% endfor %}{% endfor %}"
GROWS = "{{ 'a' * 9999999999 }}"


def chat(server: Running) -> tuple[int, str]:
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}], "max_tokens": 4})
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
        _hurry(server.service)
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
        pid = server.service.templates.worker.pid
        assert pid is not None
    assert not is_running(pid)


def test_templates_run_in_a_process_of_their_own(llm: LLM) -> None:
    with running(llm) as server:
        assert server.service.templates.worker.pid is None, "it is started when it is asked for"
        assert chat(server)[0] == 200
        assert server.service.templates.worker.pid not in (None, os.getpid())
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


def _hurry(service: Service) -> None:
    service.templates = VettedTemplates(replace(vetted.TEMPLATE, core_seconds=0.1))
    service.tokenizer.run_template = service.templates
