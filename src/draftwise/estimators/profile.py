"""Acceptance profile: the estimators fitted to one target, draft and companion, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.classifier import SPECDEC_REJECTION_WEIGHT, AcceptanceHead
from draftwise.estimators.combined import Inputs, SignalModel
from draftwise.estimators.records import Records
from draftwise.estimators.summary import ProfileSummary, summarise
from draftwise.estimators.tables import BINNINGS, AcceptanceTable

_KIND = "draftwise acceptance profile"
_FORMAT = "1"
# Exceptions raised while reading a file that is damaged or not a profile.
_UNREADABLE = SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError
NO_MODEL = "none"


@dataclass(frozen=True)
class AcceptanceProfile:
    """The result of ``draftwise profile``.

    Attributes:
        provenance: origin of the records. ``target``, ``draft`` and ``companion`` are fingerprints
            (``"none"`` for no companion). The other entries are the settings of the collection.
        tables: P(accept | S, A) by binning; empty without a companion. Tables change with
            observations, so copy one with :meth:`AcceptanceTable.to` before updating it.
        parameters: fitted parameters of the other estimators: by estimator, tensors by name.
        summary: statistics of the records; ``None`` if the profile was made without records.
    """

    provenance: Mapping[str, str]
    tables: Mapping[str, AcceptanceTable] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    summary: ProfileSummary | None = None

    def check(self, *, target: str, draft: str | None, companion: str | None) -> None:
        """Check that the profile was made with these models.

        A profile made with a companion can be used without one, as the draft's own signals do not
        depend on it.

        Args:
            target: fingerprint of the target.
            draft: fingerprint of the draft; ``None`` if none is used.
            companion: fingerprint of the companion; ``None`` if none is used.

        Raises:
            InvalidParameterError: names the models that differ.
        """
        differing = []
        for role, now in (("target", target), ("draft", draft), ("companion", companion)):
            then = self.provenance.get(role, NO_MODEL)
            if now is None or now == then:
                continue
            if then == NO_MODEL:
                differing.append(f"without a {role}, now there is {now}")
            else:
                differing.append(f"for another {role}: file {then}, now {now}")
        if differing:
            raise InvalidParameterError(
                "profile",
                f"was made {' and '.join(differing)}; make a new one with `draftwise profile`",
            )

    def save(self, path: str | Path) -> None:
        """Write the profile to one safetensors file.

        Raises:
            InvalidParameterError: the file cannot be written.
        """
        tensors = {
            f"tables/{binning}/{name}": tensor
            for binning, table in self.tables.items()
            for name, tensor in table.to_tensors().items()
        }
        for estimator, parameters in self.parameters.items():
            for name, tensor in parameters.items():
                tensors[f"parameters/{estimator}/{name}"] = tensor.detach().cpu().contiguous()
        metadata = {
            "kind": _KIND,
            "format": _FORMAT,
            "provenance": json.dumps(dict(self.provenance)),
            "summary": json.dumps(None if self.summary is None else self.summary.to_dict()),
        }
        try:
            save_file(tensors, path, metadata)
        except (OSError, SafetensorError) as error:
            raise InvalidParameterError("profile", f"cannot write {str(path)!r}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> AcceptanceProfile:
        """Read a profile from a file.

        Raises:
            InvalidParameterError: the file does not exist, or it is not an acceptance profile.
        """
        name = str(path)
        if not Path(path).is_file():
            raise InvalidParameterError("profile", f"there is no file {name!r}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                kind, version = metadata.get("kind"), metadata.get("format")
                if kind == _KIND and version == _FORMAT:
                    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                    return cls._of(metadata, tensors)
        except _UNREADABLE as error:
            raise InvalidParameterError(
                "profile", f"{name!r} is not an acceptance profile, or it is damaged: {error}"
            ) from error
        if kind == _KIND:
            raise InvalidParameterError(
                "profile",
                f"{name!r} has format {version}, but this version of Draftwise reads format "
                f"{_FORMAT}; make a new one with `draftwise profile`",
            )
        raise InvalidParameterError("profile", f"{name!r} is not an acceptance profile")

    @classmethod
    def _of(cls, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> AcceptanceProfile:
        grouped: dict[str, dict[str, dict[str, Tensor]]] = {"tables": {}, "parameters": {}}
        for key, tensor in tensors.items():
            part, owner, name = key.split("/", 2)
            if not bool(tensor.isfinite().all()) and name != "agreement_edges":
                raise ValueError(f"{key} has entries that are not finite")
            grouped[part].setdefault(owner, {})[name] = tensor
        provenance: dict[str, Any] = json.loads(metadata["provenance"])
        summary = json.loads(metadata["summary"])
        return cls(
            {str(key): str(value) for key, value in provenance.items()},
            {name: AcceptanceTable.from_tensors(each) for name, each in grouped["tables"].items()},
            grouped["parameters"],
            None if summary is None else ProfileSummary.from_dict(summary),
        )


def fit_profile(records: Records, provenance: Mapping[str, str]) -> AcceptanceProfile:
    """Fit all tables and estimators of a profile.

    Args:
        records: records of plain speculative decoding.
        provenance: origin of the records. ``companion`` states whether a companion was used;
            without one, the estimators that use S and A are left out.

    Raises:
        InvalidParameterError: there are no records.
    """
    if not len(records):
        raise InvalidParameterError(
            "profile", "nothing was drafted; generate more than one token per prompt"
        )
    has_companion = provenance.get("companion", NO_MODEL) != NO_MODEL
    return AcceptanceProfile(
        dict(provenance),
        {
            binning: AcceptanceTable.fit(records, binning)
            for binning in (BINNINGS if has_companion else ())
        },
        _fitted_parameters(records, has_companion),
        summarise(records, has_companion),
    )


def _fitted_parameters(records: Records, has_companion: bool) -> dict[str, dict[str, Tensor]]:
    """Parameters by the name under which policies look them up."""
    fitted = {
        "disco": AcceptanceHead.fit(records).to_tensors(),
        "specdec++": AcceptanceHead.fit(records, SPECDEC_REJECTION_WEIGHT).to_tensors(),
    }
    if has_companion:
        for inputs in (Inputs.COMBINED, Inputs.PREDICTABLE):
            fitted[inputs.value] = SignalModel.fit(records, inputs).to_tensors()
    return fitted
