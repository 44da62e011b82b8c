from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbench.errors import DataError, ModelError
from qbench.tasks import batches_sha256, gather_outputs, make_batches
from qbench.tasks.padding import sized_batches


@dataclass(frozen=True)
class Spec:
    name: str
    dtype: str = "int64"
    shape: tuple[int | str | None, ...] = ("batch", "sequence")


IDS, MASK = Spec("input_ids"), Spec("attention_mask")


def items(*lengths: int) -> list[dict[str, list[int]]]:
    return [{"input_ids": list(range(10, 10 + length))} for length in lengths]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    max_tokens=st.integers(1, 40),
    equal=st.booleans(),
)
def test_every_item_is_in_one_batch_within_the_budget(lengths, max_tokens, equal) -> None:
    encoded = items(*lengths)
    batches = make_batches(encoded, [IDS, MASK], max_tokens=max_tokens, equal_length=equal)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(len(lengths)))
    for batch in batches:
        assert batch.padded_tokens == batch.feeds["input_ids"].size
        assert batch.padded_tokens <= max_tokens or len(batch.rows) == 1
        assert batch.tokens == batch.feeds["attention_mask"].sum()
        if equal:
            assert batch.tokens == batch.padded_tokens


def test_padding_is_masked_and_dtypes_are_the_graphs() -> None:
    specs = [Spec("input_ids", "int32"), Spec("attention_mask", "float32"), Spec("position_ids")]
    (batch,) = make_batches(items(3, 1), specs, max_tokens=6, equal_length=False, pad_id=9)
    assert batch.rows.tolist() == [1, 0]
    assert batch.feeds["input_ids"].tolist() == [[10, 9, 9], [10, 11, 12]]
    assert batch.feeds["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.feeds["position_ids"].tolist() == [[0, 1, 2]] * 2
    assert [batch.feeds[s.name].dtype for s in specs] == [np.int32, np.float32, np.int64]


def test_old_names_of_mask_and_segments_are_known() -> None:
    specs = [IDS, Spec("input_mask"), Spec("segment_ids")]
    (batch,) = make_batches(items(2), specs, max_tokens=8)
    assert batch.feeds["input_mask"].tolist() == [[1, 1]]
    assert batch.feeds["segment_ids"].tolist() == [[0, 0]]


def test_a_fixed_batch_repeats_its_last_item() -> None:
    specs = [Spec("input_ids", shape=(3, "sequence"))]
    batches = make_batches(items(2, 2, 2, 2, 5), specs, max_tokens=1)
    assert [batch.rows.tolist() for batch in batches] == [[0, 1, 2], [3], [4]]
    assert all(batch.feeds["input_ids"].shape[0] == 3 for batch in batches)
    outputs = gather_outputs(batches, [b.feeds["input_ids"][:, -1:] for b in batches])
    assert outputs.ravel().tolist() == [11, 11, 11, 11, 14]


def test_a_fixed_sequence_is_padded_whatever_was_asked() -> None:
    specs = [Spec("input_ids", shape=("b", 6)), Spec("attention_mask", shape=("b", 6))]
    batches = make_batches(items(2, 5), specs, max_tokens=12)
    assert [batch.feeds["attention_mask"].shape for batch in batches] == [(2, 6)]
    with pytest.raises(DataError, match="item 0 has 7 tokens.*fixed at 6"):
        make_batches(items(7), specs, max_tokens=12)


def test_inputs_that_nothing_gives_name_both_sides() -> None:
    with pytest.raises(ModelError, match="asks for 'pixel_values'.*graph inputs: input_ids, pixel"):
        make_batches(items(2), [IDS, Spec("pixel_values")], max_tokens=8)
    with pytest.raises(ModelError, match="no input input_ids.*attention_mask"):
        make_batches(items(2), [MASK], max_tokens=8)
    with pytest.raises(ModelError, match="cache or decoder state"):
        make_batches(items(2), [IDS, Spec("past_key_values.0.key")], max_tokens=8)
    with pytest.raises(ModelError, match=r"\[batch, sequence\]"):
        make_batches(
            items(2), [IDS, Spec("attention_mask", shape=("b", 1, "s", "s"))], max_tokens=8
        )
    with pytest.raises(ModelError, match="different fixed batch"):
        specs = [Spec("input_ids", shape=(1, "s")), Spec("attention_mask", shape=(2, "s"))]
        make_batches(items(2), specs, max_tokens=8)


def test_what_the_tokenizer_gives_is_fed() -> None:
    encoded = [{"input_ids": [4, 5], "bbox": [7, 8]}]
    (batch,) = make_batches(encoded, [IDS, Spec("bbox")], max_tokens=8)
    assert batch.feeds["bbox"].tolist() == [[7, 8]]


def test_padding_without_a_mask_is_refused() -> None:
    with pytest.raises(ModelError, match="padded positions would count"):
        make_batches(items(1, 2), [IDS], max_tokens=8, equal_length=False)


def test_nothing_to_run_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to run"):
        make_batches([], [IDS], max_tokens=8)
    with pytest.raises(DataError, match="item 1 has no tokens"):
        make_batches(items(2, 0), [IDS], max_tokens=8)


def test_the_hash_sees_content_and_composition() -> None:
    encoded = items(2, 2, 3)
    first = make_batches(encoded, [IDS], max_tokens=8)
    assert batches_sha256(first) == batches_sha256(make_batches(encoded, [IDS], max_tokens=8))
    others = [
        make_batches(encoded, [IDS], max_tokens=2),
        make_batches(encoded, [Spec("input_ids", "int32")], max_tokens=8),
        make_batches([*encoded[:2], {"input_ids": [1, 2, 9]}], [IDS], max_tokens=8),
    ]
    assert len({batches_sha256(batches) for batches in (first, *others)}) == 4


def test_batches_cannot_be_written_to() -> None:
    (batch,) = make_batches(items(2), [IDS], max_tokens=8)
    with pytest.raises(ValueError, match="read-only"):
        batch.feeds["input_ids"][0, 0] = 1


def test_outputs_that_follow_the_sequence_name_the_choices() -> None:
    batches = make_batches(items(2, 3), [IDS], max_tokens=3)
    with pytest.raises(ModelError, match="sequence length.*model.pooling"):
        gather_outputs(batches, [np.zeros((1, 2, 4)), np.zeros((1, 3, 4))])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    size=st.integers(1, 40),
    count=st.integers(1, 8),
    specs=st.sampled_from([[IDS, MASK], [IDS]]),
)
def test_batches_to_time_have_the_size_that_was_asked(lengths, size, count, specs) -> None:
    batches = sized_batches(items(*lengths), specs, size, count)
    assert 1 <= len(batches) <= count
    for batch in batches:
        assert {array.shape[0] for array in batch.feeds.values()} == {size}
    longest = [batch.feeds["input_ids"].shape[1] for batch in batches]
    assert longest == sorted(longest)
    if count > 1:
        assert longest[-1] == max(lengths)
