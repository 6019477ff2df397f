"""Whether sampled answers have the distribution of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftwise.audit.budget import SpentError
from draftwise.audit.context import Context
from draftwise.audit.drawing import (
    ANSWERS_PER_REQUEST,
    OTHER,
    Draws,
    choose_subjects,
    draw_round,
    draws_of,
)
from draftwise.audit.findings import Case, Finding, counted, failed, not_audited, passed
from draftwise.audit.statistics import Fit, fit_to_law, fit_to_samples, holm, together

# A correct server fails with at most this probability, over all tests of the sampling.
LEVEL = 0.01
# Probability with which a bias is to be noticed.
POWER = 0.95
_FEWEST_SAMPLES = 64
ALL = "sampling, all together"


@dataclass(frozen=True)
class Tested:
    """The test of one prompt with one setting.

    Attributes:
        draws: the answers.
        fit: the test of the audited server's answers.
        control: p-value of the baseline's answers under the exact distribution; ``None`` without.
        has_law: whether the answers were compared with the exact distribution. Otherwise they were
            compared with the baseline's answers.
        p_value: corrected for the number of tests.
    """

    draws: Draws
    fit: Fit
    control: float | None
    has_law: bool
    p_value: float


@dataclass(frozen=True)
class Sampled:
    """All tests of the sampling.

    Attributes:
        tests: one for each prompt and setting.
        whole: all tests as one, which finds a bias that all settings share.
        p_value: that of ``whole``, corrected for the number of tests.
        reason: why there are no tests; empty if there are.
    """

    tests: tuple[Tested, ...] = ()
    whole: Fit | None = None
    p_value: float = 1.0
    reason: str = ""

    @property
    def level(self) -> float:
        """The p-value below which at least one test counts, before the correction."""
        return LEVEL / (len(self.tests) + 1)

    def seen_bias(self) -> float | None:
        """The total variation that would have been seen in all distributions; ``None`` for none."""
        known = self._known()
        return together(known).smallest_bias(POWER, self.level) if known else None

    def sees(self, bias: float) -> bool:
        """Whether a total variation in all distributions would have been seen with ``POWER``."""
        known = self._known()
        return bool(known) and together(known).power(bias, self.level) >= POWER

    def power(self, bias: float) -> str:
        """What would have been noticed, in sentences.

        Args:
            bias: total variation that the audit was to notice.
        """
        fits = self._known()
        if not fits:
            return ""
        whole = together(fits)
        seen = whole.smallest_bias(POWER, self.level)
        if seen is None:
            found = ["There were too few answers to see any bias"]
        else:
            found = [
                f"A bias of total variation {seen:.3f} in all {len(fits)} distributions would have "
                f"been seen with probability {POWER}"
            ]
        if not self.sees(bias):
            found.append(_too_few(whole, bias, self.level))
        single = [fit.smallest_bias(POWER, self.level) for fit in fits]
        smallest = [each for each in single if each is not None]
        if smallest:
            found.append(
                f"The smallest bias in a single one that would have been seen with probability "
                f"{POWER} is {np.median(smallest):.3f} (median)"
            )
        return ". ".join(found) + "."

    def _known(self) -> list[Fit]:
        return [each.fit for each in self.tests if not each.fit.is_impossible]


def _too_few(whole: Fit, bias: float, level: float) -> str:
    """How likely a bias was to be seen, and how many answers it takes."""
    chance = (
        f"A bias of {bias:g} in all of them would have been seen with probability "
        f"{whole.power(bias, level):.2f}"
    )
    needed = whole.num_samples_for(bias, POWER, level)
    if needed is None:
        return f"{chance}; no number of answers tells it from rounding"
    return (
        f"{chance}; for {POWER} it takes about {needed:,} sampled answers, and there were "
        f"{whole.num_samples:,}: allow more --minutes or --requests"
    )


def sample(context: Context) -> Sampled:
    """Ask for sampled answers until the bias of the settings would be seen, and test them.

    Raises:
        ServerError: a request is refused.
    """
    budget = context.budget
    try:
        budget.begin("choosing prompts for the sampling")
        draws = draws_of(context, choose_subjects(context))
    except SpentError:
        return Sampled(reason="the limit of requests or time was reached before")
    budget.begin("sampling")
    cost, number = 3 * ANSWERS_PER_REQUEST * len(draws), 0
    try:
        while budget.num_left >= cost and not _sees(draws, context.settings.bias):
            draw_round(context, draws, number)
            number += 1
    except SpentError:
        pass
    if not _are_enough(draws):
        return Sampled(reason="the limit of requests or time allowed too few answers")
    return judged(draws)


def _are_enough(draws: Sequence[Draws]) -> bool:
    return bool(draws) and min(each.ours.total() for each in draws) >= _FEWEST_SAMPLES


def _sees(draws: Sequence[Draws], bias: float) -> bool:
    """Whether a bias in all distributions would be seen with the answers so far."""
    return _are_enough(draws) and judged(draws).sees(bias)


def judged(draws: Sequence[Draws]) -> Sampled:
    """Test the answers to all prompts with all settings.

    The baseline's own answers are tested first. Where they do not follow the computed distribution,
    the server samples by other rules than those that it was computed for; then the answers of the
    two servers are compared with each other.
    """
    controls: list[float | None] = [
        None
        if each.law is None
        else fit_to_law(each.theirs, each.law.cells, each.law.other, _rounding(each)).p_value
        for each in draws
    ]
    known = [index for index, control in enumerate(controls) if control is not None]
    corrected = dict(zip(known, holm([controls[index] or 0.0 for index in known]), strict=True))
    is_exact = [corrected.get(index, 0.0) > LEVEL for index in range(len(draws))]
    fits = [
        fit_to_law(each.ours, each.law.cells, each.law.other, _rounding(each))
        if each.law is not None and exact
        else fit_to_samples(each.ours, each.theirs, _rounding(each))
        for each, exact in zip(draws, is_exact, strict=True)
    ]
    whole = together(fits)
    *single, all_together = holm([*(fit.p_value for fit in fits), whole.p_value])
    return Sampled(tuple(map(Tested, draws, fits, controls, is_exact, single)), whole, all_together)


def _rounding(draws: Draws) -> float:
    return draws.subject.nodes.rounding(draws.subject.num_tokens)


def sampling_findings(context: Context, sampled: Sampled) -> list[Finding]:
    """What the tests say: one finding for each setting, and one for all together."""
    if sampled.whole is None:
        return [not_audited("sampling", sampled.reason)]
    by_setting: dict[str, list[Tested]] = {}
    for each in sampled.tests:
        by_setting.setdefault(each.draws.sampling.name, []).append(each)
    findings = [_of_setting(context, name, tests) for name, tests in by_setting.items()]
    whole = f"{counted(sampled.whole.num_samples, 'answer')}, p = {sampled.p_value:.2g}"
    if sampled.p_value >= LEVEL:
        return [*findings, passed(ALL, whole)]
    return [*findings, failed(ALL, whole, _case(context, sampled.tests))]


def _of_setting(context: Context, name: str, tests: Sequence[Tested]) -> Finding:
    lowest = min(each.p_value for each in tests)
    num_samples = sum(each.fit.num_samples for each in tests)
    num_exact = sum(each.has_law for each in tests)
    against = "the exact distribution" if num_exact == len(tests) else "the baseline's answers"
    if 0 < num_exact < len(tests):
        against = f"the exact distribution ({num_exact} of {len(tests)}) or the baseline's answers"
    detail = (
        f"{counted(num_samples, 'answer')} to {counted(len(tests), 'prompt')} against {against}, "
        f"smallest p = {lowest:.2g}"
    )
    check = f"sampling, {name}"
    wrong = [each for each in tests if each.p_value < LEVEL]
    return failed(check, detail, _case(context, wrong)) if wrong else passed(check, detail)


def _case(context: Context, tests: Sequence[Tested]) -> Case:
    """The shortest answers that differ: the least likely test of those with the fewest tokens."""
    each = min(
        tests,
        key=lambda t: (
            t.p_value >= LEVEL,
            t.draws.subject.num_tokens,
            len(t.draws.subject.prompt),
            t.p_value,
        ),
    )
    draws = each.draws
    text, expected, seen = _most_different(each)
    total = draws.ours.total()
    shown = "another text" if text == OTHER else f"the text {text!r}"
    fields = {
        **context.own.neutral,
        **draws.sampling.fields(),
        "max_tokens": draws.subject.num_tokens,
    }
    if context.abilities.has_n:
        fields["n"] = ANSWERS_PER_REQUEST
    return Case(
        context.commands(draws.subject.prompt, fields),
        f"{shown} with probability {expected:.4f}",
        f"{shown} in {seen} of {total} answers ({seen / total:.4f})",
    )


def _most_different(each: Tested) -> tuple[str, float, int]:
    """The text whose frequency differs most from its probability, in standard deviations."""
    ours, theirs, law = each.draws.ours, each.draws.theirs, each.draws.law
    total = ours.total()
    if each.has_law and law is not None:
        expected = {**law.cells, OTHER: law.other}
        seen = Counter({text: ours[text] for text in law.cells})
        seen[OTHER] = total - seen.total()
    else:
        seen = ours
        expected = {text: theirs[text] / theirs.total() for text in {*ours, *theirs}}

    def deviation(text: str) -> float:
        p = expected[text]
        return float(abs(seen[text] - total * p) / (total * p * (1 - p) + 1) ** 0.5)

    text = max(expected, key=deviation)
    return text, expected[text], seen[text]
