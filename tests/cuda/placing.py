"""Engines of tiny models on any device, with decoding steps run in any of the ways there are."""

import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.models.static_steps import StepMode

from ..engine import assembly as engine_assembly
from ..engine.assembly import generate


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
# Where steps are recorded, or run as recorded ones are. Eager steps are the same code without it.
RECORDED = [PLACES[0], PLACES[3]]
# Numbers of tokens of prompts.
LENGTHS = [1, 2, 3, 5, 7, 8, 11, 40, 13, 16, 17, 20, 23, 29, 31, 34]


def load(place, target, speculation=None, dtype="float32", **options):
    """An ``LLM`` at a place."""
    return place.put(LLM(target, speculation, dtype=dtype, device=place.device, **options))


def assemble(place, models, recipe, max_batch_size, draft_noise=0.1, **speculation):
    """An engine for the model of a recipe, whose draft is this model with noise."""
    draft = models.folder(recipe.draft(draft_noise))
    return assemble_with(place, models, recipe, draft, max_batch_size, **speculation)


def assemble_with(place, models, recipe, draft, max_batch_size, companion=None, **speculation):
    """An engine at a place, with a companion that is the target with noise by default."""
    companion = companion or models.folder(recipe.draft(noise=0.2, noise_seed=2))
    return engine_assembly.assemble(
        models.folder(recipe),
        draft,
        companion,
        partial(load, place),
        max_batch_size=max_batch_size,
        **speculation,
    )


def varied_outputs(engine):
    """Outputs of 24 requests with many lengths, temperatures and filters."""
    count = 24
    prompts = [[index % 7, 1 + index % 5, 3] for index in range(count)]
    params = [
        SamplingParams(
            max_tokens=6 + index % 12,
            seed=index,
            temperature=(0.0, 0.7, 1.3)[index % 3],
            top_k=(0, 7)[index % 2],
            min_p=(0.0, 0.02)[index % 2],
        )
        for index in range(count)
    ]
    return generate(engine, prompts, params)
