"""The settings in vLLM's additional config, and the supported versions of vLLM."""

import pytest

from draftwise.errors import DraftwiseWarning, InvalidParameterError
from draftwise.integrations.vllm.compatibility import TESTED, check_version
from draftwise.integrations.vllm.settings import VllmSettings
from draftwise.policies import POLICIES


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"draftwise": 3}, "draftwise"),
        ({"draftwise": {"compnion": "c"}}, "draftwise.compnion"),
        ({"draftwise": {"companion": 3}}, "draftwise.companion"),
        ({"draftwise": {"policy": "svv"}}, "policy"),
        ({"draftwise": {"policy": "svip", "policy_options": {"h": 1}}}, "draftwise.policy_options"),
        ({"draftwise": {"policy": "svip", "policy_options": 1}}, "draftwise.policy_options"),
        ({"draftwise": {"policy_options": {"threshold": 1}}}, "draftwise.policy_options"),
        ({"draftwise": {"draft": "zoo:draft"}}, "draftwise.draft"),
    ],
)
def test_errors_name_the_key(given, field):
    with pytest.raises(InvalidParameterError) as caught:
        VllmSettings.of(given)
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize("nothing", [None, {}, {"other": {"x": 1}}, {"draftwise": {}}])
def test_default_policies(nothing):
    settings = VllmSettings.of(nothing)
    assert settings.policy_for(samples_drafts=False).name == "adaptive"
    assert settings.policy_for(samples_drafts=True).name == "adaptive"


def test_default_policies_with_a_companion():
    settings = VllmSettings.of({"draftwise": {"companion": "c"}})
    assert settings.policy_for(samples_drafts=False).name == "sv"
    assert settings.policy_for(samples_drafts=True).name == "sv-predictable"


@pytest.mark.parametrize("policy", ["fixed", "adaptive", "svip", "none"])
def test_a_companion_that_the_policy_does_not_use_is_refused(policy):
    settings = VllmSettings(policy=policy, companion="c")
    reason = f"not used by policy '{policy}'.* sv"
    with pytest.raises(InvalidParameterError, match=reason) as caught:
        settings.policy_for(samples_drafts=False)
    assert caught.value.field == "draftwise.companion"


@pytest.mark.parametrize("policy", ["sv", "sv-predictable", "sv-published"])
def test_a_companion_that_the_policy_uses_is_accepted(policy):
    settings = VllmSettings(policy=policy, companion="c")
    assert settings.policy_for(samples_drafts=False).name == policy


def test_the_method_decides_whether_a_model_drafts():
    assert VllmSettings().text_draft("draft_model") is None
    assert VllmSettings(draft="suffix").text_draft("draft_model") == "suffix"
    assert VllmSettings().text_draft("ngram") == "suffix"
    assert VllmSettings(draft="ngram").text_draft("ngram") == "ngram"


@pytest.mark.parametrize(
    ("settings", "method", "field"),
    [
        ({"draft": "ngram"}, "draft_model", "draftwise.draft"),
        ({"draft": "suffix", "companion": "c"}, "draft_model", "draftwise.companion"),
        ({"companion": "c"}, "ngram", "draftwise.companion"),
        ({"profile": "p.safetensors"}, "ngram", "draftwise.profile"),
    ],
)
def test_settings_that_the_method_cannot_use_are_refused(settings, method, field):
    with pytest.raises(InvalidParameterError) as caught:
        VllmSettings(**settings).text_draft(method)
    assert caught.value.field == field


def test_sampled_drafts_are_refused_beside_continuations():
    VllmSettings(draft="suffix").check_sampling(False)
    VllmSettings().check_sampling(True)
    with pytest.raises(InvalidParameterError, match="needs greedy drafts") as caught:
        VllmSettings(draft="suffix").check_sampling(True)
    assert caught.value.field == "draftwise.draft"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("samples_drafts", [False, True])
def test_only_lossless_policies_are_accepted(name, samples_drafts):
    policy = POLICIES[name]
    settings = VllmSettings(policy=name)
    refused = (
        policy.uses_target_oracle
        or policy.replaces_tokens
        or (samples_drafts and (policy.filters or not policy.lossless))
    )
    if not refused:
        assert settings.policy_for(samples_drafts) is policy
        return
    with pytest.raises(InvalidParameterError, match="policy"):
        settings.policy_for(samples_drafts)


def test_policies_that_look_at_dropped_tokens_are_refused_with_sampled_drafts():
    for name in ("sv", "tetris", "sv-published", "tetris-published"):
        with pytest.raises(InvalidParameterError, match="greedy drafts only"):
            VllmSettings(policy=name).policy_for(samples_drafts=True)
    for name in ("svip", "fixed", "adaptive", "sv-predictable", "confidence", "smartspec"):
        assert VllmSettings(policy=name).policy_for(samples_drafts=True).name == name


class TestVersions:
    def test_the_tested_version_is_accepted(self):
        check_version(f"{TESTED[0]}.{TESTED[1]}.0")

    def test_untested_versions_cause_a_warning(self):
        with pytest.warns(DraftwiseWarning, match="9.1.0 was not tested"):
            check_version("9.1.0")

    @pytest.mark.parametrize("version", ["0.11.2", "0.31.1", "dev"])
    def test_old_versions_are_refused(self, version):
        with pytest.raises(InvalidParameterError, match=version):
            check_version(version)
