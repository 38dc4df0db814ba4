"""What a GPU runs in the place of the plain functions, here on a CPU: compiled layers and
statistics, larger microbatches, and the share of the card's peak."""

import shutil
from unittest import mock

import pytest

import starter
from lab.switches import around_an_update, optimise, turn_on
from support import edits, engines, fast, gpu, tasks

import torch
import transformers
from conftest import gradient_of, make_responses, make_step


def gradients(policy, batch, precision):
    policy.zero_grad()
    starter.grpo_microbatch_step(policy, dict(batch), starter.cfg_with(precision=precision))
    return gradient_of(policy)


@pytest.mark.parametrize("precision, error", [("bf16", 5e-3), ("fp16", 6e-4)])
def test_rounding_head_is_the_float32_head_of_rounded_inputs(
    checkpoint, precision, error, monkeypatch
):
    """As vLLM's is."""
    monkeypatch.setattr(engines, "ROUNDS", set())
    assert type(starter.init_policy(checkpoint, "cpu")[0].lm_head) is starter.Float32Head
    engines.attach(starter.cfg_with(engine="transformers"))
    head = starter.init_policy(checkpoint, "cpu")[0].get_output_embeddings()
    torch.manual_seed(0)
    inputs = torch.randn(14, 64, requires_grad=True), head.weight
    plain = head(inputs[0])
    assert torch.equal(plain, inputs[0] @ head.weight.T)
    with starter.autocast(torch.device("cpu"), precision):
        logits = head(inputs[0])
    hidden, weight = (x.detach().to(starter.DTYPES[precision]).double() for x in inputs)
    by_hand = (hidden @ weight.T).float()
    torch.testing.assert_close(logits, by_hand, rtol=0, atol=1e-5)
    exact, ours = (torch.autograd.grad(x, inputs, by_hand.sin()) for x in (plain, logits))
    for a, b in zip(ours, exact):
        assert 1e-5 < (a - b).norm() / b.norm() < error


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_update_is_as_near_to_float32_as_the_plain_one(checkpoint, monkeypatch):
    monkeypatch.setattr(fast, "COMPILED", set())
    policy, _ = starter.init_policy(checkpoint, "cpu")
    batch = make_step(make_responses((9, 12, 5, 12), vocabulary=30))
    exact, plain = (gradients(policy, batch, precision) for precision in ("float32", "bf16"))
    names = {*policy.state_dict()}
    edits.replace(token_statistics=fast.token_statistics)
    gpu.compile_layers(policy)
    gpu.compile_statistics()
    assert {*policy.state_dict()} == names
    torch.testing.assert_close(gradients(policy, batch, "float32"), exact, rtol=0, atol=1e-5)
    ours = gradients(policy, batch, "bf16")
    assert 0 < (ours - exact).norm() < 1.5 * (plain - exact).norm()


def settings(**changes):
    usual = dict(preset="qwen3-1.7b", precision="bf16", engine="vllm", device=torch.device("cuda"))
    cfg = starter.cfg_with(**usual | changes)
    starter.apply_preset(cfg)
    return cfg


@pytest.mark.parametrize(
    "name, value, max_tokens",
    [
        ("seed", 0, 8_192),
        ("max_tokens_per_microbatch", 2_000, 2_000),
        ("precision", "fp16", 4_096),
        ("lora_rank", 8, 4_096),
        ("engine", "transformers", 4_096),
        ("gradient_checkpointing", True, 4_096),
    ],
)
def test_what_a_card_has_shown_is_compiled_and_microbatches_of_its_preset_double(
    name, value, max_tokens
):
    cfg = settings(**{name: value})
    edits.replace(token_statistics=fast.token_statistics)
    compiled = mock.Mock()
    stand_ins = dict(compile_layers=compiled, compile_statistics=compiled)
    with mock.patch.multiple(gpu, LARGE=0, choose_attention=mock.Mock(), **stand_ins):
        gpu.attach(mock.Mock(**{"num_parameters.return_value": 1}), None, cfg)
    assert cfg.max_tokens_per_microbatch == max_tokens
    assert compiled.called == (max_tokens != 4_096)


