"""What is said and drawn of a finished run of starter.py. Nothing here changes the model."""

import importlib.util
import math
import re
import shutil
from pathlib import Path

import torch

import starter
from support import edits, ranks


def report(result, policy, ref_model, llm, tokenizer, problems, run):
    """Adds "kl_per_token" and "kl_per_sequence" to the result. Prints what training has changed.
    Writes report.txt and a picture of the curves into the run's folder."""
    cfg, state, n = run.cfg, run.state, len(problems.held_out)
    fault = fault_of_saved_model(policy, problems.held_out, run)
    nats = measure_kl(policy, ref_model, llm, problems.held_out, cfg)
    result["kl_per_token"] = nats.mean().item()
    result["kl_per_sequence"] = nats.sum().item() / n
    if not run.writes_files:
        return
    minutes = state.get("seconds", 0.0) / 60
    lines = [f"\n=== Report: step {state['step']}, {minutes:.1f} min of training ==="]
    for name, after in result["after"].items():
        if name == "solved" or name.startswith("retention_"):
            before = result["before"][name]
            points = 100 * (after - before)
            lines.append(f"  {name:<18} {before:6.1%} -> {after:6.1%}  ({points:+.1f} points)")
    low, high = wilson_interval(result["after"]["solved"], n)
    lines.append(f"solved: 95 % interval {low:.1%} to {high:.1%}, of {n} held-out problems")
    lines.append(
        f"KL(policy || {'start' if ref_model is None else 'reference'}): "
        f"{result['kl_per_token']:z.3f} nats per token, "
        f"{result['kl_per_sequence']:z.2f} nats per response"
    )
    skills = Path(cfg.model_id) / "retention.jsonl"
    if skills.is_file():  # for whoever trains the saved model further
        shutil.copy(skills, run.folder / "model")
    log_hparams(result, run)
    lines.append(draw(run))
    print("\n".join(lines), flush=True)
    (run.folder / "report.txt").write_text("\n".join(lines) + "\n", "utf-8")
    if fault:
        raise starter.RunStopped(fault)


@torch.no_grad()
def fault_of_saved_model(policy, problems, run):
    """Reads the saved model and compares it with the policy, on a prompt, in float32: in bf16
    an adapter beside a weight and one merged into it round differently. Returns what is wrong with
    it, in a sentence, or ""."""
    folder, device = run.folder / "model", run.cfg.device
    ranks.gather([])  # when the first process has written it
    rounds = any(x.dtype != torch.float32 for x in policy.parameters())  # frozen_in_bf16
    limit = 1e-3 if device.type == "cpu" else 1e-2
    if rounds:
        limit = 0.3
    try:
        saved, _ = starter.init_policy(folder, device)
        ids = torch.tensor([problems[0]["prompt_ids"]], device=device)
        with starter.autocast(device, run.cfg.precision if rounds else "float32"):
            ours = policy(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=2)
            theirs = saved(input_ids=ids, use_cache=False).logits.float().log_softmax(dim=2)
        difference = (ours - theirs).abs().mean().item()
    except Exception as error:  # code and files of the model's authors
        found = f"cannot be read ({' '.join(str(error).split())[:200]})"
    else:
        if difference < limit:
            return ""
        found = f"differs from the policy by {difference:.2g} nats"
    kept = max(run.folder.glob("checkpoint_*.pt"), default="no checkpoint")
    return f"the saved model, {folder}, {found}; the weights are in {kept}"


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
        mask = rows["response_mask"]
        stats = starter.token_statistics(policy, rows, cfg.temperature, cfg.precision, ref_model)
        measured.append(stats["kl_per_token"][mask])
    return torch.cat(measured)


def wilson_interval(share, n):
    """Returns the ends of the 95 % interval of a share of n (E. B. Wilson, 1927)."""
    z = 1.96
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half_width = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / scale
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def log_hparams(result, run):
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
    if not run.cfg.use_kl_penalty:
        run.log("eval", {"0_headline/kl_per_token": result["kl_per_token"]}, run.state["step"])


def draw(run):
    """Puts curve.png into the run's folder and log. Returns a line for the report."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed"
    run.writer.flush()
    figure = draw_curve(run.folder)
    figure.savefig(run.folder / "curve.png")
    run.writer.add_figure("pictures/curve", figure, run.state["step"], close=False)
    return "picture: curve.png in the run's folder"


def draw_curve(folder):
    """The reward of the steps, the shares solved in evaluations, and the KL if it was measured. The
    figure is so narrow that TensorBoard's grid does not shrink it, and opens no window."""
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    figure = Figure(figsize=(4.2, 5.6), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2)
    upper.set_title("reward and held-out problems")
    lower.set_title("KL, nats per token")
    drawn = re.compile("train/reward_mean|eval/(solved|retention_.*)|train/kl_per_token")
    for tag in filter(drawn.fullmatch, log.Tags()["scalars"]):
        panel = lower if "kl" in tag else upper
        events = log.Scalars(tag)
        steps, values = [event.step for event in events], [event.value for event in events]
        panel.plot(steps, values, ".-", label=tag.partition("/")[2].removeprefix("retention_"))
    upper.legend(fontsize=8)
    lower.set_xlabel("step")
    return figure
