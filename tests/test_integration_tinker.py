"""Tests of integrations/tinker_kl.py: values, gradients through Tinker's contract, refusals."""
import asyncio
import functools
import math
from types import SimpleNamespace

import pytest
import torch

tinker = pytest.importorskip("tinker")

import starter
from integrations import example_tinker, tinker_kl
from integrations.tinker_local import LocalServiceClient, LocalTrainingClient
from starter import InputError, KLSettings
from tinker import types

PROMPTS = [[1, 2, 3], [4, 1], [2, 2, 2, 2]]
RESPONSES = [[3, 1, 4, 1], [2], [5, 0, 5]]


class SmallModel(torch.nn.Module):
    """A recurrent policy in float64, with what starter.py asks of a model."""

    def __init__(self, vocabulary=6, seed=0, spread=0.6):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.nn.Embedding(vocabulary, 5)
        self.layer = torch.nn.GRU(5, 5, batch_first=True)
        self.head = torch.nn.Linear(5, vocabulary)
        self.config = SimpleNamespace(vocab_size=vocabulary, max_position_embeddings=64)
        self.config.get_text_config = lambda: self.config
        self.double()
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = spread * values

    def base_model(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.layer(self.embedding(input_ids))[0])

    def get_output_embeddings(self):
        return self.head

    def log_p(self, ids):
        """(B, T) ids -> (B, T, V), without starter.py."""
        return self.head(self.layer(self.embedding(torch.tensor(ids)))[0]).log_softmax(-1)


@pytest.fixture
def wide(monkeypatch):
    """Tinker's tensors in float64 instead of float32, so that enumeration can be exact."""
    import numpy
    from tinker.types import tensor_data
    monkeypatch.setattr(tensor_data, "_convert_tensor_dtype_to_numpy",
                        {"float32": numpy.float64, "int64": numpy.int64}.get)
    monkeypatch.setattr(tensor_data, "_convert_tensor_dtype_to_torch",
                        {"float32": torch.float64, "int64": torch.int64}.get)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class SDKTrainingClient(tinker.TrainingClient):
    """The package's own forward_backward_custom, whose requests a local model answers."""

    def __init__(self, local):
        self.local = local
        limits = SimpleNamespace(fwdbwd_max_chunk_len=2, fwdbwd_max_chunk_bytes_count=10**6)
        submit = tinker.lib.public_interfaces.api_future.AwaitableConcurrentFuture
        self.holder = SimpleNamespace(
            _client_config=limits, get_session_id=lambda: "session", get_telemetry=lambda: None,
            run_coroutine_threadsafe=lambda coroutine: submit(
                local.thread.submit(asyncio.run, coroutine)))
        super().__init__(self.holder, 0, "model", info=None)

    def _run_fwd_bwd(self, requests, loss_fn, config, *, forward_only):
        call = self.local.forward if forward_only else self.local.forward_backward
        return call([datum for request in requests for datum in request.data], loss_fn, config)


CONTRACTS = {"stand-in": lambda client: client, "SDK": SDKTrainingClient}


def tensors(seed=0, dtype=torch.float64, spread=1.0):
    """Lists with one tensor a response: policy, old, reference log-probs; and advantages."""
    generator = torch.Generator().manual_seed(seed)

    def rows(scale):
        return [scale * torch.randn(len(r), generator=generator, dtype=dtype) for r in RESPONSES]

    old = [x - 2 for x in rows(0.7)]
    policy = [x + y for x, y in zip(old, rows(0.4 * spread))]
    ref = [x + y for x, y in zip(old, rows(0.8 * spread))]
    return policy, old, ref, torch.randn(3, generator=generator, dtype=dtype)


def leaves_of(policy):
    """Log-probs as the SDK hands them over: a leaf for each datum, the prompt included."""
    return [torch.cat([torch.full((len(prompt) - 1,), -1.5, dtype=row.dtype), row])
            .requires_grad_(True) for prompt, row in zip(PROMPTS, policy)]


def call_loss(policy, old, ref, advantages, kl_coef, kl=KLSettings(), datums=None, **more):
    leaves = leaves_of(policy)
    loss, metrics = tinker_kl.compute_grpo_kl_loss(
        datums or tinker_kl.make_datums(PROMPTS, RESPONSES), leaves, kl_coef, 0.2,
        advantages, old, ref, kl, **more)
    loss.backward()
    return loss.item(), [leaf.grad for leaf in leaves], metrics


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


