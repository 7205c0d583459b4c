"""The page as a user has it: opened in a browser, typed into, looked at."""

import json
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect

Json = dict[str, Any]

PATIENCE = 30_000  # milliseconds: longer than anything takes, however busy the machine is
CHAT = "/v1/chat/completions"
NONE = "\u2013"  # a figure that there is not

expect.set_options(timeout=PATIENCE)


class Pages:
    """Opens pages and listens to what they complain about."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []  # errors on the console; a test that expects some takes them away

    def open(self, url: str, **options: Any) -> Page:
        """The page in a browser of its own, when it knows the model or why not."""
        context = self._browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        expect(page.locator("#model:not(:text-is('…')), #trouble:not([hidden])")).to_have_count(1)
        return page

    def close(self) -> None:
        """Close them all; nobody may have complained."""
        for context in self._contexts:
            context.close()
        assert self.complaints == []


def settle(page: Page, **values: str) -> None:
    """Change settings, by their labels."""
    for label, value in {"Temperature": "0", "Max tokens": "100", "Seed": "7", **values}.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)


def ask(page: Page, text: str, button: str = "Send") -> None:
    """Type a message and press a button."""
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name=button, exact=True).click()


def finished(page: Page) -> Locator:
    """The last answer, when it has ended."""
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    return page.locator(".answer").last


def origins(answer: Locator) -> set[str]:
    """Where the tokens of an answer came from, as they are marked."""
    marks: list[str] = answer.locator(".token").evaluate_all("all => all.map(one => one.className)")
    return {mark.removeprefix("token ") for mark in marks}


def bodies(page: Page) -> list[dict[str, Any]]:
    """What the page will have asked for by chat: the list grows."""
    found: list[dict[str, Any]] = []

    def see(request: Request) -> None:
        if request.url.endswith(CHAT):
            found.append(json.loads(request.post_data or ""))

    page.on("request", see)
    return found


def as_tokens(page: Page) -> None:
    """Show the tokens as they are, in place of the text that Markdown makes of them."""
    page.get_by_role("radio", name="Tokens").check()


def round_of(*tokens: tuple[str, str], number: int = 1, **fields: Any) -> Json:
    """A round that gave these tokens, of text and origin."""
    told = [{"id": at, "text": text, "origin": origin} for at, (text, origin) in enumerate(tokens)]
    drafted = [{"id": one["id"], "text": one["text"]} for one in told if one["origin"] != "target"]
    start = number / 10
    base = {"round": number, "drafted": drafted, "accepted": len(drafted), "source": tokens[0][1], "hit": False}
    return {**base, "verify": [start, start + 0.1], "draft": None, "tokens": told, **fields}


def chunk(*rounds: Json, finish: str | None = None, **delta: Any) -> Json:
    """A chunk of a stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "speculation": list(rounds)}]}


def answer_with(page: Page, *chunks: Json) -> None:
    """A server that says this, whatever it is asked: no tiny model says it by itself."""
    body = "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"
    page.route(f"**{CHAT}", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def say(page: Page, text: str) -> Locator:
    """The answer of a server that says this in one round."""
    answer_with(page, chunk(round_of((text, "draft")), finish="stop", content=text))
    ask(page, "say it")
    return finished(page)
