"""The examples of docs/agents.md run as they stand, with small models and few steps."""

import functools
import json
import re
import runpy
import threading
import time

import pytest
from conftest import REPOSITORY, scalars, settings
from test_agents import TEMPLATES, save_model

import starter

pytestmark = pytest.mark.slow
PAGE = (REPOSITORY / "docs" / "agents.md").read_text("utf-8")
EXAMPLES = dict(re.findall(r"<!-- example (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def run_example(tmp_path, monkeypatch):
    """Returns a function that runs an example, and returns what it logged."""

    def run(name, edits=(), **changes):
        code = EXAMPLES[name]
        assert len(code.splitlines()) <= 25
        for text, other in edits:
            assert text in code
            code = code.replace(text, other)
        (tmp_path / "example.py").write_text(code)
        lines = [
            json.dumps({"prompt": f"add {a} {b}", "answer": str(a + b)})
            for a in range(8)
            for b in range(8)
        ]
        (tmp_path / "sums.jsonl").write_text("\n".join(lines))
        monkeypatch.chdir(tmp_path)
        results = []
        shipped = starter.main

        @functools.wraps(shipped)
        def main(**given):
            small = settings(changes.get("model_id", "tiny"), tmp_path / "runs", n_train_steps=2)
            small = {name: small[name] for name in small.keys() - given.keys() - {"reward"}}
            if "task" not in given:
                small["task"] = "countdown_small"
            results.append(shipped(**{**small, **given, **changes}))

        monkeypatch.setattr(starter, "main", main)
        runpy.run_path(str(tmp_path / "example.py"))
        [result] = results
        return scalars(result["run_folder"])

    return run


def test_page_has_four_examples_and_a_client():
    assert EXAMPLES.keys() == {"calculator", "game", "environment", "client", "smolagents"}


def test_calculator_answers_what_the_policy_asks(run_example, monkeypatch):
    """Answers that call it are put in the place of the model's."""
    from support import agents

    replies = iter(["<calc>2*(3+4)</calc>", "<answer>14</answer>"] * 1000)
    shipped = agents.Conversation.write
    read = []

    def write(self, response, stop=()):
        shipped(self, response, stop)
        return next(replies)

    keep = agents.Conversation.read
    monkeypatch.setattr(agents.Conversation, "write", write)
    monkeypatch.setattr(
        agents.Conversation, "read", lambda self, m: (read.append(m[0]["content"]), keep(self, m))
    )
    run_example("calculator", max_new_tokens=60)
    assert {*read} == {"14"}


def test_game_is_played_over_several_turns(run_example):
    log = run_example("game")
    assert log["train/response_length"][1] < 200 and 0 <= log["train/reward_mean"][1] < 1


def test_second_try_by_openais_client_earns_less(run_example):
    pytest.importorskip("jiter")  # of openai
    pytest.importorskip("aiohttp")
    log = run_example("client", rollout_batch_size=64)
    assert 0 < log["train/reward_mean"][1] < 1


def test_environment_of_openenv_is_played_by_its_client(run_example):
    pytest.importorskip("openenv")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Text(Action):
        text: str

    class Shown(Observation):
        text: str

    class Longer(Environment):
        """Pays for an answer that is longer than the one before; it ends after three."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **others):
            self.texts, self.paid = [""], 0
            seeds.append(seed)
            return Shown(text=f"game {seed}")

        def step(self, action, timeout_s=None, **others):
            self.paid += len(action.text) > len(self.texts[-1])
            self.texts.append(action.text)
            played.append(len(self.texts))
            done = len(self.texts) == 4
            return Shown(text="longer", done=done, reward=self.paid / 3 if done else None)

        @property
        def state(self):
            return State()

    seeds, played = [], []
    app = create_fastapi_app(Longer, Text, Shown, max_concurrent_envs=100)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        log = run_example("environment", [("127.0.0.1:8000", f"127.0.0.1:{port}")])
    finally:
        server.should_exit = True
        thread.join()
    assert {*played} == {2, 3, 4} and len({*seeds}) > 10
    assert 0 < log["train/reward_mean"][1] < 1


def test_agent_of_smolagents_asks_the_policy_with_its_tools(run_example, tmp_path, monkeypatch):
    """Whose words are no calls, as the weights are random: each step of the agent is an error, and
    the last call asks for the final answer."""
    pytest.importorskip("smolagents")
    pytest.importorskip("jiter")  # of openai
    from support import endpoint

    asked = []
    shipped = endpoint.completion

    async def completion(asker, request):
        asked.append(request)
        return await shipped(asker, request)

    monkeypatch.setattr(endpoint, "completion", completion)
    folder = save_model(tmp_path / "model", TEMPLATES["ChatML"], max_position_embeddings=32768)
    log = run_example(
        "smolagents", model_id=str(folder), rollout_batch_size=4, n_eval_problems=2, n_train_steps=1
    )
    assert "Adds two numbers." in json.dumps(asked[0]["tools"])
    assert len(asked) > 4 and log["train/response_length"][1] > 0