# --------------------------------------------------------------------------------------------------
# Values: the same term as starter.py's, and PPO by hand.

TERMS = [KLSettings(estimator=estimator, gradient=gradient, placement=placement, adaptation=rule,
                    clip_threshold=0.5, max_new_tokens=7)
         for estimator in ("k1", "k2", "k3") for gradient in ("reverse", "as_written")
         for placement in ("loss", "loss_to_go") for rule in ("none", *starter.TERM_RULES)]


@pytest.mark.parametrize("kl", TERMS, ids=lambda kl: "-".join(
    (kl.estimator, kl.gradient, kl.placement, kl.adaptation)))
def test_kl_term_of_each_token_equals_that_of_starter(kl):
    policy, old, ref, advantages = tensors()
    mask = padded([torch.ones(len(r), dtype=torch.bool) for r in RESPONSES])
    leaf = padded(policy).requires_grad_(True)
    expected, _ = starter.kl_penalty(torch.where(mask, leaf, 0.0), padded(ref), padded(old), mask,
                                     kl)
    torch.where(mask, expected, 0.0).sum().backward()
    _, without, _ = call_loss(policy, old, ref, advantages, 0.0, kl)
    plain, with_kl, _ = call_loss(policy, old, ref, advantages, 1.0, kl)
    base, _, _ = call_loss(policy, old, ref, advantages, 0.0, kl)
    assert abs(plain - base - torch.where(mask, expected, 0.0).sum().item()) < 1e-6
    for i, prompt in enumerate(PROMPTS):
        found = (with_kl[i] - without[i])[len(prompt) - 1:]
        torch.testing.assert_close(found, leaf.grad[i, :len(RESPONSES[i])], atol=1e-6, rtol=0)
        assert (with_kl[i][:len(prompt) - 1] == 0).all()
        for t in range(len(RESPONSES[i])):  # a weight of 2 counts this token's term twice
            datums = tinker_kl.make_datums(PROMPTS, RESPONSES)
            weights = datums[i].loss_fn_inputs["weights"].to_torch().clone()
            weights[len(prompt) - 1 + t] = 2.0
            datums[i].loss_fn_inputs["weights"] = types.TensorData.from_torch(weights)
            twice = [call_loss(policy, old, ref, advantages, c, kl, datums)[0] for c in (1.0, 0.0)]
            term = (twice[0] - plain) - (twice[1] - base)
            assert abs(term - expected[i, t].item()) < 1e-6


@pytest.mark.parametrize("cliprange", [0.2, (0.1, 0.3)], ids=str)
def test_ppo_term_equals_a_loop_by_hand(cliprange):
    policy, old, _, advantages = tensors(spread=3.0)
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    total, leaves = 0.0, leaves_of(policy)
    grads = []
    for prompt, new, before, a in zip(PROMPTS, policy, old, advantages.tolist()):
        grads.append([0.0] * (len(prompt) - 1))
        for x, y in zip(new.tolist(), before.tolist()):
            ratio = math.exp(x - y)
            clipped = min(max(ratio, 1 - low), 1 + high)
            total -= min(ratio * a, clipped * a)
            grads[-1].append(-ratio * a if ratio * a <= clipped * a else 0.0)
    loss, _ = tinker_kl.compute_grpo_kl_loss(tinker_kl.make_datums(PROMPTS, RESPONSES), leaves,
                                             0.0, cliprange, advantages, old)
    loss.backward()
    assert abs(loss.item() - total) < 1e-9
    assert any(0.0 in row[len(prompt) - 1:] for row, prompt in zip(grads, PROMPTS))  # it clips
    for leaf, row in zip(leaves, grads):
        torch.testing.assert_close(leaf.grad, torch.tensor(row, dtype=torch.float64))


def test_guide_call_reads_the_datums_and_equals_the_closure():
    """The names, the padding and the call as the Tinker guide prints them."""
    policy, old, ref, advantages = tensors(dtype=torch.float32)
    datums = []
    for i, prompt in enumerate(PROMPTS):
        zeros = [0.0] * (len(prompt) - 1)
        whole = prompt + RESPONSES[i]
        rows = {"advantages": [advantages[i].item()] * len(RESPONSES[i]),
                "logprobs": old[i].tolist(), "ref_logprobs": ref[i].tolist()}
        datums.append(tinker.types.Datum(
            model_input=tinker.types.ModelInput.from_ints(tokens=whole[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor(whole[1:])),
                            **{name: types.TensorData.from_torch(torch.tensor(zeros + row))
                               for name, row in rows.items()}}))
    leaves = leaves_of(policy)
    loss_fn = lambda data, logprobs: tinker_kl.compute_grpo_kl_loss(  # noqa: E731  as printed
        data, logprobs, kl_coef=0.01)
    loss, _ = loss_fn(datums, leaves)
    loss.backward()
    expected, grads, _ = call_loss(policy, old, ref, advantages, 0.01)
    assert abs(loss.item() - expected) < 1e-6
    for leaf, grad in zip(leaves, grads):
        torch.testing.assert_close(leaf.grad, grad)


