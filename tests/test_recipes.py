"""Each recipe fits starter.py, computes its formula (loops in float64), and trains."""

import itertools
import math
import random
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    at_each_call,
    gradient_of,
    load_copy,
    make_responses,
    make_step,
    often_equal,
    scalars,
    settings,
    small_sums,
    variety,
)
from forked import REPOSITORY, import_copy, in_forks, write_copy
from torch.nn.utils import parameters_to_vector

import starter
from support import engines

pytestmark = pytest.mark.slow  # an edit of lines that a recipe changes is stopped by CI only
RECIPES = REPOSITORY / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.patch"))
TEXT = (REPOSITORY / "starter.py").read_text("utf-8")
SAME_LINES = [
    {"cispo", "gspo"},
    {"curriculum", "off_policy"},
    {"dynamic_sampling", "off_policy"},
    {"length_reward", "several_rewards"},
]
TRAINED = [*NAMES, "rloo+cispo"]  # one pair: of an advantage and a loss


def git_apply(name, folder):
    """Does what recipes/README.md says, in this folder. Returns whether it worked."""
    command = ["git", "apply", str(RECIPES / f"{name}.patch")]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def load(name, folder):
    """starter.py with a recipe in it, as a module of its own without support/."""
    (folder / "starter.py").write_text(TEXT, "utf-8")
    assert git_apply(name, folder)
    return load_copy(folder)


@pytest.mark.parametrize("pair", itertools.combinations(NAMES, 2), ids="+".join)
def test_two_recipes_apply_together_unless_they_change_the_same_lines(pair, tmp_path):
    (tmp_path / "starter.py").write_text(TEXT, "utf-8")
    assert [git_apply(name, tmp_path) for name in pair] == [True, {*pair} not in SAME_LINES]


def train_twice(names, checkpoint, folder):
    """Trains with these recipes, without support/ and with it. Compares the curves."""
    logs = []
    for with_support in (False, True):
        copy = write_copy(Path(folder) / f"{names}{with_support}", TEXT, with_support)
        assert all(git_apply(name, copy) for name in names.split("+"))
        starter = import_copy(copy)
        given = settings(checkpoint, f"{copy}/out", n_train_steps=3, save_every=2)
        if names == "moving_reference":
            starter.REFERENCE_EVERY = 1
        logs.append(scalars(starter.main(**given)["run_folder"]))
    for tag in ("train/loss", "train/grad_norm", "train/reward_mean"):
        alone, supported = [list(log[tag].values()) for log in logs]
        assert alone == pytest.approx(supported, rel=2e-3, abs=1e-6) and len(alone) == 3
    assert max(logs[0]["train/grad_norm"].values()) > 0


def test_recipes_train_alike_with_and_without_support(checkpoint, tmp_path):
    calls = [(names, str(checkpoint), str(tmp_path)) for names in TRAINED]
    outcomes = in_forks("test_recipes", "train_twice", calls, tmp_path)
    failed = {n: x["stderr"][-2000:] for n, x in zip(TRAINED, outcomes) if x["status"]}
    assert not failed


# Rewards and advantages


@pytest.mark.parametrize(
    "name, by_hand",
    [("rloo", [-7 / 10, 19 / 30, -17 / 30, 19 / 30]), ("maxrl", [-1, 19 / 21, -17 / 21, 19 / 21])],
)
def test_advantages_equal_the_formula(name, by_hand, tmp_path):
    """Responses that were not scored leave their groups: of the last three one, three, and all."""
    module = load(name, tmp_path)
    nan = math.nan
    rewards = [0.0, 1.0, 0.1, 1.0] + [0.5] * 4 + [nan, 1, 0, 1] + [nan, 1, nan, nan] + [nan] * 4
    by_std = module.cfg_with().normalize_by_std is not False
    found, _ = module.compute_group_normalized_advantages(torch.tensor(rewards), 4, 1e-6, by_std)
    expected = by_hand + [0] * 4 + [0, 1 / 2, -1, 1 / 2] + [0] * 8
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_length_reward_equals_the_formula(tmp_path):
    module = load("length_reward", tmp_path)
    responses = [module.Response([5], [7] * n, [], True) for n in range(1, 21)]
    found = module.overlong_punishment(responses, 20)
    assert found.tolist() == pytest.approx([0] * 16 + [0.25, 0.5, 0.75, 1])


