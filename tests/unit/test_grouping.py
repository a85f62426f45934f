"""Which rows come together: on ranks and in micro-batches."""

import pytest

from opd_recipes.grouping import filled, for_ranks, levelled_parts, members


def test_rows_of_a_key_in_the_order_in_which_it_is_seen():
    assert members(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


def test_prompts_stay_whole_where_loads_allow_it():
    """Loads of 10, 20, 30 and 40 a prompt: 50 for each rank, by the largest with the smallest."""
    prompts = ["a", "b", "c", "d"] * 2
    loads = [5, 10, 15, 20] * 2
    shares = for_ranks(loads, prompts, 2, limit=50)
    assert sorted(map(sorted, shares)) == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_rows_of_a_prompt_follow_one_another_on_a_rank():
    assert for_ranks([1] * 6, ["x", "y", "z"] * 2, 1, limit=6) == [[0, 3, 1, 4, 2, 5]]


def test_a_prompt_is_split_where_rows_must_be_equally_many():
    """Three prompts of 4 rows on two ranks of 6."""
    shares = for_ranks([1] * 12, [i // 4 for i in range(12)], 2, limit=6)
    assert [len(share) for share in shares] == [6, 6] and sorted(sum(shares, [])) == list(range(12))
    assert sorted(len({row // 4 for row in share}) for share in shares) == [2, 2]


def test_single_rows_change_places_where_whole_prompts_would_be_unequal():
    """Whole, the ranks have 4 x 10 and 4 x 6; the busier one gives rows of 10 for rows of 6 until both have 32."""
    loads = [10] * 4 + [6] * 4
    shares = for_ranks(loads, ["a"] * 4 + ["b"] * 4, 2, limit=33)
    assert [sum(loads[i] for i in share) for share in shares] == [32, 32]
    assert [len(share) for share in shares] == [4, 4]


def test_a_limit_that_cannot_be_reached_is_said():
    assert for_ranks([100, 1], ["a", "b"], 2, limit=60) is None


def test_parts_are_filled_in_order():
    assert filled([4, 4, 4, 8, 2], [0, 1, 2, 3, 4], 10) == [[0, 1], [2], [3, 4]]
    assert filled([], [], 10) == []


def test_the_largest_part_is_as_small_as_their_number_allows():
    """Of 6 rows of 3 a budget of 15 needs two parts: three and three, not five and one."""
    assert levelled_parts([3] * 6, range(6), 2, budget=15) == [[0, 1, 2], [3, 4, 5]]


def test_the_largest_part_comes_first():
    assert levelled_parts([2, 2, 9, 1], range(4), 2, budget=10) == [[2, 3], [0, 1]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_another_rank_may_need_more_parts(count):
    parts = levelled_parts([1, 5, 2, 4, 3], [4, 0, 2, 1, 3], count, budget=15)
    assert len(parts) == count and sorted(sum(parts, [])) == [0, 1, 2, 3, 4] and all(parts)
