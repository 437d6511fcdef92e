"""Draft trees against naive twins: shapes, the walk, and attention over scratch blocks beside a dense mask."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_trees import DraftTree, trees_of
from list_trees import walk as walk_one

from vllm_spac.config.tree_shape import TreeShape, parse
from vllm_spac.methods.trees.growth import Growth
from vllm_spac.methods.trees.tensors import (
    FILLER,
    NOWHERE,
    BlockCopies,
    Layout,
    StepTrees,
    TensorRows,
    TreeTensors,
    best_chains,
    level_batch,
    scratch_blocks,
    walk,
)
from vllm_spac.methods.trees.tensors import trees_of as tensors_of

VOCABULARY = 12
NODES, DEPTH = 7, 4


def grown(shape: TreeShape, seed: int, requests: int, coarse: bool, nodes: int) -> list[DraftTree]:
    """Trees of a drafter whose distributions are random; ``coarse`` ones have ties, and certain tokens."""
    growth, forwards = growing(shape, seed, requests, coarse)
    assert forwards < shape.depth
    return trees_of(growth, nodes)


def growing(shape: TreeShape, seed: int, requests: int, coarse: bool) -> tuple[Growth, int]:
    """(what has grown, the drafter's forwards over levels); a distribution depends on the path that it is behind."""

    def logp(paths: list[list[tuple[int, ...]]]) -> torch.Tensor:
        found = []
        for number, path in ((number, path) for number, mine in enumerate(paths) for path in mine):
            rng = np.random.default_rng([seed, number, *path])
            logits = torch.from_numpy(rng.standard_normal(VOCABULARY)).float() * 3
            found.append((logits.round() * 4 if coarse else logits).log_softmax(-1))
        return torch.stack(found).view(len(paths), -1, VOCABULARY)

    paths: list[list[tuple[int, ...]]] = [[()]] * requests
    growth, forwards = Growth(shape, logp(paths)[:, 0]), 0
    while not growth.over:
        assert growth.tokens.shape == growth.parent.shape == growth.expanded.shape
        assert growth.chances.shape == (*growth.expanded.shape, growth.level)
        joint = torch.cat(growth._logp, 1).gather(1, growth.expanded)
        assert torch.allclose(growth.chances.prod(2), joint.exp(), atol=1e-6)
        follows = zip(paths, growth.parent.tolist(), growth.tokens.tolist(), strict=True)
        paths = [[(*mine[p], t) for p, t in zip(parents, tokens, strict=True)] for mine, parents, tokens in follows]
        for path, chances in zip(paths[0], growth.chances[0], strict=True):
            own = logp([[path[:-1]]])[0, 0, path[-1]].exp()
            assert torch.allclose(chances[-1], own, atol=1e-5), "of the last token, given its path"
        growth.add(logp(paths))
        forwards += 1
    return growth, forwards


class Exhaustive(TreeShape):
    """Expands whatever the depth allows."""

    def expand(self, level: int, logp: torch.Tensor, least: torch.Tensor | None = None) -> torch.Tensor:
        return super().expand(level, logp)


@given(
    nodes=st.integers(2, 40),
    depth=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
    limit=st.integers(1, 40),
)
@settings(deadline=None)
def test_grown_trees_are_connected_and_each_prefix_is_a_tree(nodes, depth, seed, coarse, limit) -> None:
    shape = parse(f"{nodes}@depth={depth}@width=7")
    assert shape is not None
    for tree in grown(shape, seed, 3, coarse, limit):
        assert len(tree.tokens) == min(nodes, limit) and max(tree.depths) <= depth
        assert all(tree.reached[tree.parents[row]] >= tree.reached[row] for row in range(1, tree.rows))
        assert sum(map(len, tree.children)) == len(tree.tokens), "two siblings with one token"
        for drafts in range(len(tree.tokens) + 1):
            part = tree.cut(drafts)
            assert part.tokens == tree.tokens[:drafts]
        chain = tree.best_chain()
        assert len(chain.tokens) == max(tree.depths)


@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 30))
@settings(deadline=None)
def test_a_tree_holds_the_most_probable_nodes(seed: int, nodes: int) -> None:
    """Of all candidates: no node outside is more probable than one inside."""
    (whole,) = grown(TreeShape(500, 4, 5, 5), seed, 1, False, 500)
    (tree,) = grown(TreeShape(500, 4, 5, 5), seed, 1, False, nodes)
    assert list(tree.reached) == sorted(whole.reached, reverse=True)[: nodes + 1]


