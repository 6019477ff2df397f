"""Greedy texts in bfloat16 are the same with and without speculation, token for token.

The native kernels compute the same bits for a token, whichever other tokens are in the pass. The
result therefore does not depend on the number of verified tokens.
"""

import pytest

from draftwise import LLM, SamplingParams
from draftwise.kernels.native.decoder import NativeDecoder

from ..stand_ins import unguarded
from ..tiny_models import Recipe

pytestmark = pytest.mark.slow

TARGET = Recipe(vocab=64, context=128, sharpness=1.0, config={"num_hidden_layers": 4})
PROMPTS = [[(7 * i + j) % 64 for j in range(3 + i % 9)] for i in range(24)]
PARAMS = SamplingParams(max_tokens=60, temperature=0.0)


def texts(models, batch_size, speculation=None):
    llm = LLM(
        models.folder(TARGET),
        speculation,
        dtype="bfloat16",
        device="cpu",
        max_batch_size=batch_size,
    )
    if not isinstance(llm.target.model.native, NativeDecoder):
        pytest.skip("the target is computed by PyTorch on this machine")
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("batch_size", [1, 7, 24])
def test_greedy_texts_equal_the_targets_in_bfloat16(models, batch_size):
    expected = texts(models, 1)
    assert len({tuple(text) for text in expected}) > 12
    assert texts(models, batch_size) == expected
    for policy, length in (("fixed", 1), ("fixed", 7), ("svip", 9), ("heuristic", 5)):
        speculation = unguarded(
            models.folder(TARGET.draft(0.05)), policy=policy, num_speculative_tokens=length
        )
        assert texts(models, batch_size, speculation) == expected
