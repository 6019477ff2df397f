"""Acceptance tables: means, empty cells, and online updates."""

import math

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from draftwise.errors import InvalidParameterError
from draftwise.estimators.binning import Grid, adaptive_grid, quantile_edges, uniform_grid
from draftwise.estimators.tables import BINNINGS, AcceptanceTable

from ..refusals import error_of
from .synthetic import records_of, smooth_law, smooth_records

each_binning = pytest.mark.parametrize("binning", BINNINGS)
property_test = settings(deadline=None, derandomize=True, max_examples=100)
unit = st.floats(0, 1, width=32)


def table_of(binning, size=20_000, seed=0):
    return AcceptanceTable.fit(smooth_records(size, seed), binning)


TABLES = {binning: table_of(binning) for binning in BINNINGS}
TABLES["prior"] = AcceptanceTable.prior()
TABLES["few"] = table_of("adaptive", 700)
TABLES["one cell"] = AcceptanceTable.fit(records_of([0.0] * 600, [0.0] * 600, [0.4] * 600), "5x5")
each_table = pytest.mark.parametrize("name", TABLES)


@each_table
def test_predictions_are_probabilities_and_non_decreasing_along_agreement(name):
    table = TABLES[name]
    steps = torch.linspace(0, 1, 101)
    predicted = table.predict(steps.unsqueeze(1).expand(101, 101), steps.expand(101, 101))
    assert predicted.shape == (101, 101)
    assert predicted.dtype == torch.float32
    assert bool(((predicted >= 0) & (predicted <= 1)).all())
    assert bool((predicted.diff(dim=1) >= 0).all())


@each_binning
def test_means_follow_the_law(binning):
    fresh = smooth_records(5000, seed=1)
    predicted = TABLES[binning].predict(
        torch.from_numpy(fresh.overlap), torch.from_numpy(fresh.agreement)
    )
    error = predicted.numpy() - smooth_law(fresh.overlap, fresh.agreement)
    width = {"5x5": 0.13, "10x10": 0.07, "20x20": 0.06, "adaptive": 0.07}[binning]
    assert np.sqrt((error**2).mean()) < width
    assert abs(error.mean()) < 0.01


def test_number_of_cells():
    cells = {binning: TABLES[binning].num_cells for binning in BINNINGS}
    assert cells["5x5"] == 25
    assert cells["10x10"] == 100
    assert cells["20x20"] == 400
    assert 320 < cells["adaptive"] <= 400


def test_adaptive_cells_hold_about_as_many_records_each():
    records = smooth_records(20_000)
    ones = np.ones(len(records), dtype=np.float32)
    grid = adaptive_grid(records.overlap, records.agreement, ones)
    counts = np.bincount(grid.cells_of(records.overlap, records.agreement))
    counts = counts[counts > 0]
    assert len(counts) == grid.num_cells
    fair = len(records) / 400
    # Many records have A = 1, so this value has its own cell of any size.
    ordinary = counts[counts < 3 * fair]
    assert len(ordinary) >= grid.num_cells - grid.shape[0]
    assert ordinary.mean() == pytest.approx(fair, rel=0.3)


def test_frequent_values_have_their_own_bins():
    records = smooth_records(20_000)
    ones = np.ones(len(records), dtype=np.float32)
    grid = adaptive_grid(records.overlap, records.agreement, ones)
    rows = torch.arange(grid.shape[0])
    for value, neighbour in ((0.0, 1e-6), (1.0, 1 - 1e-6)):
        own = grid.columns_of(rows, torch.full((len(rows),), value))
        other = grid.columns_of(rows, torch.full((len(rows),), neighbour))
        # In rows with a small overlap A = 1 is too rare for its own bin.
        assert (own != other).float().mean() > 0.7