def test_several_rewards_are_summed_exactly_and_logged(checkpoint, tmp_path):
    """0.3 + 0.6 and 0.1 + 0.8 are equal, but not in float32, where such a group would teach."""
    module = load("several_rewards", tmp_path)
    first, second = itertools.cycle([0.6, 0.8]), itertools.cycle([0.3, 0.1])
    module.MORE_REWARDS = [(lambda text, problem: next(second), 1.0)]
    reward = dict(reward=lambda text, problem: next(first))
    result = module.main(**settings(checkpoint, tmp_path, n_train_steps=1, **reward))
    log = scalars(result["run_folder"])
    expected = {
        "train/frac_zero_std": 1,
        "train/reward_mean": 0.9,
        "reward/main": 0.7,
        "reward/<lambda>": 0.2,
    }
    assert {name: log[name][1] for name in expected} == pytest.approx(expected)
    assert result["after"]["reward_mean"] == pytest.approx(0.7)  # of main()'s


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(checkpoint, tmp_path):
    """One that is not scored is not solved."""
    module = load("pass_at_k", tmp_path)
    solved = []

    def reward(text, problem):
        solved.append(text < "h")
        return 1.0 if solved[-1] else None

    given = settings(checkpoint, tmp_path, n_train_steps=0, eval_samples=5, reward=reward)
    result = module.main(**given, eval_temperature=0.0)
    samples = [solved[10 + 5 * i :][:5] for i in range(10)]  # after ten greedy ones
    expected = {}
    for k in (1, 2, 4):
        choices = [any(choice) for row in samples for choice in itertools.combinations(row, k)]
        expected[f"pass_at_{k}"] = sum(choices) / len(choices)
    found = {name: x for name, x in result["before"].items() if name.startswith("pass_at_")}
    assert found == pytest.approx(expected) and 0 < found["pass_at_1"] < found["pass_at_4"]


def test_token_advantages_are_the_discounted_rewards_still_to_come(checkpoint, tmp_path):
    module = load("token_advantages", tmp_path)
    module.make_batch = mock.Mock(wraps=module.make_batch)
    given = settings(checkpoint, tmp_path, normalize_by_std=False)
    given["reward"] = lambda text, problem, response: len(response.response_ids)
    module.main(**given)
    for responses, advantages, _ in [call.args for call in module.make_batch.call_args_list]:
        lengths = [len(response.response_ids) for response in responses]
        for i, n in enumerate(lengths):
            group = lengths[i // 4 * 4 :][:4]
            by_hand = [(n - sum(group) / 4) * 0.99 ** (n - 1 - t) for t in range(n)]
            assert advantages[i, :n].tolist() == pytest.approx(by_hand, abs=1e-5)


# The loss


@pytest.mark.parametrize("name, n_cut", [("gspo", 3), ("cispo", 2)])
def test_loss_and_gradient_equal_the_formula(name, n_cut, tmp_path):
    """Two responses of 3 and 2 tokens, one better than its group and one worse. Two ratios, exp(2)
    and exp(1.9), are above CISPO's bound; the second response's mean is within GSPO's."""
    old = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, 0.0]]).double()
    now = torch.tensor([[-0.9, -2.6, 1.5], [0.4, -2.5996, 0.0]]).double().requires_grad_()
    advantages = torch.tensor([[0.8], [-1.2]]).double()
    expected = 0.0
    for row, (advantage,), n in zip(range(2), advantages, (3, 2)):
        log_probs = now[row, :n]
        ratios = torch.exp(log_probs - old[row, :n])
        if name == "gspo":  # one clipped ratio for a response; mean over responses
            ratio = ratios.prod() ** (1 / n)
            clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
            expected -= torch.minimum(ratio * advantage, clipped * advantage) / 2
        else:  # no gradient through the ratio, which is cut at 5; mean over tokens
            expected -= (ratios.detach().clamp(max=5) * advantage * log_probs).sum() / 5
    module = load(name, tmp_path)
    cfg = module.cfg_with()
    assert cfg.epochs_per_rollout == 2  # at a ratio of 1 nothing is cut
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    loss, metadata = module.compute_loss(advantages, now, old, cfg.clip_range, mask=mask)
    total = (loss * module.AVERAGES[cfg.loss_average](mask.double(), 3)).sum()
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, now) for x in (total, expected)))
    assert metadata["clip_frac"].item() == pytest.approx(n_cut / 5)


