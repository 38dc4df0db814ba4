"""A second opinion: in some steps starter.py's own mechanics compute again what support/'s gave.

Whether support/'s mechanics fit is asked at the start, on made-up rows. Here some rows and a
response of a step are compared, before its update. Where a number differs by more than rounding,
support/'s mechanics are put aside: that step is repeated without them, and the run goes on so.
"""

import contextlib
import random
from types import SimpleNamespace

import numpy
import torch

import starter
from support import edits, fast, memory, rows

STEPS = (1, 10, 100, 1_000)  # and the last, the first of each process, and 2 of an edited file
LONGEST = 16  # tokens of a response that are sampled again

# Largest difference of a number, as a share of its largest value, or of 0.3 nats if all are less.
# `python -m lab.opinion` measures what rounding gives: lab/results/opinion.csv.
LIMITS = {"float32": 3e-4, "bf16": 0.3, "fp16": 0.05}

# What is put aside. Adapters, vLLM and several processes have no other way.
COMPARED = (
    "start_decoding",
    "token_statistics",
    "sample",
    "rows_to_train_on",
    "add_up_gradients",
)


class SecondOpinion:
    """Of one run in one process. models: the policy, and the reference or None."""

    def __init__(self, run, models):
        self.run = run
        self.models = models
        self.first_step = None  # of this process
        self.compared = None  # step and temperature of the last comparison
        self.sampled = {}  # step: the last inputs of sample(), of the last step that was due

    def is_due(self, step):
        self.first_step = self.first_step or step
        due = [*STEPS, self.first_step, self.run.cfg.n_train_steps]
        if edits.edited_names():
            due.append(2)
        return step in due

    def sample(self, policy, llm, requests, cfg, temperature):
        """Like starter.sample. Of an agent's turns the first is compared; the evaluation after the
        step before has another temperature."""
        sample = edits.OWN["sample"]
        inputs = requests, cfg, temperature
        responses = sample(policy, llm, *inputs)
        step = self.run.state["step"] + 1
        if llm is None and self.run.state["before"] is not None and self.is_due(step):
            self.sampled = {step: (policy, llm, *inputs)}
            is_compared = self.compared == (step, temperature)
            self.compared = step, temperature
            if not is_compared and self.is_wrong(
                step, numbers_of_sampler, policy, responses, *inputs
            ):
                responses = sample(policy, llm, *inputs)
        return responses

    def rows_to_train_on(self, batch, policy, ref_model, cfg):
        """Like starter.rows_to_train_on."""
        step = self.run.state["step"] + 1
        if self.is_due(step):
            wrong = self.is_wrong(step, numbers_of_step, batch, policy, ref_model, cfg)
            if wrong:
                return self.sampled_again(batch, step)
            if wrong is False:
                self.run.state["last_right"] = step
        return rows.with_gradient(batch, policy, ref_model, cfg)

    def sampled_again(self, batch, step):
        """Returns the batch with the log-probs that starter.py's own mechanics give to the same
        responses: they may be rounded otherwise."""
        if step in self.sampled:
            again = edits.OWN["sample"](*self.sampled[step])
            others = starter.make_batch(again, torch.zeros(len(again)), batch["labels"].device)
            if torch.equal(others["labels"], batch["labels"]):
                batch["sampler_log_probs"] = others["sampler_log_probs"]
        return batch

    def is_wrong(self, step, numbers, *inputs):
        """Compares numbers(*inputs), if there is memory for it. Where they differ, says so and puts
        support/'s mechanics aside."""
        try:
            fault = fault_among(*numbers(*inputs))
        except Exception as error:  # of a mistake in support/, for example
            if memory.is_lack(error):  # starter.py's own mechanics need more
                print(f"step {step}: there is no memory to compare with starter.py's own functions")
                return None
            fault = f"the comparison with starter.py's own functions failed with {error!r:.200}"
        if fault is None:
            return False
        last_right = self.run.state.get("last_right")
        last = f"the last right step was {last_right}" if last_right else "it never fitted"
        print(
            f"step {step}: {fault}; {last}. This step is repeated without support/'s mechanics, "
            "and they stay out of this run"
        )
        self.run.state["put_aside"] = step
        put_aside(self.run.cfg, self.models)
        return True


# Numbers.  -> {name: (tensor, the same by starter.py's own mechanics)}, and the limit.


def numbers_of_sampler(policy, responses, requests, cfg, temperature):
    """Samples the beginning of the most surprising response again."""
    surprises = [-sum(response.log_probs[:LONGEST]) for response in responses]
    i = surprises.index(max(surprises))
    request = requests[i]._replace(max_new_tokens=min(LONGEST, requests[i].max_new_tokens))
    with own_mechanics(policy), random_numbers_of_its_own():
        [again] = starter.rollout_with_transformers(policy, [request], cfg, temperature)
    pairs = []
    tokens = zip(responses[i].response_ids, again.response_ids)
    for (token, other), *log_probs in zip(tokens, responses[i].log_probs, again.log_probs):
        if token != other:  # the number that draws it lay between the two, within rounding
            break
        pairs.append(log_probs)
    ours, plain = torch.tensor(pairs).view(-1, 2).unbind(dim=1)
    return {"log-probs of the sampler": (ours, plain)}, LIMITS[cfg.precision]


