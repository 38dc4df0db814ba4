"""ask.url: an endpoint of OpenAI's protocol, by which programs that are written already are agents.

A call whose messages begin with those of an earlier one of the same agent, and its answer, goes on
from the sampled ids. Any other call begins a new conversation, which becomes a further row of the
batch with the advantage of its agent. Nothing listens before an agent asks for its url, or after
the rollout.
"""

import asyncio
import json
import secrets
import socket
import time

from starter import InputError
from support.rewards import event_loop


class NoRoom(Exception):
    """max_new_tokens of the conversation leave no room for another answer. What an agent does not
    catch ends it with a reward of 0."""


class Server:
    """Listens on 127.0.0.1. Each agent has an address of its own, which others cannot guess."""

    def __init__(self):
        self.askers = {}  # by the secret in their address
        self.socket = None
        self.runner = None

    def url_of(self, asker):
        if self.socket is None:
            self.listen()
        secret = secrets.token_urlsafe(16)
        self.askers[secret] = asker
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/{secret}/v1"

    def listen(self):
        try:
            from aiohttp import web
        except ImportError:
            raise InputError("ask.url needs aiohttp; pip install aiohttp") from None
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(4096)  # calls that come before the server below has started wait here
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/{secret}/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

        async def start():
            await self.runner.setup()
            await web.SockSite(self.runner, self.socket).start()

        asyncio.run_coroutine_threadsafe(start(), event_loop())

    def close(self):
        if self.runner is not None:
            asyncio.run_coroutine_threadsafe(self.runner.cleanup(), event_loop()).result()
            self.socket.close()

    async def answer(self, http_request):
        from aiohttp import web

        asker = self.askers.get(http_request.match_info["secret"])
        if asker is None or asker not in asker.game.running:
            return web.json_response(error_of("no agent has this address now"), status=404)
        try:
            request = json.loads(await http_request.text())
            return web.json_response(await completion(asker, request))
        except NoRoom as error:
            return web.json_response(error_of(error, "context_length_exceeded"), status=400)
        except ValueError as error:  # InputError is one
            return web.json_response(error_of(error), status=400)


def error_of(message, code=None):
    return {"error": {"message": str(message), "type": "invalid_request_error", "code": code}}


def checked_messages(request):
    """Returns the messages of a request, whose contents become texts. Raises InputError."""
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InputError("give messages, a list of at least one")
    checked = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(f"{message!r:.100} is no message with a role and a content")
        content = message.get("content") or ""
        if isinstance(content, list):  # of parts
            texts = [part.get("text") for part in content if isinstance(part, dict)]
            if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
                raise InputError("a content may hold parts of the type text alone")
            content = "".join(texts)
        if not isinstance(content, str):
            raise InputError(f"{content!r:.100} is no text")
        checked.append({**message, "content": content})
    if request.get("stream"):
        raise InputError("an answer cannot be streamed; leave stream out")
    if request.get("n", 1) != 1:
        raise InputError("there is one answer to a call; leave n out")
    return checked


def longest_answer(request):
    most = request.get("max_completion_tokens") or request.get("max_tokens") or float("inf")
    if not isinstance(most, (int, float)) or isinstance(most, bool) or most < 1:
        raise InputError(f"max_tokens = {most!r:.100} must be a number above 0")
    return most


def stop_texts(request):
    stop = request.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise InputError(f"stop = {stop!r:.100} must be a text, or a list of texts")
    return stop


def is_same(message, other):
    return (message["role"], message["content"]) == (other["role"], other["content"])


def conversation_before(asker, messages):
    """Returns the longest conversation with which the messages begin, or None."""
    begun = []
    for conversation in asker.conversations:
        before = conversation.messages
        is_answered = before[-1]["role"] == "assistant" and conversation.ids
        if is_answered and len(before) < len(messages) and all(map(is_same, before, messages)):
            begun.append(conversation)
    return max(begun, key=lambda conversation: len(conversation.messages), default=None)


async def completion(asker, request):
    """A chat completion request -> OpenAI's object of that name."""
    messages = checked_messages(request)
    most, stop = longest_answer(request), stop_texts(request)
    if asker.answer is not None:
        raise InputError("this agent has asked already, and is not answered yet; ask one by one")
    conversation = conversation_before(asker, messages)
    if conversation is None:
        more = {"tools": request["tools"]} if request.get("tools") else {}
        conversation = asker.begin(messages, **more)
    else:
        asker.read(conversation, messages[len(conversation.messages) :])
    n_read = len(conversation.all_ids())
    answer = await asker.sampled(conversation, most)
    text = conversation.write(*answer, stop)
    n_written = len(conversation.all_ids()) - n_read
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(request.get("model", "policy")),
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop" if conversation.finished else "length",
            }
        ],
        "usage": {
            "prompt_tokens": n_read,
            "completion_tokens": n_written,
            "total_tokens": n_read + n_written,
        },
    }