def test_printed_term_is_a_constant_gradient_on_every_token_prompt_included():
    policy, old, ref, advantages = tensors()
    _, plain, _ = call_loss(policy, old, ref, advantages, 0.0)
    for kl_coef in (0.01, 0.3):
        _, printed, _ = call_loss(policy, old, ref, advantages, kl_coef, as_printed=True)
        for a, b in zip(printed, plain):
            torch.testing.assert_close(a - b, torch.full_like(a, -kl_coef))


def test_method_added_to_starter_works_without_touching_the_integration(monkeypatch):
    monkeypatch.setitem(starter.TERM_RULES, "half", lambda kl, lengths, s: 0.5 * kl)
    monkeypatch.setitem(starter.COEFFICIENT_RULES, "double", lambda c, kl, reward: 2 * c.beta)
    controller = tinker_kl.make_controller(0.1, kl_adaptation_method="half+double")
    policy, old, ref, advantages = tensors()
    base, plain, halved = (call_loss(policy, old, ref, advantages, kl_coef, kl)[0]
                           for kl_coef, kl in ((0, KLSettings()), (1, KLSettings()),
                                               (1, controller.settings)))
    assert abs((halved - base) - 0.5 * (plain - base)) < 1e-9
    controller.update(kl=0.1, reward=0.5)
    assert controller.beta == 0.2


# --------------------------------------------------------------------------------------------------
# Gradients: every response of a small policy, through the contract of forward_backward_custom.

def all_responses(vocabulary, length):
    return [list(ids) for ids in torch.cartesian_prod(
        *[torch.arange(vocabulary)] * length).reshape(-1, length).tolist()]


def log_probs_of(model, prompt, responses):
    log_p = model.log_p([prompt + response for response in responses])
    first = len(prompt) - 1
    return torch.stack([log_p[i, range(first, first + len(r)), r]
                        for i, r in enumerate(responses)])


def gradient_through(contract, policy, old, ref, kl, length):
    """The expected gradient of the KL term on responses that old samples."""
    prompt, responses = [1, 2], all_responses(6, length)
    with torch.no_grad():
        old_rows, ref_rows = (log_probs_of(model, prompt, responses) for model in (old, ref))
    datums = []
    for datum, share in zip(tinker_kl.make_datums([prompt] * len(responses), responses),
                            old_rows.sum(1).exp()):
        inputs = dict(datum.loss_fn_inputs)
        inputs["weights"] = inputs["weights"].to_torch() * share
        datums.append(types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
    local = LocalTrainingClient(policy, None)
    loss_fn = functools.partial(
        tinker_kl.compute_grpo_kl_loss, kl_coef=1.0, kl=kl, advantages=[0.0] * len(responses),
        old_logprobs=old_rows.tolist(), ref_logprobs=ref_rows.tolist())
    CONTRACTS[contract](local).forward_backward_custom(datums, loss_fn).result(timeout=60)
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def exact_gradient(policy, old, ref, length, of_sequence=False):
    """Autograd through the enumerated KL. Not of_sequence: each token's own KL at the states that
    old visits. of_sequence: of the distribution over whole responses."""
    prompt, total = [1, 2], 0.0
    if of_sequence:
        rows = [log_probs_of(model, prompt, all_responses(6, length)).sum(1)
                for model in (policy, ref)]
        total = (rows[0].exp() * (rows[0] - rows[1])).sum()
    else:
        for t in range(length):
            for state in all_responses(6, t) if t else [[]]:
                with torch.no_grad():
                    share = log_probs_of(old, prompt, [state])[0].sum().exp() if t else 1.0
                log_pi, log_ref = (model.log_p([prompt + state])[0, -1] for model in (policy, ref))
                total = total + share * (log_pi.exp() * (log_pi - log_ref)).sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, policy.parameters())])


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("samples", ["own", "older"])
@pytest.mark.parametrize("length", [1, 2])
def test_reverse_gradient_equals_the_enumerated_kl(wide, contract, estimator, samples, length):
    policy, old, ref = (SmallModel(seed=seed) for seed in (1, 2, 3))
    old = policy if samples == "own" else old
    kl = KLSettings(estimator=estimator, ratio_cap=math.inf)
    expected = exact_gradient(policy, old, ref, length)
    found = gradient_through(contract, policy, old, ref, kl, length)
    assert expected.norm() > 0.05
    assert (found - expected).abs().max() < 1e-8