def test_entropy_bonus_is_a_hundredth_of_the_entropy(checkpoint, tmp_path):
    """Where no response has an advantage the loss is the bonus."""
    module = load("entropy_bonus", tmp_path)
    policy, _ = module.init_policy(checkpoint, "cpu")
    rows = make_step(make_responses((3, 5)), advantages=torch.zeros(2))
    loss, means = module.grpo_microbatch_step(policy, rows, module.cfg_with(precision="float32"))
    assert loss.item() == pytest.approx(-0.01 * means["entropy"].item())
    assert gradient_of(policy).norm() > 1e-4


def test_sampler_mask_equals_the_formula(tmp_path):
    """Tokens whose ratio is 1, 0.4, 5.2 and 2, and a response that has drifted by 0.1 nats each."""
    module = load("sampler_mask", tmp_path)
    drifted = [math.exp(-0.1)] * 4
    ratios = torch.tensor([[1, 0.4, 5.2, 2], drifted])
    now = torch.full((2, 4), -1.0, requires_grad=True)
    sampler = now.detach() - ratios.log()
    for advantage, of_drifted in ((0.8, drifted), (-0.8, [0.0] * 4)):
        advantages = torch.full((2, 1), advantage)
        loss, _ = module.compute_loss(advantages, now, now.detach(), 0.2, sampler_log_probs=sampler)
        [gradient] = torch.autograd.grad(loss.sum(), now)
        weights = torch.tensor([[1, 0, 0, 2], of_drifted])
        torch.testing.assert_close(gradient, -advantage * weights)


# The loop


def whole_run(module, checkpoint, folder, **changes):
    """Returns the scalars of a run of six steps, which one that is resumed after three repeats."""
    given = settings(checkpoint, folder / "out", learning_rate=1e-2, n_train_steps=6) | changes
    whole = scalars(module.main(**given)["run_folder"])
    module.main(**given | dict(n_train_steps=3))
    resumed = module.main(**given, resume=True)  # of the newest
    assert scalars(resumed["run_folder"])["train/loss"] == whole["train/loss"]
    return whole


def test_curriculum_draws_by_solve_rate_and_a_resumed_run_repeats_it(checkpoint, tmp_path):
    module = load("curriculum", tmp_path)
    scored = []  # (prompt, whether it is solved): ten of the evaluation, 16 of each step

    def reward(text, problem):
        scored.append((problem["prompt"], float(text < "h") * (int(problem["answer"]) % 2)))
        return scored[-1][1]

    whole_run(module, checkpoint, tmp_path, reward=reward)
    rates = {problem["prompt"]: 0.5 for problem in small_sums(None)[0]}
    for step in range(1, 7):
        weights = [p * (1 - p) + 0.03 for p in rates.values()]
        prompts = random.Random(f"0 {step}").choices([*rates], weights, k=4)
        for i, prompt in enumerate(prompts):
            of_group = scored[16 * step - 6 + 4 * i :][:4]
            assert {prompt for prompt, _ in of_group} == {prompt}
            rates[prompt] = sum(solved for _, solved in of_group) / 4
    assert {0.0, 0.5, 1.0} < {*rates.values()}


def test_dynamic_sampling_fills_steps_with_groups_that_differ(checkpoint, tmp_path):
    """Of half of the prompts all rewards are equal. Where those of all are, it ends, too."""
    module = load("dynamic_sampling", tmp_path)

    def reward(text, problem, response):
        assert response.prompt_ids == problem["prompt_ids"]
        return often_equal(text, problem)

    log = whole_run(module, checkpoint, tmp_path, reward=reward)
    assert {*log["train/frac_zero_std"].values()} == {0}
    sampled = []
    at_each_call(module, "rollout", lambda policy, llm, asked, *_: sampled.append(len(asked)))
    module.main(**settings(checkpoint, tmp_path, n_train_steps=1, reward=lambda *_: 0.5))
    assert sampled == [10, *[4] * 8, 10]  # between two evaluations


def test_off_policy_samples_every_fourth_step(checkpoint, tmp_path):
    def reward(text, problem, response):  # the rollout that was kept belongs to these problems
        return variety(text, problem) * (problem["prompt_ids"] == response.prompt_ids)

    module = load("off_policy", tmp_path)
    log = whole_run(module, checkpoint, tmp_path, reward=reward)
    differ = [diff > 1e-3 for diff in log["train/sampler_logprob_diff"].values()]
    assert differ == [False, True, True, True, False, True]
    assert len({*log["train/reward_mean"].values()}) == 2


