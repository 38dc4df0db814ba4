"""Tests of support/agents.py: conversations are those of the template, and what was read teaches
nothing. docs/agents.md has the agents themselves."""

import asyncio
import itertools
import json
import math
import random
import shutil
import socket
import sys
import threading
import time
from statistics import fmean

import pytest
import torch
import transformers
from conftest import (
    advantages_by_loops,
    gradient_of,
    interrupt_twice,
    needs_vllm,
    of_the_shipped_loss,
    scalars,
    settings,
    small_sums,
    variety,
)
from lab.crash_test import outcome
from test_runs import Killed, at_call, die
from tokenizers import AddedToken, Tokenizer, decoders, models

import starter
from support import agents, engines

# Each ends a turn by <|end|>, which the policy writes, too.
TEMPLATES = {
    "ChatML": """\
{%- for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "like Llama 3, trimmed": """\
{%- for m in messages %}[{{ m.role }}]

{{ m.content | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]

{% endif %}""",
    "like Gemma, turns in order": """\
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<turn>{{ 'model' if m.role == 'assistant' \
else m.role }}
{{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}""",
    "without thinking": """\
{%- for m in messages %}<|{{ m.role }}|>{{ m.content.split('#')[-1] }}<|end|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "without a system role": """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}""",
}


def save_model(folder, template, **changes):
    """Saves a model whose tokenizer joins some pairs of letters, so that sampled ids are seldom
    those of their text. Its turns soon end."""
    letters = sorted(set("0123456789 #abdelmnorstuy<|>[]:i\n"))
    pairs = [("1", "2"), ("a", "b"), ("<", "|"), ("s", "e"), *zip("0123456789", "9876543210")]
    names = [*letters, *("".join(pair) for pair in pairs)]
    ids = {name: i for i, name in enumerate(names)}
    core = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|assistant|>")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    tokenizer.chat_template = template
    small = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        eos_token_id=len(names),
        initializer_range=0.15,
        **small | changes,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.lm_head.weight.data[len(names)] *= 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def talks(problem, ask):
    """Asks at most four times, and fewer the longer the answers. The reward is of the answers."""
    answers = [await ask(problem["prompt"])]
    while len(answers) < 4 and len(answers[-1]) % 5:
        answers.append(await ask(f"{len(answers[-1])} 12 ab"))
    return variety("".join(answers), problem)


def started(folder, **changes):
    """-> policy, tokenizer, problems, settings."""
    policy, tokenizer = starter.init_policy(folder, "cpu")
    cfg = starter.cfg_with(**{"precision": "float32", "max_new_tokens": 150, **changes})
    cfg.stop_token_ids = [tokenizer.eos_token_id]
    problems = starter.with_prompt_ids(small_sums(cfg)[1][:3], policy, tokenizer, cfg)
    agents.begin_run(tokenizer)
    return policy, tokenizer, problems, cfg


def own_log_probs(policy, response):
    """(N,) log-probs of a response's tokens by the model's own forward pass."""
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    with torch.no_grad():
        table = policy(input_ids=ids[:, :-1]).logits[0].log_softmax(dim=1)
    n = len(response.response_ids)
    return table[-n:].gather(1, ids[0, -n:, None])[:, 0]


def parts_of(written, ids):
    """-> [(whether it was written, its ids)] of the answers and what was read between them."""
    pairs = itertools.groupby(zip(written, ids), lambda pair: pair[0])
    return [(is_written, [token for _, token in part]) for is_written, part in pairs]


# What is read and written


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversation_is_that_of_the_template_with_the_sampled_ids(tmp_path, capsys, name):
    """Between answers, which keep their ids, stands what the template writes there. Its log-probs
    are nan; those of the answers are of the whole conversation before."""
    policy, tokenizer, problems, cfg = started(save_model(tmp_path, TEMPLATES[name]))
    asked = []

    async def agent(problem, ask):
        messages = [{"role": "user", "content": problem["prompt"]}]
        while len(messages) < 6:
            try:
                answer = await ask(messages[-1]["content"])
            except agents.NoRoom:
                break
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"{len(answer)} 12 ab"},
            ]
        asked.append((ask, messages[:-1]))
        return 1.0

    responses = starter.rollout(policy, None, problems, cfg, "test", 4, 1.0, agent)
    by_ids = {tuple(ask.own.all_ids()): messages for ask, messages in asked}
    n_turns = set()
    n_retokenised = 0
    for response in responses:
        ids = torch.tensor(response.response_ids)
        log_probs = torch.tensor(response.log_probs)
        written = ~log_probs.isnan()
        own = own_log_probs(policy, response)
        torch.testing.assert_close(log_probs[written], own[written], rtol=0, atol=1e-5)
        messages = by_ids[tuple(response.prompt_ids + response.response_ids)]
        parts = parts_of(written.tolist(), ids.tolist())
        n_turns.add(len(parts))
        answers = [part for is_written, part in parts if is_written]
        for message, part in zip(messages[1::2], answers):
            text = tokenizer.decode(part)
            stop = tokenizer.decode(part[-1:])
            assert text in (message["content"], message["content"] + stop)
            n_retokenised += tokenizer(text, add_special_tokens=False)["input_ids"] != part
        # What was read is the text between "X" and the next answer, of the same template
        for (_, answer), (_, read), message in zip(parts[::2], parts[1::2], messages[2::2]):
            chat = [*messages[:1], {"role": "assistant", "content": "X"}, message]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            after = text.rpartition("X")[2]
            if answer[-1] == tokenizer.eos_token_id:
                after = after.removeprefix("<|end|>")
            assert tokenizer.decode(read) == after
        assert response.finished == (int(ids[-1]) in cfg.stop_token_ids and bool(written[-1]))
    assert max(n_turns) > 3 and n_retokenised > 0
    rewrites = "trimmed" in name or "Gemma" in name or "thinking" in name
    said = "the chat template would write a conversation otherwise" in capsys.readouterr().out
    assert said == rewrites