@given(
    seed=st.integers(0, 10**6), nodes=st.integers(2, 30), requests=st.integers(1, 3), coarse=st.booleans(),
    width=st.integers(3, 6),
)  # fmt: skip
@settings(deadline=None)
def test_what_cannot_have_a_child_in_the_tree_is_not_expanded(seed, nodes, requests, coarse, width) -> None:
    """The trees are those of a drafter that expands all that the depth allows, ties included."""
    (found, forwards), (whole, _) = (
        growing(kind(nodes, 4, width, width), seed, requests, coarse) for kind in (TreeShape, Exhaustive)
    )
    for mine, all_of_it in zip(found.chosen()[:3], whole.chosen()[:3], strict=True):
        assert torch.equal(mine, all_of_it)
    parents = found.chosen().parents
    deepest = max(max(tree.depths) for tree in trees_of(found, nodes))
    assert forwards <= deepest, "one to find that no deeper node is likely enough"
    assert forwards >= deepest - 1 and (parents[:, 1:] >= 0).all()


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_a_drafter_without_numbers_still_drafts_trees(broken: int) -> None:
    """Of one request, from a level on, all log-probabilities are NaN; the other request's tree is what it would be."""

    def logp(level: int, rows: int, mended: bool) -> torch.Tensor:
        values = torch.randn(2, rows, VOCABULARY, generator=torch.Generator().manual_seed(level)).log_softmax(-1)
        if level >= broken and not mended:
            values[0] = torch.nan
        return values

    found = []
    for mended in (False, True):
        growth = Growth(TreeShape(16, 4, 4, 5), logp(1, 1, mended)[:, 0])
        while not growth.over:
            growth.add(logp(growth.level + 1, growth.expanded.shape[1], mended))
        found.append(trees_of(growth, 16))
    tree = found[0][0]
    assert all(parent < row for row, parent in enumerate(tree.parents))
    assert not any(math.isnan(weight) for weight in tree.reached)
    assert found[0][1] == found[1][1]


# -- the walk --------------------------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees of NODES drafts and at most DEPTH levels; siblings have distinct tokens."""
    parents, tokens, depths = [-1], [], [0]
    for row in range(1, NODES + 1):
        parent = draw(st.sampled_from([p for p in range(row) if depths[p] < DEPTH]))
        taken = {tokens[other - 1] for other in range(1, row) if parents[other] == parent}
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(draw(st.integers(0, 12).filter(lambda token, taken=taken: token not in taken)))
    return DraftTree(tuple(tokens), tuple(parents), (1.0,) * (NODES + 1))


def tensors(given_trees: list[DraftTree]) -> TreeTensors:
    return TreeTensors.of(torch.tensor([tree.parents for tree in given_trees]), DEPTH)


batches = st.lists(st.tuples(trees(), st.integers(1, NODES)), min_size=1, max_size=3)
"""Trees, and how many of their drafts are verified."""


@given(batch=batches, data=st.data())
@settings(deadline=None)
def test_the_same_tokens_are_emitted(batch, data: st.DataObject) -> None:
    """Also of trees that were cut, and of requests whose drafts are not valid."""
    count = len(batch)
    chosen = torch.tensor(
        [[data.draw(st.sampled_from([*tree.tokens, 99])) for _ in range(NODES + 1)] for tree, _ in batch]
    )
    valid = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tokens = torch.tensor(
        [[-1, *(tree.tokens if good else [-1] * NODES)] for (tree, _), good in zip(batch, valid, strict=True)]
    )
    rows = torch.tensor([drafts + 1 for _, drafts in batch])
    walked = walk(tensors([tree for tree, _ in batch]), tokens, rows, chosen)
    for number, ((tree, drafts), good) in enumerate(zip(batch, valid, strict=True)):
        path, emitted = walk_one(tree.cut(drafts) if good else DraftTree.chain(()), chosen[number].tolist())
        gaps = [-1] * (DEPTH - len(path))
        assert walked.path[number].tolist() == [0, *path, *gaps]
        assert walked.tokens[number].tolist() == [*emitted, *gaps]
        assert int(walked.emitted[number]) == len(emitted) and int(walked.last[number]) == ([0, *path])[-1]


