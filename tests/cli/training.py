"""A tiny target for ``draftwise train``, and what is checked of every draft."""

from draftwise import LLM, SamplingParams

from ..stand_ins import unguarded
from ..tiny_models import Recipe

TARGET = Recipe(vocab=40, context=64, tokenizer=True, config={"num_hidden_layers": 3})
SMALL = ("--max-tokens=24", "--length=48", "--batch-tokens=96")
PROMPTS = [f"{word} {other}" for word in ("red", "a sea", "dear") for other in ("e", "ah", "re")]


def assert_drafts(models, folder, **settings):
    """What was trained drafts for its target, whose greedy text stays the same.

    Returns the statistics of the speculation.
    """
    options = {"policy": "fixed", "num_speculative_tokens": 3, **settings}
    speculation = unguarded(str(folder), **options)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    with LLM(models.folder(TARGET), dtype="float32") as llm:
        expected = llm.generate("red sea", sampling)[0].token_ids
    with LLM(models.folder(TARGET), speculation, dtype="float32") as llm:
        output = llm.generate("red sea", sampling)[0]
    assert output.token_ids == expected
    assert output.speculation.num_drafted > 0
    return output.speculation
