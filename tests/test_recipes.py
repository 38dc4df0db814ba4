"""Tests of recipes/: each patch fits starter.py, computes its paper's formula, and trains.

The formulas are written out below as loops over numbers, in float64. All are slow tests: whoever
edits the lines that a recipe changes is not stopped by it; CI is.
"""
import copy
import importlib.util
import math
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import save_checkpoint, scalars, settings, variety

import starter

recipes = pytest.importorskip("lab.recipes")
pytestmark = pytest.mark.slow
TEXT = (recipes.REPOSITORY / "starter.py").read_text("utf-8")
NAMES = sorted(recipes.RECIPES)


def load(name, folder, **replaced):
    """starter.py with a recipe in it, as a module of its own without support/."""
    text = recipes.apply(name, TEXT)
    for stands, becomes in replaced.items():
        assert text.count(stands) == 1
        text = text.replace(stands, becomes)
    path = folder / f"{name}.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location(f"starter_{name}", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_patch_is_what_the_list_makes_and_git_applies_it(name, tmp_path):
    patch = (recipes.FOLDER / f"{name}.patch").read_text("utf-8")
    assert patch == recipes.patch_of(name, TEXT), "run python -m lab.recipes"
    assert recipes.n_added(patch) < recipes.MOST_LINES
    (tmp_path / "starter.py").write_text(TEXT, "utf-8")
    subprocess.run(["git", "apply", str(recipes.FOLDER / f"{name}.patch")], cwd=tmp_path,
                   check=True, env={"GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PATH":
                                    starter.os.environ["PATH"]})
    assert (tmp_path / "starter.py").read_text("utf-8") == recipes.apply(name, TEXT)


def test_page_has_a_section_for_each_patch():
    page = (recipes.FOLDER / "README.md").read_text("utf-8")
    patches = {path.stem for path in recipes.FOLDER.glob("*.patch")}
    assert patches == set(NAMES)
    assert all(f"## {name}\n" in page and f"recipes/{name}.patch" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_trains_at_once(name, checkpoint, tmp_path, monkeypatch):
    """With its own numbers, alone, on a small random model."""
    monkeypatch.chdir(tmp_path)
    logged = []
    fake = SimpleNamespace(init=lambda **given: SimpleNamespace(
        log=lambda values, step: logged.append((step, values))))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    module = load(name, tmp_path)
    given = settings(checkpoint, tmp_path / "runs", n_train_steps=3, save_every=2)
    result = module.main(**given)
    log = scalars(result["run_folder"])
    assert len(log["train/loss"]) == 3 and all(map(math.isfinite, log["train/loss"].values()))
    assert max(log["train/grad_norm"].values()) > 0
    if name == "wandb":
        found = {step: values["train/loss"] for step, values in logged if "train/loss" in values}
        assert found == pytest.approx(log["train/loss"])


# --------------------------------------------------------------------------------------------------
# Advantages and schedule

REWARDS = [0.0, 1.0, 0.1, 1.0, 0.5, 0.5, 0.5, 0.5]


def advantages_of(module, normalize_by_std):
    found, _ = module.compute_group_normalized_advantages(torch.tensor(REWARDS), 4, 1e-6,
                                                          normalize_by_std)
    return found.tolist()


def test_rloo_subtracts_the_mean_of_the_others(tmp_path):
    expected = []
    for group in (REWARDS[:4], REWARDS[4:]):
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1:]
            expected.append(reward - sum(others) / len(others))
    module = load("rloo", tmp_path)
    default = starter.inspect.signature(module.main).parameters["normalize_by_std"].default
    assert default is False
    assert advantages_of(module, default) == pytest.approx(expected, abs=1e-6)


def test_maxrl_divides_by_the_mean_reward(tmp_path):
    expected = []
    for group in (REWARDS[:4], REWARDS[4:]):
        mean = sum(group) / len(group)
        expected += [(reward - mean) / (mean + 1e-6) for reward in group]
    assert advantages_of(load("maxrl", tmp_path), True) == pytest.approx(expected, abs=1e-6)


