"""Default models of commands.

The bundled models are defaults only for each other: together with a model of the user, models of
the zoo are used only if they are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from draftwise.cli.flags import flag_of, was_given
from draftwise.cli.options import SPECULATION_OPTIONS
from draftwise.core.formats import EXIT_PREFIX, MODEL_FREE_DRAFTS, draft_parts
from draftwise.errors import InvalidParameterError
from draftwise.speculation import SpeculationConfig

NO_DRAFT = "none"
_ZOO_PREFIX = "zoo:"
# "draft:int8" is the quantised draft, whichever model that is.
_DRAFT_ITSELF = "draft:"
_POLICY_WITHOUT_DRAFT = "none"
# Options that have no effect without a draft model, and those that have none without a draft.
_MODEL_OPTIONS = ("overlap", "draft_replicas")
_DRAFT_OPTIONS = ("policies", *SPECULATION_OPTIONS.own, *_MODEL_OPTIONS)


@dataclass(frozen=True)
class Zoo:
    """The bundled models that a command uses by default.

    Attributes:
        target: name of the target.
        draft: name of the draft.
        companion: name of the companion; ``None`` if the command uses none by default.
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
        draft: name of the draft; ``None`` for target-only decoding.
        companion: name of the companion, if any.
        models: names of the small models that studies compare.
        draft_is_missing: whether there is no draft although the user did not ask for none.
    """

    target: str
    draft: str | None
    companion: str | None
    models: tuple[str, ...]
    draft_is_missing: bool

    def require_draft(self, why: str) -> str:
        """Return the name of the draft.

        Args:
            why: clause for the error message that says what needs a draft.

        Raises:
            InvalidParameterError: there is no draft.
        """
        if self.draft is None:
            raise _missing_draft(why)
        return self.draft

    def require_draft_model(self, why: str) -> str:
        """Return the name of the draft, which must be a model.

        Args:
            why: clause for the error message that says what needs a draft.

        Raises:
            InvalidParameterError: there is no draft, or it is not a model.
        """
        draft = self.require_draft(why)
        if not _is_model(draft) or len(draft_parts(draft)) > 1:
            raise InvalidParameterError("draft", f"must be a model, got {draft!r}; {why}")
        return draft


def choose_models(
    zoo: Zoo,
    target: str | None,
    draft: str | None,
    companion: str | None = None,
    models: tuple[str, ...] = (),
) -> ChosenModels:
    """Choose the models of a command: those the user named, and bundled models as defaults.

    If no model is named, all models are from the zoo. With a target from the zoo, the default draft
    and companion are from the zoo too. With another target, there is no default draft or companion,
    and ``models`` are the draft and the companion.

    Args:
        zoo: defaults of the command.
        target: name of the target, if the user gave one.
        draft: name of the draft, if the user gave one; ``"none"`` for no draft.
        companion: name of the companion, if the user gave one.
        models: names of small models, if the user gave them.

    Raises:
        InvalidParameterError: a draft, a companion or one of ``models`` is not from the zoo and the
            target is not named.
    """
    if target is None:
        named = [("--draft", draft), ("--companion", companion)]
        named += [("--models", name) for name in models]
        for flag, name in named:
            if name is not None and _is_from_user(name):
                raise InvalidParameterError(
                    "target",
                    f"missing: {flag} is {name!r}, which is not a bundled model; name its target "
                    "with --target",
                )
    target = target or zoo.target
    is_zoo_target = target.startswith(_ZOO_PREFIX)
    is_declined = draft == NO_DRAFT
    if is_declined:
        draft = None
    elif draft is None and is_zoo_target:
        draft = zoo.draft
    if companion is None and is_zoo_target and draft is not None and _is_model(draft):
        companion = zoo.companion
    if not models:
        small = (name for name in (draft, companion) if name and _is_model(name))
        models = zoo.models if is_zoo_target else tuple(dict.fromkeys(small))
    return ChosenModels(target, draft, companion, models, draft is None and not is_declined)


def speculation_of(
    context: typer.Context,
    draft: str | None,
    settings: Mapping[str, Any],
    whole: SpeculationConfig | None = None,
) -> SpeculationConfig | None:
    """Build the speculation settings of a command; ``None`` without a draft.

    Args:
        context: context of the command.
        draft: name of the draft; ``None`` or ``"none"`` for target-only decoding.
        settings: the other arguments of :class:`~draftwise.speculation.SpeculationConfig`.
        whole: all settings, where one option has them in place of ``draft`` and ``settings``.

    Raises:
        InvalidParameterError: a setting is out of range, or there is no draft or no draft model
            and an option was given that has no effect without one, or an option was given beside
            that of all settings.
    """
    if whole is not None:
        others = [name for name in ("draft", *_DRAFT_OPTIONS) if name not in _MODEL_OPTIONS]
        double = [flag_of(context.command, name) for name in others if was_given(context, name)]
        if double:
            flags = ", ".join(map(str, double))
            raise InvalidParameterError(
                "speculative_config",
                f"cannot be combined with {flags}; set the same in the JSON object",
            )
        draft = ",".join(whole.draft_names)
    if draft is None or draft == NO_DRAFT:
        refuse_without_draft(context)
        return None
    if not _is_model(draft):
        useless = _given(context, _MODEL_OPTIONS)
        if useless:
            raise InvalidParameterError(
                "draft", f"must contain a model, got {draft!r}; {_need(useless)} a draft model"
            )
    return SpeculationConfig(draft, **settings) if whole is None else whole


def refuse_without_draft(context: typer.Context) -> None:
    """Reject options that have no effect without a draft.

    Raises:
        InvalidParameterError: such options were given; lists them.
    """
    useless = _given(context, _DRAFT_OPTIONS)
    if useless:
        raise _missing_draft(f"{_need(useless)} a draft")


def _given(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The flags of those options that were given, and not to decline what they are about."""
    return [
        flag_of(context.command, name) or name
        for name in names
        if was_given(context, name)
        and context.params[name] != _POLICY_WITHOUT_DRAFT
        and context.params[name] is not False
    ]


def _need(flags: Sequence[str]) -> str:
    return f"{', '.join(flags)} {'needs' if len(flags) == 1 else 'need'}"


def _missing_draft(why: str) -> InvalidParameterError:
    return InvalidParameterError(
        "draft", f"missing: {why}; name a draft of the target's family with --draft DRAFT"
    )


def _is_from_user(name: str) -> bool:
    bundled = _ZOO_PREFIX, EXIT_PREFIX
    return any(_is_model(part) and not part.startswith(bundled) for part in draft_parts(name))


def _is_model(name: str) -> bool:
    """Whether a name is that of a model of its own, or contains one."""
    others = {NO_DRAFT, *MODEL_FREE_DRAFTS}
    return any(
        part not in others and not part.startswith(_DRAFT_ITSELF) for part in draft_parts(name)
    )
