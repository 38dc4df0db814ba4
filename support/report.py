"""What is said and drawn of a finished run of starter.py. Nothing here changes the model."""

import math
import re
from dataclasses import astuple

import torch

import starter
from support import edits, ranks


def report(result, policy, ref_model, llm, tokenizer, problems, run):
    """Adds "kl_per_token" and "kl_per_sequence" to the result. Prints what training has changed.
    Writes report.txt and a picture of the curves into the run's folder. Raises RunStopped where
    the saved model is not the policy."""
    n = len(problems.held_out)
    nats = measure_kl(policy, ref_model, llm, problems.held_out, run.cfg)
    result["kl_per_token"] = nats.mean().item()
    result["kl_per_sequence"] = nats.sum().item() / n
    if not run.cfg.use_kl_penalty:  # with it, each step has logged it
        run.log("eval", {"0_headline/kl_per_token": result["kl_per_token"]}, run.state["step"])
    if run.writes_files:
        log_hparams(run)
        draw(run, n)
        text = "\n".join(lines_of_report(result, n, run))
        print(text)
        (run.folder / "report.txt").write_text(text + "\n", "utf-8")
    check_saved_model(policy, problems.held_out, run)


def lines_of_report(result, n, run):
    """Yields lines. n: the number of held-out problems."""
    yield f"\n=== Report: step {run.state['step']} ==="
    for name, now in result["after"].items():
        if name == "solved" or name.startswith("retention_"):
            before = result["before"][name]
            yield f"  {name:<18} {before:6.1%} -> {now:6.1%}  ({100 * (now - before):+.1f} points)"
    low, high = wilson_interval(result["after"]["solved"], n)
    yield f"solved: 95 % interval {low:z.1%} to {high:.1%}, of {n} held-out problems"
    reference = run.cfg.ref_model_id or "model before training"
    yield (
        f"KL(policy || {reference}): {result['kl_per_token']:z.3f} nats per token, "
        f"{result['kl_per_sequence']:z.2f} nats per response"
    )
    if "steps" in run.state:
        yield f"what eight steps did to each token: {run.folder}/steps.html"


@torch.no_grad()
def measure_kl(policy, ref_model, llm, problems, cfg):
    """Samples a response to each problem. Returns (N,) the exact KL(policy || start) at each token
    in nats."""
    prompts = [problem["prompt_ids"] for problem in problems]
    responses = starter.rollout(policy, llm, prompts, cfg, "measure_kl", 1, cfg.temperature)
    if ref_model is None:
        ref_model, _ = starter.init_policy(cfg.model_id, cfg.device)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    measured = []
    # The plain cut: of several processes each measures all responses.
    for rows in edits.own("cut_microbatches")(batch, cfg.max_tokens_per_microbatch):
        stats = starter.token_statistics(policy, rows, cfg.temperature, cfg.precision, ref_model)
        measured.append(stats["kl_per_token"][rows["response_mask"]])
    return torch.cat(measured)


@torch.no_grad()
def check_saved_model(policy, problems, run):
    """Raises RunStopped where the saved model has other log-probs than the policy, on a prompt, in
    float32: in bf16 an adapter beside a weight and one merged into it round differently."""
    ranks.gather([])  # when the first process has written it
    saved, _ = starter.init_policy(run.folder / "model", policy.device)
    precision = "float32"
    limit = 1e-3 if policy.device.type == "cpu" else 1e-2
    if run.cfg.frozen_in_bf16:
        precision = run.cfg.precision
        limit = 0.3
    ids = torch.tensor([problems[0]["prompt_ids"]], device=policy.device)
    with starter.autocast(policy.device, precision):
        both = [model(input_ids=ids, use_cache=False).logits for model in (policy, saved)]
    difference = torch.stack(both).log_softmax(dim=3).diff(dim=0).abs().mean()
    if not difference < limit:  # nan, too
        raise starter.RunStopped(
            f"the saved model, {run.folder}/model, differs from the policy by {difference:.2g} "
            "nats; the policy's weights are in the checkpoints beside it"
        )


def wilson_interval(share, n):
    """Returns the ends of the 95 % interval of a share of n (E. B. Wilson, 1927)."""
    z = 1.96
    total = n + z**2
    centre = share * n + z**2 / 2
    half_width = z * math.sqrt(share * (1 - share) * n + z**2 / 4)
    return (centre - half_width) / total, (centre + half_width) / total


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


PANELS = {  # unit of the y axis -> tags
    "mean reward": "train/reward_mean",
    "share solved": "eval/(solved|retention_.*)",
    "KL, nats per token": "0_headline/kl_per_token",
}


def draw(run, n):
    """Puts curve.png into the run's folder: over the steps the reward, the shares solved, with the
    95 % interval of the task's n problems, and the KL. Opens no window."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the curves: matplotlib is not installed")
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.writer.flush()
    log = EventAccumulator(str(run.folder), size_guidance={"scalars": 0}).Reload()
    figure = Figure(figsize=(6, 7), layout="constrained")
    panels = figure.subplots(3, sharex=True)
    for panel, (unit, tags) in zip(panels, PANELS.items()):
        panel.set_ylabel(unit)
        for tag in filter(re.compile(tags).fullmatch, log.Tags()["scalars"]):
            _, steps, values = zip(*map(astuple, log.Scalars(tag)))
            panel.plot(steps, values, ".-", label=tag.partition("/")[2])
            if tag == "eval/solved":
                ends = zip(*[wilson_interval(value, n) for value in values])
                panel.fill_between(steps, *ends, alpha=0.2, label="95 % interval")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside it
    panels[2].set_xlabel("step")
    panels[2].xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(run.folder / "curve.png")
    return figure
