"""What a person changes in starter.py is what runs, without support/ and with it.

Each edit is made in the text of a copy, at as many places as it has texts in EDITS, two at most,
and trained with for a few steps. The gradients must be those of a loss that is written out here,
from the model's own logits for the sampled responses.
"""

import functools
import sys
from types import SimpleNamespace
from typing import Callable, NamedTuple
from unittest import mock

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

from conftest import (
    advantages_by_loops,
    at_each_call,
    gradient_of,
    often_equal,
    save_checkpoint,
    scalars,
    settings,
)
from forked import edited_text, import_copy, in_forks, write_copy

import starter

ZERO = 33  # the token "0", which the checkpoint samples often


# The (B, T) losses of tokens, written out. x: what compare_with_loss() knows of a step.


def policy_loss(x):
    return -x.advantages * x.log_probs


def with_exact_kl(x, weight=1.0):
    return policy_loss(x) + x.beta * weight * x.kl


def with_kl_in_the_reward_of_winners(x):
    kl = torch.where(x.mask, x.sampler_log_probs - x.ref_log_probs, 0.0)
    to_go = kl.flip(1).cumsum(1).flip(1)
    return policy_loss(x) + x.beta * to_go * (x.advantages > 0) * x.log_probs


def with_entropy_bonus(x):
    return policy_loss(x) - x.entropy


def with_supervised_term(x):
    is_right = torch.tensor(x.rewards)[:, None] > 0.4
    return policy_loss(x) - 0.5 * is_right * x.log_probs


def with_sampled_kl(x):
    d = (x.log_probs - x.ref_log_probs).detach()
    return policy_loss(x) + x.beta * d * x.log_probs


def with_kl_in_the_reward(x):
    kl = torch.where(x.mask, x.sampler_log_probs - x.ref_log_probs, 0.0)
    return policy_loss(x) + x.beta * kl.flip(1).cumsum(1).flip(1) * x.log_probs


def of_second_epoch_near_the_first(x):
    ratio = (x.log_probs - x.first_log_probs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * x.advantages, clipped * x.advantages)
    return loss + 50 * (x.log_probs - x.first_log_probs).square()


# The edits


def ids_of(run):
    return [response.response_ids for step in run.steps for response in step.responses]


def n_zeros(run):
    return sum(ids_of(run), []).count(ZERO)


def zeros_earn_but_not_in_other_skills(run):
    other_skills = run.logged.get("eval/retention_sort", [0.0])  # alone there are none
    assert run.logged["eval/solved"][-1] > 0 == other_skills[-1]
    return 16 * sum(run.logged["train/reward_mean"]) == pytest.approx(n_zeros(run))


def logged_ranks_are_those_of_the_tables(run):
    means = [step.ranks.float().mean().item() for step in run.steps]
    return run.logged["train/rank"] == pytest.approx(means)


def coefficient_is_not_compounded(run):
    betas = run.logged["adaptive_kl/current_beta"]
    return [betas[i] / betas[0] for i in range(3)] == pytest.approx([1.0, 8 / 9, 7 / 9])


def coefficient_rises(run):
    return run.logged["adaptive_kl/current_beta"] == pytest.approx([0.3, 0.6, 0.9])


