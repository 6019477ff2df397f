"""Goodput of priced token trees against the best chain, on recorded texts with measured prices.

    python benchmarks/tree_value.py record texts.npz --prompts gsm8k_test.jsonl humaneval.jsonl
    python benchmarks/tree_value.py replay texts.npz --output tree_value.json

``record`` lets the target answer prompts. At every position of an answer it grows the tree that the
draft would propose there: the eight most likely nodes of each depth, as in EAGLE-2 (Li et al. 2024,
arXiv 2406.16858). For each node it stores the draft's probability and whether the answer goes
through the node. ``suffix`` merges the continuations of the longest matches into a tree. ``record``
also measures the times of the passes. ``replay`` drafts on these texts at the measured times, so
the load of the machine has no effect. ``--passes`` replaces the target's times by those of another
machine, from a file of ``passes.py``; the draft's are scaled alike. Each batch is always full.

Trees are verified by drawing a token x from the target and going to the child x, if there is one.
That is exact for every tree that is chosen before x is drawn. The value of a node is the product of
P(right) along its path. P(right) of a node is the frequency in the other half of the texts, by the
draft's probability and the node's rank. Results are relative to no speculation:

- ``chain``: each node's most likely child, cut where a token is not worth its price.
- ``sampled``: chains that are drawn from the draft, at temperature 1 and of the best fixed length.
- ``sampled tree``: several children, drawn without replacement (SpecInfer, Miao et al.
  2023, arXiv 2305.09781), with the best fixed number of children at each depth.
- ``tree``: all nodes of the batch that are worth their price.
- ``fixed tree``: EAGLE-2's rule, the same number of most valuable nodes for each request.

Of each, the best maximum depth, least value of a node with children, and size are used. A tree's
attention is priced like that of a chain of as many tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from recorded_texts import add_recording_options, cost_arrays, read_texts, text_key

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost
from draftwise.engine.assembly import Models
from draftwise.engine.suffix.search import _own_matches, continued
from draftwise.models.attention import Segment
from draftwise.models.heads.model import HeadModel
from draftwise.models.hidden_states import StateTap
from draftwise.models.packed_model import PackedModel
from draftwise.profiling.latency import measure_latency

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MOST_CONTEXT = 2048
DEPTH = 8
BEAM = 8
CHILDREN = 4
MATCHES = 8
FIXED_SIZES = (2, 4, 8, 16, 24, 32, 60)
LEAST_VALUES = (0.02, 0.1, 0.3)
# Maximum number of children that are drawn, and of nodes of a tree of drawn children.
MOST_DRAWN = 4
MOST_SAMPLED_NODES = 40
# Number of sequences of rejected children over which an acceptance probability is averaged.
NUM_REJECTIONS = 8


class Source(Protocol):
    """Proposes tokens after the first tokens of one recorded answer.

    Attributes:
        ids: ``[own vocab]`` the target's ids of the tokens that it proposes.
    """

    ids: torch.Tensor

    def distributions(self, length: int, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """``[paths, own vocab]`` probabilities of the token after a prefix and each path.

        Args:
            length: number of tokens of the prefix.
            paths: at most ``BEAM`` paths of the same length.
        """
        ...


class ModelSource:
    """A draft model."""

    def __init__(self, model: PackedModel, text: Sequence[int]) -> None:
        self._model = model
        self._cache = model.new_cache(BEAM, len(text) + DEPTH + 1)
        self._text = text
        self.ids = torch.arange(model.vocab_size)
        for slot in range(BEAM):
            model.forward(self._cache, text, [Segment(slot, 0, len(text))], None)

    def distributions(self, length: int, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        size, tokens, segments = len(paths[0]) + 1, [], []
        for slot, path in enumerate(paths):
            self._cache.truncate(slot, length - 1)
            tokens += [self._text[length - 1], *path]
            segments.append(Segment(slot, length - 1, size))
        rows = range(size - 1, size * len(paths), size)
        logits = self._model.forward(self._cache, tokens, segments, rows)
        assert logits is not None
        return logits.float().softmax(dim=1)


class HeadSource:
    """A head that reads the target's states."""

    def __init__(self, head: HeadModel, target: PackedModel, text: Sequence[int]) -> None:
        tap = StateTap(head.state_layers)
        target.forward(
            target.new_cache(1, len(text)), text, [Segment(0, 0, len(text))], [len(text) - 1], tap
        )
        self._head, self._states, self._text = head, tap.rows[: len(text)].clone(), text
        self.ids = torch.arange(target.vocab_size) if head.target_ids is None else head.target_ids
        self._cache = head.new_cache(BEAM, len(text) + DEPTH + 1)
        for slot in range(BEAM):
            self._read(slot, 1, len(text))

    def _read(self, slot: int, first: int, end: int) -> None:
        tokens, states = self._text[first:end], self._states[first - 1 : end - 1]
        segment = Segment(slot, first - 1, end - first)
        self._head.read(self._cache, tokens, [segment], [end - first - 1], states)

    def distributions(self, length: int, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        slots, depth = range(len(paths)), len(paths[0])
        for slot in slots:
            self._cache.truncate(slot, length - 2)
        rows = list(slots)
        tokens, states = [self._text[length - 1]] * len(paths), self._states[length - 2]
        segments = [Segment(slot, length - 2, 1) for slot in slots]
        states = states.expand(len(paths), -1).contiguous()
        output = self._head.read(self._cache, tokens, segments, rows, states)
        for place in range(depth):
            tokens = [path[place] for path in paths]
            segments = [Segment(slot, length - 1 + place, 1) for slot in slots]
            carried = output.carried.clone()
            output = self._head.read(self._cache, tokens, segments, rows, carried=carried)
        return output.logits.float().softmax(dim=1)


@dataclass
class Nodes:
    """Candidate nodes at one position, parents before children. The root is -1.

    Attributes:
        parents: index of each node's parent.
        depths: depth of each node, from 1.
        ranks: place of each node among its siblings, the most likely first.
        features: the draft's probability of the node after its parent; for ``suffix``, its share of
            the votes.
        groups: for ``suffix`` the length of the longest match at the node; otherwise 0.
        right: whether the answer goes through the node.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    features: list[float]
    groups: list[int]
    right: list[bool]

    def add(self, parent: int, rank: int, feature: float, group: int, right: bool) -> int:
        """Append a node; returns its index."""
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.ranks.append(rank)
        self.features.append(feature)
        self.groups.append(group)
        self.right.append(right and (parent < 0 or self.right[parent]))
        return len(self.parents) - 1


def grown_tree(source: Source, length: int, following: Sequence[int]) -> Nodes:
    """The most likely nodes of each depth, by the product of the draft's probabilities."""
    nodes = Nodes([], [], [], [], [], [])
    frontier: list[tuple[float, int, list[int]]] = [(1.0, -1, [])]
    for depth in range(min(DEPTH, len(following))):
        probs = source.distributions(length, [path for _, _, path in frontier])
        count = BEAM if depth == 0 else CHILDREN
        highest, places = probs.topk(count, dim=1)
        best, tokens = highest.tolist(), source.ids[places].tolist()
        options = [
            (value * q, parent, path, rank, q, token)
            for (value, parent, path), row, ids in zip(frontier, best, tokens, strict=True)
            for rank, (q, token) in enumerate(zip(row, ids, strict=True))
            if q > 0
        ]
        options.sort(key=lambda option: -option[0])
        frontier = []
        for value, parent, path, rank, q, token in options[:BEAM]:
            index = nodes.add(parent, rank, q, 0, token == following[depth])
            frontier.append((value, index, [*path, token]))
    return nodes


def suffix_tree(text: Sequence[int], length: int, following: Sequence[int]) -> Nodes:
    """The continuations of the longest matches, merged."""
    nodes = Nodes([], [], [], [], [], [])
    prefix = np.array(text[:length], dtype=np.int32)
    matches = sorted(_own_matches(prefix), key=lambda match: -match.length)[:MATCHES]
    if not matches:
        return nodes
    votes = [
        (2.0 ** (match.length - matches[0].length), match.length, continued(match, DEPTH).tolist())
        for match in matches
    ]

    def branch(parent: int, own: list[tuple[float, int, list[int]]], depth: int) -> None:
        if depth == min(DEPTH, len(following)):
            return
        children: dict[int, list[tuple[float, int, list[int]]]] = {}
        for vote in own:
            children.setdefault(vote[2][depth], []).append(vote)
        total = sum(weight for weight, _, _ in own)
        weights = {token: sum(w for w, _, _ in those) for token, those in children.items()}
        for rank, token in enumerate(sorted(children, key=lambda token: -weights[token])):
            longest = max(size for _, size, _ in children[token]) + depth
            right = token == following[depth]
            index = nodes.add(parent, rank, weights[token] / total, longest, right)
            branch(index, children[token], depth + 1)

    branch(-1, votes, 0)
    return nodes


@torch.inference_mode()
def record(arguments: argparse.Namespace) -> None:
    """Write trees, acceptance and times of passes to a file."""
    llm = LLM(arguments.target, dtype=arguments.dtype, max_batch_size=8, max_model_len=MOST_CONTEXT)
    models = llm.load_models(SpeculationConfig(arguments.draft, policy="fixed"))
    priced = models
    if arguments.costs_of:
        target, draft = arguments.costs_of
        larger = LLM(target, dtype=arguments.dtype, max_batch_size=8, max_model_len=MOST_CONTEXT)
        priced = larger.load_models(SpeculationConfig(draft, policy="fixed"))
    arrays = cost_arrays(measure_latency(priced, 64, num_speculative_tokens=DEPTH))
    for path in arguments.prompts:
        has_template = llm.target.tokenizer.chat_template is not None
        workload = load_workload(
            llm, path, arguments.num_prompts, arguments.longest_prompt, has_template
        )
        for temperature in (0.0, 1.0):
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=arguments.max_tokens,
                    seed=seed,
                    ignore_eos=True,
                )
                for seed in range(len(workload.prompts))
            ]
            outputs = llm.generate(workload.prompts, params)
            for index, (prompt, output) in enumerate(zip(workload.prompts, outputs, strict=True)):
                stored = recorded(models, prompt, output.token_ids, temperature)
                for field, values in stored.items():
                    arrays[text_key(path.stem, temperature, index, field)] = values
            print(path.stem, temperature, len(outputs), flush=True)
    np.savez_compressed(arguments.texts, **arrays)


