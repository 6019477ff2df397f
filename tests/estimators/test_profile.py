"""Acceptance profiles: their contents, their file, and the check of the models."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Inputs, SignalModel
from draftwise.estimators.information import information_gains
from draftwise.estimators.profile import AcceptanceProfile, fit_profile
from draftwise.estimators.records import Records
from draftwise.estimators.tables import BINNINGS

from ..refusals import error_of
from .synthetic import smooth_records

PROVENANCE = {"target": "aaa", "draft": "bbb", "companion": "ccc", "temperature": "1.0"}
RECORDS = smooth_records(3000, chain_length=3)


@pytest.fixture(scope="module")
def profile():
    return fit_profile(RECORDS, PROVENANCE)


@pytest.fixture
def file(profile, tmp_path):
    profile.save(tmp_path / "profile.safetensors")
    return tmp_path / "profile.safetensors"


def refusal(path):
    with pytest.raises(InvalidParameterError) as caught:
        AcceptanceProfile.load(path)
    assert caught.value.field == "profile"
    return caught.value.message


class TestFitting:
    def test_contents(self, profile):
        assert profile.provenance == PROVENANCE
        assert tuple(profile.tables) == BINNINGS
        expected = SignalModel.fit(RECORDS, Inputs.COMBINED).weights
        assert profile.parameters["combined"]["weights"].numpy() == pytest.approx(expected)

    def test_summary(self, profile):
        summary = profile.summary
        assert summary.num_tokens == 3000
        assert summary.num_chains == 1000
        first = RECORDS.position == 0
        by_position = summary.acceptance_by_position
        assert len(by_position) == 3
        assert by_position[0] == pytest.approx(RECORDS.acceptance[first].mean())
        weight = RECORDS.reach_probability()[RECORDS.position == 1]
        second = (weight * RECORDS.acceptance[RECORDS.position == 1]).sum() / weight.sum()
        assert by_position[1] == pytest.approx(second, rel=1e-5)
        assert min(by_position) < summary.mean_acceptance < max(by_position)
        assert summary.gains == information_gains(RECORDS)
        assert summary.correlation > 0.5
        for error in summary.calibration_errors.values():
            assert 0 < error < 0.06

    def test_without_companion_its_signals_are_left_out(self):
        nothing = np.zeros(len(RECORDS), dtype=np.float32)
        records = replace(RECORDS, overlap=nothing, agreement=nothing)
        profile = fit_profile(records, PROVENANCE | {"companion": "none"})
        assert not profile.tables
        assert set(profile.summary.gains) == {"H", "q(x)", "history"}
        assert not profile.summary.calibration_errors

    def test_no_records(self):
        with pytest.raises(InvalidParameterError, match="nothing was drafted") as caught:
            fit_profile(Records.empty(), PROVENANCE)
        assert caught.value.field == "profile"

    def test_few_records(self, tmp_path):
        for size in [1, 2, 9]:
            profile = fit_profile(smooth_records(size), PROVENANCE)
            profile.save(tmp_path / "profile")
            assert AcceptanceProfile.load(tmp_path / "profile").summary == profile.summary, size

    @pytest.mark.parametrize(
        ("has_companion", "names"),
        [
            (True, {"disco", "specdec++", "combined", "predictable"}),
            (False, {"disco", "specdec++"}),
        ],
    )
    def test_estimators_that_are_fitted(self, has_companion, names):
        companion = "ccc" if has_companion else "none"
        tensors = fit_profile(smooth_records(50), PROVENANCE | {"companion": companion}).parameters
        assert set(tensors) == names
        for each in tensors.values():
            assert all(bool(tensor.isfinite().all()) for tensor in each.values())
        assert not torch.equal(tensors["disco"]["bias2"], tensors["specdec++"]["bias2"])


class TestFile:
    def test_round_trip(self, profile, file):
        loaded = AcceptanceProfile.load(str(file))
        assert loaded.provenance == profile.provenance
        assert loaded.summary == profile.summary
        for binning, table in profile.tables.items():
            for name, tensor in table.to_tensors().items():
                assert torch.equal(loaded.tables[binning].to_tensors()[name], tensor)
        for name, parameters in profile.parameters.items():
            for key, tensor in parameters.items():
                assert torch.equal(loaded.parameters[name][key], tensor)
        assert loaded.parameters.keys() == profile.parameters.keys()

    def test_the_same_profile_is_the_same_file(self, profile, file, tmp_path):
        again = tmp_path / "again"
        AcceptanceProfile.load(file).save(again)
        assert load_file(again).keys() == load_file(file).keys()
        assert again.stat().st_size == file.stat().st_size

    def test_missing_file(self, tmp_path):
        assert "there is no file" in refusal(tmp_path / "nothing")
        assert "there is no file" in refusal(tmp_path)

    def test_garbage(self, tmp_path):
        for content in [b"", b"garbage", b"\0" * 5000, b'{"kind": 1}' * 100]:
            file = tmp_path / "garbage"
            file.write_bytes(content)
            assert "is not an acceptance profile" in refusal(file), content

    def test_truncated(self, file):
        content = file.read_bytes()
        for share in [0.1, 0.5, 0.99]:
            file.write_bytes(content[: int(share * len(content))])
            assert "is not an acceptance profile" in refusal(file), share

    def test_other_safetensors_files(self, tmp_path):
        for metadata in [None, {"kind": "another"}, {"format": "1"}]:
            file = tmp_path / "model.safetensors"
            save_file({"weight": torch.zeros(3)}, file, metadata)
            assert "is not an acceptance profile" in refusal(file), metadata

    def test_another_format(self, tmp_path):
        file = tmp_path / "profile"
        metadata = {"kind": "draftwise acceptance profile", "format": "99"}
        save_file({"tables/5x5/values": torch.zeros(3)}, file, metadata)
        assert "has format 99" in refusal(file)

    def test_damaged_tensors(self, profile, file):
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        for key, change in [
            ("tables/5x5/values", lambda t: t * float("nan")),
            ("tables/5x5/values", lambda t: t[1:]),
            ("parameters/combined/weights", lambda t: t * float("inf")),
            ("tables/5x5/unknown/name", None),
            ("something", None),
        ]:
            damaged = torch.tensor(float("nan")) if change is None else change(tensors[key])
            save_file(tensors | {key: damaged}, file, self.metadata(profile))
            assert "damaged" in refusal(file), key

    def test_damaged_metadata(self, profile, file):
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        for key, value in [
            ("provenance", "[]"),
            ("provenance", "{"),
            ("summary", '{"gains": 3}'),
            ("summary", '{"num_tokens": 3}'),
        ]:
            save_file(tensors, file, self.metadata(profile) | {key: value})
            assert "damaged" in refusal(file), key

    def test_a_missing_tensor(self, profile, file):
        tensors = load_file(file)
        del tensors["tables/adaptive/weights"]
        save_file(tensors, file, self.metadata(profile))
        assert "damaged" in refusal(file)

    def test_a_missing_folder(self, profile, tmp_path):
        with pytest.raises(InvalidParameterError, match="cannot write") as caught:
            profile.save(tmp_path / "no" / "profile")
        assert caught.value.field == "profile"

    def metadata(self, profile):
        return {
            "kind": "draftwise acceptance profile",
            "format": "1",
            "provenance": json.dumps(PROVENANCE),
            "summary": json.dumps(profile.summary.to_dict()),
        }


class TestModelCheck:
    def test_the_same_models(self, profile):
        profile.check(target="aaa", draft="bbb", companion="ccc")

    def test_models_that_are_not_used_do_not_matter(self, profile):
        profile.check(target="aaa", draft="bbb", companion=None)
        profile.check(target="aaa", draft=None, companion=None)

    def test_another_model(self, profile):
        for role in ["target", "draft", "companion"]:
            models = {"target": "aaa", "draft": "bbb", "companion": "ccc", role: "ddd"}
            caught = error_of(profile.check, **models, error=InvalidParameterError)
            assert caught.field == "profile"
            assert f"for another {role}: file {PROVENANCE[role]}, now ddd" in caught.message
            others = {"target", "draft", "companion"} - {role}
            assert not any(f"another {other}" in caught.message for other in others)

    def test_all_differing_models_are_named(self, profile):
        with pytest.raises(InvalidParameterError) as caught:
            profile.check(target="x", draft="y", companion="ccc")
        assert "another target: file aaa, now x and for another draft" in caught.value.message

    def test_made_without_companion_and_used_with_one(self):
        profile = AcceptanceProfile(PROVENANCE | {"companion": "none"})
        profile.check(target="aaa", draft="bbb", companion=None)
        with pytest.raises(InvalidParameterError, match="without a companion, now there is ccc"):
            profile.check(target="aaa", draft="bbb", companion="ccc")
