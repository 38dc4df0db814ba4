"""What is said and drawn of a finished run of starter.py. Nothing here changes the model."""
import importlib.util
import json
import math
import shutil
from pathlib import Path

import torch

import starter
from support.rules import MAY_CHANGE


def report(result, policy, ref_model, llm, tokenizer, problems, run):
    """Adds "kl_per_token" and "kl_per_sequence" to the result. Prints what training has changed.
    Writes report.txt, kl_by_token.json and pictures into the run's folder."""
    cfg, state, n = run.cfg, run.state, len(problems.held_out)
    run.optimizer.state.clear()  # room for a second model
    wrong = fault_of_saved_model(policy, problems.held_out, run)
    kl = measure_kl(policy, ref_model, llm, problems.held_out, cfg)
    result |= {"kl_per_token": kl[0].mean().item(), "kl_per_sequence": kl[0].sum().item() / n}
    if not run.is_first:
        return
    lines = [f"\n=== Report: step {state['step']}, {state['seconds'] / 60:.1f} min of training ==="]
    for name, after in result["after"].items():
        if name == "solved" or name.startswith(("retention_", "pass_at_")):
            before = result["before"][name]
            lines.append(f"  {name:<18} {before:6.1%} -> {after:6.1%}  "
                         f"({100 * (after - before):+.1f} points)")
    low, high = wilson_interval(result["after"]["solved"], n)
    lines += [f"solved: 95 % interval {low:.1%} to {high:.1%}, of {n} held-out problems",
              f"KL(policy || {'start' if ref_model is None else 'reference'}): "
              f"{round(result['kl_per_token'], 3) + 0.0:.3f} nats per token, "  # never -0.000
              f"{round(result['kl_per_sequence'], 2) + 0.0:.2f} nats per response"]
    if state["controller"] and cfg.use_kl_penalty and starter.rule_among(
            starter.COEFFICIENT_RULES, cfg):
        beta = state["controller"]["beta"]
        lines.append(f"KL coefficient: {cfg.kl_coef:g} at first, {beta:.3g} now")
    log_hparams(result, run)
    tables = tables_of_kl(kl, tokenizer)
    (run.folder / "kl_by_token.json").write_text(json.dumps(tables), "utf-8")
    skills = Path(cfg.model_id) / "retention.jsonl"
    if skills.is_file():  # for whoever trains the saved model further
        shutil.copy(skills, run.folder / "model")
    lines.append(draw(tables, run))
    print("\n".join(lines), flush=True)
    (run.folder / "report.txt").write_text("\n".join(lines) + "\n", "utf-8")
    if wrong:
        raise starter.RunStopped(wrong)


@torch.no_grad()
def fault_of_saved_model(policy, problems, run):
    """Reads the saved model and compares it with the policy, on a few prompts, in float32: in bf16
    an adapter beside a weight and one merged into it round differently. Returns what is wrong with
    it, in a sentence, or ""."""
    folder, cfg = run.folder / "model", run.cfg
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # until the first process has written it
    try:
        saved, _ = starter.init_policy(folder, cfg.device)
        rounds = any(p.dtype == torch.bfloat16 for p in policy.parameters())  # frozen_in_bf16
        limit = 0.3 if rounds else 1e-3 if cfg.device.type == "cpu" else 1e-2
        differences = []
        for problem in problems[:4]:
            ids = torch.tensor([problem["prompt_ids"]], device=cfg.device)
            with torch.autocast(cfg.device.type, torch.bfloat16, enabled=rounds):
                both = [model(input_ids=ids, use_cache=False).logits for model in (policy, saved)]
            both = [logits.float().log_softmax(dim=2) for logits in both]
            differences.append((both[0] - both[1]).abs().mean().item())
        if max(differences) < limit:
            return ""
        found = f"differs from the policy by {max(differences):.2g} nats"
    except Exception as error:  # code and files of the model's authors
        found = f"cannot be read ({' '.join(str(error).split())[:200]})"
    kept = max(run.folder.glob("checkpoint_*.pt"), default="no checkpoint")
    return f"the saved model, {folder}, {found}; the weights are in {kept}"


@torch.no_grad()
def measure_kl(policy, ref_model, llm, problems, cfg):
    """Samples a response to each problem. Returns (3, N): the exact KL(policy || start) at each
    token in nats, the token's place in its response, and its id."""
    prompts = [problem["prompt_ids"] for problem in problems]
    responses = starter.rollout(policy, llm, prompts, cfg, "measure_kl", 1, cfg.temperature)
    if ref_model is None:
        ref_model, _ = starter.init_policy(cfg.model_id, cfg.device)
    batch = starter.make_batch(responses, torch.zeros(len(responses)), policy.device)
    measured = []
    # The plain cut: of several processes each measures all responses.
    for rows in starter.cut_microbatches.__wrapped__(batch, cfg.max_tokens_per_microbatch):
        mask = rows["response_mask"]
        statistics = starter.token_statistics(policy, rows, cfg.temperature, cfg.bf16, ref_model)
        measured.append(torch.stack([statistics.exact_kl[mask].double(),
                                     mask.cumsum(dim=1)[mask] - 1, rows["labels"][mask]]))
    return torch.cat(measured, dim=1).cpu()


