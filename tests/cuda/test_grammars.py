"""Structured outputs and log-probabilities are the same on every device and in every step mode."""

import pytest

from ..engine.assembly import generate
from ..engine.grammars import RECIPE
from ..engine.test_logprobs import RECIPE as PLAIN_RECIPE
from ..engine.test_logprobs import assert_all_right, work
from ..engine.test_lossless import NOT_UNLIKELY
from ..engine.test_structured_outputs import SETTINGS, asked, p_values
from .placing import RECORDED, assemble

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["fixed", "sv"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_outputs_follow_the_target_within_the_grammar(models, place, policy):
    engine = assemble(place, models, RECIPE, 60, 0.3, policy=policy, num_speculative_tokens=3)
    outputs = generate(engine, *zip(*map(asked, range(4000)), strict=True))
    model = models.reference(RECIPE)
    laws = [
        None if form is None else form.law(model, prompt, params)
        for prompt, params, form in SETTINGS
    ]
    for p_value in p_values(models, outputs, laws):
        assert p_value > NOT_UNLIKELY


@pytest.mark.parametrize("policy", ["fixed", "staged"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_log_probabilities_are_those_of_a_plain_pass(models, place, policy):
    engine = assemble(place, models, PLAIN_RECIPE, 7, policy=policy, num_speculative_tokens=3)
    prompts, params = work(40)
    assert_all_right(models, generate(engine, prompts, params), params)
