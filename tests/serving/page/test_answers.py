"""Streamed answers: sources of tokens, counts, verdict, stopping and errors."""

import re

import pytest
from playwright.sync_api import expect

from . import walks
from .fake_server import error


def test_tokens_are_marked_and_counted_by_source(visit, fake):
    visit.ask("def gcd")
    assert visit.tokens() == fake.pieces
    assert visit.counts() == {"draft": 5, "copy": 1, "correction": 2, "bonus": 1, "target": 1}


def test_an_answer_has_consistent_marks_and_counts(visit):
    walks.one_answer(visit, "def gcd")


def test_the_sources_look_different_without_colour(visit):
    visit.ask("x")
    looks = visit.page.evaluate(
        """() => ["draft", "copy", "correction", "bonus", "target"].map(source =>
            getComputedStyle(document.querySelector(`.token[data-source=${source}]`))
                .textDecorationStyle)"""
    )
    assert len(set(looks)) == 5


def test_markup_in_an_answer_is_text(visit, fake):
    visit.choose("text")
    fake.pieces = [
        ("draft", "<script>alert(1)</script>"),
        ("target", "&amp; <b>bold</b>"),
        ("bonus", "<img src=x onerror=alert(1)>"),
        ("draft", "\u202egnp 😀\n\n\t"),
    ]
    visit.ask("<i>a</i> & b")
    assert visit.tokens() == fake.pieces
    assert visit.text() == "".join(text for _, text in fake.pieces)
    assert visit.at(".prompt").inner_text() == "<i>a</i> & b"
    assert visit.at("#transcript :is(script, b, i, img)").count() == 0
    assert visit.at("#transcript").inner_text().count("<script>alert(1)</script>") == 1


def test_a_piece_without_a_source_is_shown_unmarked(visit, fake):
    fake.pieces = [(None, "plain"), ("draft", " drafted")]
    visit.ask("x")
    assert visit.tokens() == [(None, "plain"), ("draft", " drafted")]
    assert visit.counts() == {"draft": 1, "copy": 0, "correction": 0, "bonus": 0, "target": 0}


def test_text_appears_before_the_answer_is_complete(visit, fake):
    fake.held.clear()
    visit.send("x")
    expect(visit.at(".token")).to_have_count(len(fake.pieces) - 1)
    expect(visit.at("#transcript")).to_have_attribute("aria-busy", "true")
    expect(visit.at("#summary")).to_be_hidden()
    fake.held.set()
    visit.ended()
    assert visit.tokens() == fake.pieces
    expect(visit.at("#transcript")).to_have_attribute("aria-busy", "false")


def test_the_summary_shows_usage_of_the_server(visit):
    visit.ask("x")
    assert visit.figure("tokens") == "10"
    assert visit.figure("accepted") == "2.50"
    assert visit.figure("rate") == "60 %"
    assert visit.figure("lossless") == "Yes"
    summary = visit.at("#summary").inner_text()
    assert "stopped at max tokens; prompt 7" in summary
    assert "6 of 10 verified" in summary
    assert "4 steps" in summary


def test_an_answer_that_is_not_lossless_is_marked(visit, fake):
    fake.usage["lossless"] = False
    visit.ask("x")
    assert visit.figure("lossless") == "No"


@pytest.mark.parametrize("by", ["button", "escape"])
def test_stop_cancels_the_request(visit, fake, by):
    fake.held.clear()
    visit.send("x")
    expect(visit.at(".token")).to_have_count(len(fake.pieces) - 1)
    if by == "button":
        visit.at("#stop").click()
    else:
        visit.page.keyboard.press("Escape")
    visit.ended()
    assert fake.left.wait(30)
    assert visit.tokens() == fake.pieces[:-1]
    expect(visit.at("#announcer")).to_have_text("Stopped after 9 tokens.")
    assert "stopped by you" in visit.at("#summary").inner_text()
    assert visit.figure("lossless") == "–"
    expect(visit.at("#answer-error")).to_be_hidden()
    fake.held.set()
    visit.ask("again")
    assert visit.tokens() == fake.pieces