def recorded(
    models: Models, prompt: list[int], output: list[int], temperature: float
) -> dict[str, Any]:
    """The nodes at all positions of an answer, and the acceptance of sampled chains."""
    text = [*prompt, *output]
    target = models.target.model
    source: Source | None = None
    if models.draft is not None:
        draft = models.draft.model
        if isinstance(draft, HeadModel):
            source = HeadSource(draft, target, text)
        else:
            source = ModelSource(draft, text)
    sampled = np.zeros((len(output), DEPTH, MOST_DRAWN), dtype=np.float32)
    target_probs = None
    if temperature and source is not None:
        cache = target.new_cache(1, len(text))
        rows = range(len(prompt) - 1, len(text) - 1)
        logits = target.forward(cache, text, [Segment(0, 0, len(text))], rows)
        assert logits is not None
        target_probs = logits.float().softmax(dim=1)
    trees: list[Nodes] = []
    # From the end, because later entries of the caches are overwritten.
    for position in reversed(range(1, len(output))):
        length, following = len(prompt) + position, output[position : position + DEPTH]
        if source is None:
            trees.append(suffix_tree(text, length, following))
            continue
        if target_probs is not None:
            for depth, token in enumerate(following):
                (place,) = (source.ids == token).nonzero(as_tuple=True)
                if not len(place):
                    break
                q = source.distributions(length, [following[:depth]])[0]
                # The tokens that the draft cannot propose count as one.
                p = target_probs[position + depth][source.ids]
                p = torch.cat([p, (1 - p.sum()).clamp(min=0).view(1)])
                q = torch.cat([q, torch.zeros(1)])
                sampled[position, depth] = acceptance_of_drawn(p, q, int(place)).numpy()
        trees.append(grown_tree(source, length, following))
    trees.reverse()
    joined = {
        field: np.array(list(itertools.chain(*(getattr(tree, field) for tree in trees))))
        for field in vars(trees[0])
    }
    types = {"features": np.float32, "right": bool}
    return {
        "sampled": sampled,
        "counts": np.array([len(tree.parents) for tree in trees], dtype=np.int16),
        **{name: each.astype(types.get(name, np.int16)) for name, each in joined.items()},
    }


