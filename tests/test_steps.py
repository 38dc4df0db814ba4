"""The page of a run that shows what its steps did to each token: the numbers, what is kept, and how
it looks in a browser."""

import json
import math
import shutil
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import make_tokenizer, of_the_shipped_loss, often_equal, settings

import starter
from lab.agents import second_try
from support import steps

# Of a response, beside numbers of its tokens
OTHERS = "reward", "finished", "length", "tokens", "read"


def read_page(folder):
    """The page in a run's folder -> its steps, each with "responses" of all its groups."""
    text = (folder / "steps.html").read_text("utf-8")
    found = json.loads(text.partition("const steps = ")[2].partition(";\n")[0])
    for step in found:
        step["responses"] = [r for group in step["groups"] for r in group["responses"]]
        for response in step["responses"]:
            for name in response.keys() - OTHERS:
                response[name] = [float(x) for x in response[name].split()]
    return found


@of_the_shipped_loss
def test_numbers_are_those_of_the_loss(checkpoint, tmp_path, monkeypatch):
    """And give its value, by another sum. They are those of the first of two epochs; entropy and
    exact KL are those after the update."""
    calls = []
    shipped = starter.grpo_microbatch_step

    def spoil_and_keep(policy, rows, *others):
        if "old_log_probs" not in rows:  # in the first epoch; so that the weight is cut
            rows["sampler_log_probs"] += torch.randn(rows["labels"].shape)
        loss, means = shipped(policy, rows, *others)
        if len(rows["labels"]) == 16:  # all rows, not some of them for support/opinion.py
            calls.append((rows, loss.item()))
        return loss, means

    monkeypatch.setattr(starter, "grpo_microbatch_step", spoil_and_keep)
    given = settings(
        checkpoint,
        tmp_path,
        n_train_steps=2,
        epochs_per_rollout=2,
        max_sampler_diff=math.inf,
        max_tokens_per_microbatch=9999,
        use_kl_penalty=True,
        kl_coef=0.3,
    )
    folder = starter.main(**given)["run_folder"]
    rows, loss = calls[2]
    mask = rows["response_mask"]
    models = [starter.init_policy(path, "cpu")[0] for path in (checkpoint, folder / "model")]
    with torch.no_grad():
        log_q, log_p = (model(rows["input_ids"]).logits.log_softmax(dim=2) for model in models)
    ref, after = (x.gather(2, rows["labels"][..., None])[..., 0] for x in (log_q, log_p))
    before = rows["old_log_probs"]
    weight = torch.exp(before - rows["sampler_log_probs"]).clamp(max=2) / mask.sum()
    expected = {
        "log_probs": before,
        "ref_log_probs": ref,
        "after": after,
        "slope": weight * (0.3 * (before - ref) - rows["advantages"]),
        "advantages": rows["advantages"],
        "sampler_log_probs": rows["sampler_log_probs"],
        "weights": mask / mask.sum(),
        "entropy": -(log_p.exp() * log_p).sum(dim=2),
        "kl_per_token": (log_p.exp() * (log_p - log_q)).sum(dim=2),
        "kl_forward": (log_q.exp() * (log_q - log_p)).sum(dim=2),
    }
    responses = read_page(folder)[1]["responses"]
    shown = [token for r in responses for token in zip(*[r[name] for name in expected])]
    of_loss = zip(*[x[mask].tolist() for x in expected.values()])
    shown, of_loss = torch.tensor(shown), torch.tensor([*of_loss])
    nearest = torch.cdist(shown, of_loss, p=1).argmin(dim=1)  # in another order
    torch.testing.assert_close(shown, of_loss[nearest], rtol=1e-3, atol=1e-6)
    before, ref, _, _, advantages, sampler, *_ = shown.T
    k3 = torch.exp(ref - before) - 1 + before - ref
    ratio = torch.exp(before - sampler).clamp(max=2)
    assert (0.3 * k3 - ratio * advantages).mean().item() == pytest.approx(loss, rel=1e-3)


