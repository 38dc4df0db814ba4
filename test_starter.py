"""Tests of the algorithm in starter.py."""
from starter import (  # noqa: F401  the quick tests, strict under pytest
    test_clip_keeps_the_smaller_objective,
    test_equal_rewards_give_zero_advantage,
    test_gradient_does_not_depend_on_microbatch_size,
    test_k1_as_written_has_zero_expected_gradient,
    test_kl_estimators_match_hand_computed_values,
    test_kl_gradient_matches_enumeration,
    test_masked_mean_ignores_masked_entries,
    test_reward_accepts_only_solutions,
    test_token_statistics_match_log_softmax,
)
