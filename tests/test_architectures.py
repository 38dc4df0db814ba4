"""Right or refused, for every architecture: what the self-check accepts is computed as the
model's own forward pass computes it, and what it refuses, it refuses in one sentence."""
import copy
import dataclasses
import functools
import inspect
import math

import pytest
import torch

import starter
from lab import architectures as A

REFUSAL_IS_FINE = {
    "Llama (rope dynamic, rows longer than it knows)",
    "Llama (rope longrope, rows on both sides)",
    "Llama4 (chunks)", "ModernBERT (decoder, window)",
    "RWKV", "RWKV (weights rescaled for sampling)", "xLSTM",
    "BERT (decoder)", "BERT (looks ahead)", "RoBERTa (decoder)", "XLM",
    "Zamba2 (recurrence)", "Nemotron-H (recurrence)",  # one token at a time they differ slightly
}

# These run in the fast tier: about 50 configurations with all mechanisms.
FAST = {
    "Llama", "Llama (tied, bias)", "Llama (rope linear)", "Llama (rope dynamic)",
    "Llama (rope dynamic, rows longer than it knows)", "Llama (rope yarn)", "Llama (rope llama3)",
    "Llama (rope longrope)", "Llama (rope longrope, rows on both sides)", "Qwen2", "Qwen2 (tied)",
    "Qwen3", "Qwen3 (tied)", "Qwen3-MoE", "Mistral", "Mixtral", "Gemma", "Phi", "Phi3", "OPT",
    "OPT (other width of embedding)", "GPT2 (dropout)", "GPT-J", "GPT-NeoX", "Falcon (alibi)",
    "Bloom", "MPT", "OLMo2", "GLM4", "Granite (logit scale)", "Cohere (logit scale)", "StableLM",
    "Nemotron", "DeepSeek-V2", "DeepSeek-V3", "SmolLM3", "Starcoder2", "XGLM", "NanoChat (cap)",
    "Mistral (window)", "Gemma2 (window, caps)", "Gemma2 (caps, no window)", "Gemma3 (window)",
    "Gemma3 (image, window)", "GPT-Neo (window)", "Llama4 (chunks)", "GPT-OSS (window, sinks)",
    "GPT-OSS (sinks, no window)", "Qwen3-Next (recurrence)", "Mamba", "Mamba2",
    "LFM2 (convolution)", "RWKV", "BERT (looks ahead)",
}
NAMES = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow, id=name)
         for name in A.TABLE]

examine = functools.cache(A.examine)


def choose(candidates, policy, ranks=None, **changes):
    return starter.choose_compute(candidates, policy, A.make_prompts(), A.settings(**changes),
                                  ranks or starter.OneProcess())


def is_one_sentence_with_a_remedy(text):
    return "\n" not in text and ". " not in text and "; " in text and len(text) < 600


# --------------------------------------------------------------------------------------------------
# 1. The table


@pytest.mark.parametrize("name", NAMES)
def test_architecture_is_right_or_refused(name):
    outcome = examine(name)
    if name not in REFUSAL_IS_FINE:
        assert outcome.outcome == "right", outcome
    if outcome.outcome == "refused":
        assert is_one_sentence_with_a_remedy(outcome.sentence), outcome.sentence
    else:
        assert outcome.outcome == "right", outcome


def test_table_covers_many_architectures():
    fast = [examine(name) for name in FAST]
    assert len(FAST) >= 40 and FAST | REFUSAL_IS_FINE <= A.TABLE.keys()
    assert sum(outcome.outcome == "right" for outcome in fast) >= 40
    assert len(A.FAMILIES) >= 40


