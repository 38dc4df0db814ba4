"""support/fast.py gives the numbers of the plain functions and of the model's own forward pass.

test_starter.py holds the tests that plain and fast functions have in common.
"""
import random
from types import SimpleNamespace

import pytest

import starter
from starter import InputError, LMHead, Response, Sampling

fast = pytest.importorskip("support.fast")

import torch
from conftest import save_checkpoint

CPU = torch.device("cpu")


def random_ids(rng, n):
    return rng.choices(range(5, 40), k=n)


def make_responses(lengths, prompt_lengths=(1, 9, 4), seed=0):
    """Random responses of these lengths. Response i has prompt i modulo the number of prompts."""
    rng = random.Random(seed)
    prompts = [random_ids(rng, n) for n in prompt_lengths]
    return [Response(prompts[i % len(prompts)], random_ids(rng, n), [-3.0] * n, True)
            for i, n in enumerate(lengths)]


def own_log_probs(model, response):
    """(T,) by transformers' eager attention, this row alone."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(response.prompt_ids) - 1:-1]
    model.set_attn_implementation(own)
    return logits.log_softmax(dim=1)[range(len(response.response_ids)), response.response_ids]


# --------------------------------------------------------------------------------------------------
# LM head

def head_inputs(n=70, vocabulary=150, width=3):
    generator = torch.Generator().manual_seed(0)
    sizes = (n, vocabulary, n, vocabulary)
    hidden, weight, ref_hidden, ref_weight = (
        torch.randn(size, width, dtype=torch.float64, generator=generator) for size in sizes)
    labels = torch.randint(vocabulary, (n,), generator=generator)
    labels[:4] = torch.tensor([0, 63, 64, vocabulary - 1])  # at the ends of slices
    return hidden.requires_grad_(), weight.requires_grad_(), labels, ref_hidden, ref_weight


@pytest.mark.parametrize("logits_at_once", [1, 70 * 100, 1 << 22])  # 3 slices, 2, 1
def test_sliced_head_and_its_gradient_match_log_softmax(logits_at_once):
    hidden, weight, labels, ref_hidden, ref_weight = head_inputs()
    ours = fast.SlicedHead.apply(hidden, weight, labels, 0.7, ref_hidden, ref_weight,
                                 logits_at_once)
    log_p = (hidden @ weight.T / 0.7).log_softmax(dim=1)
    log_q = (ref_hidden @ ref_weight.T / 0.7).log_softmax(dim=1)
    rows = range(len(labels))
    expected = (log_p[rows, labels], (log_p.exp() * (log_p - log_q)).sum(dim=1),
                -(log_p.exp() * log_p).sum(dim=1), log_q[rows, labels])
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn(2, len(labels), dtype=torch.float64,
                           generator=torch.Generator().manual_seed(1))
    for use in ((1, 0), (0, 1), (1, 1)):
        gradients = [torch.autograd.grad(
            sum((on * x * up).sum() for on, x, up in zip(use, outputs, upstream)),
            (hidden, weight), retain_graph=True) for outputs in (ours, expected)]
        torch.testing.assert_close(*gradients)


def test_sliced_head_without_a_reference_and_with_large_logits():
    hidden, weight, labels, _, _ = head_inputs()
    scaled = 300 * weight  # without a running maximum exp() would overflow
    ours = fast.SlicedHead.apply(hidden, scaled, labels, 1.0, None, None, 1)
    log_p = (hidden @ scaled.T).log_softmax(dim=1)
    torch.testing.assert_close(ours[0], log_p[range(len(labels)), labels])
    assert (ours[1] == 0).all() and (ours[3] == 0).all()
    gradients = [torch.autograd.grad(x.sum(), (hidden, weight), retain_graph=True)
                 for x in (ours[0], log_p[range(len(labels)), labels])]
    torch.testing.assert_close(*gradients)


def test_sliced_head_with_frozen_weights_gives_the_gradient_of_hidden_states():
    hidden, weight, labels, _, _ = head_inputs()
    frozen = weight.detach()
    ours, *_ = fast.SlicedHead.apply(hidden, frozen, labels, 1.0, None, None)
    expected = (hidden @ frozen.T).log_softmax(dim=1)[range(len(labels)), labels]
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), hidden) for x in (ours, expected)))


@pytest.mark.parametrize("reference", [False, True])
def test_head_waits_for_no_gpu_and_has_few_operations(reference):
    """On a GPU a step of 3,800 tokens and a vocabulary of 151,936 has as many slices."""
    n_slices = 9
    hidden, weight, labels, ref_hidden, ref_weight = head_inputs(vocabulary=64 * n_slices)
    if not reference:
        ref_hidden = ref_weight = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = fast.SlicedHead.apply(hidden, weight, labels, 0.7, ref_hidden, ref_weight, 1)
        (found[0] + (found[1] if reference else 0)).sum().backward()
    names = [event.name for event in profile.events() if event.name.startswith("aten::")
             and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))]
    waits = {"aten::nonzero", "aten::item", "aten::index", "aten::masked_select"}
    assert "aten::matmul" in names and not waits & set(names)
    views = {"aten::slice", "aten::unsqueeze", "aten::numpy_T", "aten::select", "aten::detach",
             "aten::split", "aten::unbind", "aten::t"}
    n_kernels = sum(name not in views for name in names)
    assert n_kernels / n_slices < (48 if reference else 36), n_kernels


@pytest.mark.parametrize("changes", [dict(bias=True), dict(scale=0.3), dict(cap=2.0)])
def test_head_that_is_more_than_a_matrix_is_computed_as_in_starter(changes):
    hidden, weight, labels, ref_hidden, ref_weight = head_inputs()
    if "bias" in changes:
        changes = {"bias": torch.linspace(-2, 2, len(weight), dtype=torch.float64)}
    heads = LMHead(weight, **changes), LMHead(ref_weight, **changes)
    found = [function(hidden, labels, heads[0], 0.7, ref_hidden, heads[1])
             for function in (fast.token_statistics, starter.token_statistics)]
    torch.testing.assert_close(*found)
    plain_head = starter.token_statistics(hidden, labels, LMHead(weight), 0.7)
    assert (found[0].log_probs - plain_head.log_probs).abs().max() > 0.01


def test_precision_of_matmuls_is_restored():
    before = "highest"
    torch.set_float32_matmul_precision(before)
    with starter.matmuls_in(torch.float32):
        assert torch.get_float32_matmul_precision() == before
    with starter.matmuls_in(torch.bfloat16):
        assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(RuntimeError), starter.matmuls_in(torch.bfloat16):
        raise RuntimeError("out of memory")
    assert torch.get_float32_matmul_precision() == before
    # Rotary positions are multiplied in float32: 1001 is no bf16 number.
    assert (torch.full((4, 1), 1001.0) @ torch.ones(1, 4) == 1001).all()


# --------------------------------------------------------------------------------------------------
# Scoring

@pytest.mark.parametrize("multiplied_out", [True, False])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_shared_prompts_change_neither_log_probs_nor_gradients(tmp_path, family, multiplied_out,
                                                               monkeypatch):
    """Ragged prompts, two responses to each. Every prompt is read once."""
    monkeypatch.setattr(fast, "MULTIPLIED_OUT", {torch.float64: 10**6 * multiplied_out})
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m", family=family), CPU)
    policy = policy.double()
    responses = make_responses((1, 12, 5, 3, 7, 2))
    own = torch.stack([own_log_probs(policy, response).sum() for response in responses])
    fast.prepare(policy)
    batch = starter.make_batch(responses, torch.zeros(6), "cpu")
    n_read = []
    hook = policy.get_input_embeddings().register_forward_hook(
        lambda module, args, out: n_read.append(args[0].numel()))
    ours = starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"],
                                          batch["response_mask"], compute=fast.COMPUTE).sum(dim=1)
    hook.remove()
    assert sum(n_read) == 6 * 12 + 3 * 8  # without the last token of a prompt
    torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-5)  # norms are float32 inside
    upstream = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = [torch.autograd.grad((x * upstream).sum(), list(policy.parameters()))
                 for x in (ours, own)]
    for mine, theirs in zip(*gradients):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_long_rows_are_scored_like_short_ones(tmp_path):
    """Rows of 300 tokens after a prompt of 11 take torch's fused attention, short ones do not."""
    folder = save_checkpoint(tmp_path / "long", max_position_embeddings=1024)
    policy, _ = starter.init_policy(folder, CPU)
    responses = make_responses((300, 40), prompt_lengths=(11,))
    own = own_log_probs(policy, responses[0])
    fast.prepare(policy)

    def score(batch, bf16=False):
        return starter.get_response_log_probs(policy, batch["input_ids"], batch["labels"],
                                              batch["response_mask"], 1.0, bf16, fast.COMPUTE)

    long = starter.make_batch(responses, torch.zeros(2), "cpu")
    torch.testing.assert_close(score(long)[0, 10:], own, rtol=0, atol=1e-4)
    assert (score(long, bf16=True)[0, 10:] - own).abs().mean() < 0.1
    short = starter.take_rows(long, [0, 1], 50)
    torch.testing.assert_close(score(short), score(long)[:, :50], rtol=0, atol=1e-4)