def test_an_error_during_the_stream_keeps_the_text_and_is_shown(visit, fake):
    fake.broken = error("target: logits are not numbers", kind="server_error")
    visit.send("x")
    expect(visit.at("[role=alert]")).to_have_text("target: logits are not numbers")
    visit.ended()
    assert visit.tokens() == fake.pieces
    fake.broken = None
    visit.ask("x")
    expect(visit.at("[role=alert]")).to_be_hidden()


def test_a_full_queue_shows_the_retry_time(visit, fake):
    fake.refusal = (429, error("The queue is full."), {"Retry-After": "3"})
    visit.send("x")
    expect(visit.at("[role=alert]")).to_have_text("The queue is full. Try again in 3 s.")
    visit.ended()
    expect(visit.at(".tokens")).to_have_count(0)


def test_the_status_of_a_response_without_json_is_shown(visit):
    visit.choose("text")
    visit.page.route(
        "**/v1/completions", lambda route: route.fulfill(status=413, body="<h1>Too large</h1>")
    )
    visit.send("x")
    expect(visit.at("[role=alert]")).to_contain_text("The server responded with 413")


def test_an_incomplete_stream_is_reported(visit):
    visit.choose("text")
    piece = '{"choices": [{"text": "a", "tokens": [{"text": "a", "source": "draft"}]}]}'
    visit.page.route(
        "**/v1/completions",
        lambda route: route.fulfill(body=f"data: {piece}\n\n", content_type="text/event-stream"),
    )
    visit.send("x")
    expect(visit.at("[role=alert]")).to_have_text("The connection was lost during the answer.")
    assert visit.text() == "a"


def test_streams_may_have_any_line_ends_and_comments(visit):
    visit.choose("text")
    pieces = ["a\\u2028", "b"]
    lines = [": awake", ""]
    for text in pieces:
        chunk = f'"tokens": [{{"text": "{text}", "source": "draft"}}]'
        lines += ["event: message", 'data:{"choices": [', f"data: {{{chunk}}}]}}", ""]
    body = "\r\n".join([*lines, "data: [DONE]", "", ""])
    visit.page.route(
        "**/v1/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    visit.ask("x")
    assert visit.tokens() == [("draft", "a\u2028"), ("draft", "b")]


def test_a_chat_sends_earlier_messages(visit, fake):
    visit.ask("first")
    expect(visit.at("#prompt")).to_have_value("")
    visit.ask("second")
    text = "".join(text for _, text in fake.pieces)
    assert [path for path, *_ in fake.asked] == ["/v1/chat/completions"] * 2
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "first"}]
    assert fake.bodies[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "second"},
    ]
    assert visit.at(".asked p").all_inner_texts() == ["first", "second"]
    visit.at("#new-chat").click()
    visit.ask("third")
    assert fake.bodies[2]["messages"] == [{"role": "user", "content": "third"}]
    assert visit.at(".asked p").all_inner_texts() == ["third"]


def test_a_chat_message_without_an_answer_can_be_sent_again(visit, fake):
    visit.ask("first")
    fake.refusal = (500, error("broken"), {})
    visit.send("second")
    expect(visit.at("[role=alert]")).to_have_text("broken")
    expect(visit.at("#prompt")).to_have_value("second")
    assert visit.at(".asked p").all_inner_texts() == ["first"]
    fake.refusal = None
    visit.at("#send").click()
    expect(visit.at(".asked")).to_have_count(2)
    assert len(fake.bodies[-1]["messages"]) == 3


def test_pressing_a_source_highlights_its_tokens(visit):
    visit.ask("x")
    button = visit.at("#legend button[data-source=bonus]")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(visit.at(".token[data-source=draft]").first).not_to_have_css("opacity", "1")
    expect(visit.at(".token[data-source=bonus]").first).to_have_css("opacity", "1")
    button.click()
    expect(visit.at(".token[data-source=draft]").first).to_have_css("opacity", "1")