@pytest.mark.parametrize("name", ["Llama", "GPT2 (dropout)", "Gemma2 (window, caps)", "Mamba2"])
def test_models_of_the_table_have_large_logits_and_long_prompts(name):
    model = A.make_model(name)
    prompts = A.make_prompts()
    assert min(map(len, prompts)) < A.WINDOW < max(map(len, prompts))
    largest = max(A.own_logits(model, prompt).abs().max().item() for prompt in prompts)
    assert largest > 20
    sampling = starter.Sampling(1, A.MAX_NEW_TOKENS, 0.0, 0, (A.STOP_TOKEN,))
    responses = starter.rollout_with_transformers(model, prompts, sampling)
    assert len({token for response in responses for token in response.response_ids}) > 6


def test_fast_path_is_chosen_where_it_fits():
    pytest.importorskip("support.fast")
    for name in ("Llama", "Qwen2 (tied)", "Qwen3", "SmolLM3", "GPT2 (dropout)", "Mistral"):
        assert examine(name).compute == "fast", name


# --------------------------------------------------------------------------------------------------
# 2. Paths that are wrong.  The comparison above sees them, and the self-check rejects them.

def padded_rows(rows, where, with_mask):
    """The rows of a batch with their prompts padded to one length, on the left or between prompt
    and response -> rows, attention mask or None, position ids."""
    mask = rows["response_mask"]
    n_prompt = mask.int().argmax(dim=1)  # of input_ids before the first that is scored
    widest = int(n_prompt.max())
    width = mask.shape[1] + widest
    ids = torch.zeros(len(mask), width, dtype=torch.long)
    real = torch.zeros(len(mask), width, dtype=torch.bool)
    scored = torch.zeros(len(mask), width, dtype=torch.bool)
    for row, n in enumerate(n_prompt.tolist()):
        gap = widest - n
        length = int(mask[row].nonzero().max()) + 1
        places = torch.arange(length)
        places = places + gap if where == "left" else torch.where(places < n, places, places + gap)
        ids[row, places] = rows["input_ids"][row, :length]
        real[row, places] = True
        scored[row, places] = mask[row, :length]
    positions = (real.cumsum(dim=1) - 1).clamp(min=0)
    return ids, scored, (real.long() if with_mask else None), positions


def padding_compute(where, with_mask):
    """A compute that pads prompts, as many trainers do."""
    def hidden_states(model, rows, bf16=False):
        ids, scored, attention_mask, positions = padded_rows(rows, where, with_mask)
        extra = {}
        known = inspect.signature(model.base_model.forward).parameters
        if with_mask and "position_ids" in known:
            extra["position_ids"] = positions
        hidden = model.base_model(input_ids=ids, attention_mask=attention_mask, use_cache=False,
                                  **extra).last_hidden_state
        return hidden[scored].to(model.get_output_embeddings().weight.dtype)

    how = "with" if with_mask else "without"
    return dataclasses.replace(starter.PLAIN, name=f"padded {where} {how} a mask",
                               hidden_states=hidden_states)


def assert_wrong_and_rejected(name, wrong, policy=None, least=0.01):
    """The comparison sees at least this difference, in nats; the self-check takes another compute,
    and refuses the model where there is no other."""
    policy = A.make_model(name) if policy is None else policy
    own = copy.deepcopy(policy).eval()
    own.set_attn_implementation("eager")
    attention = policy.config._attn_implementation
    wrong.prepare(policy)
    rows = A.rows_for_scoring(A.make_prompts())
    assert A.scoring_difference(own, policy, wrong, rows) > least
    wrong.undo(policy)
    compute, lines = choose([wrong, starter.PLAIN], policy)
    assert compute.name != wrong.name
    assert lines[0].startswith(f"The {wrong.name} path does not fit {type(policy).__name__}: ")
    compute.undo(policy)
    assert policy.config._attn_implementation == attention
    with pytest.raises(starter.InputError, match=wrong.name) as refusal:
        choose([wrong], policy)
    assert is_one_sentence_with_a_remedy(str(refusal.value))