def test_the_walk_keeps_the_targets_distribution() -> None:
    """Chi-square of three emitted tokens; a tree that stops short goes on with plain draws."""
    rng, words, count = torch.Generator().manual_seed(0), 4, 60_000
    first = torch.rand(words, generator=rng).softmax(0)
    second = (3 * torch.rand(words, words, generator=rng)).softmax(-1)
    third = (3 * torch.rand(words, words, words, generator=rng)).softmax(-1)
    tree = TreeTensors.of(torch.tensor([[-1, 0, 0, 1, 2, 2]]).expand(count, -1), 2)
    contexts = [(), (0,), (2,), (0, 1), (2, 3), (2, 0)]

    def distribution(context: tuple[int, ...]) -> torch.Tensor:
        return (first, second, third)[len(context)][context]

    draws = torch.stack([torch.multinomial(distribution(c), count, True, generator=rng) for c in contexts], 1)
    tokens = torch.tensor([[-1, 0, 2, 1, 3, 0]]).expand(count, -1)
    walked = walk(tree, tokens, torch.full((count,), 6), draws)
    found: dict[tuple[int, ...], int] = {}
    for row, emitted in zip(walked.tokens.tolist(), walked.emitted.tolist(), strict=True):
        said = row[:emitted]
        while len(said) < 3:
            said.append(int(torch.multinomial(distribution(tuple(said)), 1, generator=rng)))
        found[tuple(said[:3])] = found.get(tuple(said[:3]), 0) + 1
    squares = 0.0
    for a, b, c in itertools.product(range(words), repeat=3):
        expected = float(first[a] * second[a, b] * third[a, b, c]) * count
        squares += (found.get((a, b, c), 0) - expected) ** 2 / expected
    degrees = words**3 - 1
    assert squares < degrees + 5 * math.sqrt(2 * degrees), "five standard deviations"


@given(given_trees=st.lists(trees(), min_size=1, max_size=4), data=st.data())
@settings(deadline=None)
def test_a_chain_is_the_best_path_and_its_filler_is_never_accepted(given_trees, data: st.DataObject) -> None:
    where = data.draw(st.lists(st.booleans(), min_size=len(given_trees), max_size=len(given_trees)))
    logp = torch.arange(0, -NODES, -1.0).expand(len(given_trees), -1)  # of the node of each number
    tokens, along, shown = best_chains(
        torch.tensor([tree.tokens for tree in given_trees]), logp, tensors(given_trees), torch.tensor(where)
    )
    for number, (tree, chain) in enumerate(zip(given_trees, where, strict=True)):
        wanted = tree.best_chain() if chain else tree
        count = len(wanted.tokens)
        assert tokens[number, :count].tolist() == list(wanted.tokens)
        assert shown.parents[number].tolist() == [*wanted.parents, *[FILLER] * (NODES - count)]
        path = tree.path(tree.depths.index(max(tree.depths)))[1:] if chain else range(1, NODES + 1)
        assert along[number, :count].tolist() == [1.0 - row for row in path]
        assert int(tokens[number].min()) >= 0, "filler has a token: it goes through the model"
    same = tokens.clone()
    rows = torch.full((len(given_trees),), NODES + 1)
    walked = walk(shown, torch.cat([same[:, :1], same], 1), rows, same[:, [*range(NODES), 0]])
    for number, (tree, chain) in enumerate(zip(given_trees, where, strict=True)):
        if chain:  # the target agrees with every draft
            assert int(walked.last[number]) == max(tree.depths)


