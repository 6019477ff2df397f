"""Passes, fits, profile files and errors. No test asserts a time."""

import json
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.engine.assembly import Models
from draftwise.errors import DraftwiseWarning, InvalidParameterError
from draftwise.kernels.native.drafting import DraftRun
from draftwise.models.loading import load_model
from draftwise.profiling import interference, latency
from draftwise.profiling.interference import measure_interference
from draftwise.profiling.latency import load_latency, measure_latency, measure_profile
from draftwise.profiling.latency_profile import LatencyProfile, Point, fit_stage
from draftwise.profiling.passes import PassShape, PassTimer, Stage, longest_context
from draftwise.profiling.shapes import quick_shapes, thorough_shapes

from ..refusals import error_of
from ..tiny_models import Recipe

TARGET = Recipe(vocab=40, context=96)
STAGES = tuple(Stage)


@pytest.fixture(scope="module")
def triple(models):
    """A tiny target, draft and companion; the draft's context is the shortest."""

    def load(role, recipe):
        return load_model(models.folder(recipe), role, torch.float32, torch.device("cpu"))

    return Models(
        load("target", TARGET),
        load("draft", TARGET.draft(context=64)),
        load("companion", TARGET.draft(noise_seed=5)),
    )


@pytest.fixture(scope="module")
def profile(triple):
    return measure_profile(triple, max_batch_size=3, contexts=[8, 24], num_speculative_tokens=2)


@pytest.fixture
def saved(profile, tmp_path):
    file = tmp_path / "latency.json"
    profile.save(file)
    return file


@pytest.fixture
def unprobed(monkeypatch):
    """Probes find no deviation from the profile."""
    monkeypatch.setattr(latency, "_deviation", lambda profile, models: 1.0)


def point(num_requests, num_tokens, context, seconds):
    return Point(Stage.TARGET, PassShape(num_requests, num_tokens, context), seconds, 1)


def edited(file, edit):
    content = json.loads(file.read_text())
    edit(content)
    other = file.with_name("edited.json")
    other.write_text(json.dumps(content))
    return str(other)


class TestFit:
    def test_recovers_a_curve_and_the_cost_of_context(self):
        truth = StageCost((1, 4, 16, 64), (0.01, 0.011, 0.02, 0.06), 2e-6)
        points = [
            point(rows, n, context, truth(n, rows * context))
            for n in truth.tokens
            for rows, context in ((1, 64), (1, 512), (4, 512))
        ]
        fit = fit_stage(points)
        assert fit.tokens == truth.tokens
        assert fit.seconds == pytest.approx(truth.seconds, rel=1e-6)
        assert fit.per_context_token == pytest.approx(2e-6, rel=1e-6)

    def test_a_curve_is_non_decreasing(self):
        seconds = {1: 0.010, 2: 0.014, 4: 0.009, 8: 0.02, 16: 0.016}
        fit = fit_stage([point(1, n, 64, each) for n, each in seconds.items()])
        assert all(a <= b for a, b in zip(fit.seconds[:-1], fit.seconds[1:], strict=True))
        assert fit.seconds[1] == pytest.approx(fit.seconds[2])
        assert 0.009 < fit.seconds[1] < 0.014
        assert fit.per_context_token == 0.0

    def test_cost_of_context_is_non_negative(self):
        points = [point(1, n, c, 0.01 * n / c) for n in (1, 2, 4) for c in (1, 2)]
        assert fit_stage(points).per_context_token == 0.0

    def test_one_point_is_enough(self):
        assert fit_stage([point(1, 4, 64, 0.01)])(100) == pytest.approx(0.01)