@pytest.mark.parametrize("where", ["between", "left"])
def test_padding_with_mask_and_positions_suits_full_attention(where):
    """The control of the tests below: it is the padding that they reject, not the code."""
    compute, _ = choose([padding_compute(where, with_mask=True)], A.make_model("Llama"))
    assert compute.name == f"padded {where} with a mask"


@pytest.mark.parametrize("name", ["Mistral (window)", "Gemma3 (window)", "GPT-OSS (window, sinks)"])
def test_padding_between_prompt_and_response_is_rejected_with_a_window(name):
    assert_wrong_and_rejected(name, padding_compute("between", with_mask=True))


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Qwen3-Next (recurrence)",
                                  "LFM2 (convolution)"])
def test_padding_between_prompt_and_response_is_rejected_with_recurrence(name):
    assert_wrong_and_rejected(name, padding_compute("between", with_mask=True))


@pytest.mark.parametrize("name", ["Llama", "Mistral (window)", "Mamba", "LFM2 (convolution)"])
def test_padding_on_the_left_without_mask_is_rejected(name):
    assert_wrong_and_rejected(name, padding_compute("left", with_mask=False))


def without(**parts):
    """A compute whose LM head lacks these parts."""
    return dataclasses.replace(starter.PLAIN, name="incomplete",
                               head_of=lambda model: starter.lm_head_of(model)._replace(**parts))


@pytest.mark.parametrize("name, missing", [
    ("NanoChat (cap)", dict(cap=None)), ("RecurrentGemma (recurrence, cap)", dict(cap=None)),
    ("Cohere (logit scale)", dict(scale=1.0)), ("Granite (logit scale)", dict(scale=1.0)),
    ("Falcon-H1 (recurrence)", dict(scale=1.0)), ("Phi", dict(bias=None)),
    ("Gemma2 (caps, no window)", dict(cap=None))])
def test_head_without_its_cap_scale_or_bias_is_rejected(name, missing):
    assert_wrong_and_rejected(name, without(**missing))


def attend_with_fused_kernel(model):
    model._own_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")


def give_attention_back(model):
    model.set_attn_implementation(model._own_attention)


def test_attention_without_softcap_is_rejected():
    """torch's fused attention, the default of transformers, leaves out Gemma 2's soft-cap."""
    wrong = dataclasses.replace(starter.PLAIN, name="uncapped", prepare=attend_with_fused_kernel,
                                undo=give_attention_back)
    assert_wrong_and_rejected("Gemma2 (caps, no window)", wrong)


def attend_as_fast(model):
    model._own_attention = model.config._attn_implementation
    model.set_attn_implementation("starter")


@pytest.mark.parametrize("name", ["GPT-OSS (sinks, no window)", "Gemma2 (caps, no window)"])
def test_fast_attention_is_rejected_with_sinks_or_softcap(name):
    """In this attention the model's own forward pass drops them too, so that the self-check must
    not compare with it."""
    fast = pytest.importorskip("support.fast")
    wrong = dataclasses.replace(fast.COMPUTE, name="forced", prepare=attend_as_fast)
    assert_wrong_and_rejected(name, wrong)


def test_fast_attention_is_rejected_with_a_window():
    fast = pytest.importorskip("support.fast")
    wrong = dataclasses.replace(fast.COMPUTE, name="forced", prepare=attend_as_fast)
    assert_wrong_and_rejected("Mistral (window)", wrong)
    with pytest.raises(starter.InputError, match="look back"):
        fast.prepare(A.make_model("Mistral (window)"))


def test_dropout_in_train_mode_is_rejected():
    """Also where the policy is in train mode from the start: the measure is eval mode."""
    in_train_mode = dataclasses.replace(starter.PLAIN, name="training",
                                        prepare=lambda model: model.train(),
                                        undo=lambda model: model.eval())
    policy = A.make_model("GPT2 (dropout)", dropout=True)
    assert_wrong_and_rejected("GPT2 (dropout)", in_train_mode, policy)
    with pytest.raises(starter.InputError, match="standard deviations"):
        choose([starter.PLAIN], policy.train())
    starter.make_forward_exact(policy)
    assert choose([starter.PLAIN], policy)[0] is starter.PLAIN and policy.training


