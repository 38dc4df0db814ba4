"""Agents: main(agent=play), where play is an async function (problem, ask) -> reward. See
docs/agents.md.

All agents of a rollout run at once, in an event loop in a thread of its own, and take their turns
together: when each of those that still run waits for the policy, or has ended, the answers of this
turn are sampled as one batch. So what is sampled does not depend on how long their tools take.

What the policy wrote stays as it was sampled, token by token. Between two answers come the ids of
the chat template, whose log-probs are nan: starter.make_batch masks them.
"""

import asyncio
import functools
import inspect
import itertools
import math
import os
import queue
import random
import time

import starter
from support import divided, edits, endpoint, ranks
from support.endpoint import NoRoom
from support.rewards import event_loop

MARKER = "<=answer=>"  # what stands for an answer where the template is asked what follows one
MOST_REFUSED = 100  # questions of an agent for which there is no room; then it is ended
PATIENCE = 5.0  # seconds in which nothing happens, after which those that wait are answered

TOKENIZER = []  # of this run
SAID = set()  # what was said once in this run


def begin_run(tokenizer):
    TOKENIZER[:] = [tokenizer]
    SAID.clear()


def say_once(text, more=""):
    if text not in SAID:
        SAID.add(text)
        print(text + more)


def check(agent):
    """Raises InputError for what is no agent."""
    is_function = inspect.isfunction(agent) or inspect.ismethod(agent)
    call = agent if is_function else getattr(agent, "__call__", None)
    if not inspect.iscoroutinefunction(call):
        raise starter.InputError(
            f"agent = {agent!r:.100} is no async function; write async def play(problem, ask), "
            "which awaits ask(text) and returns the reward"
        )


def ids_after_answer(problem, before, messages, cfg):
    """Returns the ids that the chat template puts between an answer, the last of the messages
    before, and the next one, with these messages in between. Without a template they are those of
    the texts."""
    [tokenizer] = TOKENIZER
    if tokenizer.chat_template is None:
        text = "".join(message["content"] for message in messages)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    turn = [*before[:-1], {"role": "assistant", "content": MARKER}, *messages]
    text = starter.text_of_prompt({**problem, "prompt": turn}, tokenizer, cfg.enable_thinking)
    if text.count(MARKER) != 1:
        raise starter.InputError(
            "the chat template does not write an answer as it is, so that no agent can go on after "
            "one; give another chat_template"
        )
    return tokenizer(text.partition(MARKER)[2], add_special_tokens=False)["input_ids"]


class Conversation:
    """What the policy has read and written, one after the other."""

    def __init__(self, problem, prompt, policy, cfg, **more):
        """prompt: that of the problem, or another text or list of messages. more: what the template
        is told, such as tools."""
        [tokenizer] = TOKENIZER
        fitting = [problem]
        if more or prompt != problem["prompt"]:
            other = {**problem, **more, "prompt": prompt}
            fitting = starter.with_prompt_ids([other], policy, tokenizer, cfg)
        if not fitting:
            raise starter.InputError(
                f"an agent's first message, {prompt!r:.100}, does not fit into the model's "
                "context; shorten it, or lower max_new_tokens"
            )
        self.problem = fitting[0]
        self.cfg = cfg
        self.messages = messages_of(prompt)
        self.ids = []
        self.log_probs = []
        self.finished = True  # False: its last answer was cut, or there was no room for another
        self.is_given_up = False  # the agent has not waited for an answer

    def room(self):
        return self.cfg.max_new_tokens - len(self.ids)

    def all_ids(self):
        return self.problem["prompt_ids"] + self.ids

    def read(self, messages):
        """Appends what the template puts behind an answer, with these messages. Raises NoRoom."""
        if self.is_given_up:
            raise NoRoom("the agent has not waited for the last answer")
        ids = ids_after_answer(self.problem, self.messages, messages, self.cfg)
        if ids[:1] == self.ids[-1:]:  # the end of the answer, which the policy wrote
            ids = ids[1:]
        if len(ids) >= self.room():
            self.finished = False
            raise NoRoom(f"{self.room()} tokens are left of max_new_tokens, {len(ids)} are read")
        self.ids = self.ids + ids
        self.log_probs = self.log_probs + [math.nan] * len(ids)
        self.messages = self.messages + messages
        self.compare_with_template()

    def compare_with_template(self):
        """Says, once in a run, where the template would write the same messages otherwise."""
        [tokenizer] = TOKENIZER
        says = "the chat template would write a conversation otherwise than it was"
        if tokenizer.chat_template is None or says in SAID:
            return
        problem = {**self.problem, "prompt": self.messages}
        again = starter.ids_of_prompt(problem, tokenizer, self.cfg.enable_thinking)
        ours, template = (
            tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (self.all_ids(), again)
        )
        if ours != template:
            n = len(os.path.commonprefix([ours, template]))
            say_once(
                says,
                f" ({template[n : n + 60]!r} in the place of {ours[n : n + 60]!r}); the policy "
                "goes on from the tokens that it has read and written",
            )

    def write(self, response, text, stop=()):
        """Appends the policy's answer, which ends with the token that completes a text of `stop`.
        Returns its text, without that one."""
        n = len(response.response_ids)
        finished = response.finished
        ends = [text.find(word) for word in stop if word in text]
        if ends:
            [tokenizer] = TOKENIZER
            for i in range(1, n):
                ids = response.response_ids[:i]
                begun = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
                if any(word in begun for word in stop):
                    n = i
                    break
            text = text[: min(ends)]
            finished = True
        self.ids = self.ids + response.response_ids[:n]
        self.log_probs = self.log_probs + response.log_probs[:n]
        self.finished = finished
        begun = starter.begun_answer({"prompt": self.messages})
        if self.messages[-1]["role"] == "assistant":  # it may be empty
            del self.messages[-1]
        self.messages = [*self.messages, {"role": "assistant", "content": begun + text}]
        return text

    def response(self):
        return starter.Response(self.problem["prompt_ids"], self.ids, self.log_probs, self.finished)