class TestShapes:
    def test_quick_shapes_are_valid_and_reach_the_largest_step(self):
        for gamma in [1, 5, 16]:
            for max_requests in [1, 3, 32]:
                shapes = quick_shapes(STAGES, max_requests, gamma, 200)
                assert max(s.num_tokens for s in shapes[Stage.TARGET]) == max_requests * (gamma + 1)
                assert max(s.num_tokens for s in shapes[Stage.COMPANION]) == max_requests * gamma
                assert max(s.num_tokens for s in shapes[Stage.DRAFT]) == max_requests, gamma
                for stage, most in (
                    (Stage.TARGET, gamma + 1),
                    (Stage.COMPANION, gamma),
                    (Stage.DRAFT, 1),
                ):
                    for shape in shapes[stage]:
                        assert 1 <= shape.num_requests <= min(max_requests, shape.num_tokens)
                        assert shape.num_tokens <= shape.num_requests * most, gamma
                        assert 1 <= shape.context <= 200, gamma
                    assert len(set(shapes[stage])) == len(shapes[stage]), gamma

    def test_quick_shapes_have_two_contexts(self):
        target = quick_shapes(STAGES, 8, 5, 500)[Stage.TARGET]
        assert len({shape.context for shape in target}) == 2

    def test_thorough_shapes_are_the_grid(self):
        shapes = thorough_shapes(STAGES, 4, 2, [64, 128])
        assert len(shapes[Stage.TARGET]) == 3 * 3 * 2
        assert {(s.num_requests, s.num_tokens) for s in shapes[Stage.TARGET]} == {
            (batch, batch * tokens) for batch in (1, 2, 4) for tokens in (1, 2, 3)
        }
        assert [s.num_requests for s in shapes[Stage.DRAFT]] == [1, 2, 4]
        assert {s.context for s in shapes[Stage.COMPANION]} == {128}

    def test_some_requests_of_a_large_batch_verify_one_token_more(self):
        target = thorough_shapes(STAGES, 16, 3, [64, 128])[Stage.TARGET]
        partly = [s for s in target if s.num_tokens % s.num_requests]
        assert {s.num_tokens for s in partly} == {10, 14, 18, 20, 22, 28, 36, 40, 44}
        assert {s.context for s in partly} == {64}
        assert not any(
            s.num_tokens % s.num_requests
            for s in thorough_shapes(STAGES, 16, 3, [30_000])[Stage.TARGET]
        )

    def test_total_context_is_limited(self):
        target = thorough_shapes(STAGES, 32, 1, [128, 30_000])[Stage.TARGET]
        assert {s.num_requests for s in target if s.context == 30_000} == {1}
        assert {s.num_requests for s in target if s.context == 128} == {1, 2, 4, 8, 16, 32}

    def test_only_the_given_stages(self):
        assert quick_shapes((Stage.TARGET,), 2, 2, 50).keys() == {Stage.TARGET}


