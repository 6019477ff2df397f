"""A visit to the page in a real browser: what a user does and sees."""

import re
from urllib.parse import urlsplit

from playwright.sync_api import expect

# Chromium reports this for every response with an error status.
_REPLY = re.compile(r"Failed to load resource: the server responded with a status of [45]\d\d")
SOURCES = ("draft", "copy", "correction", "bonus", "target")


class Visit:
    """One page with its requests and console messages."""

    def __init__(self, page, url):
        self.page, self.url = page, url
        self.requested, self.complaints = [], []
        page.on("request", lambda request: self.requested.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)

    def _note(self, message):
        if message.type in ("error", "warning") and not _REPLY.match(message.text):
            self.complaints.append(message.text)

    def open(self):
        self.page.goto(self.url)
        return self

    def at(self, selector):
        return self.page.locator(selector)

    def ready(self):
        expect(self.at("#health")).to_have_text("live")
        expect(self.at("#model-target")).not_to_have_text("–")
        return self

    def choose(self, mode):
        """Choose "chat" or "text"."""
        self.at(f"input[name=mode][value={mode}]").check(force=True)
        return self

    def unfold(self):
        """Show the settings of the request."""
        # Without a click, which would move the focus.
        self.at("#settings").evaluate("each => { each.open = true; }")
        return self

    def send(self, prompt):
        self.at("#prompt").fill(prompt)
        self.at("#send").click()

    def ended(self):
        expect(self.at("#send")).to_be_enabled()
        expect(self.at("#stop")).to_be_disabled()

    def ask(self, prompt):
        self.send(prompt)
        expect(self.at("#announcer")).to_contain_text("finished")
        self.ended()

    def tokens(self):
        """(source, text) of each token of the newest answer."""
        spans = self.at(".tokens").last.locator(".token")
        return [
            tuple(each)
            for each in spans.evaluate_all("all => all.map(t => [t.dataset.source, t.textContent])")
        ]

    def text(self):
        return self.at(".tokens").last.evaluate("answer => answer.textContent")

    def counts(self):
        shown = {each: self.at(f"#legend [data-source={each}] .count") for each in SOURCES}
        return {each: int(count.inner_text()) for each, count in shown.items()}

    def figure(self, key):
        return self.at(f"#summary [data-figure={key}] .value").inner_text()

    def slide(self, selector, value):
        """Move a slider and dispatch the events of a user."""
        self.at(selector).fill(str(value))

    def error_of(self, field):
        return self.at(f"{field} .error")

    def check(self):
        """Check that no other host was contacted and that the console has no messages."""
        hosts = {urlsplit(each).netloc for each in self.requested}
        assert hosts == {urlsplit(self.url).netloc}
        assert self.complaints == []
