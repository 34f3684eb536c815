"""max_lora_rank over its whole range, with the values of the installed vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from rollproof_reference import RankError, max_lora_rank
from rollproof_reference.engine import allowed_ranks

ALLOWED = allowed_ranks()
TOP = max(ALLOWED)


def test_the_values_are_vllms_own():
    from vllm.config.lora import LoRAConfig

    assert set(ALLOWED) >= {1, 8, 16, 32, 64, 128, 256}
    for rank in ALLOWED:
        assert LoRAConfig(max_lora_rank=rank).max_lora_rank == rank


@given(st.integers(1, TOP))
def test_it_is_the_smallest_allowed_value_that_fits(rank: int):
    found = max_lora_rank(rank, ALLOWED)
    assert found in ALLOWED
    assert found >= rank
    assert not [value for value in ALLOWED if rank <= value < found]


@given(st.integers(1, TOP), st.integers(1, TOP))
def test_it_never_shrinks_as_the_rank_grows(one: int, two: int):
    low, high = sorted((one, two))
    assert max_lora_rank(low, ALLOWED) <= max_lora_rank(high, ALLOWED)


@given(st.integers(1, TOP), st.dictionaries(st.sampled_from(["q_proj", "up_proj"]), st.integers(1, TOP)))
def test_rank_pattern_counts(rank: int, pattern: dict[str, int]):
    config = LoraConfig(r=rank, rank_pattern=pattern)
    assert max_lora_rank(config, ALLOWED) == max_lora_rank(max(rank, *pattern.values(), 0), ALLOWED)


@given(st.integers(TOP + 1, 10**9))
def test_above_the_top_the_bound_is_named(rank: int):
    with pytest.raises(RankError, match=f"rank {rank} is above {TOP}, .*allowed for max_lora_rank: 1, 8"):
        max_lora_rank(rank, ALLOWED)


@given(st.integers(max_value=0))
def test_below_one_is_refused(rank: int):
    with pytest.raises(RankError, match=f"rank is {rank}: it has to be at least 1"):
        max_lora_rank(rank, ALLOWED)


@pytest.mark.parametrize("rank", [8.0, "8", True, 1.5])
def test_what_is_no_whole_number_is_refused(rank: object):
    with pytest.raises(RankError, match="has to be a whole number"):
        max_lora_rank(rank, ALLOWED)  # type: ignore[arg-type]


def test_a_rank_pattern_that_is_wrong_is_named():
    config = LoraConfig(r=8)
    config.rank_pattern = {"q_proj": 0}
    with pytest.raises(RankError, match=r"rank_pattern\['q_proj'\] is 0"):
        max_lora_rank(config, ALLOWED)


def test_the_installed_values_are_the_default():
    assert max_lora_rank(24) == 32