def messages_of(prompt):
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


class Asker:
    """What an agent gets as `ask`: await ask(text) gives the policy a text, or a list of messages,
    and returns its answer. ask.url is an endpoint of OpenAI's protocol for programs."""

    def __init__(self, problem, seed, game):
        self.problem = problem
        self.seed = seed
        self.game = game
        self.conversations = []
        self.n_turns = 0
        self.asked = None  # the conversation that waits for the policy, and its longest answer
        self.answer = None  # a future, while it waits
        self.result = None  # what the agent returned
        self.own = None  # the conversation of __call__
        self.n_not_awaited = 0  # calls of ask(), which are coroutines until they are awaited
        self.n_refused = 0  # for lack of room

    @functools.cached_property
    def url(self):
        return self.game.server.url_of(self)

    def __call__(self, text):
        self.n_not_awaited += 1
        return self.answer_to(text)

    async def answer_to(self, text):
        self.n_not_awaited -= 1
        self.check_is_free()
        if self.own is None:
            self.own = self.begin(text)
        else:
            self.read(self.own, messages_of(text))
        return self.own.write(*await self.sampled(self.own))

    def begin(self, prompt, **more):
        conversation = Conversation(self.problem, prompt, self.game.policy, self.game.cfg, **more)
        self.conversations.append(conversation)
        return conversation

    def read(self, conversation, messages):
        try:
            conversation.read(messages)
        except NoRoom:
            self.n_refused += 1
            if self.n_refused > MOST_REFUSED:
                # In an endless loop `except Exception` lets this one pass
                raise asyncio.CancelledError from None
            raise

    def check_is_free(self):
        if self.answer is not None:
            raise starter.InputError(
                "an agent asked twice at once; await each ask() before the next one"
            )

    async def sampled(self, conversation, most=math.inf):
        """Returns the Response that the policy gives next in this conversation, and its text."""
        self.check_is_free()
        self.asked = conversation, int(min(most, conversation.room()))
        self.answer = asyncio.get_running_loop().create_future()
        self.game.wait_for_turn(self)
        try:
            return await self.answer
        except asyncio.CancelledError:  # the agent waits no longer, so that it cannot go on
            self.game.waiting.discard(self)
            conversation.finished = False
            conversation.is_given_up = True
            raise
        finally:
            self.answer = None

    def request(self):
        conversation, room = self.asked
        seed = self.seed  # that of a response without an agent, in the first turn
        if self.n_turns:
            seed = random.Random(f"{self.seed} turn {self.n_turns}").getrandbits(32)
        self.n_turns += 1
        return starter.Request(conversation.all_ids(), seed, room)

    async def play(self, agent):
        try:
            self.result = number_of(await agent(self.problem, self))
            if self.n_not_awaited:
                raise starter.InputError(
                    "an agent called ask() without await, so that nothing was asked; write "
                    "await ask(...)"
                )
        except (NoRoom, asyncio.CancelledError):  # after Ctrl-C nobody looks at the result
            self.result = 0.0
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit):  # would end the event loop, for which all wait
                error = RuntimeError("exit() was called by the agent")
            if self.n_refused:  # of a client of ask.url, in its own words
                say_once(
                    "where an agent has no room left and ends with an error, its reward is 0",
                    f" (the first: {error!r:.200})",
                )
                self.result = 0.0
            else:
                error.add_note(f"It is of the agent, for {self.problem!r:.500}")
                self.game.turns.put(error)
        finally:
            self.game.leave(self)

    def response(self):
        """One of its conversations, with the reward, and the others with it."""
        first, *others = [conversation.response() for conversation in self.conversations] or [
            starter.Response(self.problem["prompt_ids"], [], [], True)
        ]
        return first._replace(reward=self.result, others=tuple(others))