@pytest.mark.slow
@of_the_shipped_loss
def test_first_last_and_six_between_are_kept_also_before_a_resume(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(steps, "TOKENS", 8)  # of 4 responses: 3 each
    given = settings(checkpoint, tmp_path, reward=often_equal)
    starter.main(**given | dict(n_train_steps=3))
    found = read_page(starter.main(**given | dict(n_train_steps=20, resume=True))["run_folder"])
    assert [step["step"] for step in found] == [1, 2, 3, 6, 9, 11, 14, 17, 20]
    responses = [r for step in found for r in step["responses"]]
    for group in (group["responses"] for step in found for group in step["groups"]):
        mean = fmean(r["reward"] for r in group)
        left_out = [r["reward"] for r in group if "slope" not in r]  # those without an advantage
        assert left_out == pytest.approx([mean] * len(left_out))
        assert len(left_out) == len(group) or len({r["reward"] for r in group}) > 1
    assert {r["reward"] for r in responses if "slope" not in r} >= {0.5}
    assert max(len(r["tokens"]) for r in responses) == 6


def test_rows_of_the_same_tokens_that_begin_elsewhere_are_told_apart():
    """As where an agent has its second question answered twice."""
    responses = [
        starter.Response([5], [6, 7, 8], [-1.0, math.nan, -1.0], True),
        starter.Response([5, 6, 7], [8], [-1.0], True),
    ]
    batch = starter.make_batch(responses, torch.ones(2), "cpu")
    keys = [steps.response_of(batch, i)[0] for i in range(2)]
    assert keys[0] != keys[1]
    for key, (prompt_ids, ids, *_) in zip(keys, responses):
        assert key == (len(prompt_ids), *prompt_ids, *ids)


@pytest.mark.parametrize("size, length, n_groups", [(64, 5000, 2), (64, 8, 8), (256, 8, 4)])
def test_page_stays_below_500_kilobytes_and_has_the_last_step(
    tmp_path, monkeypatch, size, length, n_groups
):
    n = n_groups * size
    rewards = torch.rand(n)
    numbers = {name: torch.rand(length).tolist() for name in "abcdefghij"}
    of_rows = {(2, 5, 6, *[7] * length): numbers}
    monkeypatch.setattr(steps.Page, "numbers_of_rows", lambda *_: of_rows)
    responses = [starter.Response([5, 6], [7] * length, [0.0] * length, False)] * n
    problems = [{"prompt_ids": [5, 6] * 5000}] * n_groups
    cfg = starter.cfg_with(group_size=size, max_new_tokens=length, n_train_steps=8)
    run = SimpleNamespace(cfg=cfg, state={}, writes_files=True, folder=tmp_path)
    page = steps.Page(run, None, None, make_tokenizer())
    for step in range(1, 9):
        page.after_step(step, {}, problems, responses, rewards, [])
    assert (tmp_path / "steps.html").stat().st_size < 500_000
    shown = read_page(tmp_path)
    assert all("a" in response for step in shown for response in step["responses"])
    kept = [step["step"] for step in shown]
    assert kept[0] == 1 and kept[-1] == 8 and kept == sorted(kept)


HARM = r"\u003c/script>\u003cimg src=x onerror=alert(1)>\u202e\ud83d\ude80\u0645\n"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1000,870 --user-data-dir="
)


@pytest.fixture
def browser(tmp_path):
    """Chromium, driven by selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if shutil.which("chromedriver") is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    for flag in f"{FLAGS}{tmp_path}/browser".split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.slow
def test_what_an_agent_read_is_grey_and_has_no_numbers(browser, tmp_path):
    """It is also the picture of docs/agents.md."""
    from selenium.webdriver import ActionChains

    folder = starter.main(
        n_train_steps=2,
        n_eval_problems=10,
        device="cpu",
        out_dir=str(tmp_path),
        agent=second_try,
        max_new_tokens=48,
    )["run_folder"]
    [first, *_] = read_page(folder)
    response = next(r for r in first["responses"] if any(r.get("read", [])))
    pushes = [x for x, is_read in zip(response["weights"], response["read"]) if is_read]
    assert pushes and {*pushes} == {0.0}
    browser.get((folder / "steps.html").as_uri())
    grey = browser.find_elements("css selector", ".token.read")
    assert "".join(token.text for token in grey).count("<|user|>") >= 2
    ActionChains(browser).move_to_element(grey[0]).perform()
    browser.save_screenshot(tmp_path / "steps_agent.png")
    detail = browser.find_element("id", "detail").text
    assert "read, not written by the policy: it has no part in the loss" in detail
    assert "push" not in detail
    assert not any(token.get_attribute("style") for token in grey)
    written = browser.find_elements("css selector", ".token:not(.read)")
    assert any(token.get_attribute("style") for token in written)
    assert browser.get_log("browser") == []


@pytest.mark.slow
@pytest.mark.parametrize("colours, use_kl_penalty", [("light", False), ("dark", True)])
def test_page_in_a_browser(browser, tmp_path, colours, use_kl_penalty):
    """It also takes the pictures of docs/steps.md, of the built-in model."""
    from selenium.webdriver import ActionChains

    given = dict(n_train_steps=12, n_eval_problems=10, device="cpu", out_dir=str(tmp_path))
    folder = starter.main(**given, use_kl_penalty=use_kl_penalty)["run_folder"]

    def all_of(selector):
        return browser.find_elements("css selector", selector)

    scheme = {"name": "prefers-color-scheme", "value": colours}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    page = folder / "steps.html"
    browser.get(page.as_uri())
    for choice in all_of("#quantity-choice label") + all_of("#step-choice label"):
        choice.click()
        assert any(token.get_attribute("style") for token in all_of(".token")), choice.text
    assert "teaches nothing" in all_of("section.equal")[0].text
    all_of("#quantity-choice label")[use_kl_penalty].click()
    ActionChains(browser).move_to_element(all_of(".token")[2]).perform()
    browser.save_screenshot(tmp_path / f"steps_{colours}.png")
    shown = {row.get_attribute("data-key"): row.text for row in all_of("#detail dl div")}
    token = {
        name: x[2]
        for name, x in read_page(folder)[-1]["responses"][0].items()
        if name not in OTHERS
    }
    ratio = math.exp(token["log_probs"] - token["sampler_log_probs"])
    expected = {"push": token["advantages"] * token["weights"] * ratio}
    if use_kl_penalty:
        expected["kl_push"] = -token["slope"] - expected["push"]
    for name, value in expected.items():
        number = float(shown[name].split("\n")[1].replace("\u2212", "-"))
        assert number == pytest.approx(value, rel=6e-3), name
    page.write_text(page.read_text("utf-8").replace(r"\u003canswer>", HARM), "utf-8")
    browser.get(page.as_uri())
    assert "</script><img" in all_of(".token")[0].text
    assert browser.get_log("browser") == []