@of_the_shipped_loss
def test_gradient_of_a_step_of_agents_matches_one_written_out(
    checkpoint, tmp_path, monkeypatch, gradients
):
    """What was read has no weight, no KL, and no part in lengths and means."""
    kept = []
    rollout = starter.rollout

    def keep(*arguments):
        kept.append(rollout(*arguments))
        return kept[-1]

    monkeypatch.setattr(starter, "rollout", keep)
    given = agent_settings(
        checkpoint, tmp_path, n_train_steps=1, loss_average="grpo", normalize_by_std=False
    )
    given |= dict(use_kl_penalty=True, kl_estimator="exact", ref_model_id="tiny", kl_coef=0.5)
    result = starter.main(**given)
    responses = kept[1]
    policy = starter.init_policy(checkpoint, "cpu")[0]
    teacher = starter.init_policy("support/tiny", "cpu")[0].requires_grad_(False)
    advantages = advantages_by_loops([response.reward for response in responses], 4, 0.0, False)
    total = 0.0
    kl_sum = 0.0
    for response, advantage in zip(responses, advantages):
        ids = torch.tensor([response.prompt_ids + response.response_ids])
        n = len(response.response_ids)
        table = policy(input_ids=ids[:, :-1]).logits[0, -n:].log_softmax(dim=1)
        written = torch.tensor([not math.isnan(x) for x in response.log_probs])
        log_probs = table.gather(1, ids[0, -n:, None])[written, 0]
        other = teacher(input_ids=ids[:, :-1]).logits[0, -n:].log_softmax(dim=1)
        kl = (table.exp() * (table - other)).sum(dim=1)[written]
        kl_sum += kl.sum().item()
        total = total + (0.5 * kl.mean() - advantage * log_probs.mean()) / len(responses)
    total.backward()
    expected = gradient_of(policy)
    assert (gradients[-1] - expected).norm() < 1e-4 * expected.norm()
    n_written = [sum(not math.isnan(x) for x in response.log_probs) for response in responses]
    assert sum(n_written) < sum(len(response.response_ids) for response in responses)
    log = scalars(result["run_folder"])
    texts = [[math.isnan(x) for x in response.log_probs] for response in responses]
    n_turns = [sum(not is_read for is_read, _ in itertools.groupby(text)) for text in texts]
    assert (
        log["train/turns"][1] == pytest.approx(sum(n_turns) / len(responses)) and max(n_turns) > 1
    )
    assert log["train/response_length"][1] == pytest.approx(sum(n_written) / len(responses))
    assert log["train/kl_per_token"][1] == pytest.approx(kl_sum / sum(n_written), rel=1e-3)


