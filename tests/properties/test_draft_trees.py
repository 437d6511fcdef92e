"""Draft trees against naive twins: shapes, the walk, and attention over scratch blocks beside a dense mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_trees import DraftTree, TreeRows, after_walk, before_forward, scattered, trees_of, virtual_batch, walk

from vllm_spac.config.tree_shape import DynamicShape, StaticShape, TreeShape, parse
from vllm_spac.errors import ConfigError
from vllm_spac.methods.trees.growth import Chosen, Growth
from vllm_spac.methods.trees.tensors import level_batch, scratch_blocks

VOCABULARY = 12


@st.composite
def trees(draw: st.DrawFn, most: int = 12) -> DraftTree:
    """Trees whose parents come first; siblings have distinct tokens."""
    parents, tokens = [-1], []
    for row in range(1, draw(st.integers(1, most)) + 1):
        parent = draw(st.integers(0, row - 1))
        taken = {tokens[other - 1] for other in range(1, row) if parents[other] == parent}
        parents.append(parent)
        tokens.append(draw(st.integers(0, 99).filter(lambda token, taken=taken: token not in taken)))
    return DraftTree(tuple(tokens), tuple(parents), (1.0,) * len(parents))


def grown(shape: TreeShape, seed: int, requests: int, coarse: bool, nodes: int) -> list[DraftTree]:
    """Trees of a drafter whose distributions are random; ``coarse`` ones have ties, and certain tokens."""
    rng = torch.Generator().manual_seed(seed)

    def logp(*size: int) -> torch.Tensor:
        logits = torch.randn(*size, VOCABULARY, generator=rng) * 3
        return (logits.round() * 4 if coarse else logits).log_softmax(-1)

    growth, read = Growth(shape, logp(requests)), [torch.full((requests, 0), -1)]
    while not growth.over:
        assert growth.tokens.shape == growth.parent.shape == growth.expanded.shape
        read.append(growth.tokens)
        growth.add(logp(*growth.expanded.shape))
    check_read(growth.chosen(), torch.cat(read, 1))
    return trees_of(growth, nodes)


def check_read(chosen: Chosen, read: torch.Tensor) -> None:
    """``Chosen.read`` names each node's token among those ``read``, each once, and that of each node with children."""
    for tokens, parents, numbers, known in zip(chosen.tokens, chosen.parents, chosen.read, read, strict=True):
        found = numbers[numbers >= 0]
        assert len(found.unique()) == len(found) and torch.equal(known[found], tokens[numbers >= 0])
        assert (numbers[parents[parents > 0] - 1] >= 0).all()


@given(
    nodes=st.integers(2, 40),
    depth=st.integers(2, 6),
    kind=st.sampled_from(("static", "dynamic")),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
    limit=st.integers(1, 40),
)
@settings(deadline=None)
def test_grown_trees_are_connected_and_each_prefix_is_a_tree(nodes, depth, kind, seed, coarse, limit) -> None:
    kind = "dynamic" if depth <= 2 else kind
    shape = parse(nodes, f"{kind}@depth={depth}@width=7")
    for tree in grown(shape, seed, 3, coarse, limit):
        assert len(tree.tokens) == min(nodes, limit) and max(tree.depths) <= depth
        assert all(tree.reached[tree.parents[row]] >= tree.reached[row] for row in range(1, tree.rows))
        assert sum(map(len, tree.children)) == len(tree.tokens), "two siblings with one token"
        for drafts in range(len(tree.tokens) + 1):
            part = tree.cut(drafts)
            assert part.tokens == tree.tokens[:drafts]
        chain = tree.best_chain()
        assert not chain.branches and len(chain.tokens) == max(tree.depths)


@given(seed=st.integers(0, 10**6), nodes=st.integers(2, 30))
@settings(deadline=None)
def test_a_dynamic_tree_holds_the_most_probable_nodes(seed: int, nodes: int) -> None:
    """Of all candidates: no node outside is more probable than one inside."""
    (whole,) = grown(DynamicShape(500, 4, 5, 5), seed, 1, False, 500)
    (tree,) = grown(DynamicShape(500, 4, 5, 5), seed, 1, False, nodes)
    assert list(tree.reached) == sorted(whole.reached, reverse=True)[: nodes + 1]


