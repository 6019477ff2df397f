"""The page on the real server."""

import pytest
from playwright.sync_api import expect

from . import walks

PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples has he?\nAnswer:"


@pytest.fixture
def base_url(server):
    """A visit to the real server instead of the fake one."""
    return server.url


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_an_answer_equals_that_of_the_api(visit, client, mode):
    visit.choose(mode)
    visit.at("#temperature").fill("0")
    visit.at("#max-tokens").fill("40")
    walks.one_answer(visit, PROMPT)
    body = {"temperature": 0, "max_tokens": 40}
    if mode == "text":
        answer = client.post("/v1/completions", json={**body, "prompt": PROMPT}).json()
        expected = answer["choices"][0]["text"]
    else:
        messages = [{"role": "user", "content": PROMPT}]
        answer = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
        expected = answer["choices"][0]["message"]["content"]
    assert visit.text() == expected


def test_the_slider_ends_at_the_largest_accepted_value(visit, client):
    expect(visit.at("#server-gamma")).to_have_attribute("max", "64")
    answer = client.patch("/v1/speculation", json={"num_speculative_tokens": 65})
    assert answer.status_code == 400


def test_the_page_can_be_used_by_keyboard(visit):
    walks.by_keyboard(visit, "def gcd")


def test_the_page_contacts_only_its_server(visit, client):
    """The content security policy forbids all other hosts."""
    answer = client.get("/")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    walks.fits(visit)
    walks.every_field_has_a_name(visit)
    expect(visit.at("#prompt")).to_be_visible()