def test_cosine_falls_from_the_full_rate_to_a_tenth(tmp_path):
    module = load("cosine", tmp_path)
    cfg = SimpleNamespace(learning_rate=2.0, warmup_steps=10, n_train_steps=110)
    rates = [module.learning_rate_at(step, cfg) for step in (5, 10, 35, 60, 110, 200)]
    quarter = 0.55 + 0.45 * math.sqrt(0.5)
    assert rates == pytest.approx([1.0, 2.0, 2 * quarter, 1.1, 0.2, 0.2])


# --------------------------------------------------------------------------------------------------
# Losses: two responses of 3 and 2 tokens, one better than its group and one worse

OLD = [[-1.0, -2.0, -0.5], [-1.5, -0.7]]
NOW = [[-0.9, -2.6, -0.1], [-1.4, -1.2]]
ADVANTAGES = [0.8, -1.2]


def loss_and_gradient(module, clip_range):
    """The mean over tokens, or of responses where the recipe's own average says so."""
    parameters = starter.inspect.signature(module.main).parameters
    assert parameters["clip_range"].default == clip_range
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    old, now = (torch.tensor([row + [0.0] * (3 - len(row)) for row in rows], dtype=torch.double)
                for rows in (OLD, NOW))
    now.requires_grad_()
    loss, _ = module.compute_loss(torch.tensor(ADVANTAGES, dtype=torch.double)[:, None], now, old,
                                  clip_range, mask=mask)
    weights = module.token_weights(mask, parameters["loss_average"].default, 3)
    total = (loss * weights).sum()
    total.backward()
    return total.item(), now.grad[mask].tolist()


def check_loss(module, clip_range, by_hand):
    """by_hand(now: list of lists of float64 scalars) -> the loss as a scalar."""
    leaves = [[torch.tensor(x, dtype=torch.double, requires_grad=True) for x in row]
              for row in NOW]
    expected = by_hand(leaves)
    expected.backward()
    loss, gradient = loss_and_gradient(module, clip_range)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    flat = [x.grad.item() if x.grad is not None else 0.0 for row in leaves for x in row]
    assert gradient == pytest.approx(flat, abs=1e-6)


def test_gspo_clips_the_ratio_of_the_whole_response(tmp_path):
    def by_hand(now, low=3e-4, high=4e-4):
        total = 0.0
        for row, old, advantage in zip(now, OLD, ADVANTAGES):
            ratio = torch.exp(sum(x - y for x, y in zip(row, old)) / len(row))
            total = total - torch.minimum(ratio * advantage,
                                          ratio.clamp(1 - low, 1 + high) * advantage)
        return total / len(now)

    module = load("gspo", tmp_path)
    check_loss(module, (3e-4, 4e-4), by_hand)


def test_cispo_weighs_each_log_prob_with_the_clipped_ratio(tmp_path):
    def by_hand(now):
        total = 0.0
        for row, old, advantage in zip(now, OLD, ADVANTAGES):
            for x, y in zip(row, old):
                weight = min(math.exp(x.item() - y), 5.0)
                total = total - weight * advantage * x
        return total / 5

    check_loss(load("cispo", tmp_path), (0.9, 4.0), by_hand)
    far = [[-1.0, -2.0, 3.0], [-1.5, -0.7]]  # a ratio of exp(3.5), which is cut
    with mock.patch.object(sys.modules[__name__], "NOW", far):
        check_loss(load("cispo", tmp_path), (0.9, 4.0), by_hand)


def test_sapo_gates_the_ratio(tmp_path):
    def by_hand(now):
        total = 0.0
        for row, old, advantage in zip(now, OLD, ADVANTAGES):
            steepness = 1.0 if advantage > 0 else 1.05
            for x, y in zip(row, old):
                gate = 4 / steepness / (1 + torch.exp(-steepness * (torch.exp(x - y) - 1)))
                total = total - gate * advantage
        return total / 5

    check_loss(load("sapo", tmp_path), 0.2, by_hand)


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo"])
def test_ratio_of_1_leaves_the_gradient_of_grpo(name, tmp_path):
    """So these need several optimiser steps per rollout, and their patches set two."""
    module = load(name, tmp_path)
    parameters = starter.inspect.signature(module.main).parameters
    assert parameters["epochs_per_rollout"].default == 2
    gradients = []
    for owner in (module, starter):
        now = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, -1.1]], requires_grad=True)
        loss, _ = owner.compute_loss(torch.tensor(ADVANTAGES)[:, None], now, now.detach(),
                                     parameters["clip_range"].default)
        gradients.append(torch.autograd.grad(loss.mean(), now)[0])
    torch.testing.assert_close(*gradients)