def test_rows_are_split_where_the_first_scored_token_is_predicted():
    responses = [Response([5, 6, 7], [8, 1], [0.0] * 2, True), Response([5], [3], [0.0], True),
                 Response([9, 1], [], [], False)]
    batch = starter.make_batch(responses, torch.zeros(3), "cpu")
    split = fast.split_rows(batch)
    assert split.prompts.tolist() == [[5, 6], [-1, -1], [-1, -1]]
    assert split.input_ids[:2].tolist() == [[7, 8], [5, 0]]
    assert split.scored.tolist() == [[True, True], [True, False], [False, False]]


def test_model_with_its_own_attention_is_scored_by_the_plain_function(tmp_path):
    """As on a GPU, where prepare() leaves the attention as it is."""
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m"), CPU)
    batch = starter.make_batch(make_responses((1, 12, 5)), torch.zeros(3), "cpu")
    found = [function(policy, batch)
             for function in (fast.response_hidden_states, starter.response_hidden_states)]
    assert torch.equal(*found)


def test_windows_are_found_in_layer_types_and_in_older_configs():
    for without_end in (dict(), dict(layer_types=["full_attention"] * 2, sliding_window=16),
                        dict(sliding_window=16, use_sliding_window=False)):
        assert fast.looks_back_without_end(SimpleNamespace(**without_end))
    for windows in (dict(layer_types=["full_attention", "sliding_attention"]),
                    dict(layer_types=["linear_attention"]), dict(sliding_window=16)):
        assert not fast.looks_back_without_end(SimpleNamespace(**windows))


