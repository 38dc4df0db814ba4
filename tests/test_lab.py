"""Tests of the programs in lab/, and of what they published in lab/results and in the pages."""
import contextlib
import csv
import importlib.util
import io
from unittest import mock

import pytest
import torch

pytest.importorskip("support.fast")

from lab import ablate_kl, bench, crash_test, fuzz_reward, tables, verify_kl
from support import runs


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors here are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- verify_kl: what each KL term is

def broken(rows):
    """Returns the rows whose claim did not hold. At least one must hold."""
    assert any(row["holds"] is True for row in rows)
    return [row for row in rows if row["holds"] is False]


def test_claims_about_kl_gradients_hold():
    rows = verify_kl.gradient_rows(n_policies=3)
    assert broken(rows) == []
    assert max(row["largest error"] for row in rows if row["claim"] == "exact") < 1e-10
    far = [row for row in rows if row["claim"] == "wrong" and row["median relative error"] > 0.1]
    assert len(far) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("make_rows, settings", [
    (verify_kl.gradient_rows, {}), (verify_kl.variance_rows, {"n_policies": 1}),
    (verify_kl.fixed_point_rows, {}), (verify_kl.length_rows, {}), (verify_kl.adaptive_rows, {}),
])
def test_enumerated_claims_hold(make_rows, settings):
    assert broken(make_rows(**settings)) == []


@pytest.mark.slow
def test_gradient_of_k3_as_written_explodes_and_the_default_does_not():
    as_written, default = (verify_kl.explosion_run(0, *verify_kl.EXPLOSION[name])
                           for name in ("k3 as written", "k3, reverse (default)"))
    assert as_written["largest gradient norm"] > 1e6
    assert default["largest gradient norm"] < 1


def test_published_claims_about_kl_hold():
    rows = []
    for name in ("gradients", "variance", "fixed_points", "explosion", "length", "adaptive"):
        rows += ablate_kl.read_csv(ablate_kl.RESULTS / f"kl_{name}.csv")
    with_claim = [row for row in rows if row["holds"] != ""]
    assert len(with_claim) == 267  # and one about all of kl_gradients.csv: 268
    assert {row["holds"] for row in with_claim} == {"yes"}


# --- ablate_kl: runs of the built-in model

def test_target_sound_kept_the_published_runs_near_the_target():
    runs = ablate_kl.controller_rows()
    assert len(runs) == 3
    assert all(near >= 0.9 and largest < 2 for near, largest in runs)


def test_published_kl_penalty_keeps_other_skills_at_no_cost():
    _, on = ablate_kl.best_coefficient()
    off = ablate_kl.rows_of(ablate_kl.HOT)
    assert len(on) == len(off) == 3
    assert ablate_kl.solved(on) >= ablate_kl.solved(off) - 0.02
    assert ablate_kl.other_skills(on) >= ablate_kl.other_skills(off) + 0.2


def test_published_ablation_holds_every_run_of_the_full_grid():
    known = {row["run"] for row in ablate_kl.read_csv(ablate_kl.ABLATION)}
    wanted = {ablate_kl.key_of(changes, seed) for changes in ablate_kl.FULL
              for seed in ablate_kl.SEEDS}
    assert wanted <= known
    curves = {point["id"] for point in ablate_kl.read_csv(ablate_kl.CURVES)}
    assert {ablate_kl.id_of(key) for key in wanted} <= curves


@pytest.mark.slow
def test_ablation_writes_a_row_with_its_curve_for_each_run(tmp_path):
    """One short run of the built-in model, in a process of its own as in a sweep."""
    paths = {name: tmp_path / f"{name.lower()}.csv" for name in ("ABLATION", "CURVES", "BY_TOKEN")}
    changes = dict(n_train_steps=5, rollout_batch_size=64, use_kl_penalty=True, n_eval_problems=20)
    with mock.patch.multiple(ablate_kl, SEEDS=(0,), **paths):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            ablate_kl.fill([changes], ablate_kl.ABLATION)
            ablate_kl.fill([changes], ablate_kl.ABLATION)  # nothing is left to run
    row, = ablate_kl.read_csv(paths["ABLATION"])
    assert output.getvalue().count("solved") == 1
    assert row["run"] == ablate_kl.key_of(changes, 0)
    point, = ablate_kl.read_csv(paths["CURVES"])
    assert (point["id"], point["step"], point["current_beta"]) == (row["id"], "5", "0.3")
    by_token = ablate_kl.read_csv(paths["BY_TOKEN"])
    assert {line["by"] for line in by_token} == {"position", "token"}


# --- fuzz_reward

def test_published_fuzzing_tried_a_million_texts_and_broke_no_limit():
    row = ablate_kl.read_csv(fuzz_reward.RESULTS)[-1]
    assert int(row["inputs"]) >= 10**6
    assert row["command"].endswith(f" --runs {row['inputs']}")
    assert row["broken"] == "0"
    assert float(row["slowest in ms"]) <= fuzz_reward.LIMIT_MS
    assert float(row["largest allocation in MB"]) <= fuzz_reward.LIMIT_MB
    assert 0 < int(row["solved"]) < int(row["with an answer"])
    assert int(row["corpus size"]) == len(fuzz_reward.CORPUS.read_text().splitlines())