def acceptance_of_drawn(p: torch.Tensor, q: torch.Tensor, token: int) -> torch.Tensor:
    """``[MOST_DRAWN]`` P(one of the first k children is accepted | the target emits a token).

    Children are drawn from q without replacement and tested in this order. Child i is accepted with
    min(1, p_i/q_i). Then p becomes norm(max(p - q, 0)), and q loses the child.

    Args:
        p: ``[vocab]`` the target's distribution.
        q: ``[vocab]`` the draft's distribution.
        token: the emitted token.
    """
    emitted = torch.zeros(MOST_DRAWN)
    # Rows are independent sequences of rejected children, with their probability.
    q, p = q.expand(NUM_REJECTIONS, -1).clone(), p.expand(NUM_REJECTIONS, -1)
    own = float(p[0, token])
    reach = torch.ones(NUM_REJECTIONS)
    for index in range(MOST_DRAWN):
        overlap = torch.minimum(p, q)
        emitted[index] = (reach * overlap[:, token]).mean()
        rejected = (q - overlap).clamp(min=0)
        mass = rejected.sum(dim=1)
        reach = reach * mass
        if float(reach.max()) < 1e-6:
            break
        drawn = torch.multinomial(rejected + 1e-20, 1)
        residual = (p - q).clamp(min=0)
        p = residual / residual.sum(dim=1, keepdim=True).clamp(min=1e-20)
        q = q.scatter(1, drawn, 0.0)
        q = q / q.sum(dim=1, keepdim=True).clamp(min=1e-20)
    return (emitted.cumsum(0) / max(own, 1e-9)).clamp(max=1.0)


