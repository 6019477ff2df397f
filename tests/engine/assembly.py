"""Engines of tiny models, with the parts that their policy needs."""

from draftwise import LLM, SamplingParams
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.engine.parallel.overlap import OverlappedEngine
from draftwise.outputs import FinishReason
from draftwise.policies import policy_class

from ..stand_ins import fixed_latency, profile, unguarded


def assemble(
    target, draft, companion=None, load=LLM, overlaps=False, policy_object=None, **settings
):
    """An engine. It has a companion, a profile and a latency model if the policy uses them.

    Args:
        target: folder.
        draft: name of the draft, or of several.
        companion: name of the companion, for policies that ask one.
        load: loads the models, as :class:`LLM` does.
        overlaps: whether one half of the batch drafts while the other is verified.
        policy_object: decides in place of the policy that is named.
        **settings: fields of :class:`EngineOptions`, or of :class:`SpeculationConfig`.
    """
    fields = EngineOptions.__dataclass_fields__.keys() & settings.keys()
    options = EngineOptions(**{name: settings.pop(name) for name in fields})
    settings = {"policy": "fixed", **settings}
    policy, names = policy_class(settings["policy"]), {"draft": draft}
    # This policy needs no costs, so nothing is measured while the models are loaded.
    simple = "fixed"
    if policy.uses_companion():
        names["companion"], simple = companion, "staged"
    llm = load(
        target,
        unguarded(**names, policy=simple),
        dtype="float32",
        max_batch_size=options.max_batch_size,
    )
    parts = (
        Models(llm.target, llm.draft, llm.companion),
        unguarded(**names, **settings),
        options,
        fixed_latency() if policy.needs_latency else None,
        profile() if policy.needs_profile else None,
    )
    return OverlappedEngine(*parts) if overlaps else Engine(*parts, policy=policy_object)


def assemble_recipe(models, recipe, max_batch_size, draft_noise=0.1, **speculation):
    """The same for the model of a recipe; draft and companion are this model with noise."""
    draft, companion = recipe.draft(draft_noise), recipe.draft(noise=0.2, noise_seed=2)
    folders = (models.folder(each) for each in (recipe, draft, companion))
    return assemble(*folders, max_batch_size=max_batch_size, **speculation)


def generate(engine, prompts, params):
    """Outputs of all prompts, with one sampling setting for each."""
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    while engine.num_unfinished:
        engine.step()
    return [request.output() for request in requests]


def sampled(count, **changes):
    """Sampling parameters of requests with seeds of their own."""
    return [SamplingParams(**{"max_tokens": 24, "seed": at, **changes}) for at in range(count)]


def varied_work(count, vocab=16):
    """Prompts of many lengths with their sampling parameters; some are greedy or penalised."""
    prompts = [
        [(index * 5 + i * 3) % vocab for i in range(1 + index % 11)] for index in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=1 + index % 14,
            seed=index,
            temperature=float(index % 3 > 0),
            presence_penalty=0.5 * (index % 4 == 3),
        )
        for index in range(count)
    ]
    return prompts, params


def token_ids(outputs):
    """The output of each request."""
    return [output.token_ids for output in outputs]


def assert_same_with_cancellations(engine, expected, vocab=16):
    """Requests that join one by one give the same outputs, even if some are cancelled."""
    requests = []
    for index, (prompt, params) in enumerate(zip(*varied_work(len(expected), vocab), strict=True)):
        requests.append(engine.add(None, prompt, params))
        engine.step()
        if index % 5 == 4:
            engine.cancel(requests[index - 1])
    while engine.num_unfinished:
        engine.step()
    for request, said in zip(requests, expected, strict=True):
        own = request.output().token_ids
        if request.finish_reason is FinishReason.CANCELLED:
            assert own == said[: len(own)]
        else:
            assert own == said
