"""Engines of tiny models, with whatever their policy needs."""

from draftwise import LLM, SpeculationConfig
from draftwise.engine.engine import Engine, EngineOptions, Models
from draftwise.engine.overlap import OverlapOptions
from draftwise.policies import policy_class

from ..stand_ins import fixed_latency, profile


def assemble(target, draft, companion, max_batch_size, overlaps=False, **speculation):
    """An engine with a companion, a profile and a latency model where the policy uses them.

    Args:
        target: folder.
        draft: folder.
        companion: folder.
        max_batch_size: requests at once.
        overlaps: whether one half of the batch drafts while the other is verified.
        **speculation: of :class:`SpeculationConfig`, the policy at least.
    """
    policy = policy_class(speculation["policy"])
    names = {"draft": draft}
    # A policy that needs nothing else, so that nothing is measured while the models are loaded.
    simple = "fixed"
    if policy.uses_companion():
        names["companion"], simple = companion, "staged"
    llm = LLM(
        target,
        SpeculationConfig(**names, policy=simple),
        dtype="float32",
        max_batch_size=max_batch_size,
    )
    return Engine(
        Models(llm.target, llm.draft, llm.companion),
        SpeculationConfig(**names, **speculation),
        EngineOptions(max_batch_size, overlap=OverlapOptions() if overlaps else None),
        fixed_latency() if policy.needs_latency else None,
        profile() if policy.needs_profile else None,
    )


def assemble_recipe(models, recipe, max_batch_size, draft_noise=0.1, **speculation):
    """The same for the model of a recipe; draft and companion are this model with noise."""
    draft, companion = recipe.draft(draft_noise), recipe.draft(noise=0.2, noise_seed=2)
    folders = (models.folder(each) for each in (recipe, draft, companion))
    return assemble(*folders, max_batch_size, **speculation)


def generate(engine, prompts, params):
    """Outputs of all prompts, with one sampling setting for each."""
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    while engine.num_unfinished:
        engine.step()
    return [request.output() for request in requests]
