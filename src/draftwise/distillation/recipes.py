"""The recipe of each kind of draft that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from draftwise.distillation.companion_recipe import CompanionRecipe
from draftwise.distillation.eagle3 import Eagle3Recipe
from draftwise.distillation.exit import ExitRecipe
from draftwise.distillation.model import ModelRecipe
from draftwise.distillation.recipe import Recipe
from draftwise.distillation.settings import TrainingSettings

# Each is created from the settings, and whether to run code that comes with models.
RECIPES: Mapping[str, Callable[[TrainingSettings, bool], Recipe]] = MappingProxyType(
    {
        "eagle3": Eagle3Recipe,
        "model": ModelRecipe,
        "companion": CompanionRecipe,
        "exit": ExitRecipe,
    }
)


def recipe_of(settings: TrainingSettings, trust_remote_code: bool = False) -> Recipe:
    """Create the recipe of a run.

    Args:
        settings: settings of the run.
        trust_remote_code: whether to run code that comes with the target or a named draft.

    Raises:
        DraftwiseError: a named draft cannot be read.
    """
    return RECIPES[settings.kind](settings, trust_remote_code)