# --- crash_test

def test_published_kills_ended_with_the_same_bits():
    rows = ablate_kl.read_csv(crash_test.RESULTS)
    by_kind = {}
    for row in rows:
        by_kind.setdefault((row["engine"], row["parts"]), []).append(row)
    assert {("transformers", "support/"), ("vllm", "support/")} <= set(by_kind)
    for of_kind in by_kind.values():
        assert len(of_kind) >= 50
        assert {row["phase"] for row in of_kind} == set(crash_test.PHASES)
        assert all(map(crash_test.is_same, of_kind))


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs("vllm"))])
def test_killed_runs_end_with_the_same_bits(engine, alone):
    numbers = range(2) if alone else range(4)
    for row in crash_test.kill_runs(numbers, engine, alone, at_once=2):
        assert crash_test.is_same(row), row


# --- bench

def test_slope_is_the_exponent_of_a_power_law():
    assert bench.slope([(x, 3 * x ** 1.7) for x in (1, 2, 5, 10)]) == pytest.approx(1.7)


def test_published_memory_is_what_the_formula_says():
    """Within 15 % for S, M and L. M-64 grows over the first updates by more than the formula knows,
    as docs/performance.md says."""
    rows = tables.last_rows("memory", "size", "kl_penalty")
    assert {row["size"] for row in rows} == set(bench.SIZES)
    names = ("libraries", "weights", "gradients", "moments", "reference", "bf16 copies",
             "activations", "head")
    for row in rows:
        predicted = float(row["predicted_gb"])
        assert sum(float(row[name]) for name in names) == pytest.approx(predicted, abs=0.01)
        if row["size"] != "M-64":
            assert 0.85 <= predicted / float(row["measured_gb"]) <= 1.15, row


def test_published_ratio_to_trl_is_that_of_the_medians():
    for row in tables.last_rows("step", "size", "dtype", "kl_penalty"):
        assert int(row["steps"]) >= 10
        assert float(row["ours_min_s"]) <= float(row["ours_s"]) <= float(row["ours_max_s"])
        ratio_of_medians = float(row["trl_s"]) / float(row["ours_s"])
        assert float(row["ratio"]) == pytest.approx(ratio_of_medians, rel=0.1)


SLEEPER = """
from types import SimpleNamespace

class Ours:
    def __init__(self, folder, *settings, seconds, **options):
        self.seconds = seconds

    def step(self):
        print("printed by a step")
        open({log!r}, "a").write({name!r})
        time.sleep(self.seconds)
        return {{"train/response_length": 10 * self.seconds}}

bench = SimpleNamespace(Ours=Ours)
"""


def test_versions_are_measured_in_turns(tmp_path):
    """Versions that only sleep. Every round has one step of each, the first changes, and two rounds
    are not counted."""
    log = tmp_path / "log"
    versions = {}
    for name, seconds in (("old", 0.1), ("new", 0.04), ("alone", 0.3)):
        program = SLEEPER.format(log=str(log), name=name[0])
        versions[name] = (program, {"seconds": seconds})
    with mock.patch.object(bench, "VERSIONS", versions), \
            mock.patch.object(bench, "make_checkpoint"):
        row = bench.in_turns_with_earlier("S", True, False, 2, bench.REPOSITORY)
    assert log.read_text() == "ona" "nao" "aon" "ona"
    assert row["n"] == 2
    assert float(row["new_over_old"]) < 0.8 and float(row["alone_over_old"]) > 1.5
    assert 0.1 <= float(row["old_min_s"]) <= float(row["old_s"]) <= float(row["old_max_s"])
    assert row["alone_response_length"] == "3.00"


SMALL = dict(hidden=64, layers=1, heads=2, vocabulary=None, new_tokens=4)


@pytest.mark.parametrize("kl_penalty", [False, True])
def test_steps_with_and_without_support_are_the_same_step(tmp_path, kl_penalty):
    bench.make_checkpoint(tmp_path, **SMALL)
    logged = []
    for plain in (False, True):
        ours = bench.Ours(tmp_path, 4, False, kl_penalty, plain=plain, rollout_batch_size=32)
        assert ours.parts.compute.name == ("plain" if plain else "fast")
        assert isinstance(ours.run, runs.GuardedRun) != plain
        first = dict(ours.step())
        ours.step()
        assert ours.run.state["step"] == 2
        assert first["time/total"] > first["time/rollout"] > 0
        logged.append(first)
    for name, value in logged[0].items():
        if name in logged[1] and not name.startswith(("time/", "train/tokens_per_s")):
            assert value == pytest.approx(logged[1][name], rel=1e-3, abs=1e-5), name
    assert logged[0].keys() >= logged[1].keys()
    assert ("train/kl_penalty" in logged[1]) == kl_penalty