def test_prepare_refuses_windows_and_undo_gives_the_attention_back(tmp_path):
    folder = save_checkpoint(tmp_path / "m", family="Mistral", sliding_window=16)
    policy, _ = starter.init_policy(folder, CPU)
    with pytest.raises(InputError, match="layers that do not look back without end"):
        fast.prepare(policy)
    own = policy.config._attn_implementation
    fast.undo(policy)
    assert policy.config._attn_implementation == own
    policy.config.sliding_window = None
    fast.prepare(policy)
    assert policy.config._attn_implementation == "starter"
    fast.undo(policy)
    assert policy.config._attn_implementation == own


# --------------------------------------------------------------------------------------------------
# Microbatches

def lengths_to_batch(lengths, prompts):
    """A batch of responses of these lengths; prompts: one list of ids for each."""
    responses = [Response(ids, [1] * n, [0.0] * n, True) for ids, n in zip(prompts, lengths)]
    return starter.make_batch(responses, torch.zeros(len(lengths)), "cpu")


def padding(microbatches):
    """Padded positions of responses, as a share of their tokens; a prompt counts nothing."""
    tokens = sum(int(rows["response_mask"].sum()) for rows in microbatches)
    padded = sum(len(rows["response_mask"]) * int(rows["response_mask"].sum(dim=1).max())
                 for rows in microbatches)
    return padded / tokens - 1


