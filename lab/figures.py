"""Draws lab/figures/*.png from lab/results (needs matplotlib).

    python -m lab.figures                all of them
    python -m lab.figures learning race
"""
import sys

from lab import race, sweep
from lab.rows import FIGURES
from lab.tables import curve, runs_of


def draw_learning(plt):
    """Solved and other skills over the steps, a line for each seed."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    groups = runs_of("learning", sweep.SWEEPS["learning"][:2])
    titles = {"solved": "trained task: solved, %", "other_skills": "not trained: other skills, %"}
    for axis, (name, title) in zip(axes, titles.items()):
        for (settings, rows), color in zip(groups, ("C3", "C0")):
            label = "use_kl_penalty = True" if "use_kl_penalty" in settings else "no KL penalty"
            for i, row in enumerate(rows):
                values = [100 * value for value in curve(row, name)]
                steps = [settings["eval_every"] * step for step in range(len(values))]
                axis.plot(steps, values, color=color, alpha=0.8, linewidth=1.2,
                          label=label if i == 0 else None)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False)
    return figure


def draw_race(plt):
    """Solved over the seconds of training, a line for each run."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
    for axis, (name, contest) in zip(axes, race.CONTESTS.items()):
        for (side, seed), points in sorted(race.read_runs(name).items()):
            seconds, shares = zip(*race.smoothed(points))
            axis.plot(seconds, [100 * share for share in shares], alpha=0.7, linewidth=1.1,
                      color="C0" if side == "starter.py" else "C1",
                      label=side if seed == 0 else None)
        for goal in contest["goals"]:
            axis.axhline(100 * goal, color="0.8", linewidth=0.8, zorder=0)
        axis.set(xlabel="seconds of rollout, reward and update", ylabel="solved, %", title=name)
        axis.legend()
    return figure


DRAWINGS = {"learning": draw_learning, "race": draw_race}


def main(names):
    import matplotlib
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    for name in names or DRAWINGS:
        figure = DRAWINGS[name](plt)
        figure.tight_layout()
        figure.savefig(FIGURES / f"{name}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