@pytest.mark.parametrize("family", ["GPT2", "OPT", "Bloom", "Falcon", "GPTBigCode", "Qwen3"])
def test_layers_of_a_family_are_compiled_and_plain_again_for_the_report(family, monkeypatch):
    """Under whatever name it keeps them."""
    config = getattr(transformers, f"{family}Config")(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=9, ffn_dim=32
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *x, **y: "compiled")
    gpu.compile_layers(model)
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert len(compiled) == 2 and len({type(module) for module in compiled}) == 1
    gpu.end_compiling(model)
    assert compiled[0]._compiled_call_impl is not None  # as by an edit of yours
    monkeypatch.setattr(fast, "COMPILED", {"statistics"})
    gpu.end_compiling(model)
    assert all(module._compiled_call_impl is None for module in model.modules())


def share(monkeypatch, card, responses, **changes):
    """Of the peak of a card, for a step of two seconds besides its rollout."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    policy = mock.Mock(**{"num_parameters.return_value": 1e9})
    batch = make_step(responses)
    metrics = {"time/total": 5.0, "time/rollout": 3.0}
    microbatches = starter.cut_microbatches(batch, 20)
    cfg = settings(**changes)
    return gpu.share_of_peak(policy, metrics, microbatches, cfg).get("share_of_peak")


@pytest.mark.parametrize(
    "card, peak",
    [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Tesla T4", 65e12)],
)
def test_share_of_the_peak_by_hand(monkeypatch, card, peak):
    """Of the rows that are learnt from, without padding, in each epoch."""
    responses = make_responses((7, 12, 3), prompt_lengths=(1, 9, 4))
    n_tokens = 7 + 20 + 6  # with the prompt, without the last, which nothing follows
    for changes, operations in (
        ({}, 6),
        (dict(use_kl_penalty=True), 8),
        (dict(lora_rank=8), 4),
        (dict(epochs_per_rollout=2), 12),
    ):
        expected = operations * 1e9 * n_tokens / 2 / peak
        assert share(monkeypatch, card, responses, **changes) == pytest.approx(expected)
    of_one = share(monkeypatch, card, responses[:1])
    assert of_one == pytest.approx(6 * 1e9 * 7 / 2 / peak)


def test_card_whose_peak_is_not_known_has_no_share(monkeypatch):
    assert share(monkeypatch, "NVIDIA T400", make_responses((7,))) is None


@pytest.mark.parametrize("learns", [True, False])
def test_gradient_of_a_frozen_head_is_not_computed(learns, monkeypatch):
    products = mock.Mock(wraps=engines.product_in_float32)
    monkeypatch.setattr(engines, "product_in_float32", products)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(3, 8, requires_grad=learns)
    engines.Rounded.apply(hidden, weight, torch.bfloat16).sum().backward()
    assert products.call_count == 2 + learns
    assert (weight.grad is not None) == learns


@pytest.mark.parametrize("capability, repeats", [((7, 5), True), ((8, 0), False)])
def test_old_card_repeats_keys_that_heads_share(monkeypatch, capability, repeats):
    """Torch's kernel then gets as many of them as queries, and computes the same."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    policy, _ = starter.init_policy(tasks.TINY, "cpu")  # four heads, of which two share keys
    batch = make_step(make_responses((9, 12, 5, 12), vocabulary=30))
    expected = gradients(policy, batch, "float32")
    kernel = mock.Mock(wraps=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    try:
        gpu.choose_attention([policy], "cuda:0")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    torch.testing.assert_close(gradients(policy, batch, "float32"), expected, rtol=0, atol=1e-6)
    for call in kernel.call_args_list:
        query, key, value = call.args
        assert (query.shape[1] == key.shape[1] == value.shape[1]) == repeats
        assert call.kwargs.get("enable_gqa", False) != repeats
    assert kernel.called


@pytest.mark.parametrize("switch", ["casts", "float32 gradients", "prompts"])
def test_switch_of_an_update_is_as_near_to_float32_as_the_plain_one(switch, monkeypatch):
    """In two microbatches of two groups. Casting once changes no bit."""
    monkeypatch.setattr(fast, "PROMPTS_READ_ONCE", set())
    edits.replace(token_statistics=fast.token_statistics)
    torch.manual_seed(0)
    lengths, prompt_lengths = (9, 12, 5, 12), (20, 20, 11, 11)
    batch = make_step(make_responses(lengths, prompt_lengths=prompt_lengths, vocabulary=30))

    def gradient(precision, switches=()):
        policy, _ = starter.init_policy(tasks.TINY, "cpu")
        turn_on(switches, policy)
        with around_an_update(switches):
            for rows in (slice(2), slice(2, 4)):
                some = starter.keep_rows(batch, rows)
                starter.grpo_microbatch_step(policy, some, starter.cfg_with(precision=precision))
        return gradient_of(policy)

    exact, plain, ours = gradient("float32"), gradient("bf16"), gradient("bf16", [switch])
    assert torch.equal(plain, ours) == (switch == "casts")
    assert 0 < (ours - exact).norm() < 1.2 * (plain - exact).norm()


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clip_in_the_optimiser_leaves_the_weights_of_a_clip_before_it(checkpoint, max_norm):
    """In two updates, of which the second one has moments."""
    batch = make_step(make_responses((9, 12, 5, 12), vocabulary=30))

    def weights(switches):
        policy, _ = starter.init_policy(checkpoint, "cpu")
        # With the usual eps the length of a gradient would hardly matter
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, eps=1e-3, fused=True)
        for _ in range(2):
            starter.grpo_microbatch_step(policy, dict(batch), starter.cfg_with(precision="float32"))
            optimise(switches, policy, optimizer, max_norm)
            optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()])

    plain, ours = weights([]), weights(["clip in AdamW"])
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)