# --------------------------------------------------------------------------------------------------
# Changes of the loop

def depends_on_target(text, problem):
    """All responses to half of the problems get the same reward."""
    return variety(text, problem) if problem["target"] % 2 else 0.5


def test_dynamic_sampling_draws_until_enough_groups_differ(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, n_train_steps=3, reward=depends_on_target)
    module = load("dynamic_sampling", tmp_path)
    found = scalars(module.main(**given)["run_folder"])["train/frac_zero_std"]
    plain = scalars(starter.main(**given)["run_folder"])["train/frac_zero_std"]
    assert sum(plain.values()) >= 1.5 and sum(found.values()) <= sum(plain.values()) / 2
    again = module.main(**given)
    assert scalars(again["run_folder"])["train/frac_zero_std"] == found


@pytest.mark.parametrize("epochs", [1, 2])
def test_minibatches_each_have_the_gradient_of_loops(epochs, checkpoint, tmp_path, monkeypatch):
    """Four optimiser steps on each pass over a rollout, with the mean over a quarter's tokens: n
    times its part of the whole step's mean. Later quarters clip against the sampler's log-probs."""
    module = load("minibatches", tmp_path)
    of_each = []  # (old log-probs were given, responses, response tokens, error of the gradient)

    def step(policy, rows, cfg, *args):
        result = starter_step(policy, rows, cfg, *args)
        found = [parameter.grad.double() for parameter in policy.parameters()]
        twin = copy.deepcopy(policy).double()
        twin.zero_grad()
        total = 0.0
        for i, length in enumerate(module.row_lengths(rows).tolist()):
            log_probs = twin(rows["input_ids"][i:i + 1, :length]).logits[0].log_softmax(-1)
            for t in range(length):
                if rows["response_mask"][i, t]:
                    now = log_probs[t, rows["labels"][i, t]]
                    old = rows["old_log_probs"][i, t] if "old_log_probs" in rows else now.detach()
                    sampler = rows["rollout_log_probs"][i, t]
                    ratio = torch.exp(now - old)
                    advantage = rows["advantages"][i, 0] * torch.exp(old - sampler).clamp(max=2)
                    total = total - torch.minimum(ratio * advantage,
                                                  ratio.clamp(0.8, 1.2) * advantage)
        (total * 4 / n_tokens).backward()
        wanted = [parameter.grad for parameter in twin.parameters()]
        scale = max(x.abs().max() for x in wanted)
        error = max((x - y).abs().max() for x, y in zip(found, wanted)) / scale
        of_each.append(("old_log_probs" in rows, len(rows["labels"]),
                        int(rows["response_mask"].sum()), error.item()))
        return result

    def weights(mask, *args):
        nonlocal n_tokens
        n_tokens = int(mask.sum())
        return starter_weights(mask, *args)

    n_tokens = None
    starter_step, starter_weights = module.grpo_microbatch_step, module.token_weights
    monkeypatch.setattr(module, "grpo_microbatch_step", step)
    monkeypatch.setattr(module, "token_weights", weights)
    module.main(**settings(checkpoint, tmp_path / "runs", n_train_steps=1, learning_rate=1e-2,
                           epochs_per_rollout=epochs, max_tokens_per_microbatch=10_000))
    assert [given for given, *_ in of_each] == [False, True, True, True, *[True] * 4][:4 * epochs]
    assert sum(rows for _, rows, *_ in of_each) == 16 * epochs
    assert sum(tokens for _, _, tokens, _ in of_each) == n_tokens * epochs
    assert max(error for *_, error in of_each) < 1e-4