def agent_settings(checkpoint, folder, **changes):
    """A run of agents. Of the model's random weights a turn seldom ends before it is cut, so that
    some tokens more end it."""
    given = settings(checkpoint, folder, max_new_tokens=60, agent=talks, **changes)
    del given["reward"]
    return given


@pytest.fixture(autouse=True)
def ends_of_turns(monkeypatch):
    monkeypatch.setattr(starter, "find_stop_tokens", lambda *_: [1, *range(2, 58, 5)])


# The same numbers


def test_same_bits_whatever_the_tools_take(checkpoint, tmp_path):
    def after(seconds):
        async def agent(problem, ask):
            async def ask_later(text):
                await asyncio.sleep(seconds())
                return await ask(text)

            return await talks(problem, ask_later)

        return agent

    for name, seconds in (("quick", lambda: 0), ("slow", lambda: random.random() / 50)):
        given = agent_settings(checkpoint, tmp_path / name / "runs", n_train_steps=2, save_every=1)
        starter.main(**{**given, "agent": after(seconds)})
    assert outcome(tmp_path / "quick") == outcome(tmp_path / "slow")


def test_agents_are_sampled_in_the_order_of_their_problems(checkpoint, monkeypatch):
    """Whoever asked first: a batch in another order may have other bits."""

    async def agent(problem, ask):
        await asyncio.sleep(0.01 * (3 - next(count) % 4))
        return variety(await ask(problem["prompt"]), problem)

    def noted(policy, llm, requests, *others):
        seeds.append([request.seed for request in requests])
        return sample(policy, llm, requests, *others)

    count, seeds = itertools.count(), []
    sample = starter.MECHANICS["sample"]
    monkeypatch.setitem(starter.MECHANICS, "sample", noted)
    policy, _, problems, cfg = started(checkpoint)
    starter.rollout(policy, None, problems[:4], cfg, "test", 4, 1.0, agent)
    [seeds] = seeds
    assert len(seeds) > 8 and seeds == sorted(seeds)


def test_one_turn_of_an_agent_is_a_response_with_a_reward(checkpoint, tmp_path):
    async def one_turn(problem, ask):
        return variety(await ask(problem["prompt"]), problem)

    given = agent_settings(checkpoint, tmp_path / "agent/runs", n_train_steps=2, save_every=1)
    starter.main(**{**given, "agent": one_turn})
    given = settings(checkpoint, tmp_path / "reward/runs", max_new_tokens=60, n_train_steps=2)
    starter.main(**{**given, "save_every": 1})
    by_agent = outcome(tmp_path / "agent")
    assert [turns for _, turns in by_agent.pop("train/turns")] == [1, 1]
    assert by_agent == outcome(tmp_path / "reward")


@pytest.mark.slow
def test_killed_run_of_agents_ends_with_the_same_bits(checkpoint, tmp_path):
    given = [
        agent_settings(checkpoint, tmp_path / name / "runs", n_train_steps=4, save_every=2)
        for name in ("undisturbed", "killed")
    ]
    starter.main(**given[0])
    with at_call(starter, "compute_group_normalized_advantages", 4, die), pytest.raises(Killed):
        starter.main(**given[1])
    starter.main(**given[1], resume=True)
    assert outcome(tmp_path / "undisturbed") == outcome(tmp_path / "killed")


