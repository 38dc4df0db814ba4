"""What is said and drawn of a finished run: KL, intervals, pictures, HParams, files."""

import shutil
from unittest import mock

import pytest
import torch
from conftest import log_of, make_responses, scalars, settings
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import starter
from support import report
from support.report import draw  # fixtures replace report.draw

SKILL = '{"skill": "sort", "prompt": "sort 21", "answer": "12"}\n'


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """The results of two short runs of a model with another skill: without the penalty and with."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(checkpoint, folder / "skilled")
    (folder / "skilled" / "retention.jsonl").write_text(SKILL)
    given = settings(folder / "skilled", folder / "runs", eval_every=2)
    return starter.main(**given), starter.main(**{**given, "use_kl_penalty": True, "seed": 3})


@pytest.mark.parametrize("has_reference", [True, False])
def test_measured_kl_is_that_of_the_logits_of_both_models(checkpoint, has_reference):
    policy, start = (starter.init_policy(checkpoint, "cpu")[0] for _ in range(2))
    for parameter in policy.parameters():  # the head's, too
        parameter.data.mul_(1.1)
    responses = make_responses([3, 2])
    cfg = starter.cfg_with(**settings(checkpoint, "", temperature=0.7, max_tokens_per_microbatch=5))
    reference = start if has_reference else None
    measured = report.measure_kl(policy, reference, responses, cfg)
    expected = []
    for prompt_ids, ids, *_ in responses:
        log_probs = []
        for model in (policy, start):
            logits = model(torch.tensor([prompt_ids + ids])).logits[0].detach()
            log_probs.append((logits.double() / 0.7).log_softmax(dim=1))
        log_p, log_q = log_probs
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        expected += kl[len(prompt_ids) - 1 : -1].tolist()
    assert min(expected) > 1e-4
    assert sorted(measured.tolist()) == pytest.approx(sorted(expected), rel=1e-4)


def test_interval_of_a_share_matches_published_values():
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 0 of 20."""
    assert report.wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert report.wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_report_has_changes_interval_and_kl(finished):
    """And the saved model keeps the problems of other skills."""
    for result in finished:
        folder = result["run_folder"]
        assert (folder / "model" / "retention.jsonl").read_text() == SKILL
        text = (folder / "report.txt").read_text()
        assert f"0.0% -> {result['after']['solved']:6.1%}  (" in text
        assert "  retention_sort" in text and ", of 10 held-out problems" in text
        assert f"): {result['kl_per_token']:.3f} nats per token" in text


def test_run_of_no_steps_with_the_penalty_has_a_report(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, n_train_steps=0, use_kl_penalty=True)
    folder = starter.main(**given)["run_folder"]
    assert "model before training): 0.000 nats per token" in (folder / "report.txt").read_text()
    assert "ends here" not in capsys.readouterr().out


def test_hparams_hold_the_settings_of_the_run(finished):
    plugin = log_of(finished[1]["run_folder"]).summary_metadata["_hparams_/session_start_info"]
    content = HParamsPluginData.FromString(plugin.plugin_data.content)
    hparams = content.session_start_info.hparams
    assert hparams["seed"].number_value == 3 and hparams["reward"].string_value == "variety"


def test_picture_shows_what_was_measured(finished):
    folder = finished[1]["run_folder"]
    figure = draw(mock.Mock(folder=folder), 10)
    assert (folder / "curve.png").is_file()
    logged = scalars(folder)
    lines = [line for panel in figure.axes for line in panel.lines]
    names = ["reward", "solved", "other_skills", "kl_per_token"]
    assert {line.get_label(): list(line.get_ydata()) for line in lines} == {
        f"0_headline/{name}": list(logged[f"0_headline/{name}"].values()) for name in names
    }
    units = ["mean reward", "share solved", "KL, nats per token"]
    assert [panel.get_ylabel() for panel in figure.axes] == units
    assert figure.get_supxlabel() == "step"
    [interval] = figure.axes[1].collections
    corners = {(step, round(height, 9)) for step, height in interval.get_paths()[0].vertices}
    for step, share in logged["0_headline/solved"].items():
        ends = report.wilson_interval(share, 10)
        assert {(step, round(end, 9)) for end in ends} <= corners


def test_picture_of_a_run_without_a_reference_has_no_empty_panel(finished):
    figure = draw(mock.Mock(folder=finished[0]["run_folder"]), 10)
    assert [panel.get_ylabel() for panel in figure.axes] == ["mean reward", "share solved"]
    [legend] = [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    texts = [text.get_text() for text in legend.get_texts()]
    assert sorted(texts) == ["0_headline/other_skills", "0_headline/solved", "95 % interval"]


@pytest.mark.slow
def test_report_names_the_files_of_the_run(checkpoint, tmp_path, capsys):
    given = settings(checkpoint, tmp_path, n_train_steps=1, lora_rank=2)
    folder = starter.main(**given)["run_folder"]
    printed = capsys.readouterr().out
    for name in ("report.txt", "curve.png", "steps.html", "adapters/", "model/"):
        assert name in printed.partition("=== Report")[2]
        assert (folder / name).exists() or name == "curve.png"  # which is not drawn here


def test_saved_model_that_is_not_the_policy_is_told_after_the_report(
    checkpoint, tmp_path, monkeypatch
):
    real = starter.weights_by_name

    def spoiled(policy):
        for name, tensor in real(policy):
            yield name, tensor * 1.01 if "norm" in name else tensor

    monkeypatch.setattr(starter, "weights_by_name", spoiled)
    words = r"/model, differs from the policy by .* \(limit 0.0001\)"
    with pytest.raises(starter.RunStopped, match=words):
        starter.main(**settings(checkpoint, tmp_path, precision="bf16"))
    assert list(tmp_path.glob("*/report.txt"))
