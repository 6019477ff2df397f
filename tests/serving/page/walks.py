"""Checks of the page that apply to the fake server and the real one.

Each takes a visit to an open page. They do not depend on the answers of the server.
"""

import re

from playwright.sync_api import expect

from .visit import SOURCES


def one_answer(visit, prompt):
    """Check that marks, counts and summary of an answer are consistent."""
    visit.ask(prompt)
    tokens = visit.tokens()
    assert "".join(text for _, text in tokens) == visit.text() != ""
    assert {source for source, _ in tokens} <= set(SOURCES)
    counted = {each: sum(source == each for source, _ in tokens) for each in SOURCES}
    assert visit.counts() == counted
    assert int(visit.figure("tokens")) > 0
    assert visit.figure("lossless") in ("Yes", "No")
    assert re.fullmatch(r"[\d.,]+ (ms|s)", visit.figure("first"))
    assert re.fullmatch(r"[\d.,]+", visit.figure("speed"))


def by_keyboard(visit, prompt):
    """Get an answer and change a setting with the keyboard only."""
    page = visit.page
    reached = []
    page.keyboard.press("Tab")
    expect(page.locator("input[name=mode]:checked")).to_be_focused()
    page.keyboard.press("Tab")
    expect(visit.at("#prompt")).to_be_focused()
    page.keyboard.type(prompt)
    for _ in range(40):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            """() => {
                const { id, classList, name, dataset } = document.activeElement;
                const style = getComputedStyle(
                    name === "lenience-kind"
                        ? document.activeElement.nextElementSibling
                        : document.activeElement,
                );
                const known = id || name || dataset.source || classList[0] || "";
                return [known, style.outlineStyle];
            }"""
        )
        if focus[0] == "" or focus[0] in reached[:1]:
            break
        assert focus[1] == "solid", f"the focus is not seen on {focus[0]}"
        reached.append(focus[0])
    wanted = ["own-policy", "own-gamma", "own-lenience", "temperature", "max-tokens", "seed"]
    wanted += ["send", "plot", "server-policy", "server-gamma", "server-lenience"]
    assert [each for each in reached if each in wanted and each != "plot"] == [
        each for each in wanted if each != "plot"
    ]
    assert reached.count("plot") == 4
    visit.at("#prompt").focus()
    page.keyboard.press("Control+Enter")
    expect(visit.at("#announcer")).to_contain_text("finished")
    visit.ended()
    expect(visit.at("#prompt")).to_be_focused()
    visit.at("#transcript").focus()
    expect(visit.at("#transcript")).to_be_focused()
    slider = visit.at("#server-gamma")
    slider.focus()
    before = int(slider.input_value())
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    status = visit.at("#operator [role=status]")
    expect(status).to_contain_text(re.compile(rf"Applied: .* at most {before - 1} token"))
    expect(slider).to_be_focused()


def fits(visit):
    """Check that no element is wider than the window."""
    assert (
        visit.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        == 0
    )
    outside = visit.page.evaluate(
        """() => [...document.body.querySelectorAll("*")].filter(each => {
            const { left, right, width } = each.getBoundingClientRect();
            return width > 1 && (left < 0 || right > innerWidth + 0.5);
        }).map(each => each.outerHTML.slice(0, 80))"""
    )
    assert outside == []


def every_field_has_a_name(visit):
    """Check that each control has an accessible name."""
    nameless = visit.page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button")].filter(each =>
            !(each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim())
        ).map(each => each.outerHTML)"""
    )
    assert nameless == []
