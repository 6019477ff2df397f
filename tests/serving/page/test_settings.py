"""Settings of one request and of the server, and rejected settings."""

import re

import pytest
from playwright.sync_api import expect

from .fake_server import error

OPERATOR = "#operator"


def status(visit):
    return visit.at(f"{OPERATOR} [role=status]")


def test_unchanged_settings_are_not_sent(visit, fake):
    visit.choose("text").ask("a & b")
    assert fake.bodies == [
        {
            "model": "zoo:target@200m",
            "prompt": "a & b",
            "temperature": 0.7,
            "max_tokens": 128,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_tokens": True,
        }
    ]


def test_changed_settings_are_sent(visit, fake):
    visit.at("#own-policy").select_option("fixed")
    visit.slide("#own-gamma", 3)
    visit.slide("#own-lenience", 0.8)
    expect(visit.at("#own-policy-about")).to_have_text(
        "always num_speculative_tokens, all verified."
    )
    visit.at("#temperature").fill("0")
    visit.at("#max-tokens").fill("5")
    visit.at("#seed").fill("-17")
    expect(visit.at("#own-lossy")).to_be_visible()
    visit.ask("x")
    body = fake.bodies[0]
    assert body["speculation"] == {"policy": "fixed", "num_speculative_tokens": 3, "lenience": 0.8}
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0, 5, -17)


def test_own_values_can_be_reset(visit, fake):
    visit.slide("#own-gamma", 3)
    visit.slide("#own-lenience", 0.8)
    for button in visit.at("#composer .back").all():
        button.click()
    expect(visit.at("#own-lossy")).to_be_hidden()
    expect(visit.at("#own-gamma")).to_have_value("5")
    visit.ask("x")
    assert "speculation" not in fake.bodies[0]


def test_speculation_can_be_disabled_for_a_request(visit, fake):
    visit.slide("#own-gamma", 3)
    visit.at("#own-policy").select_option("off")
    visit.ask("x")
    assert fake.bodies[0]["speculation"] == {"enabled": False}


def test_unusable_policies_are_hidden(visit):
    offered = visit.at("#own-policy option").evaluate_all("all => all.map(o => o.value)")
    assert offered == ["", "off", "fixed", "adaptive", "sv", "tetris_published"]
    expect(visit.at("#server-policy option[value=disco]")).to_be_disabled()


def test_a_policy_that_is_not_lossless_is_marked(visit):
    for whose in ("own", "server"):
        about = visit.at(f"#{whose}-policy-about")
        expect(about).to_have_text("also asks a companion what it thinks.")
        visit.at(f"#{whose}-policy").select_option("tetris_published")
        expect(about).to_contain_text("not lossless when sampling")


def test_several_models_can_be_selected(new_visit, fake):
    fake.models = ["one", "other"]
    visit = new_visit().open().ready().unfold()
    visit.at("#model").select_option("other")
    visit.ask("x")
    assert fake.bodies[0]["model"] == "other"


@pytest.mark.parametrize(("field", "value"), [("#seed", "1.5"), ("#seed", "x"), ("#seed", "1e30")])
def test_invalid_numbers_are_not_sent(visit, fake, field, value):
    visit.at(field).fill(value)
    visit.send("x")
    expect(visit.error_of("[data-field=seed]")).to_have_text("Must be a whole number.")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("param", "control"),
    [
        ("temperature", "#temperature"),
        ("max_tokens", "#max-tokens"),
        ("prompt", "#prompt"),
        ("speculation.policy", "#own-policy"),
        ("speculation.num_speculative_tokens", "#own-gamma"),
    ],
)
def test_errors_are_shown_at_their_field(visit, fake, param, control):
    fake.refusal = (400, error("must be something else", param), {})
    visit.send("x")
    field = visit.at("#composer .field").filter(has=visit.at(control))
    expect(field.locator(".error")).to_have_text("must be something else")
    expect(visit.at(control)).to_be_focused()
    expect(visit.at(control)).to_have_attribute("aria-invalid", "true")
    expect(visit.at(control)).to_have_accessible_description(re.compile("must be something else$"))
    expect(visit.at("#answer-error")).to_be_hidden()
    fake.refusal = None
    visit.ask("y")
    expect(field.locator(".error")).to_be_hidden()
    expect(visit.at(control)).not_to_have_attribute("aria-invalid", "true")


def test_settings_of_the_server_can_be_changed(visit, fake):
    visit.at("#server-policy").select_option("fixed")
    visit.slide("#server-gamma", 2)
    visit.slide("#server-lenience", 0.9)
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_have_text("Applied: fixed, at most 2 tokens, lenience 0.90.")
    assert [path for path, *_ in fake.asked] == ["/v1/speculation"]
    assert fake.bodies == [{"policy": "fixed", "num_speculative_tokens": 2, "lenience": 0.9}]
    expect(visit.at("#own-policy option").first).to_have_text("the server’s (fixed)")
    expect(visit.at("#own-gamma")).to_have_value("2")
    expect(visit.at(f"{OPERATOR} [type=reset]")).to_be_disabled()