@pytest.mark.slow
@needs("trl")
def test_ours_and_trl_take_a_step_of_as_many_responses(tmp_path):
    """32 prompts x 8 responses of the same model: ours counts its tokens, TRL's reward sees all its
    responses."""
    bench.make_checkpoint(tmp_path, **SMALL)
    ours = bench.Ours(tmp_path, 4, True, False)
    first = ours.step()
    assert ours.run.state["tokens"] == round(first["train/response_length"] * 256)
    seconds, texts = [], []

    def reward(text, problem):
        texts.append(text)
        return 0.5

    with mock.patch.object(bench, "distinct", reward):
        bench.trl_trainer(tmp_path, 4, True, False, 64, 2, seconds.append).train()
    assert len(seconds) == 2
    assert len(texts) == 2 * 256


@pytest.mark.slow
def test_every_phase_is_measured():
    with mock.patch.dict(bench.SIZES, tiny=SMALL):
        rows = bench.phases("tiny", True)
    expected = ["rollout", "log-probs", "reference", "update", "update, KL penalty on"]
    if importlib.util.find_spec("vllm"):
        expected += ["rollout, vLLM", "sync to vLLM"]
    assert [row["phase"] for row in rows] == expected
    assert all(float(row["seconds"]) > 0 for row in rows)


# --- tables: the pages show the numbers of the results

@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_page_shows_the_published_numbers(page):
    text = page.read_text()
    assert tables.with_tables(text) == text, "python -m lab.tables"


def test_tables_replace_what_stands_between_their_markers():
    page = "a\n<!-- table: length -->\nearlier\n<!-- end -->\nb\n<!-- table: fuzz -->\n<!-- end -->"
    made = tables.with_tables(page)
    assert made.startswith("a\n<!-- table: length -->\n| KL in |") and "earlier" not in made
    assert "\n<!-- end -->\nb\n<!-- table: fuzz -->\n| inputs |" in made
    assert tables.with_tables(made) == made


def test_result_files_have_one_header_and_whole_rows():
    for path in ablate_kl.RESULTS.glob("*.csv"):
        with open(path, newline="") as file:
            header, *rows = csv.reader(file)
        assert len(set(header)) == len(header) and rows, path.name
        assert all(len(row) == len(header) and row != header for row in rows), path.name


# --------------------------------------------------------------------------------------------------
# The race

def points(*solved, seconds=10.0):
    """An evaluation every five steps, `seconds` apart."""
    return [(5 * i, seconds * i, share) for i, share in enumerate(solved)]


def test_goal_is_reached_where_the_mean_of_three_evaluations_is():
    race = pytest.importorskip("lab.race")
    track = points(0.4, 0.9, 0.5, 0.7, 0.9)
    means = [0.4, 0.65, 0.6, 0.7, 0.7]
    assert [share for _, share in race.smoothed(track)] == pytest.approx(means)
    assert race.time_to(track, 0.65) == 10.0
    assert race.time_to(track, 0.68) == 30.0
    assert race.time_to(track, 0.75) is None


def test_interval_of_the_median_ratio_holds_it_and_narrows_with_agreement():
    race = pytest.importorskip("lab.race")
    low, high = race.bootstrap_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert 1.0 <= low < 3.0 < high <= 5.0
    assert race.bootstrap_interval([2.0] * 8) == (2.0, 2.0)


def test_race_table_counts_goals_that_were_not_reached(monkeypatch):
    race = pytest.importorskip("lab.race")
    runs = {("starter.py", 0): points(0.4, 0.8, 0.8, 0.8),
            ("starter.py", 1): points(0.4, 0.8, 0.8, 0.8),
            ("TRL", 0): points(0.4, 0.4, 0.4, 0.4, seconds=20.0),
            ("TRL", 1): points(0.4, 0.8, 0.8, 0.8, seconds=30.0), ("TRL", 7): points(0.9)}
    monkeypatch.setattr(race, "read_runs", lambda contest: runs)
    lines = race.race_table(race.TINY).splitlines()[2:]
    assert lines[1].startswith("| 75% solved | 2 |") and lines[1].endswith("| 0 and 1 |")
    assert lines[3].startswith("| all 15 steps | 2 | 30.0 | 75.0 | 2.50 |")


# --------------------------------------------------------------------------------------------------
# The comparison of the recipes

@pytest.mark.slow
def test_variant_trains_for_the_given_time_and_is_measured_against_the_start(tmp_path):
    """A moving reference has a KL of nearly 0 to the policy, and the policy has left the start."""
    variants = pytest.importorskip("lab.variants")
    rows = [variants.run_one(name, variants.ON, 0, tmp_path, seconds=3)
            for name in (variants.BASE, "moving_reference")]
    for row in rows:
        assert 3 <= row["seconds"] < 8 and row["steps"] > 2 and row["kl_penalty"] == "on"
        assert row["kl_per_token"] > 1e-5 and 0 <= row["solved_after"] <= 1