def test_an_empty_prompt_is_not_sent(visit, fake):
    visit.send("  ")
    expect(visit.error_of("[data-field=prompt]")).to_have_text("Write a prompt first.")
    expect(visit.at("#prompt")).to_be_focused()
    assert fake.asked == []


def test_answers_can_be_compared(visit, fake):
    visit.ask("x")
    expect(visit.at("#past-answers")).to_be_hidden()
    visit.at("#own-policy").select_option("fixed")
    visit.slide("#own-gamma", 2)
    fake.usage |= {"mean_accepted_length": 1.5, "acceptance_rate": 0.25, "lossless": False}
    visit.ask("x")
    rows = visit.at("#past-answers tbody tr")
    expect(rows).to_have_count(2)
    cells = [row.locator("td").all_inner_texts() for row in rows.all()]
    speeds = [row.pop(4) for row in cells]
    assert cells == [
        ["fixed, γ 2, lenience 1.00, temperature 0.7", "10", "1.50", "25 %", "no"],
        ["sv, γ 5, lenience 1.00, temperature 0.7", "10", "2.50", "60 %", "yes"],
    ]
    assert all(float(speed.replace(",", "")) > 0 for speed in speeds)
    visit.at("#own-policy").select_option("off")
    visit.ask("x")
    expect(rows.first.locator("td").first).to_have_text("target alone, temperature 0.7")


@pytest.mark.parametrize(
    ("usage", "verdict", "note"),
    [
        ({"seconds_saved": 50.0}, r"[\d.,]+ × as fast as without drafts", "drafts saved 50.00 s"),
        ({"seconds_saved": -500.0}, "100 % slower than without drafts", "drafts cost 500.00 s"),
        ({"seconds_saved": 0.0}, "As fast as without drafts", "estimate"),
        ({"seconds_saved": None}, "Speed without drafts: not known yet", "no step without drafts"),
        ({"seconds_saved": 0.0, "num_drafted": 0}, "As fast as without drafts", "no token drafted"),
    ],
)
def test_the_speed_is_compared_with_that_without_drafts(visit, fake, usage, verdict, note):
    fake.usage |= usage
    visit.ask("x")
    expect(visit.at("#verdict b")).to_have_text(re.compile(f"^{verdict}$"))
    expect(visit.at("#verdict span")).to_contain_text(note)


def test_the_ratio_of_speeds_is_that_of_the_times(visit, fake):
    fake.held.clear()
    fake.usage["seconds_saved"] = 1.0
    visit.send("x")
    visit.page.wait_for_timeout(1000)
    fake.held.set()
    visit.ended()
    seconds = 10 / float(visit.figure("speed").replace(",", ""))
    shown = float(visit.at("#verdict b").inner_text().split()[0])
    assert shown == pytest.approx((seconds + 1.0) / seconds, rel=0.01)


def test_a_server_that_reports_no_savings_gets_no_verdict(visit, fake):
    del fake.usage["seconds_saved"]
    visit.ask("x")
    expect(visit.at("#verdict")).to_be_hidden()


def test_a_model_without_a_chat_template_continues_texts(new_visit, fake):
    fake.has_chat_template = False
    visit = new_visit().open().ready()
    expect(visit.at("input[value=text]")).to_be_checked()
    expect(visit.at("input[value=chat]")).to_be_disabled()
    visit.ask("x")
    assert [path for path, *_ in fake.asked] == ["/v1/completions"]


def test_a_first_answer_needs_no_scrolling(new_visit, fake):
    fake.pieces = [("draft", f" word{number}") for number in range(128)]
    visit = new_visit().open().ready()
    visit.ask("Why is the sky blue?")
    for shown in ("#verdict", "#transcript", "#summary"):
        expect(visit.at(shown)).to_be_in_viewport(ratio=1)
    assert visit.page.evaluate("() => scrollY") == 0
