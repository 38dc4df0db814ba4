"""A teacher as the reference: its KL term, alone and beside a reward, and what a run says of it."""

import itertools

import pytest
import torch
from conftest import gradient_of, make_step, save_checkpoint, scalars, settings
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import starter
from starter import InputError
from support import memory

V = 4  # tokens of the enumeration
PROMPT = [1, 2, 3]


def small_models():
    """A policy and a teacher of another size, with two more logits, in float64."""
    torch.manual_seed(0)
    sizes = dict(n_positions=8, n_layer=1, n_head=1, initializer_range=0.5)
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, **sizes)).double().eval()
    teacher = GPT2LMHeadModel(GPT2Config(vocab_size=V + 2, n_embd=12, **sizes)).double().eval()
    return policy, teacher.requires_grad_(False)


def log_probs_of(model, ids):
    return model(input_ids=torch.tensor([ids])).logits[0, -1, :V].log_softmax(dim=0)


def kl(log_p, log_q, is_forward):
    if is_forward:
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q)).sum()


def divergence_by_enumeration(policy, teacher, kind):
    """Of responses of two tokens: the KL over whole responses, or the sum of those at each state
    that the policy visits, in which the visits have no gradient."""
    visits = log_probs_of(policy, PROMPT).exp()
    if kind != "sequence":
        visits = visits.detach()
    first, *second = (
        kl(log_probs_of(policy, ids), log_probs_of(teacher, ids), kind == "forward")
        for ids in [PROMPT, *([*PROMPT, token] for token in range(V))]
    )
    return first + (visits * torch.stack(second)).sum()


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("states", {"kl_estimator": "k3"}),
        ("states", {"kl_estimator": "exact"}),
        ("forward", {"kl_estimator": "exact_forward"}),
        ("sequence", {"kl_estimator": "k1", "kl_in": "loss_to_go"}),
        ("sequence", {"kl_estimator": "exact", "kl_in": "loss_to_go"}),
    ],
)
def test_expected_gradient_is_that_of_the_kl_to_a_teacher_of_another_size(kind, changes):
    policy, teacher = small_models()
    cfg = starter.cfg_with(precision="float32", use_kl_penalty=True, kl_ratio_cap=99, **changes)
    for response in itertools.product(range(V), repeat=2):
        probability = 1.0
        for t, token in enumerate(response):
            log_probs = log_probs_of(policy, [*PROMPT, *response[:t]])
            probability *= log_probs[token].exp().item()
        # As the policy samples them
        rows = make_step([starter.Response(PROMPT, list(response), [0.0] * 2, True)])
        rows["advantages"] = torch.zeros(1, 4)
        rows["weights"] = torch.full((1, 4), probability, dtype=torch.float64)
        stats = starter.token_statistics(policy, rows, 1.0)
        rows["sampler_log_probs"] = stats["log_probs"].detach()
        starter.grpo_microbatch_step(policy, rows, cfg, teacher, 1.0)
    ours = gradient_of(policy)
    policy.zero_grad()
    divergence_by_enumeration(policy, teacher, kind).backward()
    torch.testing.assert_close(ours, gradient_of(policy), rtol=0, atol=1e-9)


def test_drawn_token_that_a_smaller_teacher_lacks_pays_the_exact_kl_of_those_that_it_has():
    smaller, policy = small_models()  # the policy has V + 2 tokens, and draws the last one
    policy.requires_grad_()
    cfg = starter.cfg_with(precision="float32", use_kl_penalty=True, kl_estimator="exact")
    rows = make_step([starter.Response(PROMPT, [V + 1], [-1.0], True)])
    rows["advantages"] = torch.zeros(1, 3)
    rows["weights"] = torch.ones(1, 3)
    starter.grpo_microbatch_step(policy, rows, cfg, smaller.requires_grad_(False), 1.0)
    ours = gradient_of(policy)
    policy.zero_grad()
    log_p = policy(input_ids=torch.tensor([PROMPT])).logits[0, -1].log_softmax(dim=0)[:V]
    kl(log_p, log_probs_of(smaller, PROMPT), is_forward=False).backward()
    torch.testing.assert_close(ours, gradient_of(policy), rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("teacher"), family="Llama", hidden_size=32)


def run(checkpoint, out_dir, teacher, **changes):
    """A run that follows a teacher, without a reward."""
    given = settings(checkpoint, out_dir, reward=None, ref_model_id=str(teacher))
    given |= dict(use_kl_penalty=True, kl_coef=1.0, kl_estimator="exact", learning_rate=0.01)
    return starter.main(**given | changes)