def test_slices_of_the_head_hold_4096_tokens_whatever_the_vocabulary(checkpoint, monkeypatch):
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", {})
    policy, _ = starter.init_policy(checkpoint, "cpu")
    turn_on(["head slices"], policy)
    assert fast.LOGITS_AT_ONCE["cpu"] / policy.config.vocab_size == 4096


def test_head_on_a_gpu_sums_in_float32(monkeypatch):
    product = mock.Mock()
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "autocast", mock.MagicMock())
    engines.product_in_float32(mock.Mock(device=torch.device("cuda")), "b")
    assert product.call_args.kwargs == {"out_dtype": torch.float32}


def test_logits_that_a_gpu_holds_at_once_fit_beside_a_model(monkeypatch):
    """20 bytes each: their gradient, what the statistics keep."""
    monkeypatch.setattr(fast, "COMPILED", set())
    monkeypatch.setattr(fast, "LOGITS_AT_ONCE", {})
    assert 20 * starter.LOGITS_AT_ONCE < 2e9
    gpu.compile_statistics()
    assert 20 * fast.LOGITS_AT_ONCE["cuda"] < 6e9


def test_weights_are_cast_once_an_update_with_that_switch():
    """Each of 28 linear layers in the second microbatch again without it."""
    batch = make_step(make_responses((9, 12, 5, 12), vocabulary=30))

    def n_casts(switches):
        policy, _ = starter.init_policy(tasks.TINY, "cpu")
        with torch.profiler.profile() as seen, around_an_update(switches):
            for rows in (slice(2), slice(2, 4)):
                some = starter.keep_rows(batch, rows)
                starter.grpo_microbatch_step(policy, some, starter.cfg_with(precision="bf16"))
        return sum(x.count for x in seen.key_averages() if x.key == "aten::_to_copy")

    assert n_casts([]) - n_casts(["casts"]) == 28
