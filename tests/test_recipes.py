"""Each recipe fits starter.py, computes its formula (loops in float64), and trains."""
import importlib.util
import inspect
import itertools
import math
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from conftest import scalars, settings, small_sums, variety
from forked import REPOSITORY, import_copy, import_once, in_new_process, run_all, write_copy

pytestmark = pytest.mark.slow  # an edit of lines that a recipe changes is stopped by CI only
RECIPES = REPOSITORY / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.patch"))
TEXT = (REPOSITORY / "starter.py").read_text("utf-8")
PAIRS = ["+".join(pair) for pair in itertools.product(  # of an advantage and a loss
    ("rloo", "maxrl", "length_reward"), ("gspo", "cispo", "entropy_bonus"))]
SAME_LINES = [{"cispo", "gspo"}, {"curriculum", "off_policy"}]


def git_apply(name, folder):
    """Does what recipes/README.md says, in this folder. Returns whether it worked."""
    return subprocess.run(["git", "apply", str(RECIPES / f"{name}.patch")], cwd=folder,
                          capture_output=True).returncode == 0


def load(name, folder):
    """starter.py with a recipe in it, as a module of its own without support/."""
    (folder / "starter.py").write_text(TEXT, "utf-8")
    assert git_apply(name, folder)
    spec = importlib.util.spec_from_file_location(f"starter_{name}", folder / "starter.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module}):
        spec.loader.exec_module(module)
    module.DEFAULTS = {name: parameter.default for name, parameter
                       in inspect.signature(module.main).parameters.items()}
    return module


@pytest.mark.parametrize("pair", itertools.combinations(NAMES, 2), ids="+".join)
def test_two_recipes_apply_together_unless_they_change_the_same(pair, tmp_path):
    (tmp_path / "starter.py").write_text(TEXT, "utf-8")
    assert [git_apply(name, tmp_path) for name in pair] == [True, {*pair} not in SAME_LINES]


TURNS = dict(max_new_tokens=24, environment=lambda problem: mock.Mock(  # tells lengths, twice
    step=lambda text, done=iter((False, False, True)): (str(len(text)), next(done))))
def train_all(checkpoint, folders):
    import_once()
    return run_all([lambda folder=Path(folder): import_copy(folder).main(**settings(
        checkpoint, folder / "out", n_train_steps=3, save_every=2,
        **TURNS if "multi_turn" in folder.name else {})) for folder in folders])


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """{(recipe, with support/): (folder, outcome of training in it)}"""
    root = tmp_path_factory.mktemp("recipes")
    keys = list(itertools.product(NAMES + PAIRS, (False, True)))
    folders = [write_copy(root / f"{name}{support}", TEXT, support) for name, support in keys]
    for (names, _), folder in zip(keys, folders):
        assert all(git_apply(name, folder) for name in names.split("+"))
    outcomes = in_new_process("test_recipes", "train_all", root, REPOSITORY, str(checkpoint),
                              list(map(str, folders)))
    return dict(zip(keys, zip(folders, outcomes)))


@pytest.mark.parametrize("name", NAMES + PAIRS)
def test_recipe_trains_alike_with_and_without_support(name, trained):
    page = (RECIPES / "README.md").read_text("utf-8")
    assert name in PAIRS or f"\n## {name}\n\n`recipes/{name}.patch`" in page
    logs = []
    for with_support in (False, True):
        folder, outcome = trained[name, with_support]
        assert outcome["status"] == 0, outcome["stderr"][-2000:]
        logs.append(scalars(*(folder / "out").iterdir()))
    for tag in ("train/loss", "train/grad_norm", "train/reward_mean"):
        alone, supported = ([*log[tag].values()] for log in logs)
        assert alone == pytest.approx(supported, rel=2e-3, abs=1e-6) and len(alone) == 3
    assert max(logs[0]["train/grad_norm"].values()) > 0


def test_moving_reference_is_refused_with_adapters(tmp_path, monkeypatch):
    module = load("moving_reference", tmp_path)
    monkeypatch.setattr(module, "find_support", lambda: "as if it were there")
    with pytest.raises(module.InputError, match="use lora_rank = 0"):
        module.cfg_with(lora_rank=8)


@pytest.mark.parametrize("name", ["rloo", "maxrl"])
def test_advantages_equal_the_formula(name, tmp_path):
    groups = [[0.0, 1.0, 0.1, 1.0], [0.5] * 4]
    expected = [{"rloo": reward - (sum(group) - reward) / 3,  # less the mean of the others
                 "maxrl": (reward - sum(group) / 4) / (sum(group) / 4 + 1e-6)}[name]
                for group in groups for reward in group]
    module = load(name, tmp_path)
    found, _ = module.compute_group_normalized_advantages(
        torch.tensor(groups).flatten(), 4, 1e-6, module.DEFAULTS["normalize_by_std"])
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_length_reward_equals_the_formula_and_leaves_what_is_solved(tmp_path):
    module = load("length_reward", tmp_path)
    responses = [module.Response([5], [7] * n, [], True) for n in range(1, 21)]
    tokenizer = mock.Mock(batch_decode=lambda ids, **how: ["<answer>7</answer>"] * len(ids))
    _, rewards, solved, _ = module.score(responses, [{"answer": "7"}], tokenizer,
                                         module.cfg_with(max_new_tokens=20).reward)
    by_hand = [1.0 if n <= 16 else 1 - 0.5 * (n - 16) / 4 for n in range(1, 21)]
    assert rewards.tolist() == pytest.approx(by_hand) and solved.all()


def test_token_advantages_are_the_discounted_rewards_still_to_come(checkpoint, tmp_path):
    module = load("token_advantages", tmp_path)
    module.make_batch = mock.Mock(wraps=module.make_batch)
    module.main(**settings(checkpoint, tmp_path, normalize_by_std=False, reward=lambda text,
                           problem, response: len(response.response_ids)))
    for responses, advantages, _ in [call.args for call in module.make_batch.call_args_list]:
        lengths = [len(r.response_ids) for r in responses]
        for i, n in enumerate(lengths):
            by_hand = [(n - sum(lengths[i // 4 * 4:][:4]) / 4) * 0.99**t for t in range(n)][::-1]
            assert advantages[i, :n].tolist() == pytest.approx(by_hand, abs=1e-5)


def test_curriculum_draws_by_solve_rate_and_a_resumed_run_repeats_it(checkpoint, tmp_path):
    module = load("curriculum", tmp_path)
    scored = []  # (prompt, whether it is solved): ten of the evaluation, 16 of each step

    def reward(text, problem):
        scored.append((problem["prompt"], float(text < "h") * (int(problem["answer"]) % 2)))
        return scored[-1][1]

    whole, resumed = whole_and_resumed(module, checkpoint, tmp_path, reward=reward)
    assert whole["train/loss"] == resumed["train/loss"]
    rates = {x["prompt"]: 0.5 for x in small_sums(None)[0]}
    for step in range(1, 7):
        weights = [p * (1 - p) + 0.03 for p in rates.values()]
        prompts = module.random.Random(f"0 {step}").choices([*rates], weights, k=4)
        for i, prompt in enumerate(prompts):
            of_group = scored[16 * step - 6 + 4 * i:][:4]
            assert {prompt for prompt, _ in of_group} == {prompt}
            rates[prompt] = sum(solved for _, solved in of_group) / 4
    assert {0.0, 0.5, 1.0} < {*rates.values()}


def test_cosine_falls_from_the_full_rate_to_a_tenth(checkpoint, tmp_path):
    given = settings(checkpoint, tmp_path, n_train_steps=6, warmup_steps=2, learning_rate=2e-3)
    rates = scalars(load("cosine", tmp_path).main(**given)["run_folder"])["train/lr"]
    shares = [0.5, *(0.55 + 0.45 * math.cos(math.pi / 4 * i) for i in range(5))]
    assert [rate / 2e-3 for rate in rates.values()] == pytest.approx(shares)


# Two responses of 3 and 2 tokens, one better than its group and one worse; exp(2), exp(1.9) are cut
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.7, 0.0]], dtype=torch.double)
NOW = torch.tensor([[-0.9, -2.6, 1.5], [0.4, -3.0, 0.0]], dtype=torch.double, requires_grad=True)
ADVANTAGES = torch.tensor([[0.8], [-1.2]], dtype=torch.double)


def by_hand(name):
    total = 0.0
    for now, old, (a,), n in zip(NOW, OLD, ADVANTAGES, (3, 2)):
        log_ratios = [now[t] - old[t] for t in range(n)]
        if name == "gspo":  # one clipped ratio for a response; mean over responses
            ratio = torch.exp(sum(log_ratios) / n)
            total -= torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a) / 2
        else:  # no gradient through the ratio, which is cut at 5; mean over tokens
            total -= sum(min(x.exp().item(), 5.0) * a * y for x, y in zip(log_ratios, now)) / 5
    return total


@pytest.mark.parametrize("name, n_cut", [("gspo", 5), ("cispo", 2)])
def test_loss_and_gradient_equal_the_formula(name, n_cut, tmp_path):
    module = load(name, tmp_path)
    assert module.DEFAULTS["epochs_per_rollout"] == 2  # at a ratio of 1 nothing is cut
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    loss, metadata = module.compute_loss(ADVANTAGES, NOW, OLD, module.DEFAULTS["clip_range"],
                                         mask=mask)
    total = (loss * module.AVERAGES[module.DEFAULTS["loss_average"]](mask.double(), 3)).sum()
    torch.testing.assert_close(total, by_hand(name))
    torch.testing.assert_close(*(torch.autograd.grad(x, NOW) for x in (total, by_hand(name))))
    assert metadata["clip_frac"].item() == pytest.approx(n_cut / 5)


def test_entropy_bonus_has_the_gradient_of_the_entropy_also_where_a_token_is_forbidden(tmp_path):
    logits = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -math.inf]], requires_grad=True)
    entropy = load("entropy_bonus", tmp_path).statistics_of_logits(
        logits, torch.tensor([0, 1]), 1.0).entropy
    entropy.sum().backward()
    for row, found, gradient in zip(logits.tolist(), entropy.tolist(), logits.grad.tolist()):
        p = [math.exp(x) / sum(map(math.exp, row)) for x in row]
        by_hand = -sum(x * math.log(x) for x in p if x)
        slopes = [-x * (math.log(x) + by_hand) if x else 0.0 for x in p]
        assert [found, *gradient] == pytest.approx([by_hand, *slopes], abs=1e-6)