class LeftPadded:
    """A sampler that pads prompts on the left and calls generate() once for all of them."""

    def __init__(self, with_mask):
        self.with_mask = with_mask

    def __call__(self, policy, prompts, sampling):
        rows = [ids for ids in prompts for _ in range(sampling.group_size)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        draw = starter.DrawTokens(sampling, range(len(rows)), "cpu")
        policy.generate(ids, attention_mask=mask if self.with_mask else torch.ones_like(mask),
                        max_new_tokens=sampling.max_new_tokens, do_sample=False,
                        pad_token_id=A.STOP_TOKEN, logits_processor=[draw])
        return draw.responses(rows)


@pytest.mark.parametrize("name, with_mask", [
    ("Llama", False), ("Mistral (window)", False), ("Mamba", False), ("LFM2 (convolution)", False)])
def test_sampling_from_padded_prompts_is_rejected(name, with_mask):
    wrong = dataclasses.replace(starter.PLAIN, name="left", rollout=LeftPadded(with_mask))
    policy = A.make_model(name)
    own = copy.deepcopy(policy)
    assert A.greedy_gap(own, policy, wrong, A.make_prompts()) > 0.1
    compute, lines = choose([wrong, starter.PLAIN], policy)
    assert compute is starter.PLAIN and "sampler's log-probs" in lines[0]


def test_sampling_from_padded_prompts_with_mask_suits_full_attention():
    right = dataclasses.replace(starter.PLAIN, name="left", rollout=LeftPadded(with_mask=True))
    policy = A.make_model("Llama")
    assert A.greedy_gap(copy.deepcopy(policy), policy, right, A.make_prompts()) < 1e-4
    assert choose([right], policy)[0] is right


def test_sampler_that_is_not_the_policy_is_rejected():
    """A stale copy of the weights, and log-probs at another temperature."""
    policy = A.make_model("Llama")
    stale = copy.deepcopy(policy)
    stale.get_output_embeddings().weight.data *= 1.01

    def from_stale(_, prompts, sampling):
        return starter.rollout_with_transformers(stale, prompts, sampling)

    def at_another_temperature(model, prompts, sampling):
        return starter.rollout_with_transformers(
            model, prompts, dataclasses.replace(sampling, temperature=0.9))

    for rollout in (from_stale, at_another_temperature):
        wrong = dataclasses.replace(starter.PLAIN, rollout=rollout)
        with pytest.raises(starter.InputError, match="sampler's log-probs"):
            choose([wrong], policy)
        assert choose([wrong], policy, engine="vllm")[0] is wrong  # vLLM samples, not this rollout


def test_log_probs_that_are_not_finite_are_rejected():
    def with_nan(*args):
        statistics = starter.token_statistics(*args)
        return statistics._replace(log_probs=statistics.log_probs * math.nan)

    wrong = dataclasses.replace(starter.PLAIN, name="broken", token_statistics=with_nan)
    with pytest.raises(starter.InputError, match="by nan standard deviations"):
        choose([wrong], A.make_model("Llama"))


@pytest.mark.parametrize("errors", [(0.5, -0.5), (math.nan, 0.0)])
def test_log_probs_of_the_sampler_that_are_wrong_are_rejected(errors):
    """Errors that cancel on average, and log-probs that are not numbers."""
    def with_errors(policy, prompts, sampling):
        responses = starter.rollout_with_transformers(policy, prompts, sampling)
        return [r._replace(log_probs=[x + errors[i % 2] for i, x in enumerate(r.log_probs)])
                for r in responses]

    wrong = dataclasses.replace(starter.PLAIN, rollout=with_errors)
    with pytest.raises(starter.InputError, match="sampler's log-probs"):
        choose([wrong], A.make_model("Llama"), max_new_tokens=8)


def test_sampler_whose_window_ends_late_is_rejected_on_long_rows():
    """The sampler is checked on rows as long as any of the run can become, too."""
    def forgets_early_tokens(policy, prompts, sampling):
        shortened = [ids[-60:] for ids in prompts]
        responses = starter.rollout_with_transformers(policy, shortened, sampling)
        whole = [ids for ids in prompts for _ in range(sampling.group_size)]
        return [r._replace(prompt_ids=ids) for r, ids in zip(responses, whole)]

    wrong = dataclasses.replace(starter.PLAIN, rollout=forgets_early_tokens)
    policy = A.make_model("Llama (rope linear)")
    assert choose([wrong], policy, max_new_tokens=40)[0] is wrong  # no row is that long
    with pytest.raises(starter.InputError, match="sampler's log-probs"):
        choose([wrong], policy, max_new_tokens=108)


# --------------------------------------------------------------------------------------------------
# 3. The choice

def broken(name, error):
    def prepare(model):
        raise error

    return dataclasses.replace(starter.PLAIN, name=name, prepare=prepare)


def test_choice_falls_back_with_a_line_for_the_log():
    fast = pytest.importorskip("support.fast")
    policy = A.make_model("Mistral (window)")
    compute, lines = choose([fast.COMPUTE, starter.PLAIN], policy)
    assert compute is starter.PLAIN
    assert lines == ["The fast path does not fit MistralForCausalLM: it has layers that do not "
                     "look back without end"]
    assert policy.config._attn_implementation == "sdpa" and not policy.training


def test_compute_that_finds_itself_unlike_the_plain_one_is_not_chosen():
    def refuse(*_):
        raise starter.RunStopped("its tokens differ")

    policy = A.make_model("Llama")
    first = dataclasses.replace(starter.PLAIN, name="first", check_against_plain=refuse)
    compute, lines = choose([first, starter.PLAIN], policy)
    assert compute is starter.PLAIN
    assert lines == ["The first path does not fit LlamaForCausalLM: its tokens differ"]


def test_error_in_the_code_of_a_model_is_a_reason_and_no_traceback():
    policy = A.make_model("Llama")
    first = broken("first", TypeError("unexpected keyword\nargument 'x'"))
    compute, lines = choose([first, starter.PLAIN], policy)
    assert compute is starter.PLAIN
    assert lines == ["The first path does not fit LlamaForCausalLM: TypeError: unexpected keyword "
                     "argument 'x'"]
    with pytest.raises(starter.InputError, match="unexpected keyword argument"):
        choose([first], policy)


def test_keyboard_interrupt_is_not_a_reason():
    with pytest.raises(KeyboardInterrupt):
        choose([broken("first", KeyboardInterrupt()), starter.PLAIN], A.make_model("Llama"))


class OtherRank(starter.OneProcess):
    """Another process for which the first candidates fail."""

    def __init__(self, n_failures):
        self.n_failures = n_failures
        self.asked = []

    def total(self, numbers, largest=()):
        self.asked.append(numbers["unfit"])
        return {"unfit": numbers["unfit"] + (len(self.asked) <= self.n_failures)}


def test_ranks_decide_together():
    policy = A.make_model("Llama")
    first = dataclasses.replace(starter.PLAIN, name="first")
    second = dataclasses.replace(starter.PLAIN, name="second")
    ranks = OtherRank(1)
    compute, lines = choose([first, second], policy, ranks)
    assert compute is second and ranks.asked == [False, False]
    assert lines == ["The first path does not fit LlamaForCausalLM: another process found that it "
                     "does not"]
    with pytest.raises(starter.InputError, match="another process"):
        choose([first, second], policy, OtherRank(2))


def test_every_rank_votes_even_where_its_own_forward_pass_fails():
    policy = A.make_model("Llama")
    policy.forward = None
    ranks = OtherRank(0)
    with pytest.raises(starter.InputError):
        choose([starter.PLAIN], policy, ranks)
    assert ranks.asked == [True]


def test_bf16_sampling_is_accepted():
    assert choose(A.candidates(), A.make_model("Llama"), bf16=True)


def test_responses_for_check_are_ragged_and_as_long_as_any_row():
    prompts = A.make_prompts()
    responses = starter.responses_for_check(prompts, 100, A.VOCABULARY)
    lengths = [len(r.prompt_ids) + len(r.response_ids) for r in responses]
    assert len(set(lengths)) == 4
    assert lengths[-1] == max(map(len, prompts)) + 100
    assert all(0 <= token < A.VOCABULARY for r in responses for token in r.response_ids)


def test_own_log_probs_match_log_softmax_and_leave_the_model_alone():
    model = A.make_model("GPT2 (dropout)", dropout=True).train()
    prompt, ids = A.make_prompts()[1], [5, 9, 30, 7]
    response = starter.Response(prompt, ids, [0.0] * 4, True)
    ours, std = starter.own_log_probs(model, response, temperature=0.7)
    assert model.training and model.config._attn_implementation == "sdpa"
    logits = A.own_logits(model.eval(), prompt + ids)[len(prompt) - 1:-1] / 0.7
    expected = logits.log_softmax(dim=1)[range(4), ids]
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)
    assert std == pytest.approx(logits.std().item(), rel=1e-4)