def numbers_of_step(batch, policy, ref_model, cfg):
    """Computes the longest row, and the two least likely of those with an advantage."""
    likelihood = batch["sampler_log_probs"].sum(dim=1)
    likelihood += 1e6 * (batch["advantages"] == 0).all(dim=1)
    longest = batch["response_mask"].sum(dim=1).argmax().item()
    chosen = sorted({longest, *likelihood.argsort()[:2].tolist()})
    [some] = starter.cut_microbatches(starter.keep_rows(batch, chosen), 10**9)
    # As if these were the whole step: of more tokens fp16 would take their gradients for 0
    some["weights"] = some["weights"] / some["weights"].abs().sum().clamp(min=1e-12)
    if not some["advantages"].any():  # a gradient of rounding alone would tell nothing
        some["advantages"] = some["response_mask"].float()
    cfg = SimpleNamespace(**vars(cfg))
    if not (cfg.frozen_in_bf16 or fast.COMPILED):  # else more is rounded, or compiled anew
        cfg.precision = "float32"
    ours = numbers_of_rows(some, policy, ref_model, cfg)
    with own_mechanics(policy, ref_model):
        plain = numbers_of_rows(some, policy, ref_model, cfg)
    return {name: (ours.get(name), plain[name]) for name in plain}, LIMITS[cfg.precision]


def numbers_of_rows(some, policy, ref_model, cfg):
    """Returns the loss, all statistics, and some of the gradient. What an edit draws at random is
    the same each time, and nothing is left of it."""
    found = {}
    in_place = starter.MECHANICS["token_statistics"]

    def keep(*inputs, **named):
        stats = in_place(*inputs, **named)
        found.update({name: x.detach() for name, x in stats.items()})
        return stats

    starter.MECHANICS["token_statistics"] = keep
    try:
        with random_numbers_of_its_own():
            inputs = dict(some), cfg, ref_model, cfg.kl_coef
            loss, _ = starter.grpo_microbatch_step(policy, *inputs)
        # Of the same rows, without regard to signs: advantages may cancel
        size = some["weights"] * (some["advantages"].abs() + cfg.kl_coef)
        found["loss"] = loss / size.sum().clamp(min=1e-12)
        found["gradient"] = fast.some_of_gradient(policy)
    finally:
        starter.MECHANICS["token_statistics"] = in_place
        memory.forget_gradients(policy)
    return found


@contextlib.contextmanager
def random_numbers_of_its_own():
    """What is drawn inside is the same each time, and changes nothing that is drawn later."""
    generators = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            random.seed(0)
            numpy.random.seed(0)
            torch.manual_seed(0)
            yield
    finally:
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])


def fault_among(pairs, limit):
    """Returns what differs as a text, or None."""
    for name, (ours, plain) in pairs.items():
        difference = difference_of(name, ours, plain)
        if not difference <= limit:  # nan, too
            return (
                f"support/ computes other {name} than starter.py's own functions, by "
                f"{difference:.1e} of the largest (limit {limit:g})"
            )


def difference_of(name, ours, plain):
    """Relative to the largest value; of numbers below 0.3 nats, to that. What is nan or inf in both
    is equal: it comes from a reward, or from the weights."""
    if ours is None or ours.shape != plain.shape:
        return float("inf")
    is_equal = (ours == plain) | (ours.isnan() & plain.isnan())
    if is_equal.all():
        return 0.0
    ours, plain = (x.masked_fill(is_equal & ~x.isfinite(), 0.0) for x in (ours, plain))
    if name == "gradient":
        return ((ours - plain).norm() / plain.norm()).item()
    return ((ours - plain).abs().max() / plain.abs().max().clamp(min=0.3)).item()


# starter.py's own mechanics, for a moment or for the rest of a run


def use_own_mechanics(models):
    """Has starter.py's own mechanics run, and the models attend as they were loaded."""
    edits.restore(*COMPARED)
    for model in models:
        fast.attend_as_loaded(model)


@contextlib.contextmanager
def own_mechanics(*models):
    """Within it that is so; afterwards all is as it was."""
    in_place = dict(starter.MECHANICS)
    attended = [model for model in models if fast.attends_here(model)]
    use_own_mechanics(models)
    try:
        yield
    finally:
        starter.MECHANICS.update(in_place)
        for model in attended:
            fast.attend_on_cpu(model)


def put_aside(cfg, models):
    """Has starter.py's own mechanics run from here on."""
    use_own_mechanics(models)
    starter.limit_logits(models[0], cfg)  # all of which a microbatch then has at once


def attach(run, models):
    """Compares where there is something to compare."""
    if "token_statistics" in edits.replaced_names():
        opinion = SecondOpinion(run, models)
        edits.replace(sample=opinion.sample, rows_to_train_on=opinion.rows_to_train_on)
    else:
        edits.replace(rows_to_train_on=rows.with_gradient)


def resume(run, models):
    """A run that was put aside stays so when it goes on."""
    step = run.state.get("put_aside")
    if step:
        print(f"support/'s mechanics stay out of this run, as they do from step {step} on")
        put_aside(run.cfg, models)
