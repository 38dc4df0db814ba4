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
import itertools
import random
from concurrent.futures import Future, ThreadPoolExecutor

import numpy
import torch
from tinker import APIFuture, types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch.nn.utils.rnn import pad_sequence

import starter

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


def run_in(thread, function, *args) -> APIFuture:
    """Runs function(*args) after what was given to the thread before."""
    return AwaitableConcurrentFuture(thread.submit(function, *args))


def token_ids(model_input, model):
    """A ModelInput of text -> its ids, checked against the model."""
    ids = model_input.to_ints()
    config = model.config.get_text_config()
    if not ids or not all(0 <= token < config.vocab_size for token in ids):
        raise ValueError(f"model_input must hold ids from 0 to {config.vocab_size - 1}, got {ids}")
    if len(ids) > config.max_position_embeddings:
        raise ValueError(f"model_input has {len(ids)} tokens; this model reads "
                         f"{config.max_position_embeddings}")
    return ids


class LocalServiceClient:
    """Serves one model, by default the built-in one. model: a loaded transformers model, which is
    copied; tokenizer: its tokenizer."""

    def __init__(self, model=None, tokenizer=None):
        if model is None:
            model, tokenizer = starter.init_policy(starter.find_model("tiny"), torch.device("cpu"))
        self.base_model, self.tokenizer = model, tokenizer
        self.thread = ThreadPoolExecutor(max_workers=1)

    def create_lora_training_client(self, base_model, rank=32, seed=None):
        """-> future of a LocalTrainingClient. base_model is only a name here."""
        return run_in(self.thread, lambda: LocalTrainingClient(
            copy.deepcopy(self.base_model), self.tokenizer))

    def create_sampling_client(self, model_path=None, base_model=None):
        """-> future of a LocalSamplingClient on the weights that nobody trained."""
        if model_path is not None or base_model is None:
            raise ValueError("the local service needs base_model, and has no model_path")
        return run_in(self.thread, lambda: LocalSamplingClient(
            copy.deepcopy(self.base_model), self.tokenizer))


