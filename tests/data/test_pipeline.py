"""Batches: alignment, order, resuming, packing, hosts."""

import hashlib

import numpy as np
import pytest

from dstill_jax.data.dataset import Conversation, MemoryDataset
from dstill_jax.data.packing import pack_best_fit
from dstill_jax.data.pipeline import BatchPipeline, PipelineConfig
from dstill_jax.errors import UserError


def golden_rows(count=50, seed=0, longest=12):
    """Row i holds the ids i * 100 + (0, 1, 2, ...): each token says where it belongs. Prompts have 0-3 tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        n = int(rng.integers(2, longest + 1))
        rows.append(Conversation(str(i), np.arange(n, dtype=np.int32) + i * 100, np.arange(n) >= i % 4))
    return rows


def with_features(rows):
    """Feature row j of a token t is t / 16 + (0, 1, 2): it names its token too (exactly, in float16, below 2048)."""
    return [(row.tokens[:, None] % 2048 / 16 + np.arange(3)).astype(np.float16) for row in rows]


def pipeline(rows=None, features=False, places=None, **settings):
    rows = golden_rows() if rows is None else rows
    config = PipelineConfig(**{"seq_len": 16, "batch_size": 4, "seed": 3, **settings})
    return BatchPipeline(MemoryDataset(rows, with_features(rows) if features else None), config, places)


def digest(batch):
    return hashlib.sha256(b"".join(np.ascontiguousarray(batch[k]).tobytes() for k in sorted(batch))).hexdigest()


def documents(batches):
    """(tokens, mask, positions) of every document of some batches, found by document id alone."""
    found = []
    for batch in batches:
        for r in range(len(batch["tokens"])):
            ids = batch["document_ids"][r]
            for d in range(1, ids.max(initial=0) + 1):
                at = ids == d
                found.append(tuple(tuple(batch[k][r][at].tolist()) for k in ("tokens", "loss_mask", "positions")))
    return found


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_ids_masks_positions_and_features_are_aligned(mode):
    rows = golden_rows()
    by_id = {int(row.tokens[0]) // 100: row for row in rows}
    golden = pipeline(rows, features=True, mode=mode)
    for step in range(30):
        batch = golden.batch(step)
        assert {k: (v.dtype.name, v.shape) for k, v in batch.items()} == {
            "tokens": ("int32", (4, 16)),
            "loss_mask": ("bool", (4, 16)),
            "document_ids": ("int32", (4, 16)),
            "positions": ("int32", (4, 16)),
            "features": ("float16", (4, 16, 3)),
        }
        real = batch["document_ids"] > 0
        np.testing.assert_array_equal(batch["tokens"][real] % 100, batch["positions"][real])
        owners = batch["tokens"][real] // 100
        expected = [by_id[o].loss_mask[p] for o, p in zip(owners, batch["positions"][real], strict=True)]
        np.testing.assert_array_equal(batch["loss_mask"][real], expected)
        np.testing.assert_array_equal(batch["features"][real][:, 0], batch["tokens"][real] % 2048 / 16)
        for name in ("tokens", "loss_mask", "positions", "features"):
            assert not batch[name][~real].any(), f"padding of {name} is zero"


def test_labels_of_slot_j_are_the_token_at_anchor_plus_j():
    batch = pipeline([Conversation("a", np.arange(12, dtype=np.int32), np.arange(12) >= 4)]).batch(0)
    for anchor in np.flatnonzero(batch["loss_mask"][0][:-1] & batch["loss_mask"][0][1:]):
        np.testing.assert_array_equal(batch["tokens"][0][anchor : anchor + 2], [anchor, anchor + 1])


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_a_batch_depends_on_its_step_alone(mode):
    """Whoever goes on at step 37, or at 61, makes everything anew, and reads in any order."""
    whole = [digest(batch) for batch in map(pipeline(mode=mode).batch, range(100))]
    for first in (61, 37):
        again = pipeline(mode=mode)
        assert [digest(again.batch(step)) for step in reversed(range(first, 100))] == whole[first:][::-1]
    assert len(set(whole)) == 100


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_one_epoch_holds_every_document_once_and_epochs_differ(mode):
    rows = golden_rows(52 if mode == "pad" else 50)
    everything = sorted(documents_of(rows))
    one = pipeline(rows, mode=mode, num_epochs=1)
    assert sorted(documents(map(one.batch, range(one.total_steps)))) == everything
    three = pipeline(rows, mode=mode, num_epochs=3)
    assert sorted(documents(map(three.batch, range(three.total_steps)))) == sorted(everything * 3)
    orders = [documents(map(three.batch, range(k * 13, k * 13 + 13))) for k in range(3)] if mode == "pad" else []
    assert len({tuple(order) for order in orders}) == len(orders), "each epoch has an order of its own"


def documents_of(rows):
    return [(tuple(r.tokens.tolist()), tuple(r.loss_mask.tolist()), tuple(range(len(r.tokens)))) for r in rows]


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_one_three_and_endless_epochs_share_the_first(mode):
    one, three, endless = (pipeline(mode=mode, num_epochs=n) for n in (1, 3, None))
    units = one.summary.rows
    full = units // 4
    for step in range(full):
        assert digest(one.batch(step)) == digest(three.batch(step)) == digest(endless.batch(step))
    last = one.batch(full)  # the rest of the first epoch, then empty rows
    for name in last:
        np.testing.assert_array_equal(last[name][: units % 4], endless.batch(full)[name][: units % 4])
        assert not last[name][units % 4 :].any()
    assert one.total_steps == full + 1 and endless.total_steps is None
    with pytest.raises(IndexError):
        one.batch(full + 1)


def test_packed_documents_are_the_unpacked_ones():
    packed, padded = (pipeline(mode=mode, num_epochs=1) for mode in ("pack", "pad"))
    assert packed.total_steps < padded.total_steps
    lists = [sorted(documents(map(p.batch, range(p.total_steps)))) for p in (packed, padded)]
    assert lists[0] == lists[1]
    assert packed.summary.fill > 0.8 > padded.summary.fill
    assert packed.summary.tokens == padded.summary.tokens


def test_neighbours_share_no_document_id_even_without_prompt_tokens():
    rows = [Conversation(str(i), np.full(4, i, np.int32), np.ones(4, bool)) for i in range(8)]
    batch = pipeline(rows, mode="pack", batch_size=2).batch(0)
    np.testing.assert_array_equal(batch["document_ids"], [[1] * 4 + [2] * 4 + [3] * 4 + [4] * 4] * 2)
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 3] * 4] * 2)


def test_packing_puts_each_document_into_the_fullest_bin_that_has_room():
    # Room after 6 and 5 is 4 and 5: 3 goes to the first, the fullest; 5 fits the second only; 2 needs a new one.
    assert pack_best_fit(np.array([6, 5, 3, 5, 2]), 10) == [[0, 2], [1, 3], [4]]
    assert pack_best_fit(np.array([6, 3, 4]), 10, max_open=1) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        pack_best_fit(np.array([1, 11]), 10)


def test_packing_fills_bins_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(10, 400, 3000)
    bins = pack_best_fit(lengths, 1024)
    assert sorted(i for members in bins for i in members) == list(range(3000))
    assert max(lengths[members].sum() for members in bins) <= 1024
    assert lengths.sum() / (len(bins) * 1024) > 0.95


@pytest.mark.parametrize("mode", ["pad", "pack"])
def test_hosts_split_the_global_batch_in_order(mode):
    alone = pipeline(mode=mode, num_epochs=1)
    for count in (2, 4):
        size = alone.config.batch_size // count
        hosts = [pipeline(mode=mode, num_epochs=1, places=range(i * size, (i + 1) * size)) for i in range(count)]
        assert {host.total_steps for host in hosts} == {alone.total_steps}
        for step in range(alone.total_steps):
            parts = [host.batch(step) for host in hosts]
            for name, values in alone.batch(step).items():
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)


def test_seeds_and_epochs_do_not_meet():
    def first_epochs(seed):
        p = pipeline(golden_rows(52), seed=seed)
        return [tuple(documents(map(p.batch, range(e * 13, e * 13 + 13)))) for e in range(3)]

    orders = [order for seed in (0, 1, 2) for order in first_epochs(seed)]
    assert len(set(orders)) == 9


def test_long_documents_are_truncated_or_dropped_and_counted():
    rows = [
        Conversation("short", np.arange(5, dtype=np.int32), np.arange(5) >= 2),
        Conversation("long", np.arange(20, dtype=np.int32), np.arange(20) >= 4),
        Conversation("long prompt", np.arange(20, dtype=np.int32), np.arange(20) >= 9),  # one supervised token is left
        Conversation("one answer token", np.arange(6, dtype=np.int32), np.arange(6) == 5),
    ]
    cut = pipeline(rows, seq_len=10, num_epochs=1)
    assert cut.summary == type(cut.summary)(
        documents=4, truncated=2, dropped=0, tokens=31, tokens_cut=20, supervised_tokens=3 + 6 + 1 + 1,
        without_anchor=2, rows=4, fill=31 / 40,
    )  # fmt: skip
    assert sorted(len(tokens) for tokens, _, _ in documents([cut.batch(0)])) == [5, 6, 10, 10]
    dropped = pipeline(rows, seq_len=10, overlong="drop", mode="pack", num_epochs=1)
    assert (dropped.summary.documents, dropped.summary.dropped, dropped.summary.tokens_cut) == (2, 2, 40)
    assert sorted(len(tokens) for tokens, _, _ in documents([dropped.batch(0)])) == [5, 6]
    assert "2 dropped, 1 with nothing to train on" in dropped.summary.describe()


def test_data_without_anything_to_train_on_is_refused():
    rows = [Conversation("a", np.arange(20, dtype=np.int32), np.arange(20) >= 15)]
    with pytest.raises(UserError, match="none of the 1 documents has two supervised tokens in a row within seq_len=16"):
        pipeline(rows)
    with pytest.raises(UserError, match="all 1 documents are longer than seq_len=16"):
        pipeline(rows, overlong="drop")


def test_a_single_document_with_one_anchor_is_enough():
    rows = [Conversation("a", np.arange(6, dtype=np.int32), np.isin(np.arange(6), (3, 4)))]
    assert pipeline(rows).summary.without_anchor == 0
    np.testing.assert_array_equal(pipeline(rows, mode="pack").batch(9)["tokens"][:, :6], [np.arange(6)] * 4)


BAD = {
    "seq_len": {"seq_len": 1},
    "mode": {"mode": "stack"},
    "overlong": {"overlong": "split"},
    "seed": {"seed": -1},
    "num_epochs": {"num_epochs": 0},
    "batch_size": {"batch_size": 0},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_settings_name_the_field(field):
    with pytest.raises(UserError, match=f"{field}="):
        pipeline(**BAD[field])
