"""Charts and statistics of the server."""

import re

from playwright.sync_api import expect

TITLES = ["Goodput", "Mean accepted length", "Step time", "Requests"]


def chart(visit, title):
    return visit.at(".chart").filter(has_text=title)


def points(visit, title):
    """Number of samples on the lines of a chart."""
    drawn = (
        chart(visit, title)
        .locator("path.line.line-0")
        .evaluate_all("all => all.map(path => path.getAttribute('d'))")
    )
    return sum(len(each.split("L")) for each in drawn)


def poll(visit, fake):
    """Advance the clock of the page by one poll, and wait until its result is drawn."""
    drawn = points(visit, "Step time")
    visit.page.clock.run_for(1000)
    visit.page.wait_for_function(
        """before => document.querySelectorAll(".chart")[2]
            .querySelector("path.line")?.getAttribute("d").split("L").length !== before""",
        arg=drawn,
    )


def stopped_clock(new_visit):
    visit = new_visit()
    visit.page.clock.install(time=0)
    visit.page.clock.pause_at(1000)
    return visit.open().ready()


def test_charts_grow_with_every_poll(new_visit, fake):
    visit = stopped_clock(new_visit)
    for number in range(2, 6):
        fake.stats |= {"goodput": 100.0 * number}
        poll(visit, fake)
        assert [points(visit, title) for title in TITLES] == [number] * 4
        expect(chart(visit, "Goodput").locator(".value")).to_have_text(f"{number}00")
    assert fake.num_polls == 5


def test_current_values_have_units(visit):
    readings = [chart(visit, title).locator(".readings").inner_text() for title in TITLES]
    squeezed = [re.sub(r"\s+", " ", each).strip() for each in readings]
    assert squeezed == ["123 tokens/s", "2.75 tokens/step", "21.5 ms", "running 2 waiting 1"]
    expect(chart(visit, "Goodput").get_by_role("img")).to_have_accessible_name(
        "Goodput, now: goodput 123 tokens/s"
    )


def test_axes_are_labelled(visit):
    labels = chart(visit, "Goodput").locator("text").all_text_contents()
    assert labels == ["0", "50", "100", "150", "2 min ago", "1 min", "now"]


def test_an_idle_server_leaves_a_gap(new_visit, fake):
    visit = stopped_clock(new_visit)
    poll(visit, fake)
    idle = {"goodput": None, "mean_accepted_length": None}
    idle |= {"acceptance_by_position": [], "time_split": {}, "prefix_cache_hit_rate": None}
    idle |= {"guard_balance": None}
    fake.stats |= idle
    poll(visit, fake)
    expect(chart(visit, "Goodput").locator(".value")).to_have_text("–")
    expect(visit.at(".split")).to_be_hidden()
    expect(visit.at(".positions")).to_be_hidden()
    expect(visit.at(".prefixes")).to_be_hidden()
    expect(visit.at(".guard")).to_be_hidden()
    fake.stats |= {"goodput": 50.0}
    poll(visit, fake)
    expect(chart(visit, "Goodput").locator("path.line")).to_have_count(2)
    expect(chart(visit, "Step time").locator("path.line")).to_have_count(1)


def test_samples_older_than_two_minutes_are_dropped(new_visit, fake):
    visit = stopped_clock(new_visit)
    poll(visit, fake)
    poll(visit, fake)
    assert points(visit, "Goodput") == 3
    visit.page.clock.fast_forward(200_000)  # the page polls once and draws the response
    visit.page.wait_for_function(
        """() => document.querySelector(".chart path.line")
            .getAttribute("d").split("L").length < 3"""
    )
    assert points(visit, "Goodput") == 1


def test_values_of_a_chart_can_be_selected_by_keyboard(new_visit, fake):
    visit = stopped_clock(new_visit)
    fake.stats |= {"goodput": 456.0}
    poll(visit, fake)
    plot = chart(visit, "Goodput").get_by_role("img")
    plot.focus()
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("ArrowLeft")
    expect(chart(visit, "Goodput").locator(".value")).to_have_text("123")
    expect(chart(visit, "Goodput").locator(".when")).to_contain_text("s ago")
    visit.at("#prompt").focus()
    expect(chart(visit, "Goodput").locator(".value")).to_have_text("456")


def test_time_per_step_is_shown_by_phase(visit):
    parts = visit.at(".split li").all_inner_texts()
    assert [re.sub(r"\s+", " ", each).strip() for each in parts] == [
        "draft 20 %",
        "companion 10 %",
        "select 2 %",
        "verify 60 %",
        "accept 5 %",
        "rest 3 %",
    ]
    assert visit.at(".positions b").all_inner_texts() == ["90", "70", "50"]
    expect(visit.at(".prefixes")).to_have_text("Prompt tokens found in the prefix cache: 42 %")
    expect(visit.at(".guard")).to_have_text("Account of the guard, in steps without drafts: 12.3")


def test_polling_resumes_when_the_server_is_back(new_visit, fake):
    visit = stopped_clock(new_visit)
    visit.page.route("**/v1/stats", lambda route: route.fulfill(status=418, body="{}"))
    visit.page.clock.run_for(1000)
    expect(visit.at("#health")).to_contain_text("418")
    visit.page.unroute("**/v1/stats")
    visit.page.clock.run_for(3000)
    expect(visit.at("#health")).to_have_text("live")


def test_the_header_tells_that_the_engine_is_not_ready(new_visit, fake):
    visit = stopped_clock(new_visit)
    fake.stats |= {"status": "starting", "reason": "the engine is being started"}
    poll(visit, fake)
    expect(visit.at("#health")).to_have_text("the engine is being started")
    fake.stats |= {"status": "ok", "reason": None}
    poll(visit, fake)
    expect(visit.at("#health")).to_have_text("live")


def test_changes_by_others_are_shown_and_keep_own_edits(new_visit, fake):
    visit = stopped_clock(new_visit)
    visit.slide("#server-gamma", 2)
    fake.speculation |= {"num_speculative_tokens": 4, "policy": "adaptive"}
    for _ in range(10):
        poll(visit, fake)
    expect(visit.at("#server-policy")).to_have_value("adaptive")
    expect(visit.at("#own-gamma")).to_have_value("4")
    expect(visit.at("#server-gamma")).to_have_value("2")
