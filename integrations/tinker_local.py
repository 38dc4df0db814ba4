"""A local stand-in for the Tinker service: a model in this process behind the same three clients.

It takes and returns the types of the package `tinker`, samples from a real model, computes real
gradients, and refuses what the service refuses: unknown or missing loss_fn_inputs, tensors of the
wrong shape, a log-prob without a gradient. Every call returns a future. The requests of a training
client run in the order in which they came; after one that failed it refuses all others.

Two things differ from the service: all weights are trained and not a LoRA adapter, and there is no
network, so seconds measured here are not those of the service.
"""
import copy
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy
import torch
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch.nn.utils.rnn import pad_sequence

import starter
from support import tasks

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # absolute ratios


def cross_entropy(log_probs, target_tokens, weights):
    return -(log_probs * weights).sum()


def ppo(log_probs, target_tokens, logprobs, advantages, config):
    ratio = torch.exp(log_probs - logprobs)
    clipped = torch.clamp(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


# The loss_fn_inputs of each built-in loss: all of them, and nothing else.
LOSS_INPUTS = {"cross_entropy": {"target_tokens", "weights"},
               "ppo": {"target_tokens", "logprobs", "advantages"}}


def log_probs_of(model, rows, targets):
    """B lists of ids, B lists of the ids that follow each -> B (T,) tensors of log-probs."""
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    ids, labels, mask = (pad_sequence(some, batch_first=True) for some in (
        [torch.tensor(row).long() for row in rows],
        [torch.as_tensor(row).long() for row in targets], masks))
    log_probs = starter.get_response_log_probs(model, ids, labels, mask)
    return [row[own] for row, own in zip(log_probs, mask)]


class LocalServiceClient:
    """Serves copies of one loaded transformers model, by default of the built-in one."""

    def __init__(self, model=None, tokenizer=None):
        if model is None:
            model, tokenizer = starter.init_policy(tasks.TINY, torch.device("cpu"))
        self.base_model, self.tokenizer = model, tokenizer
        self.thread = ThreadPoolExecutor(max_workers=1)

    def _client(self, kind):
        return AwaitableConcurrentFuture(self.thread.submit(
            lambda: kind(copy.deepcopy(self.base_model), self.tokenizer)))

    def create_lora_training_client(self, base_model, rank=32, seed=None):
        """-> future of a LocalTrainingClient. base_model is only a name here."""
        return self._client(LocalTrainingClient)

    def create_sampling_client(self, base_model):
        """-> future of a LocalSamplingClient on the weights that nobody trained."""
        return self._client(LocalSamplingClient)


class LocalTrainingClient:

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.failed = None

    def get_tokenizer(self):
        return self.tokenizer

    def submit(self, function, *args):
        """Runs function(*args) after what was submitted before."""
        def run():
            if self.failed is not None:
                raise RuntimeError("a request before this one failed") from self.failed
            try:
                return function(*args)
            except BaseException as error:
                self.failed = error
                raise
        return AwaitableConcurrentFuture(self.thread.submit(run))

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        """Adds the gradient of the summed loss to that of the calls before."""
        return self.submit(self._run, list(data), loss_fn, loss_fn_config, True)

    def forward_backward_custom(self, data, loss_fn):
        """The SDK's contract: a forward pass gives log-probs; loss_fn(data, log-probs) is
        differentiated on the caller's side; the gradients come back as weights of cross_entropy."""
        return self.submit(self._run_custom, list(data), loss_fn)

    def optim_step(self, adam_params):
        return self.submit(self._optim_step, adam_params)

    def save_weights_and_get_sampling_client(self):
        return self.submit(lambda: LocalSamplingClient(copy.deepcopy(self.model), self.tokenizer))

    # What follows runs in the client's thread.

    def _check(self, data, loss_fn, config):
        if loss_fn not in LOSS_INPUTS:
            raise ValueError(f"loss_fn = {loss_fn!r}; the local service has {list(LOSS_INPUTS)}")
        if not data:
            raise ValueError("No data provided")
        unknown = set(config) - (set(CLIP) if loss_fn == "ppo" else set())
        if unknown:
            raise ValueError(f"loss_fn_config of {loss_fn!r} has unknown keys {sorted(unknown)}")
        for i, datum in enumerate(data):
            length = datum.model_input.length
            given = set(datum.loss_fn_inputs)
            if given != LOSS_INPUTS[loss_fn]:
                raise ValueError(f"datum[{i}]: {loss_fn!r} takes {sorted(LOSS_INPUTS[loss_fn])}, "
                                 f"got {sorted(given)}")
            for name, tensor in datum.loss_fn_inputs.items():
                if list(tensor.to_torch().shape) != [length]:
                    raise ValueError(f"datum[{i}]: {name} has shape {tensor.shape} for {length} "
                                     "input tokens")

    def _run(self, data, loss_fn, config, backward):
        self._check(data, loss_fn, config or {})
        loss = cross_entropy
        if loss_fn == "ppo":
            loss = functools.partial(ppo, config=CLIP | dict(config or {}))
        inputs = [{name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
                  for datum in data]
        with torch.set_grad_enabled(backward):
            log_probs = log_probs_of(self.model, [datum.model_input.to_ints() for datum in data],
                                     [own["target_tokens"] for own in inputs])
            total = sum(loss(row, **own) for row, own in zip(log_probs, inputs))
        if backward:
            total.backward()
        return types.ForwardBackwardOutput(
            loss_fn_output_type="LocalLossReturn",
            loss_fn_outputs=[{"logprobs": types.TensorData.from_torch(row.detach())}
                             for row in log_probs],
            metrics={"loss:sum": float(total.detach())})

    def _run_custom(self, data, loss_fn):
        def sent(weights_of_each):
            # All that the service sees of the datums.
            return [types.Datum(model_input=datum.model_input, loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": weights})
                for datum, weights in zip(data, weights_of_each)]

        zeros = [torch.zeros(datum.model_input.length) for datum in data]
        forward = self._run(sent(zeros), "cross_entropy", None, False)
        leaves = [output["logprobs"].to_torch().clone().requires_grad_(True)
                  for output in forward.loss_fn_outputs]
        loss, metrics = loss_fn(data, leaves)
        loss.backward()
        if any(leaf.grad is None for leaf in leaves):
            raise ValueError("No gradient computed for logprob tensor")
        # cross_entropy is -(log-probs * weights).sum(), hence the sign.
        result = self._run(sent([-leaf.grad for leaf in leaves]), "cross_entropy", None, True)
        result.metrics.update({**metrics, "loss:sum": float(loss.detach())})
        return result

    def _optim_step(self, params):
        self.optimizer.param_groups[0].update(
            lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps,
            weight_decay=params.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(),
                                              params.grad_clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return types.OptimStepResponse(metrics={"grad_norm": float(norm)})


class LocalSamplingClient:
    """Requests are served one after the other."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.thread = ThreadPoolExecutor(max_workers=1)

    def sample(self, prompt, num_samples, sampling_params):
        """-> future of a SampleResponse. Sequence j of a request draws with its seed + j."""
        params = sampling_params
        if params.top_p != 1 or params.top_k != -1 or not params.max_tokens or num_samples < 1:
            raise ValueError("the local service samples with max_tokens, top_p = 1 and top_k = -1")
        return AwaitableConcurrentFuture(self.thread.submit(
            self._sample, prompt.to_ints(), num_samples, params))

    def compute_logprobs(self, prompt):
        """-> future of a list: log p of each token given those before it, None for the first."""
        return AwaitableConcurrentFuture(self.thread.submit(self._score, prompt.to_ints()))

    def _sample(self, ids, num_samples, params):
        stop = params.stop or starter.find_stop_tokens(self.model, self.tokenizer)
        cfg = SimpleNamespace(max_new_tokens=params.max_tokens, stop_token_ids=tuple(stop),
                              bf16=False)
        seed = random.getrandbits(31) if params.seed is None else params.seed
        responses = starter.rollout_with_transformers(self.model, [ids], cfg, seed, num_samples,
                                                      params.temperature)
        return types.SampleResponse(sequences=[types.SampledSequence(
            stop_reason="stop" if response.finished else "length", sequence_id=f"sequence-{i}",
            tokens_np=numpy.array(response.response_ids, dtype=numpy.int32),
            logprobs_np=numpy.array(response.log_probs, dtype=numpy.float32))
            for i, response in enumerate(responses)])

    def _score(self, ids):
        return [None, *log_probs_of(self.model, [ids[:-1]], [ids[1:]])[0].tolist()]
