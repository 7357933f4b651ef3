import pytest
import torch

from heads.vocabulary import check_offsets, coverage, draft_index, from_offsets, membership, most_frequent, to_offsets

COUNTS = torch.tensor([0, 5, 0, 9, 5, 0, 1])


def test_the_most_frequent_ids_with_the_end_of_text_among_them():
    assert most_frequent(COUNTS, 3, always=[0]).tolist() == [0, 1, 3]
    assert most_frequent(COUNTS, 6, always=[0]).tolist() == [0, 1, 2, 3, 4, 6]  # filled with unused ids, lowest first
    assert coverage(COUNTS, torch.tensor([1, 3])) == pytest.approx(14 / 20)


def test_offsets_and_membership_describe_the_same_map():
    ids = most_frequent(COUNTS, 4, always=[5])
    assert from_offsets(to_offsets(ids)).equal(ids)
    assert membership(ids, 7).nonzero().squeeze(1).equal(ids)
    assert draft_index(ids, 7)[ids].tolist() == [0, 1, 2, 3]
    assert (draft_index(ids, 7) >= 0).sum() == 4


def test_a_map_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="must hold offsets, not the ids themselves"):
        check_offsets(torch.tensor([3, 1, 2]), 7)
    with pytest.raises(ValueError, match="outside the target's vocabulary of 7"):
        check_offsets(torch.tensor([0, 3, 7]), 7)
    with pytest.raises(ValueError, match=r"draft_vocab_size=9 must be above 1 \(end-of-text ids\) and at most"):
        most_frequent(COUNTS, 9, always=[0])