def above_the_batch(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def moves_by_sgd(run):
    first, second = run.steps[:2]
    expected = first.weights - run.logged["train/lr"][0] * first.gradient
    return torch.allclose(second.weights, expected, rtol=0, atol=1e-6)


class Edit(NamedTuple):
    """One edit of an idea: {a text that occurs once in starter.py: the text in its place}."""

    replaced: dict
    loss: Callable = policy_loss
    settings: dict = {}  # of main()
    check: Callable = lambda run: True  # of what train() returns
    says: str = (
        ""  # in the log, with support/; "" is that nothing is said of an edit without a part
    )
    scale: Callable = lambda logits: logits  # (B, T, V), of policy and reference
    references: tuple = (1.0,)  # by what the weights are multiplied of those that are averaged
    averaged: str = "logits"  # or "log_probs"
    advantages: Callable = lambda rewards: advantages_by_loops(rewards, 4, 1e-6, True)


KL = dict(use_kl_penalty=True, kl_coef=0.3, kl_estimator="exact")
LOSS = '    loss = torch.where(mask, loss * microbatch["weights"], 0.0).sum()\n'
BATCH = "batch = make_batch(responses, advantages, policy.device)"
REFERENCE = "        ref_model = copy.deepcopy(policy).eval().requires_grad_(False)\n"
SECOND = """\
        second = copy.deepcopy(ref_model)
        for parameter in second.parameters():
            parameter /= 2
"""
REF_LOGITS = "            ref_logits = response_logits(ref_model, rows, precision)\n"
STATISTICS = '        "entropy": -(log_p.exp() * log_p).sum(dim=1),\n'
WINNERS = {
    "            kl_loss = kl_coef * kl\n": """\
            kl_loss = kl_coef * kl * (advantages > 0)
""",
    "            advantages = advantages - kl_coef * charged\n": """\
            advantages = advantages - kl_coef * charged * (advantages > 0)
""",
}

CUT = "        microbatches = cut_microbatches(rows, cfg.max_tokens_per_microbatch)\n"

EDITS = dict(
    rows_without_an_advantage_pay_for_their_length=Edit(
        {
            CUT: CUT
            + """\
        for some in microbatches:
            lengths = some["response_mask"].sum(dim=1, keepdim=True)
            some["advantages"] = some["advantages"] - 0.05 * lengths
"""
        },
        lambda x: (0.05 * x.mask.sum(dim=1, keepdim=True) - x.advantages) * x.log_probs,
        {"reward": often_equal},
    ),
    top_k=Edit(
        {
            "        tokens = draw_from(probs, uniform)": """\
        kept = probs >= probs.topk(2).values[:, -1:]
        tokens = draw_from(probs * kept, uniform)"""
        },
        check=lambda run: max(step.ranks.max() for step in run.steps) == 1,
    ),
    z_loss=Edit(
        {
            STATISTICS: STATISTICS
            + '        "log_z": scale_logits(logits, temperature).logsumexp(dim=1),\n',
            LOSS: '    loss = loss + stats["log_z"].square()\n' + LOSS,
        },
        lambda x: policy_loss(x) + x.logits.logsumexp(2).square(),
        check=lambda run: run.logged["train/log_z"][0] != 0,
    ),
    first_three_tokens_at_another_temperature=Edit(
        {
            "draw_tokens(logits, uniform[:, t, None], temperature)": (
                "draw_tokens(logits, uniform[:, t, None], temperature * (0.5 if t < 3 else 1))"
            ),
            "    stats = statistics_of_logits(logits, rows": """\
    is_early = mask.cumsum(dim=1)[mask] <= 3
    logits = logits / torch.where(is_early, 0.5, 1.0)[:, None]
    stats = statistics_of_logits(logits, rows""",
        },
        scale=lambda logits: torch.cat([logits[:, :3] / 0.5, logits[:, 3:]], dim=1),
        check=lambda run: max(run.logged["train/sampler_logprob_diff"]) < 1e-4,
    ),
    half_weight_for_losers=Edit(
        {
            "    return loss + kl_loss, means": """\
    loss = loss * torch.where(advantages < 0, 0.5, 1.0)
    return loss + kl_loss, means""",
        },
        lambda x: policy_loss(x) * torch.where(x.advantages < 0, 0.5, 1.0),
    ),
    kl_of_winners=Edit(WINNERS, lambda x: with_exact_kl(x, x.advantages > 0), KL),
    kl_in_the_reward_of_winners=Edit(
        WINNERS,
        with_kl_in_the_reward_of_winners,
        KL | dict(kl_estimator="k1", kl_in="reward"),
    ),
    coefficient_by_length=Edit(
        {
            "        kl_coef=kl_coef,\n        mask=mask,\n": """\
        kl_coef=kl_coef * mask.sum(dim=1, keepdim=True),
        mask=mask,
"""
        },
        lambda x: with_exact_kl(x, x.lengths),
        KL,
    ),
    two_references=Edit(
        {
            REF_LOGITS: REF_LOGITS
            + """\
            second = copy.deepcopy(ref_model)
            for parameter in second.parameters():
                parameter /= 2
            ref_logits = (ref_logits + response_logits(second, rows, precision)) / 2
"""
        },
        with_exact_kl,
        KL,
        references=(1.0, 0.5),
    ),
    two_references_in_a_module=Edit(
        {
            REFERENCE: REFERENCE
            + """\

        class Two(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.models = torch.nn.ModuleList([ref_model, copy.deepcopy(ref_model)])
                for parameter in self.models[1].parameters():
                    parameter /= 2

            def forward(self, **inputs):
                first, second = (model(**inputs).logits for model in self.models)
                return SimpleNamespace(logits=(first + second) / 2)

        ref_model = Two()
"""
        },
        with_exact_kl,
        KL,
        references=(1.0, 0.5),
    ),
    second_reference_in_its_forward=Edit(
        {
            REFERENCE: REFERENCE
            + SECOND
            + """\
        own_forward = ref_model.forward

        def forward(**inputs):
            outputs = own_forward(**inputs)
            outputs.logits = (outputs.logits + second(**inputs).logits) / 2
            return outputs

        ref_model.forward = forward
"""
        },
        with_exact_kl,
        KL,
        references=(1.0, 0.5),
    ),
    second_reference_in_a_hook=Edit(
        {
            REFERENCE: REFERENCE
            + SECOND
            + """\

        def mix(model, arguments, inputs, outputs):
            outputs.logits = (outputs.logits + second(**inputs).logits) / 2
            return outputs

        ref_model.register_forward_hook(mix, with_kwargs=True)
"""
        },
        with_exact_kl,
        KL,
        references=(1.0, 0.5),
    ),
    second_reference_in_the_statistics=Edit(
        {
            "    zeros = torch.zeros(mask.shape, dtype=stats": """\
    if ref_model is not None:
        second = copy.deepcopy(ref_model)
        for parameter in second.parameters():
            parameter /= 2
        other = statistics_of_logits(
            response_logits(second, rows, precision), rows["labels"][mask], temperature
        )
        stats["ref_log_probs"] = (stats["ref_log_probs"] + other["log_probs"]) / 2
    zeros = torch.zeros(mask.shape, dtype=stats"""
        },
        with_sampled_kl,
        KL | dict(kl_estimator="k3"),
        references=(1.0, 0.5),
        averaged="log_probs",
    ),
    logged_rank=Edit(
        {
            STATISTICS: STATISTICS
            + '        "rank": (log_p > log_p.gather(1, labels)).sum(dim=1),\n'
        },
        with_exact_kl,
        KL,  # without it rows that have no advantage are left out
        logged_ranks_are_those_of_the_tables,
    ),
    forbidden_token=Edit(
        {
            "    if temperature > 0:  # what is greedy": """\
    logits = logits.index_fill(1, torch.tensor([33]), -math.inf)
    if temperature > 0:  # what is greedy"""
        },
        with_exact_kl,
        KL,
        check=lambda run: n_zeros(run) == 0,
        scale=lambda logits: logits.index_fill(2, torch.tensor([ZERO]), -1e30),
    ),
    advantages_of_tokens=Edit(
        {
            BATCH: """\
longest = max(len(response.response_ids) for response in responses)
        advantages = advantages[:, None] * torch.arange(longest)
        batch = make_batch(responses, advantages, policy.device)"""
        },
        lambda x: policy_loss(x) * torch.arange(x.mask.shape[1]),
    ),
    reward_in_place=Edit(
        {
            "    return score_answer(response_text, problem)": """\
    return response_text.count("0")"""
        },
        settings=dict(reward=None),
        check=zeros_earn_but_not_in_other_skills,
    ),
    reward_that_is_no_function=Edit({}, settings=dict(reward=functools.partial(often_equal))),
    new_average=Edit(
        {
            "AVERAGES = {": """\
AVERAGES = {
    "new": lambda mask, n: mask / len(mask) / mask.sum(1, keepdim=True) ** 0.5,
    """
        },
        lambda x: policy_loss(x) * x.mask.sum() / x.lengths.sqrt() / len(x.mask),
        dict(loss_average="new"),
    ),
    new_estimator=Edit(
        {"ESTIMATORS = {": 'ESTIMATORS = {"new": lambda d: 2 * d.square(), '},
        lambda x: policy_loss(x) + x.beta * 2 * (x.log_probs - x.ref_log_probs).square(),
        KL | dict(kl_estimator="new", kl_gradient="as_written"),
    ),
    entropy_bonus=Edit(
        {LOSS: '    loss = loss - stats["entropy"]\n' + LOSS},
        with_entropy_bonus,
        dict(reward=often_equal),
    ),
    supervised_term_on_right_answers=Edit(
        {
            "        rows = rows_to_train_on(": """\
        batch["correct"] = (rewards > 0.4).float()[:, None]
        rows = rows_to_train_on(""",
            LOSS: '    loss = loss - 0.5 * microbatch["correct"] * log_probs\n' + LOSS,
        },
        with_supervised_term,
        dict(reward=often_equal),
    ),
    kl_of_winners_where_it_is_not_charged=Edit(
        {
            "            kl_loss = kl_coef * kl\n": """\
            kl_loss = kl_coef * kl * (advantages > 0)
"""
        },
        with_kl_in_the_reward,
        KL | dict(kl_estimator="k1", kl_in="reward"),
        says="edited, but without a part in this step: compute_loss;",
    ),
    statistic_in_a_reward=Edit(
        {
            "        advantages, metrics = compute_group": """\
        scored = make_batch(responses, torch.zeros(len(responses)), policy.device)
        likelihood = token_statistics(policy, scored, cfg.temperature)["log_probs"].sum(dim=1)
        rewards = rewards + likelihood.detach().double()
        advantages, metrics = compute_group"""
        },
        check=lambda run: min(min(step.rewards) for step in run.steps) < -5,
    ),
    last_layer_alone_in_the_optimizer=Edit(
        {
            "    optimizer = torch.optim.AdamW(": """\
    trainable = [*policy.model.layers[-1].parameters()]
    optimizer = torch.optim.AdamW("""
        },
        check=lambda run: not torch.equal(run.steps[0].weights, run.steps[1].weights),
    ),
    kept_for_the_second_epoch=Edit(
        {
            '    old_log_probs = microbatch["old_log_probs"]\n': """\
    old_log_probs = microbatch["old_log_probs"]
    first = microbatch.setdefault("first", log_probs.detach())
""",
            LOSS: "    loss = loss + 50 * (log_probs - first).square()\n" + LOSS,
        },
        of_second_epoch_near_the_first,
        dict(epochs_per_rollout=2, importance_cap=1e9),
    ),
    coefficient_changed_in_the_loop=Edit(
        {
            "            beta = kl_coef\n": """\
            kl_coef = 0.3 * step
            beta = kl_coef
"""
        },
        with_exact_kl,
        KL,
        check=coefficient_rises,
    ),
    coefficient_of_a_schedule=Edit(
        {"            beta = kl_coef\n": "            beta = kl_coef * (1 - step / 10)\n"},
        with_exact_kl,
        KL,
        check=coefficient_is_not_compounded,
    ),
    metric_named_solved=Edit(
        {
            "        metrics = joined(metrics, others)": """\
        metrics["solved"] = (rewards >= 0.5).float().mean().item()
        metrics = joined(metrics, others)"""
        },
        check=lambda run: (
            run.logged["train/solved"]
            == pytest.approx([sum(r >= 0.5 for r in step.rewards) / 16 for step in run.steps])
        ),
    ),
    own_baseline=Edit(
        {
            BATCH: """\
advantages = rewards - rewards.mean()
        batch = make_batch(responses, advantages, policy.device)"""
        },
        advantages=above_the_batch,
    ),
    new_parameter=Edit(
        {
            '    loss_average="dapo",': '    loss_scale=2.0,\n    loss_average="dapo",',
            'loss * microbatch["weights"]': 'cfg.loss_scale * loss * microbatch["weights"]',
        },
        lambda x: 2 * policy_loss(x),
    ),
    learning_rate_schedule=Edit(
        {"return rising * (FINAL_RATE + (1 - FINAL_RATE) * (1 + cosine) / 2)": "return 1 / step"},
        check=lambda run: run.logged["train/lr"] == pytest.approx([0.01, 0.005, 0.01 / 3]),
    ),
    other_optimizer=Edit(
        {
            """\
torch.optim.AdamW(
        trainable,
        cfg.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=cfg.weight_decay,
        fused=True,
    )""": "torch.optim.SGD(trainable, cfg.learning_rate)"
        },
        settings=dict(max_grad_norm=1e9),
        check=moves_by_sgd,
    ),
    stop_after_a_token=Edit(
        {"torch.isin(tokens, stop_tokens)": "(torch.isin(tokens, stop_tokens) | (tokens == 33))"},
        check=lambda run: all(ZERO not in ids[:-1] for ids in ids_of(run)),
    ),
    metric_of_your_own=Edit(
        {
            "        metrics = joined(metrics, others)": """\
        metrics["zeros"] = sum(response.response_ids.count(33) for response in responses)
        metrics = joined(metrics, others)"""
        },
        check=lambda run: sum(run.logged["train/zeros"]) == n_zeros(run),
    ),
)


# Edits whose log-probs or batches the quick tests do not know
FAILING_QUICK_TESTS = (
    "first_three_tokens_at_another_temperature",
    "supervised_term_on_right_answers",
)


# A run, in a process of its own


def train(starter, checkpoint, folder, **changes):
    """A few steps with this module. Returns what it logged, and of each step the responses and
    rewards, and the policy's weights and gradient before the update."""
    # A stand-in for vLLM: without an engine it is transformers that samples.
    sys.modules["vllm"] = mock.MagicMock(__spec__=True, LLM=lambda *args, **options: None)
    starter.test_functions()
    if starter.find_support():
        report = sys.modules["support.report"]
        for name in ("write_report", "log_hparams", "draw"):  # its pictures take a second
            setattr(report, name, mock.Mock(__name__=name))
        sys.modules["support.engines"].ON_CPU = True
    steps = [{}]  # what support/ tries before the first one

    def keep_policy(policy, *others):
        steps[0]["policy"] = policy

    def keep_gradient(parameters, max_norm):
        policy = steps[0]["policy"]
        weights = parameters_to_vector(policy.parameters()).detach()
        steps[-1].setdefault("first_weights", weights)  # of the first epoch
        steps[-1].update(weights=weights, gradient=gradient_of(policy))

    def keep_responses(responses, *others):
        steps[-1].setdefault("responses", responses)  # an edit may make another batch later on

    def keep_rewards(rewards, *others):
        steps.append({"rewards": rewards.tolist()})

    at_each_call(starter, "rollout", keep_policy)
    at_each_call(starter, "compute_group_normalized_advantages", keep_rewards)
    at_each_call(starter, "make_batch", keep_responses)
    at_each_call(starter, "clip_gradient", keep_gradient)
    given = {"n_train_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, **changes}
    given = settings(checkpoint, folder, **given)
    given["reward"] = given["reward"] or starter.reward_fn
    logged = scalars(starter.main(**given)["run_folder"])
    logged = {tag: list(values.values()) for tag, values in logged.items()}
    return SimpleNamespace(logged=logged, steps=[SimpleNamespace(**step) for step in steps[1:]])


def padded(rows):
    return pad_sequence([*map(torch.tensor, rows)], True)


def logits_of(model, weights, responses):
    """The (B, T, V) logits at the tokens of each response, by the model with these weights."""
    vector_to_parameters(weights, model.parameters())
    rows = []
    for response in responses:
        ids = torch.tensor([response.prompt_ids + response.response_ids])
        rows.append(model(ids).logits[0, len(response.prompt_ids) - 1 : -1])
    return pad_sequence(rows, True)


def compare_with_loss(checkpoint, folder, name):
    """Trains with an edit, and asserts of each step that its gradient and its KL are right."""
    edit = EDITS[name]
    starter = import_copy(folder)
    run = train(starter, checkpoint, f"{folder}/runs", **edit.settings)
    model, _ = starter.init_policy(checkpoint, "cpu")
    at_start = run.steps[0].weights
    for i, x in enumerate(run.steps):
        labels = padded([response.response_ids for response in x.responses])
        x.sampler_log_probs = padded([response.log_probs for response in x.responses])
        x.lengths = torch.tensor([[len(response.response_ids)] for response in x.responses])
        x.mask = torch.arange(labels.shape[1]) < x.lengths
        x.advantages = torch.tensor(edit.advantages(x.rewards))[:, None]
        of_references = [logits_of(model, at_start * y, x.responses) for y in edit.references]
        ref_logits = sum(of_references).detach() / len(of_references)
        x.logits = logits_of(model, x.weights, x.responses)
        log_p, log_q = (edit.scale(y).log_softmax(dim=2) for y in (x.logits, ref_logits))
        x.log_probs, x.ref_log_probs = (
            y.gather(2, labels[..., None])[..., 0] for y in (log_p, log_q)
        )
        x.first_log_probs = x.log_probs.detach()
        if not torch.equal(x.first_weights, x.weights):
            first = edit.scale(logits_of(model, x.first_weights, x.responses)).log_softmax(dim=2)
            x.first_log_probs = first.gather(2, labels[..., None])[..., 0].detach()
            vector_to_parameters(x.weights, model.parameters())
        if edit.averaged == "log_probs":
            of_each = [y.log_softmax(dim=2).gather(2, labels[..., None]) for y in of_references]
            x.ref_log_probs = (sum(of_each) / len(of_each))[..., 0].detach()
        x.kl = (log_p.exp() * (log_p - log_q)).sum(dim=2)
        x.entropy = -(log_p.exp() * log_p).sum(dim=2)
        x.ranks = (log_p > x.log_probs[..., None]).sum(dim=2)[x.mask]
        if "kl_coef" in edit.settings:  # the sampled KL has the same reference
            x.beta = run.logged["adaptive_kl/current_beta"][i]
            k1 = (x.log_probs - x.ref_log_probs)[x.mask].mean().item()
            assert run.logged["train/kl_k1"][i] == pytest.approx(k1, abs=1e-4)
        model.zero_grad()
        edit.loss(x)[x.mask].mean().backward()
        expected = gradient_of(model)
        error = (x.gradient - expected).norm() / expected.norm().clamp(min=1e-6)
        assert error < 1e-3, f"step {i + 1}"
    assert edit.check(run)


# The tests

ALL = [*EDITS]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "names, with_support",
    [
        (["entropy_bonus"], True),
        pytest.param(ALL, True, marks=slow),
        pytest.param(ALL, False, marks=slow),
    ],
)
def test_edits_take_effect(names, with_support, tmp_path):
    model = save_checkpoint(tmp_path / "model")
    skills = [f'{{"prompt": "sort {i}", "answer": 1, "skill": "sort"}}\n' for i in range(20)]
    (model / "retention.jsonl").write_text("".join(skills))
    calls = []
    for name in names:
        text = edited_text(EDITS[name].replaced)
        calls.append((str(model), write_copy(tmp_path / name, text, with_support), name))
    for name, outcome in zip(names, in_forks("test_edits", "compare_with_loss", calls, tmp_path)):
        printed = outcome["stdout"]
        assert outcome["status"] == 0, name + printed[-2000:] + outcome["stderr"][-3000:]
        if with_support:
            says = EDITS[name].says or "edited, but without"
            assert (says in printed) == (EDITS[name].says != ""), name
            assert "repeated without support/" not in printed, name
        fails_quick_tests = name in FAILING_QUICK_TESTS
        assert ("FAILED: test_" in printed) == fails_quick_tests, name


def run_with_mechanics_edited(checkpoint, folder):
    """Each function that support/ may replace is another one, which calls starter.py's own."""
    starter = import_copy(folder)
    edited = {}
    for name in starter.MECHANICS:
        edited[name] = mock.Mock(side_effect=starter.MECHANICS[name])
    vars(starter).update(edited)
    train(starter, checkpoint, folder)
    not_called = {name for name in edited if not edited[name].called}
    assert not_called == {"init_vllm", "load_policy_into_vllm_instance", "load_checkpoint"}


@slow
def test_edited_mechanics_run_in_the_place_of_those_of_support(checkpoint, tmp_path):
    call = str(checkpoint), write_copy(tmp_path / "copy", edited_text({}), True)
    [outcome] = in_forks("test_edits", "run_with_mechanics_edited", [call], tmp_path)
    assert outcome["status"] == 0, outcome["stderr"]


@slow
def test_function_that_is_set_between_two_runs_runs_in_the_second(
    checkpoint, tmp_path, monkeypatch
):
    """As in a notebook, where the first run has put support/'s around it."""
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=1))
    calls = []
    own = starter.compute_group_normalized_advantages  # its own again

    def kept(*arguments):
        calls.append(1)
        return own(*arguments)

    monkeypatch.setattr(starter, "compute_group_normalized_advantages", kept)
    starter.main(**settings(checkpoint, tmp_path, n_train_steps=2))
    assert len(calls) == 2