@pytest.mark.parametrize("contract", CONTRACTS)
def test_loss_to_go_gradient_equals_the_enumerated_sequence_kl(wide, contract):
    policy, ref = SmallModel(seed=1), SmallModel(seed=3)
    kl = KLSettings(estimator="k1", placement="loss_to_go", ratio_cap=math.inf)
    expected = exact_gradient(policy, policy, ref, 2, of_sequence=True)
    assert (gradient_through(contract, policy, policy, ref, kl, 2) - expected).abs().max() < 1e-8


@pytest.mark.parametrize("kl, samples, wrong", [
    (KLSettings(estimator="k1", gradient="as_written"), "own", "zero"),
    (KLSettings(estimator="k3", gradient="as_written"), "own", "other"),
    (KLSettings(estimator="k3", ratio_cap=2.0), "older", "other"),
], ids=["k1 as written", "k3 as written", "cap of 2"])
def test_wrong_forms_are_seen_to_be_wrong_by_the_enumeration(wide, kl, samples, wrong):
    policy, old, ref = (SmallModel(seed=seed) for seed in (1, 2, 3))
    old = policy if samples == "own" else old
    found = gradient_through("stand-in", policy, old, ref, kl, 1)
    expected = exact_gradient(policy, old, ref, 1)
    assert (found - expected).norm() > 0.01 * expected.norm()
    assert (found.abs().max() < 1e-12) == (wrong == "zero")


# --------------------------------------------------------------------------------------------------
# The built-in "ppo", and the stand-in's rules.

def clients(model=None, n=1):
    service = LocalServiceClient(model or SmallModel().float(), tokenizer=None)
    return [service.create_lora_training_client("small").result() for _ in range(n)]


@pytest.mark.parametrize("contract", CONTRACTS)
def test_kl_coef_0_gives_the_weights_of_the_built_in_ppo_to_the_bit(contract):
    """Three steps on one rollout, so that ratios leave 1 and are clipped."""
    _, old, ref, advantages = tensors(dtype=torch.float32)
    advantages = advantages.tolist()
    built_in, custom = clients(n=2)
    adam = types.AdamParams(learning_rate=0.05)
    loss_fn = functools.partial(tinker_kl.compute_grpo_kl_loss, kl_coef=0, advantages=advantages,
                                old_logprobs=[x.tolist() for x in old])
    for _ in range(3):
        a = built_in.forward_backward(
            tinker_kl.make_ppo_datums(PROMPTS, RESPONSES, [x.tolist() for x in old], advantages),
            "ppo", tinker_kl.ppo_loss_fn_config(0.2)).result()
        b = CONTRACTS[contract](custom).forward_backward_custom(
            tinker_kl.make_datums(PROMPTS, RESPONSES), loss_fn).result()
        assert abs(a.metrics["loss:sum"] - b.metrics["loss:sum"]) < 1e-5
        built_in.optim_step(adam).result()
        custom.optim_step(adam).result()
    assert b.metrics["clip_frac"] > 0
    before = clients()[0].model
    for x, y, z in zip(*(model.parameters() for model in (built_in.model, custom.model, before))):
        assert torch.equal(x, y) and not torch.equal(x, z)