class LocalTrainingClient:

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.optimizer = None
        self.failed = None

    def get_tokenizer(self):
        return self.tokenizer

    def submit(self, function, *args):
        def run():
            if self.failed is not None:
                raise RuntimeError("a request before this one failed") from self.failed
            try:
                return function(*args)
            except BaseException as error:
                self.failed = error
                raise
        return run_in(self.thread, run)

    def forward(self, data, loss_fn, loss_fn_config=None):
        return self.submit(self._run, list(data), loss_fn, loss_fn_config, False)

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
            ids = token_ids(datum.model_input, self.model)
            given = set(datum.loss_fn_inputs)
            if given != LOSS_INPUTS[loss_fn]:
                raise ValueError(f"datum[{i}]: {loss_fn!r} takes {sorted(LOSS_INPUTS[loss_fn])}, "
                                 f"got {sorted(given)}")
            for name, tensor in datum.loss_fn_inputs.items():
                if list(tensor.to_torch().shape) != [len(ids)]:
                    raise ValueError(f"datum[{i}]: {name} has shape {tensor.shape} for "
                                     f"{len(ids)} input tokens")

    def _log_probs(self, data):
        """-> one (T,) tensor for each datum."""
        ids = [torch.tensor(datum.model_input.to_ints()) for datum in data]
        targets = [datum.loss_fn_inputs["target_tokens"].to_torch() for datum in data]
        masks = [torch.ones(len(row), dtype=torch.bool) for row in ids]
        ids, labels, mask = (pad_sequence(rows, batch_first=True) for rows in (ids, targets, masks))
        log_probs = starter.get_response_log_probs(self.model, ids, labels, mask)
        return [row[own] for row, own in zip(log_probs, mask)]

    def _run(self, data, loss_fn, config, backward):
        self._check(data, loss_fn, config or {})
        loss = cross_entropy
        if loss_fn == "ppo":
            loss = functools.partial(ppo, config=CLIP | dict(config or {}))
        with torch.set_grad_enabled(backward):
            log_probs = self._log_probs(data)
            inputs = [{name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
                      for datum in data]
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
        if not isinstance(params, types.AdamParams):
            raise TypeError("Expected AdamParams")
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.optimizer.param_groups[0].update(
            lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps,
            weight_decay=params.weight_decay)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(),
                                              params.grad_clip_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return types.OptimStepResponse(metrics={"grad_norm": float(norm)})


class ServedOnWait(AwaitableConcurrentFuture):
    """A future whose request is served when somebody waits for it."""

    def __init__(self, serve):
        super().__init__(Future())
        self.serve = serve

    def result(self, timeout=None):
        self.serve()
        return super().result(timeout)

    async def result_async(self, timeout=None):
        self.serve()
        return await super().result_async(timeout)

    def future(self):
        self.serve()
        return self._future


class LocalSamplingClient:
    """Requests that were sent before anyone waited are served together, as a server would. What
    is in a batch then depends on the program alone, and a run can be repeated to the bit."""

    def __init__(self, model, tokenizer):
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.waiting = []  # (future, what serves it, request)
        self.names = map("sequence-{}".format, itertools.count())

    def sample(self, prompt, num_samples, sampling_params):
        """-> future of a SampleResponse. Sequence j of a request draws with its seed + j."""
        params = sampling_params
        if params.top_p != 1 or params.top_k != -1 or not params.max_tokens or num_samples < 1:
            raise ValueError("the local service samples with max_tokens, top_p = 1 and top_k = -1")
        ids = token_ids(prompt, self.model)
        seed = random.getrandbits(31) if params.seed is None else params.seed
        return self._submit(self._sample, (ids, num_samples, seed, params))

    def compute_logprobs(self, prompt):
        """-> future of a list: log p of each token given those before it, None for the first."""
        return self._submit(self._score, token_ids(prompt, self.model))

    def _submit(self, serve, request):
        future = ServedOnWait(self._serve)
        self.waiting.append((future, serve, request))
        return future

    @torch.no_grad()
    def _serve(self):
        waiting, self.waiting = self.waiting, []
        for serve in dict.fromkeys(serve for _, serve, _ in waiting):
            of_kind = [(future, request) for future, kind, request in waiting if kind == serve]
            try:
                for (future, _), answer in zip(of_kind, serve([x for _, x in of_kind])):
                    future._future.set_result(answer)
            except Exception as error:  # who waits for one of them must hear of it
                for future, _ in of_kind:
                    future._future.set_exception(error)

    def _sample(self, requests):
        """Neighbours that ask for the same and whose seeds follow one another are one rollout."""
        def kind(item):
            i, (_, n, seed, params) = item
            return n, seed - i * n, params.max_tokens, params.temperature, str(params.stop)

        answers = []
        for (n, *_), same in itertools.groupby(enumerate(requests), kind):
            prompts, _, seeds, params = zip(*(request for _, request in same))
            stop = params[0].stop
            if stop is None:
                stop = starter.find_stop_tokens(self.model, self.tokenizer)
            sampling = starter.Sampling(n, params[0].max_tokens, params[0].temperature, seeds[0],
                                        tuple(stop))
            responses = starter.rollout_with_transformers(self.model, list(prompts), sampling)
            sequences = [sampled_sequence(response, next(self.names)) for response in responses]
            answers += [types.SampleResponse(sequences=sequences[first:first + n])
                        for first in range(0, len(sequences), n)]
        return answers

    def _score(self, requests):
        ids = pad_sequence([torch.tensor(ids) for ids in requests], batch_first=True)
        lengths = torch.tensor([len(ids) for ids in requests])[:, None]
        labels = ids[:, 1:]
        mask = torch.arange(1, ids.shape[1]) < lengths
        log_probs = starter.get_response_log_probs(self.model, ids[:, :-1], labels, mask)
        return [[None, *row[own].tolist()] for row, own in zip(log_probs, mask)]


def sampled_sequence(response, name):
    return types.SampledSequence(
        stop_reason="stop" if response.finished else "length", sequence_id=name,
        tokens_np=numpy.array(response.response_ids, dtype=numpy.int32),
        logprobs_np=numpy.array(response.log_probs, dtype=numpy.float32))
