"""Tests of integrations/tinker_kl.py: values, gradients through Tinker's contract, refusals."""

import asyncio
import functools
from concurrent.futures import Future, ThreadPoolExecutor
from unittest import mock

import pytest
import torch

tinker = pytest.importorskip("tinker")

from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

import starter
from integrations import tinker_kl
from starter import InputError, KLSettings

PROMPTS = [[1, 2, 3], [4, 1], [2, 2, 2, 2]]
RESPONSES = [[3, 1, 4, 1], [2], [5, 0, 5]]


def small_model(seed):
    """A policy of 6 tokens: a (6, 6) table of the logits after each."""
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.Embedding.from_pretrained(table, freeze=False)


def response_log_probs(model):
    """Those of RESPONSES, a tensor for each, without starter.py."""
    rows = []
    for prompt, response in zip(PROMPTS, RESPONSES):
        table = model(torch.tensor([prompt[-1], *response[:-1]])).log_softmax(dim=1)
        rows.append(table[range(len(response)), response])
    return rows


class LocalTrainingClient(tinker.TrainingClient):
    """The package's own client, whose requests a small model in this process answers. It sums the
    cross-entropy over tokens, and adds the gradients of calls up, as the service does."""

    def __init__(self):
        self.model = small_model(1)
        thread = ThreadPoolExecutor(max_workers=1)
        limits = mock.Mock(fwdbwd_max_chunk_len=2, fwdbwd_max_chunk_bytes_count=10**6)
        holder = mock.Mock(
            _client_config=limits,
            run_coroutine_threadsafe=lambda coroutine: AwaitableConcurrentFuture(
                thread.submit(asyncio.run, coroutine)
            ),
        )
        super().__init__(holder, 0, "model", info=None)

    def _run_fwd_bwd(self, requests, loss_fn, config, *, forward_only):
        data = [datum for request in requests for datum in request.data]
        future = Future()
        future.set_result(self.answer(data, forward_only))
        return AwaitableConcurrentFuture(future)

    def answer(self, data, forward_only):
        total, outputs = 0.0, []
        for datum in data:
            given = {name: x.to_torch() for name, x in datum.loss_fn_inputs.items()}
            assert given.keys() == {"target_tokens", "weights"}
            table = self.model(torch.tensor(datum.model_input.to_ints())).log_softmax(dim=1)
            row = table[range(len(table)), given["target_tokens"]]
            outputs.append({"logprobs": types.TensorData.from_torch(row.detach())})
            total = total - (row * given["weights"]).sum()
        if not forward_only:
            total.backward()
        return types.ForwardBackwardOutput(
            loss_fn_output_type="Local", loss_fn_outputs=outputs, metrics={"loss:sum": total.item()}
        )


def tensors():
    """Lists with one tensor a response: policy, old, reference log-probs; and advantages."""
    rows = [[x.detach() for x in response_log_probs(small_model(seed))] for seed in (1, 2, 3)]
    return *rows, torch.tensor([0.7, -1.2, 0.4])


def call_loss(policy, old, ref, advantages, kl_coef, kl=KLSettings(), datums=None, **more):
    """-> loss, its gradients for each datum, the prompt included, and metrics."""
    leaves = [
        torch.cat([torch.full((len(prompt) - 1,), -1.5), row]).requires_grad_()
        for prompt, row in zip(PROMPTS, policy)
    ]
    more = dict(cliprange=0.2, advantages=advantages, old_logprobs=old, ref_logprobs=ref) | more
    loss, metrics = tinker_kl.compute_grpo_kl_loss(
        datums or tinker_kl.make_datums(PROMPTS, RESPONSES), leaves, kl_coef, kl=kl, **more
    )
    loss.backward()
    return loss.item(), [leaf.grad for leaf in leaves], metrics


# Values and gradients


@pytest.mark.parametrize(
    "kl_coef, kl",
    [
        (0.0, KLSettings()),
        (0.5, KLSettings()),
        (0.5, KLSettings(kl_estimator="k1", kl_in="reward")),
        (
            0.5,
            KLSettings(
                kl_in="loss_to_go", kl_adaptation_method="clip_sound", kl_clip_threshold=0.5
            ),
        ),
        (0.5, KLSettings(kl_adaptation_method="length_normalized_sound", max_new_tokens=7)),
    ],
)
def test_loss_and_gradient_through_the_sdk_equal_those_of_starter(kl_coef, kl):
    """Old samples are of another policy, so each token of a logged KL counts by its ratio."""
    _, old, ref, advantages = tensors()
    mask = tinker_kl.padded([torch.ones(len(response), dtype=torch.bool) for response in RESPONSES])
    model = small_model(1)
    policy = tinker_kl.padded(response_log_probs(model))
    expected, metadata = starter.compute_loss(
        advantages[:, None],
        policy,
        tinker_kl.padded(old),
        0.2,
        tinker_kl.padded(ref),
        kl_coef,
        mask,
        kl,
    )
    expected[mask].sum().backward()
    loss_fn = functools.partial(
        tinker_kl.compute_grpo_kl_loss,
        kl_coef=kl_coef,
        kl=kl,
        advantages=advantages,
        old_logprobs=old,
        ref_logprobs=ref,
    )
    local = LocalTrainingClient()
    datums = tinker_kl.make_datums(PROMPTS, RESPONSES)
    result = local.forward_backward_custom(datums, loss_fn).result(timeout=60)
    found = [result.metrics[name] for name in ("loss:sum", "adaptive_kl/raw_kl", "kl_per_token")]
    logged = [metadata[name].item() for name in ("kl_penalty_mean", "kl_k3")]
    assert found == pytest.approx([expected[mask].sum().item(), *logged], abs=1e-5)
    torch.testing.assert_close(local.model.weight.grad, model.weight.grad, rtol=0, atol=1e-5)