@dataclass(frozen=True)
class Position:
    """The nodes at one position of an answer, with estimated values.

    Attributes:
        values: ``[nodes]`` estimated probability that the answer goes through the node.
        parent_values: ``[nodes]`` value of the parent; 1 for the root.
        depths: ``[nodes]`` depth.
        right: ``[nodes]`` whether the answer goes through the node.
        is_chain: ``[nodes]`` whether the node is on the path of most likely children.
        sampled: ``[DEPTH, MOST_DRAWN]`` P(one of the first children is accepted) along the answer.
    """

    values: Floats
    parent_values: Floats
    depths: Integers
    right: NDArray[np.bool_]
    is_chain: NDArray[np.bool_]
    sampled: Floats


def node_groups(texts: Sequence[dict[str, Any]]) -> list[Integers]:
    """For each text, the group of each node, whose nodes share an estimate of P(right)."""
    found = []
    for text in texts:
        odds = np.log(
            np.clip(text["features"], 1e-4, 1 - 1e-4) / np.clip(1 - text["features"], 1e-4, 1)
        )
        bins = np.clip(np.round(odds * 1.5), -10, 10).astype(np.int64) + 10
        ranks = np.minimum(text["ranks"], 3).astype(np.int64)
        lengths = np.searchsorted([1, 2, 3, 4, 6, 9, 14], text["groups"], side="right")
        found.append((bins * 4 + ranks) * 8 + lengths)
    return found


def positions_of(texts: Sequence[dict[str, Any]]) -> list[list[Position]]:
    """The nodes of all texts. Estimates come from texts of the other half."""
    groups, num_groups = node_groups(texts), 21 * 4 * 8
    tried, right = np.zeros((2, num_groups)), np.zeros((2, num_groups))
    parents_of, before = [], []
    for text in texts:
        firsts = np.concatenate([[0], np.cumsum(text["counts"].astype(np.int64))])
        offsets = np.repeat(firsts[:-1], text["counts"])
        parents = np.where(text["parents"] < 0, -1, text["parents"] + offsets)
        parents_of.append((firsts, parents))
        before.append(np.where(parents < 0, True, text["right"][parents]))
    for half, text in enumerate(texts):
        known = before[half]
        np.add.at(tried[half % 2], groups[half][known], 1.0)
        np.add.at(right[half % 2], groups[half][known], text["right"][known])
    result = []
    for half, text in enumerate(texts):
        other = 1 - half % 2
        mean = right[other].sum() / tried[other].sum()
        estimate = ((right[other] + 4 * mean) / (tried[other] + 4))[groups[half]]
        firsts, parents = parents_of[half]
        values, parent_values = np.zeros(len(parents)), np.ones(len(parents))
        chain = np.zeros(len(parents), dtype=bool)
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0:
                parent_values[node] = values[parent]
            values[node] = parent_values[node] * estimate[node]
            chain[node] = text["ranks"][node] == 0 and (parent < 0 or chain[parent])
        result.append(
            [
                Position(
                    values[first:end],
                    parent_values[first:end],
                    text["depths"][first:end],
                    text["right"][first:end],
                    chain[first:end],
                    text["sampled"][place + 1],
                )
                for place, (first, end) in enumerate(itertools.pairwise(firsts.tolist()))
            ]
        )
    return result