class TestPasses:
    @pytest.mark.parametrize(
        ("stage", "shape"),
        [
            (Stage.TARGET, PassShape(2, 5, 30)),
            (Stage.TARGET, PassShape(1, 1, 1)),
            (Stage.DRAFT, PassShape(3, 3, 20)),
            (Stage.COMPANION, PassShape(2, 3, 20)),
        ],
    )
    def test_passes_have_the_requested_shape(self, triple, stage, shape, monkeypatch):
        timer = PassTimer(triple, 3, 40, 3)
        model = getattr(triple, stage).model
        seen = []
        forward = model.forward

        def watched(cache, tokens, segments, *rest, **named):
            seen.append([(s.cache_slot, s.start, s.num_tokens) for s in segments])
            return forward(cache, tokens, segments, *rest, **named)

        read = DraftRun.read

        def watched_read(run, tokens, segments, *rest):
            seen.append([(s.cache_slot, s.start, s.num_tokens) for s in segments])
            return read(run, tokens, segments, *rest)

        monkeypatch.setattr(model, "forward", watched)
        monkeypatch.setattr(DraftRun, "read", watched_read)
        timer(Stage.TARGET, PassShape(3, 12, 40))  # leaves the cache elsewhere
        seen.clear()
        assert timer(stage, shape) > 0
        first = seen[0]
        assert [slot for slot, _, _ in first] == list(range(shape.num_requests))
        assert sum(start for _, start, _ in first) == shape.num_requests * shape.context
        assert [start for _, start, _ in first] == shape.contexts
        assert sum(count for _, _, count in first) == shape.num_tokens

    def test_longest_context_is_that_of_the_shortest_model(self, triple):
        longest = longest_context(triple, 3)
        shape = PassShape(2, 2, longest)
        assert 64 - 5 - 2 <= max(shape.contexts) <= 64 - 5
        timer = PassTimer(triple, 2, longest, 3)
        for stage in timer.stages:
            assert timer(stage, shape) > 0

    def test_a_target_alone_has_one_stage(self, triple):
        assert PassTimer(Models(triple.target), 1, 8, 2).stages == (Stage.TARGET,)

    def test_without_time_the_first_draft_pass_is_like_the_others(self, triple):
        assert PassTimer(triple, 2, 16, 3).first_draft_extra(PassShape(2, 2, 8), 0.0) == 0.0

    def test_profiles_have_the_first_draft_pass_apart(self, triple, monkeypatch, tmp_path):
        monkeypatch.setattr(PassTimer, "first_draft_extra", lambda *_: 1e-6)
        assert measure_latency(triple, 2).first_draft_extra == pytest.approx(1e-6)
        profile = measure_profile(triple, 1, [8], 2)
        profile.save(tmp_path / "latency.json")
        loaded = LatencyProfile.load(tmp_path / "latency.json")
        assert loaded.costs[Stage.DRAFT].first_extra == pytest.approx(1e-6)

    def test_a_single_drafted_token_has_no_other_pass(self, triple):
        assert PassTimer(triple, 1, 8, 1).first_draft_extra(PassShape(1, 1, 8)) == 0.0

    def test_interference_is_measured_for_both(self, triple):
        factors = measure_interference(PassTimer(triple, 2, 16, 2), [1, 2], 3, 16)
        assert factors.keys() == {Stage.TARGET, Stage.DRAFT}
        assert all(factor > 0 for factor in factors.values())

    def test_interference_on_one_core_is_refused_before_any_pass(self, triple, monkeypatch):
        passes = []
        monkeypatch.setattr(interference, "shares", lambda: None)
        with pytest.raises(InvalidParameterError, match="two cores") as caught:
            measure_profile(
                triple, 1, [8], 2, interference=True, on_pass=lambda *each: passes.append(each)
            )
        assert caught.value.field == "interference"
        assert not passes