def number_of(result):
    """What an agent returned -> a number, or None."""
    try:
        return None if result is None else float(result)
    except (TypeError, ValueError, OverflowError):
        raise starter.InputError(
            f"the agent returns {result!r:.100}, and must return one number, or None"
        ) from None


def answer(futures, responses, texts):
    """In the event loop."""
    for future, response, text in zip(futures, responses, texts):
        if future is not None and not future.done():  # an agent may have set itself a limit of time
            future.set_result((response, text))


class Game:
    """A rollout of agents, which run in the event loop. The policy answers in the main thread. That
    one sleeps until all of them wait: woken for each, it would take the processor from them."""

    def __init__(self, policy, cfg, sample):
        self.policy = policy
        self.cfg = cfg
        self.sample = sample  # list of Requests -> list of Responses
        self.server = endpoint.Server()
        self.turns = queue.Queue()  # of lists of Askers that wait for the policy, or an error
        # In the event loop:
        self.running = set()  # Askers
        self.waiting = set()  # those of them that wait
        self.last = time.monotonic()  # when something has happened

    async def play(self, agent, askers):
        try:
            await asyncio.gather(*[asker.play(agent) for asker in askers])
        except Exception as error:  # a fault of this file, for which nobody else would look
            self.turns.put(error)

    def wait_for_turn(self, asker):
        self.waiting.add(asker)
        self.end_turn()

    def leave(self, asker):
        self.running.remove(asker)
        self.end_turn()

    def end_turn(self):
        self.last = time.monotonic()
        if len(self.waiting) == len(self.running):
            self.hand_over()

    def hand_over(self):
        """Hands those that wait to the main thread, or nobody when all have ended."""
        if self.waiting or not self.running:
            waiting = sorted(self.waiting, key=lambda asker: asker.seed)
            self.waiting = set()
            self.turns.put(waiting)

    # In the main thread:

    def run(self, agent, askers):
        loop = event_loop()
        self.running = set(askers)
        playing = asyncio.run_coroutine_threadsafe(self.play(agent, askers), loop)
        try:
            while waiting := self.those_that_ask(loop):
                futures = [asker.answer for asker in waiting]
                responses = self.sample([asker.request() for asker in waiting])
                texts = starter.texts_of(responses, *TOKENIZER)
                loop.call_soon_threadsafe(answer, futures, responses, texts)
        finally:
            playing.cancel()  # after Ctrl-C, or an error of an agent
            self.server.close()

    def those_that_ask(self, loop):
        """Waits until all agents that run ask the policy, and returns these, or none at the end."""
        while True:
            try:
                left = self.last + PATIENCE - time.monotonic()
                turn = self.turns.get(timeout=max(0.01, left))
            except queue.Empty:
                if self.waiting and time.monotonic() > self.last + PATIENCE:
                    say_once(
                        f"agents have waited for others for {PATIENCE:g} s, which take longer, or "
                        "wait for them: what is sampled together now depends on time"
                    )
                    loop.call_soon_threadsafe(self.hand_over)
                continue
            if isinstance(turn, Exception):
                raise turn
            return turn


def turns_of(response):
    """How often the policy has answered in the conversations of an agent."""
    parts = itertools.groupby(response.log_probs, math.isnan)
    n = sum(not is_read for is_read, _ in parts)
    return n + sum(map(turns_of, response.others))


def play(agent, policy, llm, problems, cfg, seed, group_size, temperature):
    """P problems -> P * group_size Responses, group after group: in each the conversation of an
    agent, and the reward that it returned. Each of several processes plays for its share."""
    sample = starter.sample
    if ranks.WORLD > 1:
        divided.join_weights(policy, llm)
        sample = edits.OWN["sample"]

    def answer_all(requests):
        """Each of the processes that run one engine must ask it for the same."""
        ranks.for_engine(requests, cfg.vllm_tp)
        return sample(policy, llm, requests, cfg, temperature)

    game = Game(policy, cfg, answer_all)
    asked = [problem for problem in problems for _ in range(group_size)]
    askers = [Asker(problem, seed + i, game) for i, problem in enumerate(asked)]
    askers = ranks.share_of(askers, cfg.vllm_tp)
    responses = []
    if ranks.RANK % cfg.vllm_tp == 0:
        game.run(agent, askers)
        ranks.for_engine(None, cfg.vllm_tp)  # the end
        responses = [asker.response() for asker in askers]
    else:
        while requests := ranks.for_engine(None, cfg.vllm_tp):
            sample(policy, llm, requests, cfg, temperature)
    responses = ranks.gather(responses)
    if cfg.use_kl_penalty and cfg.kl_in != "loss" and any(x.others for x in responses):
        say_once(
            f"kl_in = {cfg.kl_in!r}: of an agent's conversations each pays for its own KL, not for "
            "that of the later ones"
        )
    if not any(response.n_written() for response in responses):
        raise starter.RunStopped(
            "no agent asked the policy for anything, so that there is nothing to learn from; "
            "await ask(text) in it"
        )
    return responses
