"""Accessibility of the page: keyboard, phones, dark mode and API keys."""

import pytest
from playwright.sync_api import expect

from . import walks

PHONE = {"viewport": {"width": 360, "height": 740}}


def brightness(visit, selector, what):
    colour = visit.at(selector).evaluate(f"each => getComputedStyle(each).{what}")
    return sum(int(part) for part in colour.strip("rgb()").split(","))


def test_the_page_can_be_used_by_keyboard(visit):
    walks.by_keyboard(visit, "def gcd")


def test_every_field_has_a_name(visit):
    walks.every_field_has_a_name(visit)


def test_focus_moves_between_send_and_stop(visit, fake):
    fake.held.clear()
    visit.at("#prompt").fill("x")
    visit.at("#send").focus()
    visit.page.keyboard.press("Enter")
    expect(visit.at("#stop")).to_be_focused()
    fake.held.set()
    visit.ended()
    expect(visit.at("#send")).to_be_focused()


def test_ctrl_enter_in_the_operators_form_sends_no_prompt(visit, fake):
    visit.at("#prompt").fill("x")
    visit.at("#server-policy").focus()
    visit.page.keyboard.press("Control+Enter")
    visit.page.keyboard.press("Tab")
    assert fake.asked == []


def test_screen_readers_announce_only_the_end(visit):
    live = visit.page.evaluate(
        """() => [...document.querySelectorAll("[role=status], [role=alert], [aria-live], output")]
            .filter(each => each.querySelector(".tokens, .value, svg")).length"""
    )
    assert live == 0
    visit.ask("x")
    expect(visit.at("#announcer[role=status]")).to_have_text("Answer finished, 10 tokens.")


@pytest.mark.parametrize("rule", [1.0, {"0": 1.0, "8": 0.95, "32": 0.9}], ids=["one", "rule"])
def test_nothing_overflows_a_phone(new_visit, fake, rule):
    fake.speculation |= {"lenience": rule, "target": "somebody/" + "a-long-name-" * 8}
    fake.speculation["num_speculative_tokens"] = 8
    fake.stats["acceptance_by_position"] = [0.9] * 64
    fake.pieces = [("draft", "long" * 60), ("bonus", " x = " + "y" * 300), ("target", "z")]
    visit = new_visit(**PHONE).open().ready()
    walks.fits(visit)
    visit.unfold()
    visit.slide("#own-lenience", 0.5)
    visit.slide("#own-gamma", 1)
    visit.ask("unbroken" * 50)
    visit.ask("unbroken" * 50)
    expect(visit.at("#past-answers")).to_be_visible()
    walks.fits(visit)


def test_a_phone_scrolls_to_the_answer(new_visit):
    visit = new_visit(**PHONE).open().ready()
    visit.ask("x")
    expect(visit.at("#legend")).to_be_in_viewport()


def test_nothing_overflows_a_phone_in_a_chat(new_visit):
    visit = new_visit(**PHONE).open().ready()
    visit.ask("unbroken" * 50)
    walks.fits(visit)


def test_dark_mode_is_supported(new_visit):
    light = new_visit(color_scheme="light").open().ready().unfold()
    dark = new_visit(color_scheme="dark").open().ready().unfold()
    for selector in ("body", ".card.answer", "#send", "#own-policy"):
        grounds = [brightness(each, selector, "backgroundColor") for each in (light, dark)]
        inks = [brightness(each, selector, "color") for each in (light, dark)]
        assert (grounds[0] > inks[0]) != (grounds[1] > inks[1])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(new_visit, scheme):
    visit = new_visit(color_scheme=scheme).open().ready().unfold()
    visit.ask("x")
    faint = visit.page.evaluate(
        """() => {
            const channel = (value) => {
                const part = value / 255;
                return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
            };
            const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
            const light = ([r, g, b]) =>
                0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
            const ground = (each) => {
                const colour = parts(getComputedStyle(each).backgroundColor);
                return colour[3] === 0 ? ground(each.parentElement) : colour;
            };
            const texts = [...document.body.querySelectorAll("*")].filter((each) =>
                each.checkVisibility() && !each.closest("svg, :disabled") &&
                [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
            return texts.flatMap((each) => {
                const [one, other] = [parts(getComputedStyle(each).color), ground(each)]
                    .map(light).sort((a, b) => b - a);
                const contrast = (one + 0.05) / (other + 0.05);
                return contrast < 4.5 ? [`${each.outerHTML.slice(0, 80)} ${contrast}`] : [];
            });
        }"""
    )
    assert faint == []


def test_a_required_key_is_requested(new_visit, fake):
    fake.key = "secret-17"
    visit = new_visit().open()
    expect(visit.at("#key")).to_be_focused()
    expect(visit.at("#health")).to_have_text("needs an API key")
    visit.page.keyboard.type("wrong")
    visit.page.keyboard.press("Enter")
    expect(visit.error_of("#key-field")).to_have_text("The server rejected this key.")
    visit.at("#key").fill("kľúč")
    visit.page.keyboard.press("Enter")
    expect(visit.error_of("#key-field")).to_contain_text("ASCII")
    visit.at("#key").fill("secret-17")
    visit.page.keyboard.press("Enter")
    visit.ready()
    expect(visit.at("#key-form")).to_be_hidden()
    visit.ask("x")
    assert fake.asked[0][2]["authorization"] == "Bearer secret-17"
    assert all("secret-17" not in each for each in visit.requested)
    visit.page.reload()
    visit.ready()
    expect(visit.at("#key-form")).to_be_hidden()


def test_the_key_is_forgotten_with_the_tab(new_visit, fake):
    fake.key = "secret-17"
    first = new_visit().open()
    first.at("#key").fill("secret-17")
    first.page.keyboard.press("Enter")
    first.ready()
    assert first.page.evaluate("() => [localStorage.length, document.cookie]") == [0, ""]
    second = new_visit().open()
    expect(second.at("#key-form")).to_be_visible()


def test_a_revoked_key_is_requested_again(visit, fake):
    fake.key = "new"
    visit.send("x")
    expect(visit.at("#key-form")).to_be_visible()
    expect(visit.at("#answer-error")).to_have_text("Give the API key.")
    visit.at("#key").fill("new")
    visit.page.keyboard.press("Enter")
    expect(visit.at("#health")).to_have_text("live")
    expect(visit.at("#key-form")).to_be_hidden()
    visit.ask("x")