def test_datums_hold_what_the_service_accepts_and_survive_the_wire_format():
    from tinker.proto.request_conv import forward_backward_request_to_proto
    logprobs = [[-1.0] * len(r) for r in RESPONSES]
    custom = tinker_kl.make_datums(PROMPTS, RESPONSES)
    for_ppo = tinker_kl.make_ppo_datums(PROMPTS, RESPONSES, logprobs, [0.5, -1.0, [1.0, 2.0, 3.0]])
    assert {frozenset(datum.loss_fn_inputs) for datum in custom} == {
        frozenset({"target_tokens", "weights"})}
    assert for_ppo[2].loss_fn_inputs["advantages"].data == [0, 0, 0, 1, 2, 3]
    assert custom[0].model_input.to_ints() == [1, 2, 3, 3, 1, 4]
    assert custom[0].loss_fn_inputs["target_tokens"].data == [2, 3, 3, 1, 4, 1]
    assert custom[0].loss_fn_inputs["weights"].data == [0, 0, 1, 1, 1, 1]
    for data, loss_fn, config in ((custom, "cross_entropy", None),
                                  (for_ppo, "ppo", tinker_kl.ppo_loss_fn_config((0.2, 0.28)))):
        message = forward_backward_request_to_proto(types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(data, loss_fn, config),
            model_id="m", seq_id=1))
        assert len(message.data) == 3
        clients()[0].forward_backward(data, loss_fn, config).result()
    assert dict(message.loss_fn_config) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


def test_reference_logprobs_are_aligned_with_the_response():
    model = SmallModel()
    client = LocalServiceClient(model, None).create_sampling_client(base_model="small").result()
    found = asyncio.run(tinker_kl.compute_reference_logprobs(client, PROMPTS, RESPONSES))
    for prompt, response, row in zip(PROMPTS, RESPONSES, found):
        expected = log_probs_of(model, prompt, [response])[0]
        torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), expected.detach())


def test_stand_in_refuses_what_the_service_refuses():
    data = tinker_kl.make_datums(PROMPTS, RESPONSES)
    extra = types.Datum(model_input=data[0].model_input, loss_fn_inputs={
        **data[0].loss_fn_inputs, "ref_logprobs": torch.zeros(6)})
    short = types.Datum(model_input=data[0].model_input, loss_fn_inputs={
        "target_tokens": torch.zeros(2, dtype=torch.long), "weights": torch.zeros(2)})
    unused = lambda data, rows: (rows[0].sum(), {})  # noqa: E731
    for call, message in [
        (lambda c: c.forward_backward([extra], "cross_entropy"), "ref_logprobs"),
        (lambda c: c.forward_backward(data, "ppo"), "advantages"),
        (lambda c: c.forward_backward([short], "cross_entropy"), "shape"),
        (lambda c: c.forward_backward(data, "cross_entropy", {"clip_low_threshold": 1}), "unknown"),
        (lambda c: c.forward_backward_custom(data, unused), "No gradient"),
        (lambda c: c.forward_backward([], "cross_entropy"), "No data"),
    ]:
        client = clients()[0]
        future = call(client)
        with pytest.raises(ValueError, match=message):
            future.result()
        with pytest.raises(RuntimeError, match="failed"):
            client.optim_step(types.AdamParams()).result()


def test_stand_in_adds_gradients_up_until_the_optimiser_step():
    data = tinker_kl.make_datums(PROMPTS, RESPONSES)
    client, = clients()

    def gradient():
        return torch.cat([p.grad.flatten() for p in client.model.parameters()])

    client.forward_backward(data, "cross_entropy").result()
    once = gradient()
    client.forward_backward(data, "cross_entropy").result()
    torch.testing.assert_close(gradient(), 2 * once)
    before = client.model.head.weight.clone()
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert all(p.grad is None for p in client.model.parameters())
    torch.testing.assert_close((client.model.head.weight - before).abs().max(), torch.tensor(0.01))


# --------------------------------------------------------------------------------------------------
# Advantages, settings, refusals.

def test_advantages_subtract_the_mean_and_divide_by_the_deviation_if_asked():
    rewards = [1, 0, 0, 1, 0.3, 0.3, 0.3, 0.3]
    plain, stats = tinker_kl.compute_advantages(rewards, 4)
    assert plain == [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0] and stats["frac_zero_std"] == 0.5
    divided, _ = tinker_kl.compute_advantages(rewards, 4, normalize_by_std=True)
    assert divided == pytest.approx([x / (math.sqrt(1 / 3) + 1e-6) for x in plain])


def test_kl_in_the_advantages_is_paid_by_this_token_and_all_earlier_ones():
    _, old, ref, advantages = tensors(dtype=torch.float32)
    found = tinker_kl.advantages_with_kl(advantages.tolist(), [x.tolist() for x in old],
                                         [x.tolist() for x in ref], kl_coef=0.3)
    for row, a, x, y in zip(found, advantages.tolist(), old, ref):
        d = (x - y).tolist()
        assert row == pytest.approx([a - 0.3 * sum(d[t:]) for t in range(len(d))], abs=1e-6)
    loss, _, _ = call_loss(old, old, ref, advantages, 0.3,
                           KLSettings(estimator="k1", placement="reward"))
    assert loss == pytest.approx(-sum(map(sum, found)), abs=1e-4)  # the custom loss does the same