def tables_of_kl(kl, tokenizer):
    """(3, N) of measure_kl -> {"position": {i: [nats, tokens]}, "token": {"id text": the same}}."""
    tables = {}
    for name, key in (("position", kl[1].long()), ("token", kl[2].long())):
        nats, counts = key.bincount(kl[0]).tolist(), key.bincount().tolist()
        tables[name] = {f"{i} {tokenizer.decode([i])}" if name == "token" else i: [x, n]
                        for i, (x, n) in enumerate(zip(nats, counts)) if n}
    return tables


def wilson_interval(share, n):
    """Returns the ends of the 95 % interval of a share of n (E. B. Wilson, 1927)."""
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2) / (1 + z * z / n)
    return max(0.0, centre - half_width), min(1.0, centre + half_width)


def log_hparams(result, run):
    """A row of TensorBoard's HPARAMS page, with each parameter that changes what is learnt, and the
    run's name. TensorBoard is not given a list of columns, since it then puts first what differs
    between runs; its first metrics are those of 0_headline."""
    from torch.utils.tensorboard.summary import hparams
    settings = {}
    for name, value in (run.settings | {"bf16": run.cfg.bf16}).items():  # what "auto" chose
        if name not in MAY_CHANGE or name in ("n_train_steps", "run_name", "bf16"):
            value = Path(value).name if name in ("model_id", "task") else value
            settings[name] = value if type(value) in (int, float) else str(value)
    if run.writer is not None:  # `add_hparams` would begin a second file of events in the folder
        for summary in hparams(settings, {})[1:]:
            run.writer.file_writer.add_summary(summary)
    if not run.cfg.use_kl_penalty:
        run.log("add_scalar", "0_headline/kl_per_token", result["kl_per_token"], run.state["step"])


def draw(tables, run):
    """Puts kl.png and curve.png into the run's folder and log. Returns a line for the report."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no pictures: matplotlib is not installed"
    run.log("flush")
    for name, figure in (("kl", draw_kl(tables)), ("curve", draw_curve(run.folder))):
        figure.savefig(run.folder / f"{name}.png")
        run.log("add_figure", f"pictures/{name}", figure, run.state["step"], False)
    return "pictures: curve.png and kl.png in the run's folder"


def new_figure(*titles):
    """Returns a figure and its panels, one below the other, so narrow that TensorBoard's grid does
    not shrink it. No window is opened."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(4.2, 2.8 * len(titles)), dpi=110, layout="constrained")
    panels = figure.subplots(len(titles), 1, squeeze=False)[:, 0]
    for panel, title in zip(panels, titles):
        panel.set_title(title)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, panels


def draw_curve(folder):
    """The reward of the steps, the shares solved in evaluations, and the KL if it was measured."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    curves = {tag: list(zip(*((event.step, event.value) for event in log.Scalars(tag))))
              for tag in log.Tags()["scalars"]}
    has_kl = "train/kl_per_token" in curves
    titles = ["reward and held-out problems", "KL(policy || reference), nats per token"]
    figure, panels = new_figure(*titles[:1 + has_kl])
    for tag, points in curves.items():
        if tag in ("train/reward_mean", "eval/solved") or tag.startswith("eval/retention_"):
            name = tag.partition("/")[2].removeprefix("retention_")
            panels[0].plot(*points, ".-" if "eval/" in tag else "-", label=name)
    panels[0].legend(fontsize=8)
    if has_kl:
        panels[1].plot(*curves["train/kl_per_token"], color="C3")
    panels[-1].set_xlabel("step")
    return figure


def draw_kl(tables):
    """The mean KL at each place in the response, and the tokens to which most of the KL belongs."""
    figure, panels = new_figure("nats per token, by place in the response", "share of KL, by token")
    places = tables["position"]
    panels[0].bar(places.keys(), [nats / n for nats, n in places.values()], color="C3")
    tokens = sorted(tables["token"].items(), key=lambda item: -item[1][0])
    total = max(sum(nats for _, (nats, _) in tokens), 1e-12)
    names = [repr(name.partition(" ")[2]).replace("$", r"\$") for name, _ in tokens[:10]]
    panels[1].barh(range(len(names)), [nats / total for _, (nats, _) in tokens[:10]], color="C3")
    panels[1].set_yticks(range(len(names)), names)
    panels[1].invert_yaxis()
    return figure