def test_only_what_changed_is_applied(visit, fake):
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_contain_text("Nothing to apply")
    visit.slide("#server-gamma", 7)
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_contain_text("at most 7 tokens")
    assert fake.bodies == [{"num_speculative_tokens": 7}]


def test_changes_can_be_discarded(visit, fake):
    visit.at("#server-policy").select_option("fixed")
    visit.slide("#server-gamma", 2)
    visit.slide("#server-lenience", 0.5)
    visit.at(f"{OPERATOR} [type=reset]").click()
    expect(visit.at("#server-policy")).to_have_value("sv")
    expect(visit.at("#server-gamma")).to_have_value("5")
    expect(visit.at("#server-lenience")).to_have_value("1")
    assert fake.asked == []


def test_lenience_by_load_can_be_set(visit, fake):
    visit.at(f"{OPERATOR} input[value=rule]").check(force=True)
    visit.at(f"{OPERATOR} [data-part=add]").click()
    start, value = visit.at(f"{OPERATOR} .rule li").last.locator("input").all()
    expect(start).to_be_focused()
    start.fill("16")
    value.fill("0.8")
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_have_text(
        "Applied: sv, at most 5 tokens, lenience 1.00, 0.80 from 16."
    )
    assert fake.bodies == [{"lenience": {"0": 1, "16": 0.8}}]


def test_lenience_by_load_is_shown_and_can_be_replaced(new_visit, fake):
    fake.speculation["lenience"] = {"0": 1.0, "8": 0.9}
    visit = new_visit().open().ready().unfold()
    expect(visit.at("#composer [data-field=lenience] .shown")).to_have_text("1.00, 0.90 from 8")
    rows = visit.at(f"{OPERATOR} .rule li")
    expect(rows).to_have_count(2)
    rows.last.get_by_role("button").click()
    expect(rows).to_have_count(1)
    visit.at(f"{OPERATOR} input[value=one]").check(force=True)
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_contain_text("lenience 1.00.")
    assert fake.bodies == [{"lenience": 1}]


@pytest.mark.parametrize(
    ("param", "control"),
    [
        ("policy", "#server-policy"),
        ("num_speculative_tokens", "#server-gamma"),
        ("lenience", "#server-lenience"),
        ("lenience.8", "#server-lenience"),
    ],
)
def test_a_rejected_change_is_shown_at_its_field(visit, fake, param, control):
    fake.change_refusal = error("cannot be so", param)
    visit.slide("#server-gamma", 2)
    visit.at(f"{OPERATOR} [type=submit]").click()
    field = visit.at(f"{OPERATOR} .field").filter(has=visit.at(control))
    expect(field.locator(".error")).to_have_text("cannot be so")
    expect(visit.at(control)).to_be_focused()
    expect(status(visit)).to_have_text("Not applied.")
    expect(visit.at("#server-gamma")).to_have_value("2")
    fake.change_refusal = None
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_contain_text("Applied")
    expect(field.locator(".error")).to_be_hidden()


def test_a_rejected_change_without_a_field_is_shown_below(visit, fake):
    fake.change_refusal = error("the engine has stopped")
    visit.slide("#server-gamma", 2)
    visit.at(f"{OPERATOR} [type=submit]").click()
    expect(status(visit)).to_have_text("Not applied: the engine has stopped")


def test_without_a_draft_speculation_is_hidden(new_visit, fake):
    fake.speculation |= {"enabled": False, "draft": None, "companion": None, "policy": "none"}
    fake.pieces = [("target", "a"), ("target", "b"), ("target", "c"), ("target", "d")]
    visit = new_visit().open().ready()
    expect(visit.at("#no-draft")).to_be_visible()
    hidden = ["#operator", "#own-policy", "#own-gamma", "#own-lenience", "#model-draft"]
    hidden += ["#legend", ".chart.speculative", ".positions"]
    for selector in hidden:
        expect(visit.at(selector)).to_be_hidden()
    visit.ask("x")
    assert "speculation" not in fake.bodies[0]
    for figure in ("accepted", "rate", "lossless"):
        expect(visit.at(f"#summary [data-figure={figure}]")).to_be_hidden()
    expect(visit.at("#summary [data-figure=tokens]")).to_be_visible()


def test_settings_are_folded_into_a_line(new_visit, fake):
    visit = new_visit().open().ready()
    expect(visit.at("#own-policy")).to_be_hidden()
    words = visit.at("#settings-summary [data-part=words]")
    expect(words).to_have_text("sv, γ 5, lenience 1.00, temperature 0.7, at most 128 tokens")
    visit.at("#settings-summary").click()
    visit.at("#own-policy").select_option("off")
    visit.at("#temperature").fill("0")
    visit.at("#settings-summary").click()
    expect(words).to_have_text("target alone, temperature 0, at most 128 tokens")
    fake.refusal = (400, error("must be something else", "temperature"), {})
    visit.send("x")
    expect(visit.at("#temperature")).to_be_focused()
