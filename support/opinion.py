"""A second opinion: in some steps starter.py's own mechanics compute again what support/'s gave.

Whether support/'s mechanics fit is asked at the start, on made-up rows. Here some rows and a
response of a step are compared, before its update. Where a number differs by more than rounding,
support/'s mechanics are put aside: that step is repeated without them, and the run goes on so.
"""

import contextlib
import random
from types import SimpleNamespace

import torch

import starter
from support import edits, fast, rows

STEPS = (1, 10, 100, 1_000)
LONGEST = 16  # tokens of a response that are sampled again

# Largest difference of a number, as a share of its largest value, or of 0.3 nats if all are less.
# Measured by `python -m lab.opinion`: the largest of 139 architectures.
LIMITS = {"float32": 4e-4, "bf16": 0.3, "fp16": 0.05}

# What is put aside. Adapters, vLLM and the sums of several processes have no other way.
COMPARED = (
    "start_decoding",
    "token_statistics",
    "sample",
    "rows_to_train_on",
    "add_up_gradients",
)


class SecondOpinion:
    """Of one run in one process."""

    def __init__(self, run):
        self.run = run
        self.first_step = None  # of this process
        self.sampled_in = 0  # the last step whose sampler was compared
        self.sampled_by = None  # what its responses were sampled with
        self.last_right = 0

    def is_due(self, step):
        if self.first_step is None:
            self.first_step = step
        due = {*STEPS, self.first_step, self.run.cfg.n_train_steps}
        if edits.edited_names():
            due.add(2)
        return step in due and "token_statistics" in edits.replaced_names()

    def sample(self, policy, llm, prompts, cfg, seed, group_size, temperature):
        """Like starter.sample."""
        sample = edits.own("sample")
        inputs = prompts, cfg, seed, group_size, temperature
        responses = sample(policy, llm, *inputs)
        step = self.run.state["step"] + 1
        is_training = self.run.state["before"] is not None
        if llm is None and is_training and step != self.sampled_in and self.is_due(step):
            self.sampled_in = step
            self.sampled_by = policy, llm, *inputs
            fault = self.compared(self.fault_of_sampler, policy, responses, *inputs)
            if fault:
                self.put_aside(policy, None, step, fault)
                responses = sample(policy, llm, *inputs)
        return responses

    def fault_of_sampler(self, policy, responses, prompts, cfg, seed, group_size, temperature):
        """Samples the beginning of the most surprising response again. Returns (name, difference,
        limit), or None."""

        def surprise(i):
            return -sum(responses[i].log_probs[:LONGEST])

        i = max(range(len(responses)), key=surprise)
        short = SimpleNamespace(**vars(cfg))
        short.max_new_tokens = min(LONGEST, cfg.max_new_tokens)
        with own_mechanics(policy):
            [again] = starter.rollout_with_transformers(
                policy, [prompts[i // group_size]], short, seed + i, 1, temperature
            )
        pairs = []
        for token, other, *log_probs in zip(
            responses[i].response_ids, again.response_ids, responses[i].log_probs, again.log_probs
        ):
            if token != other:  # the number that draws it lay between the two, within rounding
                break
            pairs.append(log_probs)
        ours, plain = torch.tensor(pairs).view(-1, 2).unbind(dim=1)
        return first_fault({"log-probs of the sampler": (ours, plain)}, LIMITS[cfg.precision])

    def rows_to_train_on(self, batch, policy, ref_model, cfg):
        """Like starter.rows_to_train_on."""
        step = self.run.state["step"] + 1
        if self.is_due(step):
            fault = self.compared(self.fault_of_statistics, batch, policy, ref_model, cfg)
            if fault:
                self.put_aside(policy, ref_model, step, fault)
                return self.sampled_again(batch)
            self.last_right = step
        return rows.with_gradient(batch, policy, ref_model, cfg)

    def sampled_again(self, batch):
        """Returns the batch with the log-probs that starter.py's own mechanics give to the same
        responses: they may be rounded otherwise."""
        again = edits.own("sample")(*self.sampled_by)
        others = starter.make_batch(again, torch.zeros(len(again)), batch["labels"].device)
        if torch.equal(others["labels"], batch["labels"]):
            batch["rollout_log_probs"] = others["rollout_log_probs"]
        return batch

    def fault_of_statistics(self, batch, policy, ref_model, cfg):
        """Computes the longest row and the two with the least likely responses in both ways."""
        likelihood = batch["rollout_log_probs"].sum(dim=1)
        has_advantage = (batch["advantages"] != 0).any(dim=1)
        lengths = batch["response_mask"].sum(dim=1)
        likelihood = likelihood + 1e6 * ~has_advantage  # these last
        chosen = {lengths.argmax().item(), *likelihood.argsort()[:2].tolist()}
        some = starter.keep_rows(batch, torch.tensor(sorted(chosen)))
        width = (some["response_mask"].any(dim=0).nonzero().max() + 1).item()
        some = {name: tensor[:, :width] for name, tensor in some.items()}
        exact = SimpleNamespace(**vars(cfg))
        if not (cfg.frozen_in_bf16 or fast.COMPILED):  # else more is rounded, or compiled anew
            exact.precision = "float32"
        ours = numbers_of(policy, some, exact, ref_model)
        with own_mechanics(policy, ref_model):
            plain = numbers_of(policy, some, exact, ref_model)
        pairs = {name: (ours.get(name), plain[name]) for name in plain}
        return first_fault(pairs, LIMITS[exact.precision])

    def compared(self, fault_of, *inputs):
        """Returns what is wrong as a text, or None."""
        try:
            fault = fault_of(*inputs)
        except Exception as error:  # of a mistake in support/, for example
            return f"the comparison with starter.py's own functions failed with {error!r:.200}"
        if fault:
            name, difference, limit = fault
            return (
                f"support/ computes other {name} than starter.py's own functions, by "
                f"{difference:.1e} of the largest (limit {limit:g})"
            )

    def put_aside(self, policy, ref_model, step, fault):
        last = (
            f"the last right step was {self.last_right}" if self.last_right else "it never fitted"
        )
        print(
            f"step {step}: {fault}; {last}. This step is repeated without support/'s mechanics, "
            "and they stay out of this run"
        )
        self.run.state["put_aside"] = step
        put_aside(self.run.cfg, policy, ref_model)


def put_aside(cfg, policy, ref_model=None):
    """Has starter.py's own mechanics run from here on."""
    edits.restore(*COMPARED)
    for model in (policy, ref_model):
        fast.attend_as_loaded(model)
    most = starter.LOGITS_AT_ONCE // policy.config.get_text_config().vocab_size
    cfg.max_tokens_per_microbatch = min(most, cfg.max_tokens_per_microbatch)


@contextlib.contextmanager
def own_mechanics(*models):
    """Within it starter.py's own mechanics run, and the models attend as they were loaded."""
    in_place = {name: starter.MECHANICS[name] for name in COMPARED}
    attended = [model for model in models if fast.attends_here(model)]
    edits.restore(*COMPARED)
    for model in attended:
        fast.attend_as_loaded(model)
    try:
        yield
    finally:
        starter.MECHANICS.update(in_place)
        for model in attended:
            fast.attend_on_cpu(model)


def numbers_of(policy, some, cfg, ref_model):
    """Rows of a batch -> {name: tensor}: loss, all statistics, and some of the gradient. What an
    edit draws at random is the same each time, and nothing is left of it."""
    found = {}
    in_place = starter.MECHANICS["token_statistics"]

    def keep(*inputs, **named):
        stats = in_place(*inputs, **named)
        found.update({name: x.detach() for name, x in stats.items()})
        return stats

    generators = random.getstate()
    starter.MECHANICS["token_statistics"] = keep
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            random.seed(0)
            inputs = dict(some), cfg, ref_model, cfg.kl_coef
            found["loss"], _ = starter.grpo_microbatch_step(policy, *inputs)
    finally:
        starter.MECHANICS["token_statistics"] = in_place
        random.setstate(generators)
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    found["gradient"] = torch.cat([x[:: 1 + len(x) // 1000].double() for x in gradients])
    policy.zero_grad()
    return found


def first_fault(pairs, limit):
    """{name: (tensor, the same by starter.py's own mechanics)} -> (name, difference, limit) of the
    first that differs, or None."""
    for name, (ours, plain) in pairs.items():
        difference = difference_of(name, ours, plain)
        if not difference <= limit:  # nan, too
            return name, difference, limit


def difference_of(name, ours, plain):
    """Relative to the largest value; of numbers below 0.3 nats, to that."""
    if ours is None or ours.shape != plain.shape:
        return float("inf")
    if plain.numel() == 0 or torch.equal(ours, plain):
        return 0.0
    if name in ("gradient", "loss"):
        return ((ours - plain).double().norm() / plain.double().norm()).item()
    scale = plain.abs().max().clamp(min=0.3)
    return ((ours - plain).abs().max() / scale).item()


def attach(run):
    """Compares where there is something to compare."""
    if "token_statistics" in edits.replaced_names():
        opinion = SecondOpinion(run)
        edits.replace(sample=opinion.sample, rows_to_train_on=opinion.rows_to_train_on)
    else:
        edits.replace(rows_to_train_on=rows.with_gradient)


def resume(run, policy):
    """A run that was put aside stays so when it goes on."""
    step = run.state.get("put_aside")
    if step:
        print(f"support/'s mechanics stay out of this run, as they do from step {step} on")
        put_aside(run.cfg, policy)
