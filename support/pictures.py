"""Pictures of a run: its learning curve, and where the policy has moved away from the start.

They are in TensorBoard's Images tab and lie as PNG files beside report.txt. Needs matplotlib, which
the requirements files name; without it the log says that there are no pictures.
"""
import torch

ROWS = 15  # tokens in the picture of the KL by token


def read_scalars(folder):
    """Returns {tag: {step: value}} of a run's folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]}


def new_figure(width, height, n_columns=1):
    """Returns a figure and its axes. No window is opened, on no machine."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), dpi=110)
    figure.subplots_adjust(left=0.9 / width, right=1 - 0.2 / width, bottom=0.55 / height,
                           top=1 - 0.4 / height, wspace=0.25)
    axes = figure.subplots(1, n_columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def smooth(values, weight=0.9):
    """Exponential moving average, without the bias of its start."""
    averages, total, scale = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        averages.append(total / scale)
    return averages


def draw_curve(scalars, title):
    """Rewards over the steps on the left, with the share solved and other skills where they were
    evaluated; on the right the KL per token, where it was measured in training."""
    has_kl = "train/kl_per_token" in scalars
    figure, axes = new_figure(9 if has_kl else 6, 3.6, 2 if has_kl else 1)
    rewards = scalars.get("train/reward_mean", {})
    axes[0].plot(rewards.keys(), rewards.values(), color="C0", alpha=0.25)
    axes[0].plot(rewards.keys(), smooth(rewards.values()), color="C0", label="reward, smoothed")
    solved = scalars.get("eval/solved", {})
    axes[0].plot(solved.keys(), solved.values(), "o-", color="C2", label="solved, held out")
    for tag, values in scalars.items():
        if tag.startswith("eval/retention_"):
            axes[0].plot(values.keys(), values.values(), ".--", linewidth=1,
                         label=tag.removeprefix("eval/retention_"))
    axes[0].set(xlabel="step", title=title)
    axes[0].legend(fontsize=8)
    if has_kl:
        kl = scalars["train/kl_per_token"]
        axes[1].plot(kl.keys(), kl.values(), color="C3", alpha=0.25)
        axes[1].plot(kl.keys(), smooth(kl.values()), color="C3")
        axes[1].set(xlabel="step", ylabel="nats per token", title="KL(policy || reference)")
    return figure


def draw_kl(kl, tokenizer):
    """kl: (3, N) of runs.measure_kl: nats, place in the response, token id. The mean KL at each
    place on the left; on the right the tokens to which most of the KL belongs."""
    nats, places, tokens = kl[0], kl[1].long(), kl[2].long()
    figure, axes = new_figure(10, 4, 2)
    mean = torch.bincount(places, nats) / torch.bincount(places).clamp(min=1)
    axes[0].bar(range(len(mean)), mean.tolist(), color="C3")
    axes[0].set(xlabel="place in the response", ylabel="nats per token", title="KL by position")
    total = torch.bincount(tokens, nats)
    largest = total.topk(min(ROWS, len(total)))
    names = [repr(tokenizer.decode([i])) for i in largest.indices.tolist()]
    share = largest.values / nats.sum().clamp(min=1e-12)
    axes[1].barh(range(len(names)), share.tolist(), color="C3")
    axes[1].set_yticks(range(len(names)), names)
    axes[1].invert_yaxis()
    axes[1].set(xlabel="share of all KL", title="KL by token")
    return figure


def draw(run, kl, tokenizer):
    """Draws the pictures of a finished run into its folder and its log. Returns a line for the
    report."""
    try:
        from matplotlib import image
    except ImportError:
        return "no pictures: matplotlib is not installed"
    if run.ranks.rank:  # the first process has the log
        return ""
    run.log("flush")
    pictures = {"curve": draw_curve(read_scalars(run.folder), run.folder.name),
                "kl": draw_kl(kl, tokenizer)}
    for name, figure in pictures.items():
        rgba = pixels(figure)
        image.imsave(run.folder / f"{name}.png", rgba)
        run.log("add_image", f"pictures/{name}", rgba[:, :, :3].transpose(2, 0, 1),
                run.state["step"])
    return "pictures: curve.png and kl.png in that folder"


def pixels(figure):
    """(H, W, 4) uint8 of a figure."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return numpy.asarray(canvas.buffer_rgba())
