"""Which models a command runs where not all of them are named.

The bundled models are defaults among themselves only: beside a model of one's own nothing is taken
from the zoo unless it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from draftwise.cli.flags import flag_of, was_given
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.params import SpeculationConfig

NO_DRAFT = "none"
_ZOO_PREFIX = "zoo:"
# "draft:int8" is the draft itself, whichever it is.
_DRAFT_ITSELF = "draft:"
_POLICY_WITHOUT_DRAFT = "none"
# Options that have no effect without a draft.
_ABOUT_DRAFTS = (
    "companion",
    "policy",
    "policies",
    "policy_option",
    "num_speculative_tokens",
    "verification",
    "lenience",
    "profile",
    "latency_profile",
)


@dataclass(frozen=True)
class Zoo:
    """The bundled models that a command takes by default.

    Attributes:
        target: name of the target.
        draft: name of the draft.
        companion: name of the companion; ``None`` where the command takes none by itself.
        models: names of the small models that studies compare.
    """

    target: str = "zoo:target"
    draft: str = "zoo:draft"
    companion: str | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChosenModels:
    """The models that a command runs.

    Attributes:
        target: name of the target.
        draft: name of the draft; ``None`` for the target alone.
        companion: name of the companion, if any.
        models: names of the small models that studies compare.
        draft_is_missing: there is no draft, and the user did not say that there is to be none.
    """

    target: str
    draft: str | None
    companion: str | None
    models: tuple[str, ...]
    draft_is_missing: bool

    def require_draft(self, why: str) -> str:
        """The draft's name.

        Args:
            why: what needs a draft, as a clause.

        Raises:
            InvalidParameterError: there is no draft.
        """
        if self.draft is None:
            raise _missing_draft(why)
        return self.draft


def choose_models(
    zoo: Zoo,
    target: str | None,
    draft: str | None,
    companion: str | None = None,
    models: tuple[str, ...] = (),
) -> ChosenModels:
    """Complete the models that were named by the bundled ones, where these go with them.

    If no model is named, all are the zoo's. With a target of the zoo, its draft and companion are
    the zoo's unless named. With a target of one's own, there is no draft and no companion unless
    named, and ``models`` are the draft and the companion.

    Args:
        zoo: the command's defaults.
        target: as the user named it, if so.
        draft: likewise; ``"none"`` for none.
        companion: likewise.
        models: likewise.

    Raises:
        InvalidParameterError: a draft, a companion or one of ``models`` is the user's own and the
            target is not named.
    """
    if target is None:
        named = [("--draft", draft), ("--companion", companion)]
        named += [("--models", name) for name in models]
        for flag, name in named:
            if name is not None and _is_own(name):
                raise InvalidParameterError(
                    "target",
                    f"missing: {flag} names {name!r}, which is none of the bundled models; name "
                    "the target it belongs to with --target",
                )
    target = target or zoo.target
    of_zoo = target.startswith(_ZOO_PREFIX)
    declined = draft == NO_DRAFT
    if declined:
        draft = None
    elif draft is None and of_zoo:
        draft = zoo.draft
    if companion is None and of_zoo and draft is not None:
        companion = zoo.companion
    if not models:
        small = (name for name in (draft, companion) if name and not _is_draft_itself(name))
        models = zoo.models if of_zoo else tuple(dict.fromkeys(small))
    return ChosenModels(target, draft, companion, models, draft is None and not declined)


def speculation_of(
    context: typer.Context, draft: str | None, settings: Mapping[str, Any]
) -> SpeculationConfig | None:
    """How to speculate; ``None`` without a draft.

    Args:
        context: of the command.
        draft: name of the draft; ``None`` or ``"none"`` for the target alone.
        settings: the other arguments of :class:`~draftwise.params.SpeculationConfig`.

    Raises:
        InvalidParameterError: a setting is out of its range, or there is no draft and an option was
            given that has no effect without one.
    """
    from draftwise.params import SpeculationConfig

    if draft is None or draft == NO_DRAFT:
        refuse_without_draft(context)
        return None
    return SpeculationConfig(draft, **settings)


def refuse_without_draft(context: typer.Context) -> None:
    """Check that no option was given that has no effect without a draft.

    Raises:
        InvalidParameterError: one was; names it.
    """
    useless = [
        flag_of(context.command, name) or name
        for name in _ABOUT_DRAFTS
        if was_given(context, name) and context.params[name] != _POLICY_WITHOUT_DRAFT
    ]
    if useless:
        need = "needs" if len(useless) == 1 else "need"
        raise _missing_draft(f"{', '.join(useless)} {need} one")


def _missing_draft(why: str) -> InvalidParameterError:
    return InvalidParameterError(
        "draft", f"missing: {why}; name a draft of the target's family with --draft DRAFT"
    )


def _is_own(name: str) -> bool:
    return name != NO_DRAFT and not name.startswith(_ZOO_PREFIX) and not _is_draft_itself(name)


def _is_draft_itself(name: str) -> bool:
    return name.startswith(_DRAFT_ITSELF)