def test_grown_trees_are_the_same() -> None:
    shape = TreeShape(12, 4, 5, 5)
    rng = torch.Generator().manual_seed(3)
    growth = Growth(shape, torch.randn(3, 20, generator=rng).log_softmax(-1))
    while not growth.over:
        growth.add(torch.randn(*growth.expanded.shape, 20, generator=rng).log_softmax(-1))
    tokens, _, device = tensors_of(growth.chosen(), shape.depth, torch.zeros(3, dtype=torch.bool))
    for number, tree in enumerate(trees_of(growth, 12)):
        assert tokens[number].tolist() == list(tree.tokens)
        assert device.parents[number].tolist() == list(tree.parents)
        assert device.depths[number].tolist() == list(tree.depths)
        for row in range(tree.rows):
            path = tree.path(row)
            assert device.lineage[number, row].tolist() == path + [NOWHERE] * (shape.depth + 1 - len(path))


def test_chains_until_a_drafter_has_run() -> None:
    first = TreeTensors.chains(2, 5, 3, torch.device("cpu"))
    assert first.parents.tolist() == [[-1, 0, 1, 2, -2, -2]] * 2 and first.depths.tolist() == [[0, 1, 2, 3, 1, 1]] * 2
    first.put(torch.tensor([1]), first.take(torch.tensor([0])))
    assert first.lineage[0, 3].tolist() == [0, 1, 2, 3]


# -- attention over scratch ------------------------------------------------------------------------------------


class Cache:
    """A paged cache of one layer whose entries are (request, position, token); attention reads sets of them."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.entries = torch.full((blocks, block_size), -1, dtype=torch.long)
        self.size = block_size

    def write(self, slots: torch.Tensor, values: torch.Tensor) -> None:
        self.entries[slots // self.size, slots % self.size] = values

    def read(self, table: torch.Tensor, length: int) -> list[int]:
        return self.entries[table.long()].flatten()[:length].tolist()


def slots_of(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return table[positions // block_size].long() * block_size + positions % block_size


def checked(copies: BlockCopies, unused: torch.Tensor) -> BlockCopies:
    """No block is read and written, and none is written twice; but for the roots' scratch, which nobody reads."""
    targets = [target for target in copies.targets.tolist() if target not in unused]
    assert len(targets) == len(set(targets)) and not set(targets) & set(copies.sources.tolist())
    return copies


@given(
    bases=st.lists(st.integers(0, 13), min_size=1, max_size=3),
    block_size=st.sampled_from((2, 4, 5)),
    plain=st.integers(1, 3),
    data=st.data(),
)
@settings(deadline=None)
def test_a_row_sees_its_ancestors_and_the_accepted_path_becomes_the_prefix(bases, block_size, plain, data) -> None:
    """Beside a dense mask, at every fill of the last block, in two steps: what the first leaves behind is not read.

    The first request of the batch has no tree, and ``plain`` rows.
    """
    count, each = len(bases), scratch_blocks(DEPTH, block_size)
    places = 1 + torch.arange(count * (NODES + 1) * each).view(count, NODES + 1, each)
    width = (max(bases) + 2 * (NODES + 1)) // block_size + 2
    table = (1 + places.numel() + torch.arange((1 + count) * width)).view(1 + count, width).int()
    cache, ids = Cache(1 + places.numel() + table.numel(), block_size), iter(range(10**9))
    prefixes = [[next(ids) for _ in range(base)] for base in bases]
    for request, prefix in enumerate(prefixes, 1):
        cache.write(slots_of(table[request], torch.arange(len(prefix)), block_size), torch.tensor(prefix).long())
    for _ in range(2):
        batch = [(data.draw(trees()), data.draw(st.integers(1, NODES))) for _ in bases]
        drafts = np.array([0, *(cut for _, cut in batch)])
        starts = np.cumsum([0, plain, *(1 + drafts[1:])])
        layout = Layout.of(starts, drafts, np.arange(1, 1 + count))
        rows = TensorRows(*torch.from_numpy(layout.rows))
        assert layout.starts.tolist() == [0, *range(plain, starts[-1] + 1)]
        at = torch.tensor([len(prefix) for prefix in prefixes])
        step = StepTrees(tensors([tree for tree, _ in batch]), rows, at, table[1:], places)
        depths = torch.tensor([batch[number][0].depths[row] for number, row, *_ in layout.rows.T.tolist()])
        assert torch.equal(step.positions, at[rows.tree] + depths)
        assert torch.equal(step.linear, at[rows.tree] + rows.row)

        values = torch.tensor([next(ids) for _ in range(starts[-1])])
        checked(step.before_forward(block_size), places[:, 0]).apply(cache.entries)
        for number in range(count):  # each row's own slot, as if it were in a chain
            mine = rows.tree == number
            cache.write(slots_of(table[1 + number], step.linear[mine], block_size), values[rows.token[mine]])
        also = step.scattered(block_size)
        written = also.slots != NOWHERE
        assert len(also.slots[written].unique()) == int(written.sum()), "two keys for one slot"
        cache.write(also.slots[written], values[also.rows[written]])

        lengths = torch.tensor([plain, *(at + 1 + torch.from_numpy(drafts[1:]))], dtype=torch.int32)
        ends, tables = step.sequences(torch.from_numpy(layout.owner), lengths, table, block_size)
        assert int(ends[0]) == plain and tables[0].tolist() == table[0].tolist()
        for number, row, _, sequence in layout.rows.T.tolist():
            seen = cache.read(tables[sequence], int(ends[sequence]))
            lineage = [int(values[starts[1 + number] + other]) for other in batch[number][0].path(row)]
            assert seen == prefixes[number] + lineage

        last = [data.draw(st.integers(0, cut)) for _, cut in batch]
        checked(step.after_walk(torch.tensor(last), block_size), places[:, 0]).apply(cache.entries)
        order = step.as_chains(torch.tensor(last), len(values))
        for number, row in enumerate(last):
            path = [int(values[starts[1 + number] + other]) for other in batch[number][0].path(row)]
            assert values[order][starts[1 + number] :][: len(path)].tolist() == path, "accepted rows come first"
            prefixes[number] += path
            assert cache.read(table[1 + number], len(prefixes[number])) == prefixes[number]


