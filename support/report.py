"""What is said and drawn of a finished run of starter.py. Nothing here changes the model."""

import io
import logging
from dataclasses import astuple

import numpy
import torch
from transformers import AutoModelForCausalLM

import starter
from support import divided, fast, ranks
from support.safely import safely, write_whole


def report(result, policy, ref_model, llm, problems, run):
    """Adds "kl_per_token" to the result. Prints what training has changed.
    Writes report.txt and a picture of the curves into the run's folder. Raises RunStopped where
    the saved model is not the policy. Whatever else fails here is a line."""
    safely("the report", write_report, result, policy, ref_model, llm, problems, run)
    if run.writes_files:
        n = len(problems.held_out)
        safely("TensorBoard's table of settings", log_hparams, run)
        safely("curve.png", draw, run, n)
    safely("the check of the saved model", check_saved_model, policy, problems, run)


def write_report(result, policy, ref_model, llm, problems, run):
    cfg = run.cfg
    n = len(problems.held_out)
    held_out = problems.held_out
    responses = starter.rollout(
        policy, llm, held_out, cfg, "measure_kl", 1, cfg.temperature, cfg.agent
    )
    nats = measure_kl(policy, ref_model, responses, cfg)
    result["kl_per_token"] = nats.mean().item()
    if run.writes_files:
        reference = cfg.ref_model_id or "model before training"
        first = run.state.get("first_reference")
        last = run.state.get("reference") or first  # none where no step was trained
        if ref_model is not None and last != first:
            reference = "reference at the end"
        text = "\n".join(lines_of_report(result, nats, n, run, reference))
        print(text)
        write_whole(run.folder / "report.txt", f"{text}\n".encode())


def lines_of_report(result, nats, n, run, reference):
    """Yields lines. nats: the KL at each token of n responses."""
    yield f"\n=== Report: step {run.state['step']} ==="
    for name, now in result["after"].items():
        if name == "solved" or name.startswith("retention_"):
            before = result["before"][name]
            yield f"  {name:<18} {before:6.1%} -> {now:6.1%}  ({100 * (now - before):+.1f} points)"
    low, high = wilson_interval(result["after"]["solved"], n)
    yield f"solved: 95 % interval {low:z.1%} to {high:.1%}, of {n} held-out problems"
    if result["before"]["solved"] == result["after"]["solved"] == 0:
        mean = result["after"]["reward_mean"]
        yield f"nothing was solved, for which a reward of 1 is needed; their mean is {mean:.3g}"
    yield (
        f"KL(policy || {reference}): "
        f"{nats.mean():z.3f} nats per token, {nats.sum() / n:z.2f} nats per response"
    )
    yield f"in {run.folder}: report.txt, curve.png, and in steps.html what steps did to each token"
    if run.cfg.lora_rank:
        yield "adapters/ has LoRA's adapters alone, model/ the model with them"


@torch.no_grad()
def measure_kl(policy, ref_model, responses, cfg):
    """Returns (N,) the exact KL(policy || reference) at each token of the responses in nats.
    ref_model=None is the model before training."""
    if ref_model is None:
        ref_model, _ = starter.init_policy(cfg.model_id, cfg.device)
        divided.shard_alone(ref_model, cfg)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    measured = []
    # Of several processes each measures all responses.
    for rows in starter.cut_microbatches(batch, cfg.max_tokens_per_microbatch):
        inputs = rows, cfg.temperature, cfg.precision, ref_model
        stats = starter.token_statistics(policy, *inputs)
        measured.append(stats["kl_per_token"][rows["response_mask"]])
    return torch.cat(measured)


LIMIT = 1e-4  # nats per token between the policy and its saved model; rounding gives 1e-9
LIMIT_IN_16_BITS = 0.02  # where the policy's weights are rounded


@torch.no_grad()
def last_log_probs(model, problem, precision):
    """Returns the (n, V) log-probs at the last tokens of a problem's prompt, by the model's own
    forward pass."""
    ids = torch.tensor([problem["prompt_ids"]], device=model.device)
    with starter.autocast(model.device, precision):
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[0, -64:].float().log_softmax(dim=1)


