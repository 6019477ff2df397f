"""How many tokens of a draft are accepted on average, and which draft length that advises."""

from __future__ import annotations


def expected_accepted(acceptance: float, num_tokens: int) -> float:
    """Expected number of accepted tokens among γ drafted tokens: α + α² + … + α^γ.

    Each token is accepted with probability α if the token before it is. Leviathan et al. 2023,
    equation 1, without the token that the target adds.
    """
    if acceptance >= 1.0:
        return float(num_tokens)
    return acceptance * (1.0 - acceptance**num_tokens) / (1.0 - acceptance)


def advised_draft_length(mean_accepted: float, num_drafted: int) -> int:
    """Recommend a draft length from statistics at a fixed draft length.

    With 3 tokens accepted on average at γ = 10, the recommendation is 4. The average draft is
    rejected after three tokens, and one more token allows for better drafts. If nearly all tokens
    are accepted, a longer draft is recommended.

    Args:
        mean_accepted: mean number of drafted tokens accepted per step, without the corrected or
            bonus token.
        num_drafted: γ, the number of tokens drafted per step.

    Returns:
        The recommended draft length: at least 1, at most twice ``num_drafted``.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 <= mean_accepted <= num_drafted or num_drafted < 1:
        raise ValueError("needs 0 <= mean_accepted <= num_drafted and num_drafted >= 1")
    if mean_accepted >= 0.9 * num_drafted:
        return 2 * num_drafted
    return max(1, min(num_drafted, round(mean_accepted) + 1))