@each_binning
def test_records_are_weighted_by_reach_probability(binning):
    """If the first token of every chain is always rejected, only first tokens count."""
    size = 4000
    acceptance = np.tile([0.0, 1.0], size // 2)
    records = records_of([0.55] * size, [0.55] * size, acceptance, chain_length=2)
    table = AcceptanceTable.fit(records, binning)
    assert table.predict(torch.tensor(0.55), torch.tensor(0.55)).item() < 0.01


@each_binning
def test_few_records_give_a_coarse_grid(binning):
    for size in [0, 1, 3, 30]:
        table = AcceptanceTable.fit(smooth_records(size), binning)
        assert bool(table.values.isfinite().all()), size
        assert table.predict(torch.tensor(0.9), torch.tensor(1.0)) > table.predict(
            torch.tensor(0.2), torch.tensor(0.0)
        )


@each_binning
def test_empty_cells_fall_back_to_coarser_tables(binning):
    """With all data in one corner, distant cells are still updated and stay defined."""
    for level in [0.1, 0.9]:
        random = np.random.default_rng(0)
        size = 3000
        overlap, agreement = 0.5 + 0.1 * random.random((2, size))
        records = records_of(overlap, agreement, np.full(size, level))
        table, prior = AcceptanceTable.fit(records, binning), AcceptanceTable.prior()
        here, far = torch.tensor(0.55), torch.tensor(0.95)
        assert table.predict(here, here).item() == pytest.approx(level, abs=0.02)
        moved = table.predict(far, here) - prior.predict(far, here)
        assert torch.sign(moved) == math.copysign(1, level - 0.5)
        assert bool(table.values.isfinite().all()), level


def test_values_are_monotone_along_agreement():
    agreement = np.tile([0.1, 0.9], 2000)
    records = records_of(np.full(4000, 0.5), agreement, np.where(agreement < 0.5, 0.8, 0.2))
    table = AcceptanceTable.fit(records, "5x5")
    for a in (0.1, 0.5, 0.9):
        predicted = table.predict(torch.tensor(0.5), torch.tensor(a)).item()
        assert predicted == pytest.approx(0.5, abs=0.02)


def test_an_unknown_binning_is_refused():
    with pytest.raises(InvalidParameterError, match="5x5, 10x10, 20x20, adaptive") as caught:
        AcceptanceTable.fit(smooth_records(10), "6x6")
    assert caught.value.field == "binning"


@each_table
def test_tensors_hold_the_whole_table(name):
    table = TABLES[name]
    tensors = table.to_tensors()
    again = AcceptanceTable.from_tensors(tensors)
    assert torch.equal(again.values, table.values)
    assert torch.equal(again.grid.agreement_edges, table.grid.agreement_edges)
    assert again.num_cells == table.num_cells
    for key, tensor in again.to_tensors().items():
        assert torch.equal(tensor, tensors[key])


def test_invalid_tensors_are_refused():
    for key, change in [
        ("values", lambda t: t[:-1]),
        ("values", lambda t: t.flip(1)),
        ("values", lambda t: t + 2),
        ("values", lambda t: t * float("nan")),
        ("weights", lambda t: t - 1e6),
        ("weights", lambda t: t * float("nan")),
        ("overlap_edges", lambda t: t.flip(0)),
        ("overlap_edges", lambda t: t[:-1]),
        ("overlap_edges", lambda t: t * float("nan")),
        ("agreement_edges", lambda t: t.flip(1)),
        ("agreement_edges", lambda t: t - 1),
        ("agreement_edges", lambda t: t[0]),
    ]:
        tensors = TABLES["10x10"].to_tensors()
        error_of(
            AcceptanceTable.from_tensors,
            tensors | {key: change(tensors[key])},
            error=ValueError,
            match=r"must|needs",
        )


class TestObserving:
    def observe(self, table, size, level, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(size // 50):
            overlap, agreement = torch.rand(2, 50, generator=generator)
            table.observe(overlap, agreement, torch.full((50,), level))

    @pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
    def test_the_prior_moves_towards_observations(self, level):
        table = AcceptanceTable.prior()
        before = table.values.clone()
        self.observe(table, 20_000, level)
        assert (table.values - level).abs().mean() < 0.1 < (before - level).abs().mean()
        assert bool((table.values.diff(dim=1) >= 0).all())

    def test_a_few_observations_move_the_table_as_a_whole(self):
        table = AcceptanceTable.prior()
        before = table.values.clone()
        half = torch.full((256,), 0.5)
        table.observe(half, half, torch.ones(256))
        assert bool((table.values > before)[1:9, 1:9].all())
        assert table.values[5, 5] == table.values[5, 5:].min()

    def test_older_observations_are_forgotten(self):
        table = AcceptanceTable.prior()
        self.observe(table, 20_000, 1.0)
        self.observe(table, 20_000, 0.0)
        assert table.values.mean() < 0.15

    def test_a_table_of_much_data_still_adapts(self):
        table = table_of("5x5")
        self.observe(table, 20_000, 0.0)
        assert table.values.mean() < 0.2

    def test_observations_of_weight_zero_change_nothing(self):
        table = AcceptanceTable.prior()
        before = table.values.clone()
        ones = torch.ones(500)
        table.observe(ones, ones, 0 * ones, 0 * ones)
        table.observe(ones[:0], ones[:0], ones[:0])
        assert torch.equal(table.values, before)

    def test_copies_are_independent(self):
        table = table_of("10x10")
        copy = table.to(torch.device("cpu"))
        self.observe(table, 2000, 0.0)
        assert not torch.equal(copy.values, table.values)
        assert torch.equal(table.to(torch.device("cpu")).values, copy.values)
        assert torch.equal(table.to_tensors()["values"], copy.values)


class TestGrids:
    def test_an_edge_belongs_to_the_bin_above(self):
        grid = uniform_grid(5, 5)
        values = torch.tensor([0.0, 0.19, 0.2, 0.4, 0.99, 1.0])
        rows = torch.tensor([0, 0, 1, 2, 4, 4])
        assert torch.equal(grid.rows_of(values), rows)
        assert torch.equal(grid.columns_of(rows, values), rows)

    def test_rows_of_different_length(self):
        grid = Grid(torch.tensor([0.5]), torch.tensor([[0.2, 0.4], [0.7, math.inf]]))
        assert grid.num_cells == 5
        assert grid.num_columns == [3, 2]
        overlap, agreement = (
            np.float32([0.1, 0.1, 0.5, 0.9, 1]),
            np.float32([0.1, 0.4, 0.4, 0.7, 1]),
        )
        assert grid.cells_of(overlap, agreement).tolist() == [0, 2, 3, 4, 4]

    def test_quantiles_have_no_empty_bins(self):
        values = np.float32([0, 0, 0, 0, 0.5, 1, 1, 1])
        edges = quantile_edges(values, 8)
        assert np.bincount(np.searchsorted(edges, values, side="right")).tolist() == [4, 1, 3]
        assert len(quantile_edges(np.float32([0.3] * 5), 4)) == 0
        assert len(quantile_edges(values[:0], 4)) == 0

    def test_quantiles_by_weight(self):
        values = np.linspace(0, 1, 101, dtype=np.float32)
        edges = quantile_edges(values, 2, (values >= 0.8).astype(np.float32))
        assert edges == pytest.approx([0.9], abs=0.011)