def whole_and_resumed(module, checkpoint, folder, **changes):
    """-> the scalars of a run of six steps, and of one that is resumed after three."""
    given = settings(checkpoint, folder / "out", learning_rate=1e-2, n_train_steps=6, **changes)
    whole = module.main(**given)
    module.main(**given | dict(n_train_steps=3))
    resumed = module.main(**given, resume=True)  # of the newest
    return scalars(whole["run_folder"]), scalars(resumed["run_folder"])


def test_off_policy_samples_every_fourth_step(checkpoint, tmp_path):
    whole, resumed = whole_and_resumed(
        load("off_policy", tmp_path), checkpoint, tmp_path, reward=lambda text, problem, response:
        variety(text, problem) * (problem["prompt_ids"] == response.prompt_ids))
    differ = [diff > 1e-3 for diff in whole["train/sampler_logprob_diff"].values()]
    assert differ == [False, True, True, True, False, True]
    assert len({*whole["train/reward_mean"].values()}) == 2
    assert whole["train/loss"] == resumed["train/loss"]


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_moving_reference_goes_its_share_of_the_way(checkpoint, tmp_path, monkeypatch, share):
    module = load("moving_reference", tmp_path)
    module.REFERENCE_EVERY, module.REFERENCE_SHARE = 2, share
    real, seen = module.accumulate_gradients, []

    def spy(policy, rows, cfg, ref_model, beta):
        seen.append([parameters_to_vector(x.parameters()).clone() for x in (policy, ref_model)])
        return real(policy, rows, cfg, ref_model, beta)

    monkeypatch.setattr(module, "accumulate_gradients", spy)
    whole, resumed = whole_and_resumed(module, checkpoint, tmp_path)
    assert whole["train/loss"] == resumed["train/loss"]
    for step, ((_, before), (policy, ref)) in enumerate(itertools.pairwise(seen[:6]), 1):
        moved = before if step % 2 else (1 - share) * before + share * policy
        torch.testing.assert_close(ref, moved)
        assert not policy.equal(before)