@pytest.mark.slow
def test_tools_of_all_agents_work_at_the_same_time(tmp_path):
    """64 agents with three turns, each after a tool of 50 ms. Only what they wait is timed: not one
    after the other."""
    policy, _, problems, cfg = started(save_model(tmp_path, TEMPLATES["ChatML"]))

    async def agent(problem, ask):
        running.append(1)
        for _ in range(3):
            most.append(len(running))
            await asyncio.sleep(0.05)
        running.pop()
        await ask(problem["prompt"])
        return 1.0

    running, most = [], []
    starter.rollout(policy, None, problems[:1], cfg, "test", 64, 1.0, agent)
    assert max(most) == 64


def test_other_skills_are_asked_without_the_agent(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint, tmp_path / "model")
    skill = {"prompt": "add 1 1", "answer": "2", "skill": "sums"}
    (model / "retention.jsonl").write_text(json.dumps(skill))
    seen = []

    async def agent(problem, ask):
        seen.append(problem)
        return variety(await ask(problem["prompt"]), problem)

    log = play(model, tmp_path, agent)
    assert log["eval/retention_sums"] == {0: 0.0, 1: 0.0}
    assert seen and all("skill" not in problem for problem in seen)


# What may go wrong


def play(checkpoint, folder, agent, **changes):
    """Runs main() with an agent for a step. Returns what was logged."""
    given = agent_settings(checkpoint, folder, n_train_steps=1, **changes)
    return scalars(starter.main(**{**given, "agent": agent})["run_folder"])


def test_agent_that_mostly_returns_nothing_is_warned_of(checkpoint, tmp_path, capsys):
    async def agent(problem, ask):
        await ask(problem["prompt"])
        if next(count) % 4 == 0:
            return 1.0

    count = itertools.count()
    share = play(checkpoint, tmp_path, agent)["train/unscored_frac"][1]
    assert 0.5 <= share < 1
    assert f"returned None or nan for {share:.0%} of the responses" in capsys.readouterr().out


def test_error_of_an_agent_ends_the_run_and_names_the_problem(checkpoint, tmp_path):
    async def agent(problem, ask):
        await ask(problem["prompt"])
        raise OSError("the game server is gone")

    with pytest.raises(OSError, match="the game server is gone") as caught:
        play(checkpoint, tmp_path, agent)
    assert "It is of the agent, for {'prompt': 'add " in caught.value.__notes__[0]


def test_conversation_without_room_is_cut_and_scored_0_or_what_its_agent_returns(
    checkpoint, tmp_path
):
    """Of every four agents one returns a reward when there is no room, and one goes on to ask,
    whatever is raised, until it is ended."""

    async def agent(problem, ask):
        kind = next(count) % 4
        while True:
            try:
                await ask(problem["prompt"])
            except agents.NoRoom:
                if kind == 0:
                    return 0.5
                if kind > 1:
                    raise
            except Exception:
                assert kind == 1

    count = itertools.count()
    log = play(checkpoint, tmp_path, agent)
    assert log["train/reward_mean"][1] == 0.5 / 4
    assert log["train/truncated_frac"][1] == 1
    assert log["train/response_length"][1] < 60


def test_agent_that_never_asks_learns_nothing_beside_others_that_do(checkpoint, tmp_path):
    async def sometimes(problem, ask):
        if next(count) % 3 == 0:
            return 0.1
        return variety(await ask(problem["prompt"]), problem)

    async def never(problem, ask):
        return 1.0

    count = itertools.count()
    assert math.isfinite(play(checkpoint, tmp_path, sometimes)["train/loss"][1])
    with pytest.raises(starter.RunStopped, match="no agent asked the policy for anything"):
        play(checkpoint, tmp_path, never)


def test_agent_that_no_longer_waits_gets_no_other_answer(checkpoint, tmp_path, monkeypatch):
    """It has set itself a limit of time. What the policy wrote for it is not learnt from."""
    shipped = starter.sample

    def slow(*arguments):
        time.sleep(0.2)
        return shipped(*arguments)

    async def agent(problem, ask):
        try:
            await asyncio.wait_for(ask(problem["prompt"]), 0.05 if next(count) % 4 == 0 else 60)
        except TimeoutError:
            with pytest.raises(agents.NoRoom):
                await ask(problem["prompt"])
            return 0.0
        return 1.0

    count = itertools.count()
    monkeypatch.setattr(starter, "sample", slow)
    assert play(checkpoint, tmp_path, agent)["train/truncated_frac"][1] >= 0.25