@pytest.mark.parametrize("broken", [1, 2, 3])
@pytest.mark.parametrize("shape", [DynamicShape(16, 4, 4, 5), StaticShape.of_size(16, 4, 4)])
def test_a_drafter_without_numbers_still_drafts_trees(shape: TreeShape, broken: int) -> None:
    """Of one request, from a level on, all log-probabilities are NaN; the other request's tree is what it would be."""

    def logp(level: int, rows: int, mended: bool) -> torch.Tensor:
        values = torch.randn(2, rows, VOCABULARY, generator=torch.Generator().manual_seed(level)).log_softmax(-1)
        if level >= broken and not mended:
            values[0] = torch.nan
        return values

    found = []
    for mended in (False, True):
        growth = Growth(shape, logp(1, 1, mended)[:, 0])
        while not growth.over:
            growth.add(logp(growth.level + 1, growth.expanded.shape[1], mended))
        found.append(trees_of(growth, 16))
    tree = found[0][0]
    assert all(parent < row for row, parent in enumerate(tree.parents))
    assert not any(math.isnan(weight) for weight in tree.reached)
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("nodes", [2, 16, 63, 255])
def test_a_static_shape_has_its_size_and_its_prefixes_are_shapes(nodes: int) -> None:
    shape = StaticShape.of_size(nodes, 6, 8)
    assert shape.nodes == nodes and shape.depth <= 6 and shape.width <= 8
    for count in range(1, nodes + 1):
        assert StaticShape(shape.paths[:count]).nodes == count


def test_a_shape_is_written_as_eagle_writes_it() -> None:
    shape = StaticShape.of_paths("[[0],[1],[0,0],[0,1],[1,0],[0,0,0]]")
    (tree,) = grown(shape, 3, 1, False, 99)
    paths = {(): 0}
    for row in range(1, tree.rows):
        siblings = [other for other in range(1, tree.rows) if tree.parents[other] == tree.parents[row]]
        rank = sorted(siblings, key=lambda other: -tree.reached[other]).index(row)
        parent = next(path for path, number in paths.items() if number == tree.parents[row])
        paths[(*parent, rank)] = row
    assert set(paths) - {()} == {(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)}


@pytest.mark.parametrize(
    "text", ["", "[]", "[[]]", "[0]", "[[-1]]", "[[0],[0]]", "[[0,0]]", "{}", "[[0.5]]", "[[true]]"]
)
def test_other_texts_are_no_shape(text: str) -> None:
    with pytest.raises(ConfigError):
        StaticShape.of_paths(text)


# -- the walk --------------------------------------------------------------------------------------------------


@given(tree=trees(), data=st.data())
def test_the_walk_follows_choices_while_they_are_children(tree: DraftTree, data: st.DataObject) -> None:
    choices = st.sampled_from([*tree.tokens, 100])
    chosen = data.draw(st.lists(choices, min_size=tree.rows, max_size=tree.rows))
    path, tokens = walk(tree, chosen)
    assert [tree.tokens[row - 1] for row in path] == tokens[:-1]
    rows = [0, *path]
    assert all(tree.parents[row] == before for before, row in itertools.pairwise(rows))
    assert tokens == [chosen[row] for row in rows]
    assert tokens[-1] not in tree.children[rows[-1]]


def test_the_walk_keeps_the_targets_distribution() -> None:
    """Chi-square of three emitted tokens; a tree that stops short goes on with plain draws."""
    rng, words, count = torch.Generator().manual_seed(0), 4, 60_000
    first = torch.rand(words, generator=rng).softmax(0)
    second = (3 * torch.rand(words, words, generator=rng)).softmax(-1)
    third = (3 * torch.rand(words, words, words, generator=rng)).softmax(-1)
    tree = DraftTree((0, 2, 1, 3, 0), (-1, 0, 0, 1, 2, 2), (1.0,) * 6)
    contexts = [(), (0,), (2,), (0, 1), (2, 3), (2, 0)]

    def distribution(context: tuple[int, ...]) -> torch.Tensor:
        return (first, second, third)[len(context)][context]

    draws = torch.stack([torch.multinomial(distribution(c), count, True, generator=rng) for c in contexts], 1)
    found: dict[tuple[int, ...], int] = {}
    for row in draws.tolist():
        _, said = walk(tree, row)
        while len(said) < 3:
            said.append(int(torch.multinomial(distribution(tuple(said)), 1, generator=rng)))
        found[tuple(said[:3])] = found.get(tuple(said[:3]), 0) + 1
    squares = 0.0
    for a, b, c in itertools.product(range(words), repeat=3):
        expected = float(first[a] * second[a, b] * third[a, b, c]) * count
        squares += (found.get((a, b, c), 0) - expected) ** 2 / expected
    degrees = words**3 - 1
    assert squares < degrees + 5 * math.sqrt(2 * degrees), "five standard deviations"


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