def test_little_of_a_microbatch_is_padding():
    """Responses of 20 to 256 tokens, as in a step on a GPU; and steps where many responses fill
    all tokens, which leaves the padding to the short ones."""
    rng = random.Random(0)
    prompts = [random_ids(rng, 99) for _ in range(32)]
    lengths = [rng.randint(20, 256) for _ in range(128)]
    batch = lengths_to_batch(lengths, [prompts[i // 8] for i in range(128)])
    microbatches = fast.cut_microbatches(batch, 16_384)
    assert padding(microbatches) < 0.11 and len(microbatches) <= 12
    assert sum(len(rows["labels"]) for rows in microbatches) == 128

    lengths = [64] * 120 + [rng.randint(1, 64) for _ in range(136)]
    batch = lengths_to_batch(lengths, [prompts[i // 8][:16] for i in range(256)])
    microbatches = fast.cut_microbatches(batch, 2_048)
    assert padding(microbatches) < 0.11 and len(microbatches) <= 10


def test_small_rest_is_not_cut_into_a_microbatch_of_its_own():
    batch = lengths_to_batch([16] * 200 + [3] * 20, [[5, 6, 7]] * 220)
    assert len(fast.cut_microbatches(batch, 8_192)) == 1


def test_prompt_that_rows_have_in_common_counts_once():
    one = lengths_to_batch([2] * 9, [[5, 6, 7, 8]] * 9)
    many = lengths_to_batch([2] * 9, [[5, 6, 7, i] for i in range(9)])  # the last is no part of it
    different = lengths_to_batch([2] * 9, [[i, 6, 7, 8] for i in range(9)])
    n = [len(fast.cut_microbatches(batch, 9 * 2 + 3)) for batch in (one, many, different)]
    assert n[0] == n[1] == 1 and n[2] > 1


# --------------------------------------------------------------------------------------------------
# Sampling

@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_fast_rollout_samples_the_tokens_of_the_plain_one(tmp_path, family):
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m", family=family), CPU)
    rng = random.Random(0)
    prompts = [random_ids(rng, n) for n in (1, 9, 4, 9)]
    sampling = Sampling(4, 20, 0.9, 3, (1, 20))
    plain = starter.rollout_with_transformers(policy, prompts, sampling)
    fast.prepare(policy)
    ours = fast.rollout(policy, prompts, sampling)
    for a, b in zip(ours, plain):
        assert a._replace(log_probs=[]) == b._replace(log_probs=[])
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-4)
    assert len({len(response.response_ids) for response in ours}) > 3


def test_fast_rollout_gives_a_model_its_own_attention_back(tmp_path):
    """As on a GPU, where the model learns with its own attention."""
    policy, _ = starter.init_policy(save_checkpoint(tmp_path / "m"), CPU)
    own = policy.config._attn_implementation
    sampling = Sampling(2, 10, 1.0, 3, (1,))
    prompts = [[5, 6, 7], [8]]
    unprepared = fast.rollout(policy, prompts, sampling)
    assert policy.config._attn_implementation == own != "starter"
    fast.prepare(policy)
    assert fast.rollout(policy, prompts, sampling) == unprepared


@pytest.mark.parametrize("vocabulary", [5, 256, 700])
def test_draw_tokens_does_not_depend_on_how_many_rows_it_takes_at_once(vocabulary):
    logits = 3 * torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(40, 1, generator=torch.Generator().manual_seed(1))
    whole = fast.draw_tokens(logits, uniform, 0.7)
    parts = fast.draw_tokens(logits, uniform, 0.7, logits_at_once=7 * vocabulary)
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])
    plain = starter.draw_tokens(logits, uniform, 0.7)
    assert torch.equal(whole[0], plain[0])