@pytest.mark.slow
def test_second_interrupt_ends_a_run_whose_agent_hangs(checkpoint, tmp_path):
    """The others are cancelled."""
    calls = itertools.count()
    cancelled = threading.Event()

    async def agent(problem, ask):
        n = next(calls)
        if n == 11:
            interrupt_twice()
        answer = await ask(problem["prompt"])
        try:
            await asyncio.sleep(60 * (n >= 11))
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return variety(answer, problem)

    with pytest.raises(KeyboardInterrupt):
        play(checkpoint, tmp_path, agent)
    assert cancelled.wait(10)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(agent=lambda problem, ask: 1.0), "is no async function; write async def play"),
        (dict(reward=variety), "an agent returns the reward itself; leave reward out"),
    ],
)
def test_what_is_no_agent_is_refused(checkpoint, tmp_path, changes, words):
    given = agent_settings(checkpoint, tmp_path)
    with pytest.raises(starter.InputError, match=words):
        starter.main(**{**given, **changes})


async def asks_twice_at_once(problem, ask):
    await asyncio.gather(ask(problem["prompt"]), ask(problem["prompt"]))


async def forgets_to_await(problem, ask):
    answer = await ask(problem["prompt"])
    ask("and now?")
    return variety(answer, problem)


async def returns_a_text(problem, ask):
    return await ask(problem["prompt"])


async def returns_two_numbers(problem, ask):
    await ask(problem["prompt"])
    return [1.0, 2.0]


async def returns_what_no_float_holds(problem, ask):
    await ask(problem["prompt"])
    return 10**400


@pytest.mark.parametrize(
    "agent, words",
    [
        (asks_twice_at_once, "asked twice at once; await each ask()"),
        (forgets_to_await, r"called ask\(\) without await"),
        (returns_a_text, "must return one number, or None"),
        (returns_two_numbers, "must return one number, or None"),
        (returns_what_no_float_holds, "must return one number, or None"),
    ],
)
def test_mistake_of_an_agent_is_refused(checkpoint, tmp_path, agent, words):
    with pytest.raises(starter.InputError, match=words):
        play(checkpoint, tmp_path, agent)


def test_exit_in_an_agent_is_an_error(checkpoint, tmp_path):
    """Of a program that the policy wrote, for example. It does not end the event loop."""

    async def agent(problem, ask):
        await ask(problem["prompt"])
        sys.exit()

    with pytest.raises(RuntimeError, match=r"exit\(\) was called by the agent"):
        play(checkpoint, tmp_path, agent)


def test_stop_text_that_the_tokenizer_would_clean_up_ends_an_answer(checkpoint):
    """Llama 3's tokenizers have this switch, which takes the blank before a comma out."""
    policy, tokenizer, [problem, *_], cfg = started(checkpoint)
    tokenizer.clean_up_tokenization_spaces = True
    conversation = agents.Conversation(problem, problem["prompt"], policy, cfg)
    ids = tokenizer("3 , 4")["input_ids"]
    response = starter.Response([], ids, [-1.0] * len(ids), False)
    assert conversation.write(response, "3 , 4", [" ,"]) == "3"
    assert tokenizer.decode(conversation.ids, clean_up_tokenization_spaces=False) == "3 ,"


def responses_by(folder, agent):
    policy, _, problems, cfg = started(folder)
    return starter.rollout(policy, None, problems, cfg, "test", 4, 1.0, agent)


def test_second_question_that_is_refused_is_not_read(tmp_path):
    """Where the agent goes on: nothing of it is in the row that it learns from."""
    folder = save_model(tmp_path, TEMPLATES["ChatML"])

    async def asks(problem, ask):
        return variety(await ask(problem["prompt"]), problem)

    async def asks_too_early(problem, ask):
        both = ask(problem["prompt"]), ask("12 ab")
        answer, refused = await asyncio.gather(*both, return_exceptions=True)
        assert isinstance(refused, starter.InputError)
        return variety(answer, problem)

    assert responses_by(folder, asks_too_early) == responses_by(folder, asks)