class TestMeasuring:
    def test_quick_model_covers_every_stage(self, triple):
        model = measure_latency(triple, 4, 3)
        assert isinstance(model, LatencyModel)
        assert model.target.tokens[0] == 1
        assert model.target.tokens[-1] == 16
        assert 0 < model.target_seconds(1) <= model.target_seconds(64)
        assert model.draft_seconds(1) > 0
        assert model.companion_seconds(1) > 0

    def test_quick_model_of_a_target_alone(self, triple):
        model = measure_latency(Models(triple.target), 1, 0)
        assert model.draft is None
        assert model.companion is None
        assert model.target_seconds(1) > 0

    def test_the_shortest_time_of_a_quick_measurement_counts(self):
        """First passes touch new memory, and other work delays some passes."""
        calls = Counter()

        def timer(stage, shape):
            calls[shape] += 1
            is_delayed = calls[shape] == 1 or (shape.num_tokens == 8 and calls[shape] % 2)
            return 1e-3 * shape.num_tokens * (10 if is_delayed else 1)

        shapes = {Stage.TARGET: [PassShape(1, n, 8) for n in (1, 2, 8, 16, 32)]}
        points = latency._measure_quickly(timer, shapes)
        assert {point.shape.num_tokens: point.seconds for point in points} == pytest.approx(
            {n: 1e-3 * n for n in (1, 2, 8, 16, 32)}
        )

    def test_a_slow_model_is_measured_at_fewer_sizes(self, triple, monkeypatch):
        monkeypatch.setattr(latency, "_BUDGET_SECONDS", 0.0)
        model = measure_latency(triple, 16, 5)
        assert model.target.tokens == (1, 8, 32)
        assert model.target_seconds(96) > 0

    def test_profile_has_every_shape_and_reports_progress(self, triple):
        calls = []
        measured = measure_profile(
            triple, 2, [8], 1, on_pass=lambda done, total: calls.append((done, total))
        )
        shapes = thorough_shapes(STAGES, 2, 1, [8])
        assert {(p.stage, p.shape) for p in measured.points} == {
            (stage, shape) for stage in shapes for shape in shapes[stage]
        }
        assert len({p.num_passes for p in measured.points}) == 1
        assert [done for done, _ in calls] == list(range(1, len(calls) + 1))
        assert {total for _, total in calls} == {len(calls)}

    def test_default_contexts_are_those_that_fit(self, triple):
        measured = measure_profile(Models(triple.target), 1, None, 1)
        assert {p.shape.context for p in measured.points} == {4 * (96 - 3) // 5}

    def test_refuses_invalid_sizes(self, triple):
        for field, arguments in [
            ("contexts", {"contexts": [60]}),
            ("contexts", {"contexts": [0]}),
            ("contexts", {"contexts": []}),
            ("max_batch_size", {"max_batch_size": 0}),
            ("num_speculative_tokens", {"num_speculative_tokens": 0}),
        ]:
            error = error_of(
                measure_profile,
                triple,
                **{"max_batch_size": 1, **arguments},
                error=InvalidParameterError,
            )
            assert error.field == field


class TestFile:
    def test_round_trip(self, profile, saved):
        assert LatencyProfile.load(saved) == profile

    def test_gives_the_fitted_costs(self, profile, saved, triple, unprobed):
        model = load_latency(str(saved), triple)
        assert model.target == profile.costs[Stage.TARGET]
        assert model.draft == profile.costs[Stage.DRAFT]
        assert model.companion == profile.costs[Stage.COMPANION]

    def test_a_target_alone_can_use_the_profile_of_a_triple(self, saved, triple, unprobed):
        assert load_latency(str(saved), Models(triple.target)).target_seconds(1) > 0

    def test_another_name_of_the_same_model_is_accepted(self, saved, triple, unprobed):
        renamed = replace(triple, target=replace(triple.target, name="elsewhere"))
        assert load_latency(str(saved), renamed).target_seconds(1) > 0

    def test_refuses_a_profile_of_other_models_or_machines(self, saved, triple):
        for edit, named in [
            (lambda c: c["machine"].update(dtype="bfloat16"), "dtype 'bfloat16'"),
            (lambda c: c["machine"].update(threads=77), "threads 77"),
            (lambda c: c["machine"].update(device="cuda"), "device 'cuda'"),
            (lambda c: c["machine"].update(processor="Z80"), "processor 'Z80'"),
            (lambda c: c["models"]["target"].update(fingerprint="0"), "another target"),
            (lambda c: c["models"]["draft"].update(fingerprint="0"), "another draft"),
            (lambda c: c["models"]["companion"].update(dtype="int8"), "another companion"),
            (lambda c: c["models"].pop("companion"), "no companion"),
            (lambda c: c["fit"].pop("draft"), "no draft"),
        ]:
            error = error_of(
                load_latency,
                edited(saved, edit),
                triple,
                error=InvalidParameterError,
                match="was measured with",
            )
            assert error.field == "latency_profile", edit
            assert named in error.message, edit

    def test_refuses_files_that_are_not_profiles(self, saved, triple):
        for edit in [
            lambda c: c.pop("format"),
            lambda c: c.update(format=2),
            lambda c: c.pop("machine"),
            lambda c: c.update(machine=[]),
            lambda c: c.update(models={"target": 3}),
            lambda c: c["models"]["target"].pop("fingerprint"),
            lambda c: c["machine"].pop("threads"),
            lambda c: c["fit"].pop("target"),
            lambda c: c["fit"].update(oracle=c["fit"]["target"]),
            lambda c: c["fit"]["target"].update(seconds=[]),
            lambda c: c["fit"]["target"]["seconds"].__setitem__(-1, -1.0),
            lambda c: c["fit"]["target"]["tokens"].__setitem__(0, None),
            lambda c: c["measured"].clear(),
            lambda c: c["measured"][0].pop("context"),
            lambda c: c["measured"][0].update(stage="oracle"),
        ]:
            error = error_of(
                load_latency,
                edited(saved, edit),
                triple,
                error=InvalidParameterError,
                match="is not a latency profile",
            )
            assert error.field == "latency_profile", edit

    def test_refuses_garbage(self, tmp_path, triple):
        for content in [b"", b"{", b"[1]", b"null", b"\xff\xfe\x00"]:
            file = tmp_path / "latency.json"
            file.write_bytes(content)
            error_of(
                load_latency,
                str(file),
                triple,
                error=InvalidParameterError,
                match="is not a latency profile",
            )

    def test_refuses_a_missing_file(self, tmp_path, triple):
        with pytest.raises(InvalidParameterError, match="cannot read") as error:
            load_latency(str(tmp_path / "none.json"), triple)
        assert error.value.field == "latency_profile"

    def test_names_a_path_that_cannot_be_written(self, profile, tmp_path):
        with pytest.raises(InvalidParameterError, match="cannot write") as error:
            profile.save(tmp_path / "missing" / "latency.json")
        assert error.value.field == "output"


class TestStaleness:
    """Real probes are compared with synthetic profiles, so no test depends on timing."""

    @staticmethod
    def scaled(file, factor):
        def edit(content):
            for each in content["measured"]:
                each["seconds"] *= factor

        return edited(file, edit)

    def test_warns_with_the_command_when_the_machine_changed(self, saved, triple):
        for factor in [1e-4, 1e4]:
            with pytest.warns(DraftwiseWarning, match="draftwise profile-latency") as caught:
                load_latency(path := self.scaled(saved, factor), triple)
            message = str(caught[0].message)
            assert f"-o {path}" in message, factor
            assert f"--target {triple.target.name}" in message, factor
            assert caught[0].filename == __file__, factor

    def test_the_command_repeats_the_measurement(self, profile):
        companion = {**profile.models["companion"], "name": "small:int8"}
        models = {
            "target": {**profile.models["target"], "name": "my target"},
            "draft": {**profile.models["draft"], "name": "small"},
            "companion": companion,
        }
        threads = torch.get_num_threads()
        assert replace(profile, models=models).command("out.json") == (
            "draftwise profile-latency --draft small --target 'my target' --companion draft:int8 "
            f"--dtype float32 --device cpu --threads {threads} --max-batch-size 3 "
            "--contexts 8,24 --num-speculative-tokens 2 -o out.json"
        )
        beside = replace(profile, models=models, interference={Stage.TARGET: 1.2, Stage.DRAFT: 1.1})
        assert beside.command("out.json").endswith(" --interference -o out.json")
        alone = replace(profile, models={"target": models["target"]})
        assert " --draft none " in alone.command("out.json")
        models["draft"]["dtype"] = "bfloat16"
        assert " --dtype auto " in replace(profile, models=models).command("out.json")

    @pytest.mark.parametrize(("off", "warned"), [(1.4, 0), (0.7, 0), (1.6, 1), (0.6, 1)])
    def test_warns_above_the_maximum_deviation(self, saved, triple, monkeypatch, off, warned):
        monkeypatch.setattr(latency, "_deviation", lambda profile, models: off)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_latency(str(saved), triple)
        assert len(caught) == warned