# --------------------------------------------------------------------------------------------------
# 4. Dropout and gradient checkpointing

def log_probs_and_gradient(policy, rows):
    policy.zero_grad()
    ours = starter.get_response_log_probs(policy, rows["input_ids"], rows["labels"],
                                          rows["response_mask"])
    ours.sum().backward()
    return ours.detach(), policy.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize("name", ["GPT2 (dropout)", "OPT (other width of embedding)"])
def test_gradient_checkpointing_gives_the_log_probs_of_eval_mode(name):
    """GPT-2's dropout and OPT's dropout and layer drop are on in its config."""
    policy = A.make_model(name, dropout=True)
    for module in policy.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.5
    rows = starter.make_batch([starter.Response(prompt, response, [0.0] * len(response), True)
                               for prompt, response in A.rows_for_scoring(A.make_prompts())],
                              torch.zeros(8), "cpu")
    expected, expected_grad = log_probs_and_gradient(policy.eval(), rows)
    with_dropout, _ = log_probs_and_gradient(policy.train(), rows)
    assert (with_dropout - expected).abs().max() > 0.1  # the fault that is switched off
    starter.make_forward_exact(policy)
    starter.enable_gradient_checkpointing(policy)
    assert policy.training
    ours, grad = log_probs_and_gradient(policy, rows)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-4)


def test_dropout_that_cannot_be_switched_off_is_refused_with_gradient_checkpointing():
    """Falcon reads its rates from the config in every forward pass."""
    policy = A.make_model("Falcon (alibi)")
    policy.config.hidden_dropout = 0.1
    assert choose([starter.PLAIN], policy)[0] is starter.PLAIN  # eval mode has no dropout
    starter.enable_gradient_checkpointing(policy)
    with pytest.raises(starter.InputError, match="standard deviations"):
        choose([starter.PLAIN], policy)


def test_gradient_checkpointing_is_refused_for_a_model_without_it():
    with pytest.raises(starter.InputError, match="use gradient_checkpointing = False"):
        starter.enable_gradient_checkpointing(A.make_model("GPT"))


def test_short_rows_on_a_cpu_have_eager_attention_and_long_ones_have_not(checkpoint):
    policy, _ = starter.init_policy(checkpoint, torch.device("cpu"))
    starter.choose_attention(policy, starter.SHORT_ROW + 1)
    assert policy.config._attn_implementation == "sdpa"
    starter.choose_attention(policy, starter.SHORT_ROW)
    assert policy.config._attn_implementation == "eager"