def test_minibatches_share_a_rollout_among_optimiser_steps(checkpoint, tmp_path, monkeypatch):
    module, plain = (load(name, tmp_path) for name in ("minibatches", "cosine"))
    given = settings(checkpoint, tmp_path, n_train_steps=2, learning_rate=1e-3, loss_average="grpo")
    real, steps = module.accumulate_gradients, []

    def spy(policy, microbatches, *others):
        weights = sum(rows["weights"].sum().item() for rows in microbatches)
        steps.append((sum(len(rows["labels"]) for rows in microbatches), round(weights, 5)))
        return real(policy, microbatches, *others)

    monkeypatch.setattr(module, "accumulate_gradients", spy)
    ratios = scalars(module.main(**given)["run_folder"])["train/ratio_mean"]
    assert steps == [(4, 1.0)] * 8  # 16 responses a step, 4 optimiser steps
    assert all(abs(ratio - 1) > 1e-4 for ratio in ratios.values())
    module.N_MINIBATCHES = 1  # then the first step is that of starter.py
    first, expected = (scalars(x.main(**given | dict(warmup_steps=0))["run_folder"])
                       for x in (module, plain))
    for tag in ("train/loss", "train/grad_norm"):
        assert first[tag][1] == pytest.approx(expected[tag][1], rel=1e-3, abs=1e-6)