def test_empty_message_of_the_assistant_is_no_turn(tmp_path):
    """The answer takes its place: roles alternate, which this template asks for."""
    folder = save_model(tmp_path, TEMPLATES["like Gemma, turns in order"])
    empty = {"role": "assistant", "content": ""}

    def agent_after(more):
        async def agent(problem, ask):
            answer = await ask([user(problem["prompt"]), *more])
            return variety(answer + await ask("12 ab"), problem)

        return agent

    assert responses_by(folder, agent_after([empty])) == responses_by(folder, agent_after([]))


def test_agent_needs_support(checkpoint, tmp_path, without_support):
    with pytest.raises(starter.InputError, match="need the folder support/ beside this file"):
        starter.main(**agent_settings(checkpoint, tmp_path))


# vLLM


@needs_vllm
def test_agents_with_vllm_agree_with_the_trainer_and_keep_its_cache_in_a_rollout(
    tmp_path, monkeypatch
):
    policy, _, problems, cfg = started(save_model(tmp_path, TEMPLATES["ChatML"]), engine="vllm")
    engines.attach(cfg)
    longest = max(len(problem["prompt_ids"]) for problem in problems) + cfg.max_new_tokens
    llm = starter.init_vllm(tmp_path, 0, longest, 0.3, "float32")
    forgotten = []
    shipped = starter.forget_prompts
    monkeypatch.setattr(starter, "forget_prompts", lambda llm: forgotten.append(shipped(llm)))
    responses = starter.rollout(policy, llm, problems, cfg, "test", 4, 1.0, talks)
    assert len(forgotten) == 1
    for response in responses:
        log_probs = torch.tensor(response.log_probs)
        written = ~log_probs.isnan()
        own = own_log_probs(policy, response)
        torch.testing.assert_close(log_probs[written], own[written], rtol=0, atol=1e-4)
    assert any(math.isnan(x) for response in responses for x in response.log_probs)
    assert starter.rollout(policy, llm, problems, cfg, "test", 4, 1.0, talks) == responses


# Programs that speak to an endpoint


