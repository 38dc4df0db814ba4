"""What is said and drawn of a finished run: KL, intervals, pictures, HParams, files."""

import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import log_of, scalars, settings
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import starter
from support import report

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
def test_measured_kl_is_that_of_the_logits_of_both_models(checkpoint, monkeypatch, has_reference):
    policy, start = (starter.init_policy(str(checkpoint), "cpu")[0] for _ in range(2))
    with torch.no_grad():
        for parameter in policy.parameters():  # the head's, too
            parameter.mul_(1.1)
    responses = [
        starter.Response([1, 2, 3], [10, 11, 12], [-1.0] * 3, True),
        starter.Response([4], [13, 14], [-1.0] * 2, True),
    ]
    monkeypatch.setattr(starter, "rollout", lambda *given: responses)
    cfg = starter.cfg_with(
        model_id=str(checkpoint),
        device="cpu",
        precision="float32",
        temperature=0.7,
        max_tokens_per_microbatch=5,
    )
    reference = start if has_reference else None
    problems = [{"prompt_ids": response.prompt_ids} for response in responses]
    measured = report.measure_kl(policy, reference, None, problems, cfg).tolist()
    assert len(measured) == 5
    for prompt_ids, ids, *_ in responses:
        log_probs = []
        for model in (policy, start):
            logits = model(torch.tensor([prompt_ids + ids])).logits[0].detach()
            log_probs.append((logits.double() / 0.7).log_softmax(dim=1))
        log_p, log_q = log_probs
        kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
        for place in range(len(ids)):
            expected = kl[len(prompt_ids) - 1 + place].item()
            assert expected > 1e-4
            assert expected in [pytest.approx(value, rel=1e-4) for value in measured]


def test_interval_of_a_share_matches_published_values():
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 0 of 20."""
    assert report.wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert report.wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


def test_report_and_saved_model_have_what_a_reader_needs_next(finished):
    for result in finished:
        text = (result["run_folder"] / "report.txt").read_text()
        assert "  solved               0.0% ->   0.0%  (+0.0 points)" in text
        assert "  retention_sort" in text and "95 % interval 0.0% to 27.8%, of 10 held-out" in text
        assert f"): {result['kl_per_token']:.3f} nats per token" in text
        assert (result["run_folder"] / "model" / "retention.jsonl").read_text() == SKILL


def test_hparams_have_the_same_columns_for_every_run(finished):
    columns = []
    for result in finished:
        plugin = log_of(result["run_folder"]).summary_metadata["_hparams_/session_start_info"]
        content = HParamsPluginData.FromString(plugin.plugin_data.content)
        columns.append(content.session_start_info.hparams)
    assert columns[0].keys() == columns[1].keys() >= {"device", "precision", "eval_every"}
    assert [found["seed"].number_value for found in columns] == [0, 3]
    assert columns[0]["reward"].string_value == "variety"
    kl = scalars(finished[0]["run_folder"])["0_headline/kl_per_token"]  # without a penalty
    assert kl == {4: pytest.approx(finished[0]["kl_per_token"])}


def test_pictures_fit_into_tensorboards_grid_and_show_what_was_measured(finished):
    free, penalised = (result["run_folder"] for result in finished)
    assert (free / "curve.png").read_bytes().startswith(b"\x89PNG")
    [image] = log_of(free).Images("pictures/curve")
    assert 300 < image.width < 500 and image.height > 200
    logged = scalars(penalised)
    curve = report.draw_curve(penalised)
    drawn = {}
    for panel in curve.axes:
        drawn.update({line.get_label(): list(line.get_ydata()) for line in panel.lines})
    assert drawn == {
        "reward_mean": [*logged["train/reward_mean"].values()],
        "solved": [*logged["eval/solved"].values()],
        "sort": [*logged["eval/retention_sort"].values()],
        "kl_per_token": [*logged["train/kl_per_token"].values()],
    }


def test_without_matplotlib_a_line_says_so(tmp_path):
    with mock.patch.dict(sys.modules, matplotlib=None):
        assert "matplotlib is not installed" in report.draw(SimpleNamespace(folder=tmp_path))


@pytest.mark.parametrize(
    "precision, factor, words",
    [
        ("float32", 1.2, "differs from the"),
        ("bf16", 1.01, "differs"),
        ("float32", None, "cannot be read"),
    ],
)
def test_saved_model_that_is_not_the_policy_is_told_with_the_checkpoint(
    checkpoint, tmp_path, monkeypatch, precision, factor, words
):
    real = starter.weights_by_name

    def spoiled(policy):
        for name, tensor in real(policy):
            if "norm" not in name:
                yield name, tensor
            elif factor is not None:
                yield name, tensor * factor

    monkeypatch.setattr(starter, "weights_by_name", spoiled)
    message = f"the saved model, .*{words}.*; the weights are in .*checkpoint_00000004"
    with pytest.raises(starter.RunStopped, match=message):
        starter.main(**settings(checkpoint, tmp_path, precision=precision))
