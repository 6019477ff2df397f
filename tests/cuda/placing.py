"""Engines of tiny models on any device, with decoding steps run in any of the ways there are."""

import os
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from draftwise import LLM, SpeculationConfig
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.engine import Engine
from draftwise.models.static_steps import StepMode
from draftwise.policies import policy_class

from ..stand_ins import fixed_latency, profile


@dataclass(frozen=True)
class Place:
    """Where models are, and how their decoding steps are run."""

    device: str
    mode: StepMode

    def __str__(self):
        return f"{self.device}-{self.mode}"

    def put(self, llm):
        """Run all models of an ``LLM`` so; it is on the device already."""
        for model in (llm.target, llm.draft, llm.companion):
            if model is not None:
                model.model.step_mode = self.mode
        return llm


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")
# Triton's kernels run on a CPU too, slowly, if its interpreter is on before Triton is imported.
IS_INTERPRETED = (
    not torch.cuda.is_available()
    and os.environ.get("TRITON_INTERPRET") == "1"
    and find_spec("triton") is not None
)
NEEDS_TRITON = pytest.mark.skipif(
    not (torch.cuda.is_available() or IS_INTERPRETED),
    reason="Triton's kernels need CUDA, or Triton and TRITON_INTERPRET=1 (make test-interpreted)",
)
TRITON_DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# What a GPU records is run kernel by kernel elsewhere: the same code on the same fixed memory.
PLACES = [
    Place("cpu", StepMode.STATIC),
    pytest.param(Place("cuda", StepMode.EAGER), marks=NEEDS_CUDA),
    pytest.param(Place("cuda", StepMode.STATIC), marks=NEEDS_CUDA),
    pytest.param(Place("cuda", StepMode.GRAPHS), marks=NEEDS_CUDA),
]
RECORDED = [PLACES[0], PLACES[3]]


def load(place, target, speculation=None, dtype="float32", **options):
    """An ``LLM`` at a place."""
    return place.put(LLM(target, speculation, dtype=dtype, device=place.device, **options))


def assemble(place, models, recipe, max_batch_size, draft_noise=0.1, **speculation):
    """An engine for the model of a recipe, with what its policy needs."""
    policy = policy_class(speculation["policy"])
    names = {"draft": models.folder(recipe.draft(draft_noise))}
    simple = "fixed"
    if policy.uses_companion():
        names["companion"] = models.folder(recipe.draft(noise=0.2, noise_seed=2))
        simple = "staged"
    llm = load(
        place,
        models.folder(recipe),
        SpeculationConfig(**names, policy=simple),
        max_batch_size=max_batch_size,
    )
    return Engine(
        Models(llm.target, llm.draft, llm.companion),
        SpeculationConfig(**names, **speculation),
        EngineOptions(max_batch_size),
        fixed_latency() if policy.needs_latency else None,
        profile() if policy.needs_profile else None,
    )
