"""Whole models on the Triton kernels by its interpreter, for machines without CUDA."""

import pytest
import torch

from draftwise.models import blocked_linear, decoder
from draftwise.models.loading import load_model
from draftwise.models.ragged import RaggedKernels
from draftwise.models.segment import Segment
from draftwise.models.static_steps import StepMode
from draftwise.models.tree_tokens import whole_tree

from ...architectures import ALL, CONTEXT, WITH_WINDOWS
from ..placing import IS_INTERPRETED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not IS_INTERPRETED,
        reason="needs Triton and TRITON_INTERPRET=1, without CUDA (make test-interpreted)",
    ),
    # Padding tokens are computed from memory that was not written.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


# In each the kernels do something in another way: heads are rotated in part or normalised, scores
# capped, residuals scaled or normalised, and layers have no positions.
FAMILIES = ["llama", "phi3", "qwen3", "gemma2", "gemma3_text", "olmo3", "granite", "smollm3"]


@pytest.fixture
def on_kernels(monkeypatch):
    """The path of CUDA on a CPU."""
    monkeypatch.setattr(decoder, "has_kernels", lambda _: True)
    monkeypatch.setattr(blocked_linear, "can_block", lambda *_: False)
    monkeypatch.setattr(RaggedKernels, "of", classmethod(lambda cls, *_: cls(True, False)))


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_steps_past_the_window(models, on_kernels, family):
    """A chunk of a prompt, drafts of several lengths, and rollbacks, until the ring has wrapped."""
    recipe = ALL[family]
    reference = models.reference(recipe)
    # Other implementations ignore soft-caps in some versions of transformers.
    reference.set_attn_implementation("eager")
    model = load_model(models.folder(recipe), "target", torch.float32, torch.device("cpu")).model
    model.step_mode = StepMode.STATIC
    cache = model.new_cache(3, CONTEXT, 33)
    assert (min(cache.sizes) < CONTEXT) == (family in WITH_WINDOWS)
    generator = torch.Generator().manual_seed(1)
    texts = {0: [], 2: []}
    for counts in ((33, 1), (30, 9), (1, 1), (5, 3), (4, 5), (1, 1)):
        tokens, segments = [], []
        for (row, text), count in zip(texts.items(), counts, strict=True):
            new = torch.randint(0, recipe.vocab, (count,), generator=generator).tolist()
            segments.append(Segment(row, len(text), count))
            tokens += new
            text += new
        logits = model.forward(cache, tokens, segments, range(len(tokens)))
        for (row, text), part in zip(texts.items(), logits.split(counts), strict=True):
            expected = reference(input_ids=torch.tensor([text])).logits[0, -len(part) :]
            torch.testing.assert_close(part, expected, rtol=1e-3, atol=1e-3)
            # All but the first of the newest tokens are rejected.
            if 1 < len(part) < 9:
                del text[1 - len(part) :]
                cache.truncate(row, len(text))
    assert cache.steps.num_sizes > 0
    assert len(texts[0]) > 64


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "mode"), [("llama", StepMode.EAGER), ("gemma3_text", StepMode.STATIC)]
)
def test_nodes_of_trees_read_their_paths(models, on_kernels, family, mode):
    """Beside a chain, in one pass; in layers with a window after it is full."""
    recipe = ALL[family]
    reference = models.reference(recipe)
    reference.set_attn_implementation("eager")
    model = load_model(models.folder(recipe), "target", torch.float32, torch.device("cpu")).model
    model.step_mode = mode
    cache = model.new_cache(2, CONTEXT, 40)
    generator = torch.Generator().manual_seed(1)

    def random_tokens(count):
        return torch.randint(0, recipe.vocab, (count,), generator=generator).tolist()

    texts = [random_tokens(50), random_tokens(40)]
    for slot, text in enumerate(texts):
        for start in range(0, len(text) - 1, 25):
            part = text[start : min(start + 25, len(text) - 1)]
            model.forward(cache, part, [Segment(slot, start, len(part))], None)
    parents, drafted, chain = [-1, -1, 0, 0, 1, 2, 4, 5, 5, 3, 9], random_tokens(11), [3, 1, 2]
    tokens = [texts[0][-1], *drafted, texts[1][-1], *chain]
    segments = [Segment(0, 49, 12), Segment(1, 39, 4)]
    logits = model.forward(
        cache, tokens, segments, range(16), trees=[whole_tree(49, parents), None]
    )
    paths = [[]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], drafted[node]])
    every = [[*texts[0], *path] for path in paths]
    every += [[*texts[1], *chain[:count]] for count in range(4)]
    expected = [reference(input_ids=torch.tensor([ids])).logits[0, -1] for ids in every]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-3, atol=1e-3)
    assert (cache.steps is not None) == (mode is StepMode.STATIC)