def test_moving_reference_goes_its_share_of_the_way(checkpoint, tmp_path):
    module = load("moving_reference", tmp_path)
    module.REFERENCE_EVERY, module.REFERENCE_SHARE = 2, 0.25
    seen = []  # of each step: policy and reference

    def keep(policy, rows, cfg, ref_model, *others):
        seen.append([parameters_to_vector(x.parameters()).clone() for x in (policy, ref_model)])

    at_each_call(module, "grpo_microbatch_step", keep)
    whole_run(module, checkpoint, tmp_path, max_tokens_per_microbatch=10_000)
    for step, ((_, before), (policy, ref)) in enumerate(itertools.pairwise(seen[:6]), 1):
        moved = before if step % 2 else 0.75 * before + 0.25 * policy
        torch.testing.assert_close(ref, moved)
        assert not policy.equal(before)


def move_with_support(checkpoint, folder):
    copy = write_copy(Path(folder) / "copy", TEXT, with_support=True)
    assert git_apply("moving_reference", copy)
    module = import_copy(copy)
    module.REFERENCE_EVERY, module.REFERENCE_SHARE = 2, 0.25
    whole_run(module, checkpoint, Path(folder))


def test_support_finds_the_moved_reference_again_and_reports_the_kl_to_the_start(
    checkpoint, tmp_path
):
    calls = [(str(checkpoint), str(tmp_path))]
    [outcome] = in_forks("test_recipes", "move_with_support", calls, tmp_path)
    assert not outcome["status"], outcome["stderr"]
    text = outcome["stdout"]
    assert "after step 3" in text and "the reference is another one" not in text
    assert text.count("KL(policy || model before training)") == 3 == text.count("KL(policy ||")


def test_minibatches_share_a_rollout_among_optimiser_steps(checkpoint, tmp_path):
    """The ratio is that to the policy before the first of them."""
    module = load("minibatches", tmp_path)
    steps = [[]]  # the microbatches of each optimiser step
    at_each_call(module, "grpo_microbatch_step", lambda policy, rows, *_: steps[-1].append(rows))
    at_each_call(module, "clip_gradient", lambda *_: steps.append([]))
    given = settings(checkpoint, tmp_path, n_train_steps=2, loss_average="grpo")
    log = scalars(module.main(**given)["run_folder"])
    assert steps.pop() == []
    of_rows = [torch.cat([rows["weights"].sum(dim=1) for rows in step]) for step in steps]
    assert len(steps) == 8  # 16 responses a step
    for weights in of_rows:
        assert weights.tolist() == pytest.approx([1 / 4] * 4)
    assert all(abs(ratio - 1) > 1e-4 for ratio in log["train/ratio_mean"].values())


# Rollouts


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_stop_strings_end_responses_behind_a_whole_token(checkpoint, tmp_path, engine):
    """One of a single token, one of two, and one of a token's beginning."""
    module = load("stop_strings", tmp_path)
    model, tokenizer = module.init_policy(checkpoint, "cpu")
    cfg = module.cfg_with(
        max_new_tokens=20, precision="float32", stop_token_ids=[1, 9], engine=engine
    )
    if engine == "vllm":
        pytest.importorskip("vllm")
        engines.attach(cfg)
        model = starter.init_vllm(checkpoint, 0, 128, 0.3, "float32")
    given = model, starter.requests_for([[7, 8], [9, 10, 11]], cfg, 3, 16), cfg
    uncut = getattr(starter, f"rollout_with_{engine}")(*given)
    ids = max((response.response_ids for response in uncut), key=len)
    strings = [tokenizer.decode(part) for part in (ids[4:5], ids[2:4])] + ["<answ"]
    module.STOP_STRINGS[:] = strings
    responses = getattr(module, f"rollout_with_{engine}")(*given)
    texts, _ = module.score(responses, [{}] * 2, tokenizer, lambda *_: 0)
    for response, text, (_, ids, *_) in zip(responses, texts, uncut):
        read = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        by_token = [n for n, token in enumerate(ids, 1) if token in cfg.stop_token_ids]
        by_string = [n for n, start in enumerate(read) if any(x in start for x in strings)]
        n = min(by_token + by_string, default=len(ids))
        assert (response.response_ids, response.finished) == (ids[:n], bool(by_token + by_string))
        assert text == read[n - (n in by_token)]
    assert any(text.endswith(strings[1]) for text in texts)