def test_distillation_moves_the_policy_towards_the_teacher(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "runs" / "earlier" / "model", seed=1)
    module = load("distillation", tmp_path)
    run = module.main(**settings(checkpoint, tmp_path / "out", n_train_steps=30, kl_coef=1.0,
                                 learning_rate=3e-3))
    kl = list(scalars(run["run_folder"])["train/kl_per_token"].values())
    assert kl[-1] < 0.7 * kl[0]


def test_distillation_refuses_a_teacher_with_other_tokens(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "runs" / "earlier" / "model", vocab_size=100)
    module = load("distillation", tmp_path)
    with pytest.raises(module.InputError, match="the teacher knows 100 tokens"):
        module.main(**settings(checkpoint, tmp_path / "out"))


def test_distillation_says_when_there_is_no_teacher(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load("distillation", tmp_path).teacher("start")
    assert capsys.readouterr().out == "no teacher in runs/: nothing will be learnt\n"


def test_moving_reference_is_reset_and_survives_a_resume(checkpoint, tmp_path):
    module = load("moving_reference", tmp_path,
                  **{"REFERENCE_EVERY = 50": "REFERENCE_EVERY = 2"})
    given = dict(n_train_steps=5, save_every=1, learning_rate=1e-2, kl_coef=0.1)
    whole = module.main(**settings(checkpoint, tmp_path / "whole", **given))
    kl = scalars(whole["run_folder"])["train/kl_per_token"]
    assert kl[2] > 1e-4 and kl[4] > 1e-4  # it has moved
    assert kl[3] == pytest.approx(0, abs=1e-6) and kl[5] == pytest.approx(0, abs=1e-6)
    halves = settings(checkpoint, tmp_path / "halves", **given)
    module.main(**halves | {"n_train_steps": 3})
    resumed = module.main(**halves, resume=True)
    for tag in ("train/loss", "train/kl_per_token"):
        of_both = [scalars(run["run_folder"])[tag] for run in (whole, resumed)]
        assert of_both[0] == of_both[1]


def test_calculator_answers_calls_and_its_tokens_are_masked(tmp_path):
    module = load("calculator", tmp_path)
    class Tokenizer:
        def decode(self, ids):
            return "".join(map(chr, ids))

        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(map(ord, text))}

    tokenizer = Tokenizer()
    texts = ["so <calc>2+3*4</calc> cut off", "no call", "<calc>2+</calc>"]
    asked = []

    def sample(policy, prompts, sampling):
        asked.append((prompts, sampling))
        if len(asked) == 1:
            ids = [list(map(ord, text)) for text in texts]
        else:
            ids = [list(map(ord, "ok"))] * len(prompts)
        return [module.Response(prompts[i // sampling.group_size], response, [-1.0] * len(response),
                                True) for i, response in enumerate(ids)]

    parts = SimpleNamespace(ranks=module.OneProcess(), compute=SimpleNamespace(rollout=sample),
                            run=SimpleNamespace(tokenizer=tokenizer))
    sampling = module.Sampling(3, 40, 1.0, 0, (0,))
    responses = module.rollout(None, None, [[65, 66]], sampling, parts)
    said = [tokenizer.decode(r.response_ids) for r in responses]
    assert said == ["so <calc>2+3*4</calc> = 14 ok", "no call", "<calc>2+</calc> = error ok"]
    assert [tokenizer.decode(ids) for ids in asked[1][0]] == [
        "ABso <calc>2+3*4</calc> = 14 ", "AB<calc>2+</calc> = error "]
    assert asked[1][1].seed != sampling.seed and len(responses[0].prompt_ids) == 2
    batch = module.make_batch(responses, torch.zeros(3), "cpu")
    for row, (response, text) in enumerate(zip(responses, said)):
        mask = batch["response_mask"][row]
        learnt = tokenizer.decode(batch["labels"][row][mask].tolist())
        result = text[text.index(" = "):-2] if " = " in text else None
        assert learnt == (text if result is None else text.replace(result, "", 1))
        assert len(response.log_probs) == len(response.response_ids)
