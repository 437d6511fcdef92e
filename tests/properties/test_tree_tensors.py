"""Trees as tensors beside the same trees one at a time on the host: the same rows, slots, copies and tokens."""

from __future__ import annotations

import list_trees
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_trees import DraftTree, TreeRows, scattered, virtual_batch
from list_trees import walk as walk_one

from vllm_spac.config.tree_shape import DynamicShape, StaticShape
from vllm_spac.methods.trees.growth import Growth
from vllm_spac.methods.trees.tensors import (
    FILLER,
    NOWHERE,
    BlockCopies,
    StepTrees,
    TensorRows,
    TreeTensors,
    best_chains,
    scratch_blocks,
    trees_of,
    walk,
)

NODES, DEPTH = 7, 4


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


batches = st.lists(st.tuples(trees(), st.integers(1, NODES), st.integers(1, 14)), min_size=1, max_size=3)
block_sizes = st.sampled_from((2, 4, 5))


def step(given_batch, block_size: int, others: list[int]):
    """The trees of a batch as tensors and one at a time; ``others``: rows of a plain request before each tree."""
    per_node = scratch_blocks(DEPTH, block_size)
    count = len(given_batch)
    places = torch.arange(1, 1 + count * (NODES + 1) * per_node).view(count, NODES + 1, per_node)
    width = max(base + NODES + 1 for _, _, base in given_batch) // block_size + 1
    table = 1 + places.numel() + torch.randperm(2 * count * width)[: 2 * count * width].view(2 * count, width)
    starts, owner, rows, single, lengths = [0], [], [], [], []
    for number, ((tree, drafts, base), plain) in enumerate(zip(given_batch, others, strict=True)):
        owner.append(2 * number)
        starts.append(starts[-1] + plain)
        lengths.append(plain)
        cut = tree.cut(drafts)
        alone = tuple((row,) for row in range(cut.rows))
        single.append(TreeRows(2 * number + 1, starts[-1], base, cut, alone, places[number, 1 : cut.rows]))
        for row in range(cut.rows):
            rows.append((number, row, starts[-1] + row, len(owner)))
            owner.append(2 * number + 1)
        starts.append(starts[-1] + cut.rows)
        lengths.append(base + cut.rows)
    whole = StepTrees(
        tensors([tree for tree, _, _ in given_batch]),
        TensorRows(*torch.tensor(rows).T),
        torch.tensor([base for _, _, base in given_batch]),
        table[1::2],
        places,
    )
    return whole, single, torch.tensor(owner), torch.tensor(starts), torch.tensor(lengths, dtype=torch.int32), table


@given(batch=batches, block_size=block_sizes, data=st.data())
@settings(deadline=None)
def test_attention_sees_the_same_sequences_and_slots(batch, block_size: int, data: st.DataObject) -> None:
    others = data.draw(st.lists(st.integers(1, 3), min_size=len(batch), max_size=len(batch)))
    whole, single, owner, starts, lengths, table = step(batch, block_size, others)
    wanted = virtual_batch(starts.int(), lengths, table, single, block_size)
    ends, tables = whole.sequences(owner, lengths, table, block_size)
    assert ends.tolist() == wanted.lengths.tolist() and tables.tolist() == wanted.block_table.tolist()
    assert whole.positions.tolist() == [at for tree in single for at in tree.positions().tolist()]
    assert whole.linear.tolist() == [tree.base + row for tree in single for row in range(tree.tree.rows)]
    also, pairs = whole.scattered(block_size), scattered(single, table, block_size)
    written = also.slots != NOWHERE
    found = sorted(zip(also.rows[written].tolist(), also.slots[written].tolist(), strict=True))
    assert found == sorted(zip(pairs.rows.tolist(), pairs.slots.tolist(), strict=True))


def effect(copies: BlockCopies, blocks: int, ignored: torch.Tensor) -> list[int]:
    assert not set(copies.targets.tolist()) & set(copies.sources.tolist()) - set(ignored.tolist())
    cache = torch.arange(blocks)
    copies.apply(cache)
    cache[ignored] = 0
    return cache.tolist()


@given(batch=batches, block_size=block_sizes, data=st.data())
@settings(deadline=None)
def test_the_same_blocks_are_copied(batch, block_size: int, data: st.DataObject) -> None:
    whole, single, _, _, _, table = step(batch, block_size, [1] * len(batch))
    blocks, roots = int(table.max()) + 1, whole.scratch[:, 0].flatten()
    last = [data.draw(st.integers(0, tree.tree.rows - 1)) for tree in single]
    paths = [tree.tree.path(row)[1:] for tree, row in zip(single, last, strict=True)]
    compacted = list_trees.after_walk(single, paths, table, block_size)
    mine = whole.after_walk(torch.tensor(last), block_size)
    assert effect(mine, blocks, roots) == effect(compacted, blocks, roots)
    targets = [target for target in mine.targets.tolist() if target not in roots.tolist()]
    assert len(targets) == len(set(targets)), "two copies to one block"
    fresh = torch.cat([tree.scratch[:, 0] for tree in single if tree.base % block_size == 0] or [roots])
    ignored = torch.cat([roots, fresh])  # nothing is in that block yet
    before = list_trees.before_forward(single, table, block_size)
    assert effect(whole.before_forward(block_size), blocks, ignored) == effect(before, blocks, ignored)
    order = whole.as_chains(torch.tensor(last), int(single[-1].start + single[-1].tree.rows + 2))
    wanted = list(range(len(order)))
    for tree, path in zip(single, paths, strict=True):
        for level, row in enumerate(path, 1):
            wanted[tree.start + level] = tree.start + row
    assert order.tolist() == wanted


@given(batch=batches, data=st.data())
@settings(deadline=None)
def test_the_same_tokens_are_emitted(batch, data: st.DataObject) -> None:
    """Also of trees that were cut, and of requests whose drafts are not valid."""
    count = len(batch)
    chosen = torch.tensor(
        [[data.draw(st.sampled_from([*tree.tokens, 99])) for _ in range(NODES + 1)] for tree, _, _ in batch]
    )
    valid = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tokens = torch.tensor(
        [[-1, *(tree.tokens if good else [-1] * NODES)] for (tree, _, _), good in zip(batch, valid, strict=True)]
    )
    rows = torch.tensor([drafts + 1 for _, drafts, _ in batch])
    walked = walk(tensors([tree for tree, _, _ in batch]), tokens, rows, chosen)
    for number, ((tree, drafts, _), good) in enumerate(zip(batch, valid, strict=True)):
        path, emitted = walk_one(tree.cut(drafts) if good else DraftTree.chain(()), chosen[number].tolist())
        gaps = [-1] * (DEPTH - len(path))
        assert walked.path[number].tolist() == [0, *path, *gaps]
        assert walked.tokens[number].tolist() == [*emitted, *gaps]
        assert int(walked.emitted[number]) == len(emitted) and int(walked.last[number]) == ([0, *path])[-1]


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


@pytest.mark.parametrize("shape", [DynamicShape(12, 4, 5, 5), StaticShape.of_size(12, 4, 5)])
def test_grown_trees_are_the_same(shape) -> None:
    rng = torch.Generator().manual_seed(3)
    growth = Growth(shape, torch.randn(3, 20, generator=rng).log_softmax(-1))
    while not growth.over:
        growth.add(torch.randn(*growth.expanded.shape, 20, generator=rng).log_softmax(-1))
    tokens, _, device = trees_of(growth.chosen(), shape.depth, torch.zeros(3, dtype=torch.bool))
    for number, tree in enumerate(list_trees.trees_of(growth, 12)):
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