def test_guide_call_reads_the_datums_and_equals_the_closure():
    """The names, the padding and the call as the Tinker guide prints them."""
    policy, old, ref, advantages = tensors()
    datums = tinker_kl.make_ppo_datums(PROMPTS, RESPONSES, old, advantages)
    for datum, prompt, row in zip(datums, PROMPTS, ref):
        padded = torch.cat([torch.zeros(len(prompt) - 1), row])
        datum.loss_fn_inputs["ref_logprobs"] = types.TensorData.from_torch(padded)
    found = call_loss(policy, None, None, None, 0.01, datums=datums)
    expected = call_loss(policy, old, ref, advantages, 0.01)
    assert abs(found[0] - expected[0]) < 1e-6
    for ours, grad in zip(found[1], expected[1]):
        torch.testing.assert_close(ours, grad)


def test_printed_term_is_a_constant_gradient_on_every_token_prompt_included():
    policy, old, ref, advantages = tensors()
    _, plain, _ = call_loss(policy, old, ref, advantages, 0.0)
    _, printed, _ = call_loss(policy, old, ref, advantages, 0.3, as_printed=True)
    for a, b in zip(printed, plain):
        torch.testing.assert_close(a - b, torch.full_like(a, -0.3), atol=1e-6, rtol=0)


# What travels.


def test_datums_are_those_by_hand_and_survive_the_wire_format():
    from tinker.proto.request_conv import forward_backward_request_to_proto

    _, logprobs, *_ = tensors()
    custom = tinker_kl.make_datums(PROMPTS, RESPONSES)
    for_ppo = tinker_kl.make_ppo_datums(PROMPTS, RESPONSES, logprobs, [0.5, -1.0, [1.0, 2.0, 3.0]])
    assert for_ppo[2].loss_fn_inputs["advantages"].data == [0, 0, 0, 1, 2, 3]
    assert custom[0].model_input.to_ints() == [1, 2, 3, 3, 1, 4]
    assert custom[0].loss_fn_inputs["target_tokens"].data == [2, 3, 3, 1, 4, 1]
    assert custom[0].loss_fn_inputs["weights"].data == [0, 0, 1, 1, 1, 1]
    config = tinker_kl.ppo_loss_fn_config((0.2, 0.28))
    for inputs in ((custom, "cross_entropy", None), (for_ppo, "ppo", config)):
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(*inputs), model_id="m", seq_id=1
        )
        message = forward_backward_request_to_proto(request)
    assert dict(message.loss_fn_config) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


def test_reference_logprobs_are_aligned_with_the_response():
    """compute_logprobs is not shifted: entry t is about token t, and the first is None."""
    model = small_model(0)

    class Client:
        async def compute_logprobs(self, prompt):
            ids = prompt.to_ints()
            table = model(torch.tensor(ids)).log_softmax(dim=1)
            return [None, *table[range(len(ids) - 1), ids[1:]].tolist()]

    found = asyncio.run(tinker_kl.compute_reference_logprobs(Client(), PROMPTS, RESPONSES))
    for row, expected in zip(found, response_log_probs(model), strict=True):
        assert row == pytest.approx(expected.tolist())


# Advantages, settings, refusals.


def test_kl_in_the_advantages_is_paid_by_this_token_and_all_earlier_ones():
    _, old, ref, advantages = tensors()
    found = tinker_kl.advantages_with_kl(advantages, old, ref, kl_coef=0.3)
    for row, a, x, y in zip(found, advantages.tolist(), old, ref):
        d = (x - y).tolist()
        assert row == pytest.approx([a - 0.3 * sum(d[t:]) for t in range(len(d))], abs=1e-6)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tinker_kl.ppo_loss_fn_config(1.2), "distance from 1"),
        (lambda: tinker_kl.make_datums([[]], [[1]]), "at least one"),
        (lambda: call_loss(*tensors()[:2], None, [1.0] * 3, 0.1), "needs advantages"),
        (lambda: call_loss(*tensors()[:3], [1.0] * 2, 0.1), "2 entries for 3"),
        (lambda: call_loss(*tensors(), 0.1, KLSettings(kl_estimator="exact")), "two log-probs"),
    ],
)
def test_mistake_gets_one_sentence(call, message):
    with pytest.raises(InputError, match=message):
        call()