def check_saved_model(policy, problems, run):
    """Raises RunStopped where the saved model is another than the policy, in float32: in bf16 an
    adapter beside a weight and one merged into it round differently. Of several processes all run
    the policy, whose weights they divide, and the first one, which wrote the model, compares."""
    fast.attend_as_loaded(policy)
    precision, limit = "float32", LIMIT
    is_rounded = run.cfg.frozen_in_bf16 or ranks.WORLD > 1  # which gather them in 16 bits
    if is_rounded and run.cfg.precision != "float32":
        precision, limit = run.cfg.precision, LIMIT_IN_16_BITS
    some = problems.held_out[:8]
    of_policy = [last_log_probs(policy, problem, precision) for problem in some]
    if not run.writes_files:
        return
    path = run.folder / "model"
    saved = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    saved.to("cpu" if ranks.WORLD > 1 else policy.device)  # a GPU may have room for a part alone
    saved.set_attn_implementation(policy.config._attn_implementation)
    kl = 0.0
    for problem, log_p in zip(some, of_policy):
        log_q = last_log_probs(saved, problem, precision).to(log_p.device)
        kl += (log_p.exp() * (log_p - log_q)).sum(dim=1).mean().item() / len(some)
    if not kl < limit:  # nan, too
        raise starter.RunStopped(
            f"the saved model, {path}, differs from the policy by {kl:.2g} nats per token (limit "
            f"{limit:g}); the policy's weights are in the checkpoints beside it"
        )


def wilson_interval(share, n):
    """Returns the ends of the 95 % interval of a share of n (E. B. Wilson, 1927): the p that are
    1.96 standard deviations from it, n * (share - p)**2 = 1.96**2 * p * (1 - p)."""
    square = 1.96**2
    return sorted(numpy.roots([n + square, -2 * n * share - square, n * share**2]))


def log_hparams(run):
    """A row of TensorBoard's HPARAMS page, with all settings. TensorBoard is not given a list of
    columns, since it then puts first what differs between runs; its first metrics are those of
    0_headline."""
    from torch.utils.tensorboard.summary import hparams

    settings = {}
    for name, value in vars(run.cfg).items():
        if type(value) not in (int, float):
            value = getattr(value, "__name__", str(value))  # of a reward
        settings[name] = value
    for summary in hparams(settings, {})[1:]:  # `add_hparams` would begin a second file
        run.writer.file_writer.add_summary(summary)


PANELS = {  # unit of the y axis: how its tags begin
    "mean reward": "0_headline/reward",
    "share solved": ("0_headline/solved", "0_headline/other_skills"),
    "KL, nats per token": "0_headline/kl",  # "_per_token", or "_to_teacher"
}


def draw(run, n):
    """Puts curve.png into the run's folder: over the steps the reward, the shares solved, with the
    95 % interval of the task's n problems, and the KL. Opens no window."""
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.writer.flush()
    # After a kill it would warn of the steps that were logged again
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    log = EventAccumulator(str(run.folder)).Reload()
    tags_of_panel = {}
    for unit, beginnings in PANELS.items():
        tags = [tag for tag in log.Tags()["scalars"] if tag.startswith(beginnings)]
        if tags:  # without a penalty there is no KL
            tags_of_panel[unit] = tags
    figure = Figure(figsize=(8, 1 + 2 * len(tags_of_panel)), layout="constrained")
    panels = figure.subplots(len(tags_of_panel), sharex=True, squeeze=False)[:, 0]
    for panel, unit in zip(panels, tags_of_panel):
        panel.set_ylabel(unit)
        for tag in tags_of_panel[unit]:
            _, steps, values = numpy.transpose([astuple(event) for event in log.Scalars(tag)])
            panel.plot(steps, values, ".-", label=tag)
            if tag == "0_headline/solved":
                ends = zip(*[wilson_interval(value, n) for value in values])
                panel.fill_between(steps, *ends, alpha=0.2, label="95 % interval")
        if len(panel.lines) > 1:
            panel.legend(loc=(1.01, 0))
    panels[0].locator_params("x", integer=True)
    figure.supxlabel("step")
    picture = io.BytesIO()
    figure.savefig(picture)
    write_whole(run.folder / "curve.png", picture.getvalue())
    return figure