@dataclass(frozen=True)
class Rule:
    """What is drafted and verified.

    Attributes:
        arm: ``chain``, ``sampled``, ``tree``, ``fixed tree`` or ``sampled tree``.
        depth: maximum depth.
        least: least value of a node whose children are drafted.
        size: number of verified nodes of each request, for ``fixed tree``.
        widths: number of drawn children of each node by depth; empty for the other arms.
    """

    arm: str
    depth: int
    least: float = 0.0
    size: int = 0
    widths: tuple[int, ...] = ()


class Replay:
    """A batch of recorded texts that is always full."""

    def __init__(
        self, texts: Sequence[list[Position]], latency: LatencyModel, batch_size: int, copies: bool
    ) -> None:
        self._texts, self._latency, self._batch_size = texts, latency, batch_size
        self._copies = copies
        self._random = np.random.default_rng(0)

    def goodput(self, rule: Rule, num_tokens: int) -> float:
        """Tokens per second."""
        waiting = itertools.cycle(self._texts)
        running = [next(waiting) for _ in range(self._batch_size)]
        # Requests are at different places of their answers.
        at = [int(self._random.integers(len(text))) for text in running]
        alone = self._batch_size / self._latency.target_seconds(self._batch_size)
        longest = self._batch_size * (1 + BEAM * DEPTH)
        curve = self._latency.target_curve(longest)[self._batch_size :]
        tokens = seconds = 0.0
        while tokens < num_tokens:
            goodput = (
                max(alone, tokens / seconds) if tokens > 50 * self._batch_size else alone * 1.2
            )
            positions = [text[place] for text, place in zip(running, at, strict=True)]
            gained, spent = self._step(rule, positions, curve, goodput)
            for row, count in enumerate(gained):
                tokens += min(count, len(running[row]) - at[row])
                at[row] += count
                if at[row] >= len(running[row]):
                    running[row], at[row] = next(waiting), 0
            seconds += spent
        return tokens / seconds

    def _step(
        self, rule: Rule, positions: Sequence[Position], curve: Floats, goodput: float
    ) -> tuple[list[int], float]:
        if rule.widths:
            return self._sampled(rule, positions, curve)
        usable = []
        for each in positions:
            usable.append((each.depths <= rule.depth) & (each.parent_values >= rule.least))
            if rule.arm == "chain":
                usable[-1] &= each.is_chain
        values = np.concatenate([p.values[u] for p, u in zip(positions, usable, strict=True)])
        if rule.arm == "fixed tree":
            chosen = []
            for each, own in zip(positions, usable, strict=True):
                keep = np.zeros(len(own), dtype=bool)
                order = np.argsort(-np.where(own, each.values, -1.0), kind="stable")[: rule.size]
                keep[order] = own[order]
                chosen.append(keep)
        else:
            ordered = np.sort(values)[::-1]
            gains = np.concatenate([[0.0], np.cumsum(ordered)]) / goodput - curve[: len(values) + 1]
            count = int(gains.argmax())
            least = ordered[count - 1] if count else np.inf
            chosen = [u & (p.values >= least) for p, u in zip(positions, usable, strict=True)]
        verified = int(sum(each.sum() for each in chosen))
        gained = [
            1 + int(np.max(p.depths[c & p.right], initial=0))
            for p, c in zip(positions, chosen, strict=True)
        ]
        return gained, float(curve[verified]) + self._drafting(rule, positions, usable)

    def _drafting(
        self, rule: Rule, positions: Sequence[Position], usable: Sequence[NDArray[np.bool_]]
    ) -> float:
        if self._copies or not rule.depth:
            return 0.0
        seconds = self._latency.drafting_seconds([len(positions)])
        for depth in range(1, rule.depth):
            # Nodes whose children are drafted in the next pass.
            count = 0
            for each, own in zip(positions, usable, strict=True):
                at_depth = own & (each.depths == depth) & (each.values >= rule.least)
                count += int(at_depth.sum())
            seconds += self._latency.draft_seconds(count)
        return seconds

    def _sampled(
        self, rule: Rule, positions: Sequence[Position], curve: Floats
    ) -> tuple[list[int], float]:
        gained = []
        widths = np.array(rule.widths)
        for each in positions:
            probs = each.sampled[np.arange(len(widths)), widths - 1]
            accepted = self._random.random(len(widths)) < probs
            gained.append(1 + int(np.logical_and.accumulate(accepted).sum()))
        nodes = np.cumprod(widths) * len(positions)
        seconds = float(curve[nodes.sum()]) + self._latency.first_draft_extra
        for width, drafted in zip(widths, nodes, strict=True):
            seconds += self._latency.draft_seconds(int(drafted // width))
        return gained, seconds


def rules(copies: bool, sampled: bool) -> list[Rule]:
    """All rules that are compared."""
    least = (0.0,) if copies else LEAST_VALUES
    depths = (DEPTH,) if copies else (1, 2, 3, 4, DEPTH)
    found = [
        Rule(arm, depth, value) for arm in ("chain", "tree") for depth in depths for value in least
    ]
    found += [Rule("fixed tree", depth, 0.0, size) for depth in depths for size in FIXED_SIZES]
    if sampled and not copies:
        found += [Rule("sampled", depth, widths=(1,) * depth) for depth in depths]
        for depth in depths:
            shapes = itertools.product(range(1, MOST_DRAWN + 1), repeat=min(depth, 3))
            for shape in shapes:
                widths = (*shape, *(1,) * (depth - len(shape)))
                # Later children are worth less, so trees do not widen with depth.
                falls = all(a >= b for a, b in itertools.pairwise(widths))
                if falls and widths[0] > 1 and np.cumprod(widths).sum() <= MOST_SAMPLED_NODES:
                    found.append(Rule("sampled tree", depth, widths=widths))
    return found


def costs_elsewhere(costs: Sequence[StageCost], path: Path) -> list[StageCost]:
    """The target's times on another machine, and the draft's in the same proportion to them."""
    seconds: dict[float, float] = {}
    for each in json.loads(path.read_text())["passes"]:
        tokens = float(each["batch_size"] * each["tokens_each"])
        seconds[tokens] = min(seconds.get(tokens, math.inf), each["native_ms"] / 1000)
    tokens = sorted(seconds)
    # A pass takes no longer than one over more tokens.
    rising = np.minimum.accumulate([seconds[each] for each in reversed(tokens)])[::-1]
    target = StageCost(tuple(tokens), tuple(rising.tolist()))
    factor = target(1) / costs[0](1)
    draft = costs[1]
    return [target, replace(draft, seconds=tuple(factor * each for each in draft.seconds))]


def replay_all(arguments: argparse.Namespace) -> None:
    """Replay every workload, and print goodput relative to no speculation."""
    costs, texts = read_texts(arguments.texts)
    if arguments.passes:
        costs = costs_elsewhere(costs, arguments.passes)
    copies = not any(costs[1].seconds)
    cells = []
    for (workload, temperature), those in texts.items():
        positions = positions_of(those)
        for batch_size in arguments.batch_sizes:
            replay = Replay(positions, LatencyModel(*costs), batch_size, copies)
            alone = batch_size / LatencyModel(*costs).target_seconds(batch_size)
            figures: dict[str, float] = {}
            best: dict[str, Rule] = {}
            for rule in rules(copies, temperature > 0):
                goodput = replay.goodput(rule, arguments.num_tokens) / alone
                if goodput > figures.get(rule.arm, 0.0):
                    figures[rule.arm], best[rule.arm] = goodput, rule
            chain = max(1.0, figures["chain"], figures.get("sampled", 0.0))
            tree = max(1.0, figures["tree"], figures.get("sampled tree", 0.0))
            cell = {"workload": workload, "temperature": temperature, "batch_size": batch_size}
            chosen = {arm: vars(rule) for arm, rule in best.items()}
            cells.append(cell | figures | {"tree_over_chain": tree / chain, "rules": chosen})
            print(
                f"{workload:14s} T {temperature} batch {batch_size:3d}  ",
                "  ".join(f"{name} {value:.3f}" for name, value in figures.items()),
                f"  tree/chain {tree / chain:.3f}",
                flush=True,
            )
    ratios = [cell["tree_over_chain"] for cell in cells]
    print(f"geometric mean {np.exp(np.mean(np.log(ratios))):.3f}, highest {max(ratios):.3f}")
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"cells": cells})


def main() -> None:
    """Record or replay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    add_recording_options(recording, num_prompts=16, longest_prompt=1000, max_tokens=96)
    recording.add_argument(
        "--costs-of",
        nargs=2,
        metavar=("TARGET", "DRAFT"),
        help="measure the passes of these models, such as the inflated ones, with the same texts",
    )
    recording.set_defaults(run=record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("texts", type=Path)
    replaying.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    replaying.add_argument("--num-tokens", type=int, default=4000)
    replaying.add_argument("--passes", type=Path)
    replaying.add_argument("--output", type=Path)
    replaying.set_defaults(run=replay_all)
    arguments = parser.parse_args()
    run = arguments.run
    del arguments.run
    run(arguments)


if __name__ == "__main__":
    main()