def with_client(function):
    """An agent that lets an async function talk through OpenAI's client. (problem, client) ->
    reward."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("jiter")  # which it imports late
    pytest.importorskip("aiohttp")

    async def agent(problem, ask):
        async with openai.AsyncOpenAI(base_url=ask.url, api_key="-", max_retries=0) as client:
            return await function(problem, client)

    return agent


async def complete(client, messages, **options):
    return await client.chat.completions.create(model="any", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


def test_program_with_openais_client_trains_as_an_agent_does(checkpoint, tmp_path):
    """The same questions: the same bits."""

    async def talks_by_client(problem, client):
        messages = [user(problem["prompt"])]
        answers = []
        while not answers or (len(answers) < 4 and len(answers[-1]) % 5):
            if answers:
                messages.append(user(f"{len(answers[-1])} 12 ab"))
            [choice] = (await complete(client, messages)).choices
            answers.append(choice.message.content)
            messages.append({"role": "assistant", "content": answers[-1]})
        return variety("".join(answers), problem)

    for name, agent in (("client", with_client(talks_by_client)), ("agent", talks)):
        given = agent_settings(checkpoint, tmp_path / name / "runs", n_train_steps=2, save_every=1)
        starter.main(**{**given, "agent": agent})
    assert outcome(tmp_path / "client") == outcome(tmp_path / "agent")


@pytest.mark.parametrize("average", ["grpo", "dapo", "dr_grpo"])
def test_conversations_that_branch_are_rows_that_share_the_weight_of_a_response(
    tmp_path, average, capsys
):
    """An agent that goes on from its first answer, then anew. Each answer is learnt from once. That
    no conversation pays for the KL of another one is said where this could be expected."""

    async def branches(problem, client):
        first = [user(problem["prompt"])]
        [answer] = (await complete(client, first, max_tokens=9)).choices
        first.append({"role": "assistant", "content": answer.message.content})
        for messages in ([*first, user("go on")], [user("anew 1")], [user("anew 2")]):
            reply = await complete(client, messages, max_tokens=5)
            assert reply.usage.completion_tokens <= 5
            lengths.append(reply.usage.completion_tokens)
        return 1.0

    lengths = []
    policy, _, problems, cfg = started(save_model(tmp_path, TEMPLATES["ChatML"]))
    cfg.use_kl_penalty = True
    cfg.kl_in = "loss_to_go" if average == "dr_grpo" else "loss"
    responses = starter.rollout(policy, None, problems, cfg, "test", 2, 1.0, with_client(branches))
    said = "of an agent's conversations each pays for its own KL, not for that of the later ones"
    assert (said in capsys.readouterr().out) == (average == "dr_grpo")
    assert all(len(response.others) == 2 for response in responses)
    for response in responses:
        for part in (response, *response.others):
            log_probs = torch.tensor(part.log_probs)
            written = ~log_probs.isnan()
            own = own_log_probs(policy, part)
            torch.testing.assert_close(log_probs[written], own[written], rtol=0, atol=1e-5)
    cfg.loss_average = average
    batch = starter.make_batch(responses, torch.arange(6.0), "cpu")
    weights = starter.weights_of_tokens(batch, cfg)
    counts = [response.n_written() for response in responses]
    expected = {
        "grpo": [1 / n / 6 for n in counts],
        "dapo": [1 / sum(counts)] * 6,
        "dr_grpo": [1 / 6 / cfg.max_new_tokens] * 6,
    }[average]
    row = 0
    for i, response in enumerate(responses):
        for part in (response, *response.others):
            written = [not math.isnan(x) for x in part.log_probs]
            mask = batch["response_mask"][row]
            assert mask.sum() == sum(written)
            assert weights[row][mask].tolist() == pytest.approx([expected[i]] * sum(written))
            assert weights[row][~mask].abs().max() == 0
            assert (batch["advantages"][row][mask] == i).all()
            row += 1
    assert row == len(weights)


def test_tools_of_a_first_request_are_in_its_prompt_also_if_its_messages_are_the_problems(tmp_path):
    async def asks(problem, client):
        tool = {"type": "function", "function": {"name": "sort"}}
        await complete(client, problem["prompt"], tools=[tool])
        return 1.0

    template = "{% if tools %}tools: {{ tools[0].function.name }} {% endif %}" + TEMPLATES["ChatML"]
    policy, tokenizer, problems, cfg = started(save_model(tmp_path, template))
    problems = [{**problem, "prompt": [user(problem["prompt"])]} for problem in problems]
    responses = starter.rollout(policy, None, problems, cfg, "test", 2, 1.0, with_client(asks))
    for response in responses:
        assert tokenizer.decode(response.prompt_ids).startswith("tools: sort ")


def test_stop_text_ends_an_answer_behind_the_token_that_completes_it(tmp_path):
    async def stops(problem, client):
        [choice] = (await complete(client, [user("add 1 2")], stop=["1", "7"])).choices
        answers.append(choice.message.content)
        return 1.0

    answers = []
    policy, tokenizer, problems, cfg = started(save_model(tmp_path, TEMPLATES["ChatML"]))
    responses = starter.rollout(policy, None, problems, cfg, "test", 4, 1.0, with_client(stops))
    texts = [tokenizer.decode(response.response_ids) for response in responses]
    is_cut = [any(digit in text for digit in "17") for text in texts]
    assert any(is_cut) and all(response.finished for response in responses)
    for response, text, cut in zip(responses, texts, is_cut):
        if cut:
            assert "1" not in text[:-2] and "7" not in text[:-2]  # the last token may be a pair
    assert not any(digit in answer for answer in answers for digit in "17")


BAD_REQUESTS = [
    {},
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"content": "hello"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [user("a")], "stream": True},
    {"messages": [user("a")], "n": 2},
    {"messages": [user("a")], "max_tokens": -1},
    {"messages": [user("a")], "stop": [1]},
    [1, 2],
]


def test_request_that_is_malformed_gets_a_sentence_and_harms_nobody(tmp_path, checkpoint):
    aiohttp = pytest.importorskip("aiohttp")

    async def agent(problem, ask):
        async with aiohttp.ClientSession() as session:
            address = f"{ask.url}/chat/completions"
            for request in BAD_REQUESTS:
                async with session.post(address, json=request) as reply:
                    assert reply.status == 400 and (await reply.json())["error"]["message"]
            async with session.post(address, data=b"\xff{") as reply:
                assert reply.status == 400
            other = address.replace(address.split("/")[3], "another")
            async with session.post(other, json={"messages": [user("a")]}) as reply:
                assert reply.status == 404
            async with session.get(address) as reply:
                assert reply.status == 405
        addresses.append(ask.url)
        return variety(await ask(problem["prompt"]), problem)

    addresses = []
    assert math.isfinite(play(checkpoint, tmp_path, agent)["train/loss"][1])
    assert len({*addresses}) == len(addresses) > 16
    for address in (addresses[0], addresses[-1]):  # nothing listens after a rollout
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", int(address.split(":")[2].split("/")[0])), 1)


def test_conversation_of_a_program_without_room_ends_as_an_agents_does(
    checkpoint, tmp_path, capsys
):
    async def endless(problem, client):
        messages = [user(problem["prompt"])]
        for _ in range(50):
            [choice] = (await complete(client, messages)).choices
            messages += [{"role": "assistant", "content": choice.message.content}, user("again")]
        return 1.0

    log = play(checkpoint, tmp_path, with_client(endless))
    assert log["train/reward_mean"][1] == 0 and log["train/truncated_frac"][1] == 1
    said = "where an agent has no room left and ends with an error, its reward is 0 (the first: "
    assert capsys.readouterr().out.count(said) == 1


def test_share_of_cut_answers_counts_every_conversation(checkpoint, tmp_path, monkeypatch):
    async def asks_anew(problem, client):
        await complete(client, [user(problem["prompt"])])
        await complete(client, [user("anew")], max_tokens=1)
        return 0.5

    batches = []
    make_batch = starter.make_batch

    def keep_and_make(responses, *others):
        batches.append(responses)
        return make_batch(responses, *others)

    monkeypatch.setattr(starter, "make_batch", keep_and_make)
    log = play(checkpoint, tmp_path, with_client(asks_anew))
    # The step has 16 responses; other batches are of the report's 10 problems, or tried for room.
    [kept] = [responses for responses in batches if len(responses) == 16]
    cut = [not x.finished for response in kept for x in (response, *response.others)]
    assert log["train/truncated_frac"][1] == pytest.approx(fmean(cut))
    assert fmean(cut) != fmean(not response.finished for response in kept)


def test_programs_that_block_a_thread_each_run_together(checkpoint, tmp_path):
    """More of them than threads of a usual pool."""

    async def agent(problem, ask):
        loop = asyncio.get_running_loop()

        def blocking():
            return asyncio.run_coroutine_threadsafe(ask(problem["prompt"]), loop).result()

        return variety(await asyncio.to_thread(blocking), problem)

    log = play(checkpoint, tmp_path, agent, rollout_batch_size=64)
    assert math.isfinite(log["train/loss"][1])


def test_agents_that_wait_for_others_are_answered_after_a_while(
    checkpoint, tmp_path, monkeypatch, capsys
):
    """Here at most three at a time ask the policy."""

    async def agent(problem, ask):
        async with limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(3)):
            return variety(await ask(problem["prompt"]), problem)

    limits = {}
    monkeypatch.setattr(agents, "PATIENCE", 0.05)
    assert math.isfinite(play(checkpoint, tmp_path, agent)["train/loss"][1])
    assert "agents have waited for others for 0.05 s" in capsys.readouterr().out