@given(
    bases=st.lists(st.integers(1, 20), min_size=1, max_size=3), block_size=st.sampled_from((2, 4, 5)), data=st.data()
)
@settings(deadline=None)
def test_a_growing_node_sees_its_ancestors(bases: list[int], block_size: int, data: st.DataObject) -> None:
    """Level by level, as the drafter runs: each level copies its parents' scratch and writes its own tokens."""
    count, front, depth = len(bases), 3, 4
    width = (max(bases) + depth) // block_size + 2
    per_node = scratch_blocks(depth, block_size)
    places = 1 + torch.arange(2 * count * front * per_node).view(2, count, front, per_node)
    table = (1 + places.numel() + torch.arange(count * width)).view(count, width).int()
    cache = Cache(1 + places.numel() + count * width, block_size)
    ids = iter(range(10**9))
    prefixes = [[next(ids) for _ in range(base)] for base in bases]
    for number, prefix in enumerate(prefixes):
        positions = torch.arange(len(prefix))
        cache.write(
            table[number, positions // block_size].long() * block_size + positions % block_size,
            torch.tensor(prefix, dtype=torch.long),
        )
    at = torch.tensor(bases)
    lines: list[list[list[int]]] = [[[]] * front for _ in bases]
    previous = None
    for level in range(1, depth):
        here = places[level % 2]
        parent = torch.tensor(
            data.draw(
                st.lists(
                    st.lists(st.integers(0, front - 1), min_size=front, max_size=front), min_size=count, max_size=count
                )
            )
        )
        if previous is None:
            own = table.gather(1, (at // block_size)[:, None]).long().expand(-1, front)
            cache.entries[here[..., 0].flatten()] = cache.entries[own.flatten()]
        else:
            there = previous.gather(1, parent[..., None].expand(-1, -1, per_node))
            cache.entries[here.flatten()] = cache.entries[there.flatten()]
        batch = level_batch(table, at, level, here, block_size)
        written = torch.tensor([next(ids) for _ in range(count * front)])
        cache.write(batch.slots, written)
        lines = [
            [[*lines[r][int(parent[r, f])], int(written[r * front + f])] for f in range(front)] for r in range(count)
        ]
        for sequence in range(count * front):
            seen = cache.read(batch.block_table[sequence], int(batch.lengths[sequence]))
            assert seen == prefixes[sequence // front] + lines[sequence // front][sequence % front]
        assert batch.positions.tolist() == [base + level - 1 for base in bases for _ in range(front)]
        previous = here