# Tokens whose ratio is 1, 0.4, 5.2 and 2; the second response has drifted by 0.1 nats a token
@pytest.mark.parametrize("advantage, weights", [
    (0.8, [[1, 0, 0, 2], [math.exp(-0.1)] * 4]), (-0.8, [[1, 0, 0, 2], [0] * 4])])
def test_sampler_mask_equals_the_formula(advantage, weights, tmp_path, monkeypatch):
    module, seen = load("sampler_mask", tmp_path), []
    now = torch.full((2, 4), -1.0, requires_grad=True)
    ratios = torch.tensor([[1, 0.4, 5.2, 2], [math.exp(-0.1)] * 4])
    mask = torch.ones(2, 4, dtype=torch.bool)
    monkeypatch.setattr(module, "token_statistics", lambda *_: module.TokenStatistics(
        now * 1.0, *[torch.zeros(2, 4)] * 4))
    monkeypatch.setattr(module, "compute_loss", lambda advantages, log_probs, *_, **__: (
        seen.append(advantages) or log_probs, {}))
    module.grpo_microbatch_step(None, dict(
        response_mask=mask, weights=mask.float(), advantages=torch.full((2, 1), advantage),
        rollout_log_probs=now.detach() - ratios.log()), module.cfg_with())
    torch.testing.assert_close(seen[0], advantage * torch.tensor(weights, dtype=torch.float))


def test_conversations_teach_what_was_written_and_not_what_was_read(checkpoint, tmp_path):
    module = load("multi_turn", tmp_path)
    stops = range(1, 58, 4)  # random weights soon end a turn with one of them
    cfg = module.cfg_with(stop_token_ids=tuple(stops), **TURNS)
    policy, tokenizer = module.init_policy(checkpoint, "cpu")
    problems = module.with_prompt_ids(small_sums(cfg)[0][::20], policy, tokenizer, cfg)
    module.seed_for = mock.Mock(wraps=module.seed_for)
    responses = module.rollout(policy, None, [x["prompt_ids"] for x in problems], cfg, 1, 4, 1.0)
    assert len({call.args[1] for call in module.seed_for.call_args_list}) == 3  # of each turn
    batch = module.make_batch(responses, torch.zeros(12), "cpu")
    for r, *found in zip(responses, batch["response_mask"], batch["rollout_log_probs"]):
        rest = r.response_ids
        written = [False] * (len(r.prompt_ids) - 1)
        for turn in range(3):
            n = next((n for n, token in enumerate(rest, 1) if token in stops), len(rest))
            length = len(tokenizer.decode(rest[:n], skip_special_tokens=True))
            read = tokenizer(f"<|user|>{length}<|assistant|>")["input_ids"]
            assert rest[n:n + len(read)] in (read, [])
            written += [True] * n + [False] * len(rest[n:n + len(read)])
            rest = rest[n + len(read):]
        assert r.finished == (n > 0 and r.response_ids[-1] in stops) and sum(written) <= 24
        ids = torch.tensor(r.prompt_ids + r.response_ids)
        table = policy(ids[None, :-1]).logits[0].double().log_softmax(dim=1)
        written = torch.tensor(written).double()
        own = table[range(len(written)), ids[1:]] * written
        torch.testing.assert_close(torch.stack(found)[:, :len(written)].double(),
                                   torch.stack([written, own]), rtol=0, atol=1e-4)


def test_calculator_answers_arithmetic_and_nothing_else(tmp_path, monkeypatch):
    module = load("multi_turn", tmp_path)
    step = module.Calculator({}).step
    pytest.raises(module.InputError, step, "it needs support/")
    monkeypatch.setattr(module, "find_support", lambda: "as if it were there")
    assert step("<calc>12 * (3 + 4)</calc>") == ("84", False) and step("it is 84")[1]
    assert step("<calc>__import__('os')</calc>") == ("not arithmetic", False)