def kl_to_teacher(result):
    return list(scalars(result["run_folder"])["0_headline/kl_to_teacher"].values())


@pytest.mark.slow
def test_run_without_a_reward_follows_its_teacher_and_names_it(
    checkpoint, teacher, tmp_path, capsys, monkeypatch
):
    """The task's own reward is called in evaluations alone."""
    scored = []
    monkeypatch.setattr(starter, "score_answer", lambda text, problem: scored.append(text) or 1.0)
    result = run(checkpoint, tmp_path, teacher, n_train_steps=8)
    assert result["after"]["solved"] == 1.0
    assert len(scored) == 1 + 2 * 10  # of an empty response, and of 10 problems before and after
    kl = kl_to_teacher(result)
    assert 0 < kl[-1] < kl[0] / 2
    out = capsys.readouterr().out
    assert f"KL(policy || {teacher})" in out
    assert "all rewards" not in out


@pytest.mark.slow
def test_run_that_is_resumed_with_another_teacher_is_measured_from_that_one(
    checkpoint, teacher, tmp_path, capsys
):
    another = save_checkpoint(tmp_path / "another", family="Llama", hidden_size=48)
    folder = run(checkpoint, tmp_path, teacher, n_train_steps=1)["run_folder"]
    capsys.readouterr()
    run(checkpoint, tmp_path, another, n_train_steps=2, resume=str(folder))
    out = capsys.readouterr().out
    assert "resume: ref_model_id was" in out and f"KL(policy || {another})" in out
    assert "another one than before" not in out


@pytest.mark.slow
def test_reference_of_adapters_is_the_teacher_in_16_bits_and_not_their_base(
    checkpoint, teacher, tmp_path
):
    stored = dict(frozen_in_bf16=True, precision="bf16")
    result = run(checkpoint, tmp_path, teacher, lora_rank=2, n_train_steps=1, **stored)
    assert kl_to_teacher(result)[0] > 0.01  # to their base it is 0 in the first step


def test_teacher_with_as_many_other_tokens_is_refused(checkpoint, tmp_path):
    other = save_checkpoint(tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8").replace('"a": ', '"\u00e4": '), "utf-8")
    with pytest.raises(InputError, match="has other tokens than the policy"):
        run(checkpoint, tmp_path, other)


def test_teacher_that_reads_less_than_the_longest_response_is_refused(checkpoint, tmp_path):
    other = save_checkpoint(tmp_path / "other", max_position_embeddings=9)
    with pytest.raises(InputError, match="reads 9 tokens, and the longest prompt .* has 1[0-9]"):
        run(checkpoint, tmp_path, other)


@pytest.mark.parametrize("changes", [{"ref_model_id": "tiny"}, {"reward": None}])
def test_teacher_or_no_reward_is_refused_without_the_kl_term(changes, checkpoint, tmp_path):
    with pytest.raises(InputError, match="use_kl_penalty = True"):
        starter.main(**settings(checkpoint, tmp_path) | changes)


def test_memory_counts_the_teacher(checkpoint, teacher):
    config = AutoConfig.from_pretrained(checkpoint)
    kl = dict(use_kl_penalty=True, engine="transformers", precision="bf16")
    start, taught = (
        memory.predicted_gb(config, starter.cfg_with(**kl, ref_model_id=name), 1)
        for name in (None, teacher)
    )

    def stored(folder):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return 4 * model.num_parameters()

    difference = stored(teacher) - stored(checkpoint) + 4 * config.vocab_size  # its logits
    assert 1e9 * (taught - start) == pytest.approx(difference)


def test_teacher_with_fewer_logits_is_compared_on_the_tokens_that_both_have():
    """The further logits of the policy are of no token, which is as good as never sampled."""
    torch.manual_seed(0)
    logits, ref_logits = torch.randn(2, 3, V, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1])
    wider = torch.cat([logits, torch.full((3, 2), -1e4)], dim=1)
    expected = starter.statistics_of_logits(logits, labels, 1.0, ref_logits)
    for name, values in starter.statistics_of_logits(wider, labels, 1.0, ref_logits).items():
        torch.testing.assert_close(values, expected[name], rtol=0, atol=1e-12)
    of_no_token = torch.tensor([V + 1, 3, 1])  # drawn all the same
    found = starter.statistics_of_logits(wider, of_no_token, 1.0, ref_logits)
    assert found["ref_log_probs"][0].isfinite()
    assert torch.equal(found["ref_log_probs"][1:], expected["ref_log_probs"][1:])