def test_controller_goes_on_from_its_state():
    options = dict(kl_adaptation_method="target_sound+clip_sound", kl_target=0.05)
    whole = tinker_kl.make_controller(0.3, **options)
    half = tinker_kl.make_controller(0.3, **options)
    path = [(0.2, 0.1), (0.01, 0.5), (float("nan"), 0.6), (0.3, 0.7), (0.2, 0.9), (0.0, 1.0)]
    for kl, reward in path:
        whole.update(kl, reward)
    for kl, reward in path[:3]:
        half.update(kl, reward)
    resumed = tinker_kl.make_controller(0.3, state=dict(half.state), **options)
    for kl, reward in path[3:]:
        resumed.update(kl, reward)
    assert resumed.state == whole.state and whole.beta != 0.3


@pytest.mark.parametrize("call, message", [
    (lambda: tinker_kl.make_controller(0.0), "kl_coef = 0.0"),
    (lambda: tinker_kl.make_controller(0.1, kl_target=0), "kl_target"),
    (lambda: tinker_kl.make_controller(0.1, kl_target_=0.1), "kl_target_ is not an option"),
    (lambda: tinker_kl.make_controller(0.1, kl_gradient="revers"), "kl_gradient = 'revers'"),
    (lambda: tinker_kl.make_controller(0.1, kl_estimator="exact"), "must be 'k1', 'k2' or 'k3'"),
    (lambda: tinker_kl.make_controller(0.1, kl_adaptation_method="clipp"), "clip"),
    (lambda: tinker_kl.make_controller(0.1, kl_estimator="k1", kl_gradient="as_written"),
     "expected gradient of zero"),
    (lambda: tinker_kl.make_controller(0.1, kl_in="reward"), "kl_estimator = 'k1'"),
    (lambda: tinker_kl.ppo_loss_fn_config(1.2), "distance from 1"),
    (lambda: tinker_kl.compute_advantages([1, 2, 3], 2), "whole groups"),
    (lambda: tinker_kl.make_datums([[]], [[1]]), "at least one"),
    (lambda: tinker_kl.make_ppo_datums([[1]], [[1, 2]], [[0.1]], [1.0]), "logprobs"),
    (lambda: tinker_kl.advantages_with_kl([1.0], [[0.1]], [[0.1]], 0.1, KLSettings()), "'k1'"),
    (lambda: call_loss(*tensors()[:2], None, [1.0] * 3, 0.1), "needs advantages"),
    (lambda: call_loss(*tensors()[:3], [1.0] * 2, 0.1), "2 entries for 3"),
    (lambda: call_loss(*tensors(), kl_coef=-1.0), "kl_coef = -1.0"),
    (lambda: call_loss(*tensors(), 0.1, KLSettings(estimator="exact")), "two log-probs"),
])
def test_mistake_gets_one_sentence(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_constant_switches_to_the_real_service(monkeypatch):
    monkeypatch.setattr(tinker, "ServiceClient", lambda: "the real one")
    assert example_tinker.make_service("Qwen/Qwen3-8B") == "the real one"
    assert isinstance(example_tinker.make_service("tiny"), LocalServiceClient)


@pytest.mark.slow
def test_example_learns_and_equals_ppo_at_kl_coef_0():
    """20 steps: the reward rises, the penalty lowers the KL, and kl_coef = 0 through the custom
    loss gives the weights of the built-in "ppo" to the bit."""
    cfg = example_tinker.Settings(n_steps=20, n_eval=25)
    runs = {name: asyncio.run(example_tinker.train(name, cfg))
            for name in ("no penalty (ppo)", "kl_coef = 0", "reverse (default)")}
    for name, (row, _) in runs.items():
        assert row["reward_last"] > row["reward_first"] + 0.05, name
    ppo, zero = (runs[name][1].model.parameters() for name in ("no penalty (ppo)", "kl_coef = 0"))
    assert all(torch.equal(a, b) for a, b in zip(ppo, zero))
    assert runs["reverse (default)"][0]["kl_per_token"] < (
        runs["no penalty (ppo)"][0]["kl_per_token"])