def divided(tree: DraftTree, data: st.DataObject) -> tuple[tuple[int, ...], ...]:
    """The rows of a tree as any paths: one per leaf, and others."""
    paths = [[0]]
    for row, parent in enumerate(tree.parents[1:], 1):
        here = next((path for path in paths if path[-1] == parent and data.draw(st.booleans())), None)
        if here is None:
            paths.append([row])
        else:
            here.append(row)
    return data.draw(st.sampled_from((tree.paths, tuple(map(tuple, paths)))))


def slots_of(table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    return table[positions // block_size].long() * block_size + positions % block_size


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
    steps = [[data.draw(trees()) for _ in bases] for _ in range(2)]
    each = scratch_blocks(max(max(tree.depths) for tree in sum(steps, [])), block_size)
    most = max(tree.rows for tree in sum(steps, []))
    places = 1 + torch.arange(len(bases) * most * each).view(len(bases), most, each)
    width = (max(bases) + 2 * most) // block_size + 2
    count = 1 + len(bases)
    table = (1 + places.numel() + torch.arange(count * width)).view(count, width).int()
    cache, ids = Cache(1 + places.numel() + count * width, block_size), iter(range(10**9))
    prefixes = [[next(ids) for _ in range(base)] for base in bases]
    for request, prefix in enumerate(prefixes, 1):
        cache.write(slots_of(table[request], torch.arange(len(prefix)), block_size), torch.tensor(prefix).long())
    for step in steps:
        rows, start = [], plain
        for number, (tree, prefix) in enumerate(zip(step, prefixes, strict=True)):
            paths = divided(tree, data)
            rows.append(TreeRows(number + 1, start, len(prefix), tree, paths, places[number, : len(paths) - 1]))
            start += tree.rows
        values = torch.tensor([next(ids) for _ in range(start)])
        before_forward(rows, table, block_size).apply(cache.entries)
        for tree in rows:  # each row's own slot, as if it were in a chain
            linear = slots_of(table[tree.request], tree.base + torch.arange(tree.tree.rows), block_size)
            cache.write(linear, values[tree.start : tree.start + tree.tree.rows])
        also = scattered(rows, table, block_size)
        assert len(also.slots.unique()) == len(also.slots), "two keys for one slot"
        cache.write(also.slots, values[also.rows])
        starts = torch.tensor([0, *[tree.start for tree in rows], start], dtype=torch.int32)
        lengths = torch.tensor([plain, *[tree.base + tree.tree.rows for tree in rows]], dtype=torch.int32)
        batch = virtual_batch(starts, lengths, table, rows, block_size)
        assert batch.query_start.tolist() == [0, *range(plain, start + 1)]
        assert int(batch.lengths[0]) == plain and batch.block_table[0].tolist() == table[0].tolist()
        for tree in rows:
            for row in range(tree.tree.rows):
                sequence = 1 + tree.start + row - plain
                seen = cache.read(batch.block_table[sequence], int(batch.lengths[sequence]))
                lineage = [int(values[tree.start + other]) for other in tree.tree.path(row)]
                assert seen == prefixes[tree.request - 1] + lineage
        accepted = [tree.path(data.draw(st.integers(0, tree.rows - 1)))[1:] for tree in step]
        after_walk(rows, accepted, table, block_size).apply(cache.entries)
        for tree, path in zip(rows, accepted, strict=True):
            prefixes[tree.request - 1] += [int(values[tree.start + row]) for row in (0, *path)]
            prefix = prefixes[tree.request - 1]
            assert cache.read(table[tree.request], len(prefix)) == prefix


@given(tree=trees())
def test_paths_are_one_per_leaf_and_follow_the_most_probable_child(tree: DraftTree) -> None:
    assert sorted(sum(tree.paths, ())) == list(range(tree.rows)) and tree.paths[0][0] == 0
    for path in tree.paths:
        assert not tree.children[path[-1]], "a path ends at a leaf"
        for before, row in itertools.pairwise(path):
            assert row == min(tree.children[before].values())
    assert len(tree.paths) == sum(not children for children in tree.children)


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
