"""Who is let in, from where, and what a stranger cannot do."""

import json
from pathlib import Path

import pytest

from saguaro import LLM
from saguaro.model.tiny import write_tiny
from saguaro.serve.http.page import FILES, FOLDER
from tests.serve.http.driver import Running, running, tiny_llm

PATHS = ["/v1/models", "/v1/models/tiny", "/version", "/metrics", "/openapi.json", "/nope"]
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


def test_with_a_key_everything_but_health_and_the_page_needs_it(llm: LLM) -> None:
    with running(llm, api_keys=["se|cret", "other"]) as server:
        wrong = [
            {},
            {"Authorization": "Bearer secret"},
            {"Authorization": "se|cret"},
            {"Authorization": "Basic se|cret"},
        ]
        wrong.append({"Authorization": "Bearer"})
        for headers in wrong:
            answers = [server.client.get(path, headers=headers) for path in PATHS]
            answers += [server.post(path, {"prompt": "the"}, headers=headers) for path in POSTS]
            for answer in answers:
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.client.get("/health").status_code == 200
        assert all(server.client.get(path).status_code == 200 for path in FILES)
        for key in ("se|cret", "other"):
            headers = {"Authorization": f"Bearer {key}"}
            assert server.client.get("/v1/models", headers=headers).status_code == 200
            assert server.post("/v1/completions", {"prompt": "the"}, headers=headers).status_code == 200
        strange = "Bearer sé|cret".encode()
        assert server.client.get("/v1/models", headers={b"Authorization": strange}).status_code == 401


def test_the_page_is_served_with_its_types_and_lets_nothing_else_in(server: Running) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES.values())
    for path, name in FILES.items():
        answer = server.client.get(path)
        assert answer.text == (FOLDER / name).read_text()
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[name.rpartition(".")[2]]
        assert answer.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_pages_of_other_origins_are_not_allowed_unless_named(server: Running, folder: Path) -> None:
    ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.client.get("/version", headers={"Origin": "http://page"}).headers
    assert server.client.options("/v1/completions", headers=ask).status_code == 405
    with running(tiny_llm(folder), allowed_origins=["http://page"], api_keys=["key"]) as other:
        answer = other.client.options("/v1/completions", headers=ask)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://page")
        stranger = other.client.options("/v1/completions", headers={**ask, "Origin": "http://stranger"})
        assert stranger.status_code == 400
        assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(tmp_path: Path, template: str) -> None:
    folder = write_tiny(tmp_path, "llama", num_hidden_layers=4)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with running(tiny_llm(folder)) as server:
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]})
        assert answer.status_code == 400, answer.text
        assert "refuses this conversation" in answer.json()["error"]["message"]


def test_what_is_said_is_no_template(server: Running) -> None:
    plain, evil = (
        server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in ("49", "{{ 7 * 7 }}")
    )
    assert plain != evil


def test_two_servers_in_one_process_do_not_disturb_each_other(server: Running, folder: Path) -> None:
    with running(tiny_llm(folder)) as other:
        before = server.metric("vllm:prompt_tokens_total")
        other.complete([5] * 30, max_tokens=1)
        assert server.metric("vllm:prompt_tokens_total") == before
        assert other.metric("vllm:prompt_tokens_total") == 30


OWN = ["127.0.0.1", "localhost", "LocalHost:8000", "[::1]:8000", "192.168.1.7:80", "10.0.0.1", "gpu-box:8000"]
OWN += ["saguaro.local", "saguaro.internal:80", "a.localhost", "localhost.", "mine.example.com", "a.wild.example.com"]
STRANGE = ["evil.com", "evil.com:8000", "127.0.0.1.evil.com", "localhost.evil.com", "example.com", "other.example.com"]
STRANGE += ["wild.example.com", "1.2.3", "evil.local.com", "[evil.com]", "evil.com."]


def test_a_host_that_is_not_the_servers_own_is_refused(folder: Path) -> None:
    """A page that has its name resolved to this machine (DNS rebinding) is still known by that name."""
    with running(tiny_llm(folder), allowed_hosts=["mine.example.com", "*.wild.example.com"]) as server:
        for host in OWN:
            assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200, host
        for host in STRANGE:
            for path in ("/v1/models", "/health", "/", "/v1/models/"):
                answer = server.client.get(path, headers={"Host": host})
                assert answer.status_code == 421, host
                assert "location" not in answer.headers
            message = answer.json()["error"]["message"]
            assert f"this server is not known as {host!r}; start it with --allowed-hosts " in message
            assert server.post("/v1/completions", {"prompt": "the"}, headers={"Host": host}).status_code == 421
        long = server.client.get("/", headers={"Host": f"{'a' * 10_000}.com"})
        assert (long.status_code, len(long.json()["error"]["message"]) < 400) == (421, True)


def test_any_host_is_served_if_that_is_wanted(folder: Path) -> None:
    with running(tiny_llm(folder), allowed_hosts=["*"]) as server:
        assert server.client.get("/v1/models", headers={"Host": "evil.com"}).status_code == 200


def test_no_answer_sends_a_client_to_the_host_it_named(server: Running) -> None:
    for path in ("/health/", "/v1/models/", "/v1/completions/", "/tokenize/"):
        answer = server.client.get(path, headers={"Host": "somewhere"})
        assert answer.status_code in (404, 405), path
        assert "location" not in answer.headers
