"""What a run leaves for the eye: TensorBoard's tags, samples, images and HParams, and PNG files."""
import json
import math
import sys

import pytest
import torch
from conftest import scalars, settings, variety
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytest.importorskip("support.runs")

import starter
from support import pictures, runs

KL_TAGS = {"debug/kl_mean", "debug/kl_max", "debug/kl_min", "debug/ref_logp_mean"}


def finished(checkpoint, folder, **changes):
    """Returns the result of a short run, and what TensorBoard reads in its folder."""
    given = dict(n_train_steps=3, eval_every=2, reward=variety)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starter, "N_TRAIN_PROBLEMS", 60)
        result = starter.main(**settings(checkpoint, folder, **given | changes))
    log = EventAccumulator(str(result["run_folder"]), size_guidance={"tensors": 0, "images": 0})
    log.Reload()
    return result, log


@pytest.fixture(scope="module")
def penalised(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("penalised")
    return finished(checkpoint, folder, use_kl_penalty=True, kl_coef=0.1, seed=3,
                    kl_adaptation_method="target")


@pytest.fixture(scope="module")
def free(checkpoint, tmp_path_factory):
    return finished(checkpoint, tmp_path_factory.mktemp("free"))


def texts(log):
    """{tag: the last text under it}"""
    return {tag: log.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
            for tag in log.Tags()["tensors"]}


def test_headline_curves_come_first_and_equal_those_they_repeat(penalised):
    result, log = penalised
    logged = scalars(result["run_folder"])
    assert min(logged) == "0_headline/kl_per_token"
    for headline, tag in (("reward", "train/reward_mean"), ("kl_per_token", "train/kl_per_token"),
                          ("response_length", "train/response_length"), ("solved", "eval/solved")):
        assert logged[f"0_headline/{headline}"] == logged[tag]
    assert logged["0_headline/solved"].keys() == {0, 2, 3}


def test_adaptive_kl_is_logged_where_it_is_used_and_nowhere_else(penalised, free, checkpoint,
                                                                 tmp_path):
    def adaptive(result):
        return {tag for tag in scalars(result["run_folder"]) if "adaptive_kl" in tag}

    assert adaptive(penalised[0]) == {f"adaptive_kl/{name}" for name in (
        "raw_kl", "adapted_kl", "current_beta")}
    fixed, _ = finished(checkpoint, tmp_path, use_kl_penalty=True, kl_coef=0.1)
    assert adaptive(free[0]) == adaptive(fixed) == set()


def test_debug_tags_describe_the_log_probs(penalised, free):
    logged = scalars(penalised[0]["run_folder"])
    assert KL_TAGS | {"debug/policy_logp_mean"} <= logged.keys()
    assert not KL_TAGS & scalars(free[0]["run_folder"]).keys()
    for step, mean in logged["debug/kl_mean"].items():
        assert mean == pytest.approx(logged["train/kl_k3"][step], rel=1e-4, abs=1e-7)
        assert 0 <= logged["debug/kl_min"][step] <= mean <= logged["debug/kl_max"][step]
    # In the first step the policy is the reference, up to what their two passes round.
    assert logged["debug/ref_logp_mean"][1] == pytest.approx(logged["debug/policy_logp_mean"][1])


class TwoAlike(starter.OneProcess):
    """Two processes with the same numbers: sums are twice as large, the largest is the same."""
    def total(self, numbers, largest=()):
        return {name: x if name in largest else 2 * x for name, x in numbers.items()}


@pytest.mark.parametrize("ranks", [starter.OneProcess(), TwoAlike()])
def test_debug_numbers_match_those_computed_by_hand(ranks):
    rows = [{"response_mask": torch.tensor([[True, False], [True, True]]),
             "ref_log_probs": torch.tensor([[-1.0, 9.0], [-2.0, -3.0]])}]
    now = [torch.tensor([[-1.5, 9.0], [-2.1, -2.0]])]
    numbers = runs.debug_numbers(rows, now, ranks)
    k3 = [math.exp(0.5) - 1 - 0.5, math.exp(0.1) - 1 - 0.1, math.exp(-1) - 1 + 1]
    assert numbers == pytest.approx({
        "policy_logp_mean": -5.6 / 3, "ref_logp_mean": -2.0, "kl_mean": sum(k3) / 3,
        "kl_max": max(k3), "kl_min": min(k3)}, abs=1e-6)


def test_samples_show_prompt_response_reward_and_expected_answer(free):
    shown = texts(free[1])
    for name in ("best", "worst", "0", "1", "2"):
        text = shown[f"samples/{name}/text_summary"]
        for part in ("prompt: ", "response: ", "reward: ", "expected answer: "):
            assert f"    {part}" in text, text

    def reward_of(name):
        text = shown[f"samples/{name}/text_summary"]
        return float(text.partition("reward: ")[2].split()[0])

    assert reward_of("best") >= reward_of("worst")


def test_best_and_worst_sample_are_those_of_the_step():
    logged = {}

    class Log:
        cfg = type("", (), {"group_size": 2})

        def log(self, what, tag, text, step):
            logged[tag] = text

    problems = [{"prompt": "p", "answer": "x"}, {"prompt": "q", "answer": "y"}]
    samples = problems, ["a", "b", "c", "d"], torch.tensor([0.1, 0.0, 1.0, 0.5]), None
    runs.GuardedRun.log_best_and_worst(Log(), samples, 1)
    assert logged["samples/best"].split("\n    ") == [
        "    prompt: q", "response: c", "reward: 1", "expected answer: y"]
    assert "prompt: p" in logged["samples/worst"] and "response: b" in logged["samples/worst"]


def test_hparams_hold_changed_settings_and_outcome(penalised):
    result, log = penalised
    plugin = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    found = HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert found["seed"].number_value == 3 and found["kl_coef"].number_value == 0.1
    assert found["kl_adaptation_method"].string_value == "target"
    logged = scalars(result["run_folder"])
    assert logged["hparam/solved"][0] == pytest.approx(result["after"]["solved"])
    assert logged["hparam/kl_per_token"][0] == pytest.approx(result["kl_per_token"])


def test_pictures_are_in_the_folder_and_in_tensorboard(penalised, free):
    for result, log in (penalised, free):
        for name in ("curve", "kl"):
            png = (result["run_folder"] / f"{name}.png").read_bytes()
            assert png.startswith(b"\x89PNG") and len(png) > 5000
            [image] = log.Images(f"pictures/{name}")
            assert image.width > 400 and image.height > 200
        assert "curve.png" in (result["run_folder"] / "report.txt").read_text()


def test_learning_curve_shows_rewards_evaluations_and_kl(penalised, free):
    logged = scalars(penalised[0]["run_folder"])
    figure = pictures.draw_curve(logged, "a run")
    drawn = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert drawn["solved, held out"] == list(logged["eval/solved"].values())
    assert list(figure.axes[1].lines[0].get_ydata()) == list(logged["train/kl_per_token"].values())
    assert len(pictures.draw_curve(scalars(free[0]["run_folder"]), "a run").axes) == 1


def test_smoothing_has_no_bias_at_its_start():
    assert pictures.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert pictures.smooth([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 2 / 3])


def test_picture_of_the_kl_has_means_by_place_and_shares_by_token():
    class Tokenizer:
        def decode(self, ids):
            return "ab"[ids[0]]

    kl = torch.tensor([[1.0, 3.0, 0.0, 4.0], [0, 0, 1, 1], [0, 0, 0, 1]], dtype=torch.float64)
    by_place, by_token = pictures.draw_kl(kl, Tokenizer()).axes
    assert [bar.get_height() for bar in by_place.patches] == [2.0, 2.0]
    assert [bar.get_width() for bar in by_token.patches] == [0.5, 0.5]
    assert [label.get_text() for label in by_token.get_yticklabels()] == ["'a'", "'b'"]


def test_without_matplotlib_a_line_says_so_and_the_report_is_whole(checkpoint, tmp_path,
                                                                   monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, _ = finished(checkpoint, tmp_path, n_train_steps=1)
    report = (result["run_folder"] / "report.txt").read_text()
    assert "no pictures: matplotlib is not installed" in report and "KL(policy" in report
    assert not list(result["run_folder"].glob("*.png"))


def test_several_rewards_are_logged_one_by_one(checkpoint, tmp_path):
    def first(text, problem):
        return 1.0 if text < "m" else 0.0

    def second(text, problem):
        return float(len(text))

    result, _ = finished(checkpoint, tmp_path, reward=[(first, 1.0), (second, 0.25)])
    logged = scalars(result["run_folder"])
    for step, total in logged["train/reward_mean"].items():
        parts = logged["reward/first"][step] + 0.25 * logged["reward/second"][step]
        assert total == pytest.approx(parts, abs=1e-5)
    assert json.loads((result["run_folder"] / "config.json").read_text())["settings"]["reward"] == [
        ["first", 1.0], ["second", 0.25]]
