"""What is known of acceptance for one triple of models: fitted once, kept in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.records import Records
from draftwise.estimators.summary import ProfileSummary, summarise
from draftwise.estimators.tables import BINNINGS, AcceptanceTable

Fit = Callable[[Records], Mapping[str, Tensor]]

_KIND = "draftwise acceptance profile"
_FORMAT = "1"
# What reading a file raises that is damaged, or looks like a profile and is none.
_UNREADABLE = SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError
NO_MODEL = "none"


@dataclass(frozen=True)
class AcceptanceProfile:
    """What ``draftwise profile`` learnt.

    Attributes:
        provenance: what it was made from. ``target``, ``draft`` and ``companion`` are fingerprints
            (``"none"`` for no companion), the rest says how it was made.
        tables: P(accept | S, A) by binning; empty without a companion. They follow what they
            observe: whoever lets one learn takes a copy with :meth:`AcceptanceTable.to`.
        parameters: what other estimators were fitted to: tensors by name, by estimator.
        summary: statistics of the records; ``None`` if it was made without any.
    """

    provenance: Mapping[str, str]
    tables: Mapping[str, AcceptanceTable] = field(default_factory=dict)
    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    summary: ProfileSummary | None = None

    def check(self, *, target: str, draft: str | None, companion: str | None) -> None:
        """Refuse to be used with other models.

        A profile made with a companion may be used without: the draft's own signals mean the same.

        Args:
            target: fingerprint of the target.
            draft: of the draft; ``None`` if none is used.
            companion: of the companion; ``None`` if none is used.

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
                f"was made {' and '.join(differing)}; make it anew with `draftwise profile`",
            )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file.

        Raises:
            InvalidParameterError: it cannot be written.
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
        """Read a file.

        Raises:
            InvalidParameterError: there is none, or it is not an acceptance profile.
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
                "profile", f"{name!r} is not an acceptance profile, or damaged: {error}"
            ) from error
        if kind == _KIND:
            raise InvalidParameterError(
                "profile",
                f"{name!r} has format {version}, this is Draftwise for format {_FORMAT}; make it "
                "anew with `draftwise profile`",
            )
        raise InvalidParameterError("profile", f"{name!r} is not an acceptance profile")

    @classmethod
    def _of(cls, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> AcceptanceProfile:
        grouped: dict[str, dict[str, dict[str, Tensor]]] = {"tables": {}, "parameters": {}}
        for key, tensor in tensors.items():
            part, owner, name = key.split("/", 2)
            if not bool(tensor.isfinite().all()) and name != "agreement_edges":
                raise ValueError(f"{key} has entries that are not numbers")
            grouped[part].setdefault(owner, {})[name] = tensor
        provenance: dict[str, Any] = json.loads(metadata["provenance"])
        summary = json.loads(metadata["summary"])
        return cls(
            {str(key): str(value) for key, value in provenance.items()},
            {name: AcceptanceTable.from_tensors(each) for name, each in grouped["tables"].items()},
            grouped["parameters"],
            None if summary is None else ProfileSummary.from_dict(summary),
        )


def fit_profile(
    records: Records, provenance: Mapping[str, str], extra_fits: Mapping[str, Fit]
) -> AcceptanceProfile:
    """Fit everything a profile holds.

    Args:
        records: of plain speculative decoding.
        provenance: what they come from; ``companion`` says whether there was one.
        extra_fits: what else to fit, by the name under which it is kept (without a slash).

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
        {name: dict(fit(records)) for name, fit in extra_fits.items()},
        summarise(records, has_companion),
    )
