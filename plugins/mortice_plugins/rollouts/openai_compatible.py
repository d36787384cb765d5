"""Answers from a server with OpenAI's completions interface: `POST {url}/completions`, one request an answer.

Servers differ in what they say. All give text; token ids only some, each in its own way (`ids`), else the text is
tokenized again, and where it does not come back as the same text, or the server counts other tokens, that is reported.
Log-probabilities, where there are any, are of temperature 1 or of what filters left, as the server likes: none are
taken. Nor can a server be given the weights that train. So the engine provides none of these, and training scores by
itself, or refuses.

The prompt goes out as text, special tokens spelled out; a server that puts BOS in front of every text doubles one that
stands there already. Which ids end an answer is up to the server. What this leaves out: streaming, redirects (a key
would go along), proxies.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import SplitResult, urlsplit

import attrs
from attrs import define, field, frozen

from mortice.batch import Completion
from mortice.errors import ConfigError, DataError, TrainingError
from mortice.options import ge, gt, in_, option
from mortice.protocols import EngineContext, Request, Sampling
from mortice.sampling import answer_seed

LARGEST = 64 * 2**20
"""Bytes of an answer that is read."""
LONGEST_WAIT = 30.0
"""Seconds between two tries, at most."""
POLL = 0.2
AGAIN = (408, 409, 425, 429)
"""Statuses that may be another one next time, beside those from 500 on."""
IDS: Mapping[str, Mapping[str, Any]] = {
    "text": {},
    "return_token_ids": {"return_token_ids": True},
    "logprobs": {"logprobs": True},
}
"""What a request says so that its answer holds token ids: nothing; as vLLM wants it; as mlx-lm's server does."""


def _address(instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{attribute.name!r} must be like http://127.0.0.1:8080/v1")
    if parts.username or parts.password:
        raise ValueError(f"{attribute.name!r} must not hold a password; name a variable in api_key_variable")


@frozen
class OpenAICompatible:
    """Answers from a server with OpenAI's completions interface (vLLM, llama.cpp, mlx-lm's own).

    It samples from weights of its own, so training takes its answers only with `source.off_policy`, and scores them
    itself. The key, where one is needed, is read from the environment variable that `api_key_variable` names; it is
    written nowhere.
    """

    url: str = option(help="where the interface is, up to /v1", validator=_address)
    model: str = option(help="name of the model there")
    ids: str = option(
        "text",
        help='token ids: of the "text", tokenized again, or asked for with "return_token_ids" (vLLM) or "logprobs" '
        "(mlx-lm's server)",
        validator=in_(tuple(IDS)),
    )
    concurrency: int = option(8, help="requests at once", validator=ge(1))
    timeout: float = option(600.0, help="seconds without a byte after which a request is given up", validator=gt(0.0))
    retries: int = option(3, help="further tries of a request that failed", validator=ge(0))
    api_key_variable: str | None = option(None, help="environment variable that holds the key")

    @property
    def provides(self) -> frozenset[str]:
        return frozenset() if self.ids == "text" else frozenset({"token-ids"})

    def open(self, context: EngineContext) -> OpenAICompatibleEngine:
        """Raises ConfigError where the variable of the key is not set."""
        key = None
        if self.api_key_variable is not None:
            key = os.environ.get(self.api_key_variable)
            if not key:
                raise ConfigError(f"rollout.api_key_variable: {self.api_key_variable} is not set in the environment")
        return OpenAICompatibleEngine(self, context, key)


class _Failed(Exception):
    """A try that came to nothing. `again`: whether another one may do better; `after`: what the server says of when."""

    def __init__(self, message: str, *, again: bool, after: float = 0.0) -> None:
        super().__init__(message)
        self.again, self.after = again, after


@define(eq=False)
class OpenAICompatibleEngine:
    options: OpenAICompatible
    context: EngineContext
    _key: str | None = field(default=None, repr=False)
    answers: int = 0
    retokenized: int = 0
    """Answers whose ids may not be those that were sampled."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, int, Completion]]:
        for request in requests:
            if not request.ids:
                raise DataError(f"prompt {request.key!r} is empty")
        stopping = threading.Event()
        held: set[http.client.HTTPConnection] = set()
        pool = ThreadPoolExecutor(self.options.concurrency, thread_name_prefix="rollout")
        try:
            asked: dict[Future[dict[str, Any]], tuple[int, int]] = {}
            for index, request in enumerate(requests):
                for sample in range(sampling.samples):
                    body = self._body(request, sample, sampling)
                    asked[pool.submit(self._ask, body, stopping, held)] = (index, sample)
            while asked:
                done, _ = wait(asked, POLL, FIRST_COMPLETED)
                self.context.poll()
                for future in done:
                    index, sample = asked.pop(future)
                    yield index, sample, self._completion(future.result(), sampling)
        finally:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for connection in list(held):  # a thread that waits for its server wakes up
                _cut(connection)
            pool.shutdown(wait=True)

    def close(self) -> None:
        """Say how many answers were tokenized again to something else."""
        if self.retokenized:
            self.context.report(
                f"{self.retokenized} of {self.answers} answers may have been sampled as other tokens than their text "
                "gives",
                count=("rollout_retokenized", self.retokenized),
            )
            self.answers = self.retokenized = 0

    def _body(self, request: Request, sample: int, sampling: Sampling) -> bytes:
        said: dict[str, Any] = {
            "model": self.options.model,
            "prompt": self.context.tokenizer.decode(request.ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": answer_seed(sampling, request, sample) >> 32,  # servers take 31 bits
            **IDS[self.options.ids],
        }
        plain = Sampling()
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"):
            if getattr(sampling, name) != getattr(plain, name):
                said[name] = getattr(sampling, name)
        if sampling.stop:
            said["stop"] = list(sampling.stop)
        return json.dumps(said).encode()

    def _ask(
        self, body: bytes, stopping: threading.Event, held: set[http.client.HTTPConnection]
    ) -> dict[str, Any]:  # fmt: skip
        """The first choice of the answer. Raises TrainingError where all tries failed, or none can do better."""
        for turn in range(self.options.retries + 1):
            try:
                return self._try(body, stopping, held)
            except _Failed as error:
                last = turn == self.options.retries
                if stopping.is_set() or last or not error.again:
                    tries = f" after {turn + 1} tries" if turn else ""
                    raise TrainingError(f"rollout server {self.options.url}: {self._told(error)}{tries}") from None
                stopping.wait(min(LONGEST_WAIT, max(error.after, 0.25 * 2**turn)))
        raise AssertionError("unreachable")

    def _told(self, error: Exception) -> str:
        """Without the key, whatever the server repeats."""
        return str(error).replace(self._key, "…") if self._key else str(error)

    def _try(
        self, body: bytes, stopping: threading.Event, held: set[http.client.HTTPConnection]
    ) -> dict[str, Any]:  # fmt: skip
        parts = urlsplit(self.options.url)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = _connection(parts, self.options.timeout)
        held.add(connection)
        try:
            if stopping.is_set():
                raise _Failed("stopped", again=False)
            connection.request("POST", f"{parts.path.rstrip('/')}/completions", body, headers)
            response = connection.getresponse()
            content = response.read(LARGEST + 1)
        except TimeoutError as error:
            raise _Failed(f"said nothing for {self.options.timeout:g} s", again=True) from error
        except (OSError, http.client.HTTPException) as error:
            raise _Failed(f"{type(error).__name__}: {error}", again=True) from error
        finally:
            held.discard(connection)
            connection.close()
        if response.status != 200:
            after = response.headers.get("Retry-After", "")
            raise _Failed(
                f"answered {response.status}: {_shortened(content)}",
                again=response.status >= 500 or response.status in AGAIN,
                after=float(after) if after.isdigit() else 0.0,
            )
        return _choice(content)

    def _completion(self, said: Mapping[str, Any], sampling: Sampling) -> Completion:
        text, reason = said["text"], "length"
        found = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        if found:
            text, reason = text[: min(found)], "stop-string"
        elif said.get("finish_reason") != "length":
            # Where stop strings were asked for, only some servers say which kind of end it was.
            named = isinstance(said.get("stop_reason"), str)
            unsaid = bool(sampling.stop) and "stop_reason" not in said
            reason = "stop-string" if named or unsaid else "stop"
        ids = self._ids(said, text, whole=reason != "stop-string")
        if reason == "stop" and sampling.eos_ids and (not ids or ids[-1] not in sampling.eos_ids):
            ids = [*ids, sampling.eos_ids[0]]
        self.answers += 1
        return Completion(tuple(ids), text=text, finish_reason=reason)

    def _ids(self, said: Mapping[str, Any], text: str, *, whole: bool) -> list[int]:
        """As the server says, or of the text, which is not `whole` where a stop string was sampled behind it.

        Raises TrainingError where the server was asked for ids and gave none.
        """
        if self.options.ids != "text":
            found = said.get("token_ids")
            if self.options.ids == "logprobs":
                logprobs = said.get("logprobs")
                content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
                listed = isinstance(content, list) and all(isinstance(each, Mapping) for each in content)
                found = [each.get("id") for each in content or ()] if listed else None
            if not isinstance(found, list) or not all(type(i) is int and i >= 0 for i in found):
                raise TrainingError(
                    f'rollout server {self.options.url} gives no token ids where rollout.ids = "{self.options.ids}" '
                    'asks for them; set rollout.ids = "text"'
                )
            return found
        ids = self.context.tokenizer.encode(text)
        counted = said.get("completion_tokens")
        other = isinstance(counted, int) and counted not in (len(ids), len(ids) + 1)  # some count the end
        if other or not whole or self.context.tokenizer.decode(ids) != text:
            self.retokenized += 1
        return ids


def _connection(parts: SplitResult, timeout: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    assert parts.hostname is not None
    return kind(parts.hostname, parts.port, timeout=timeout)


def _cut(connection: http.client.HTTPConnection) -> None:
    import socket

    if connection.sock is not None:
        try:
            connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone already
            return


def _shortened(content: bytes) -> str:
    text = " ".join(content.decode("utf-8", "replace").split())
    return text if len(text) <= 200 else f"{text[:200]}…"


def _choice(content: bytes) -> dict[str, Any]:
    """The first choice, with the count of tokens that the server gives. Raises _Failed for anything else."""
    if len(content) > LARGEST:
        raise _Failed(f"answered with more than {LARGEST:,} bytes", again=False)
    try:
        said = json.loads(content)
    except ValueError as error:
        raise _Failed(f"answered with no whole JSON: {_shortened(content)!r}", again=True) from error
    choices = said.get("choices") if isinstance(said, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, dict) or not isinstance(first.get("text"), str):
        raise _Failed(f"answered without choices[0].text: {_shortened(content)}", again=False)
    usage = said.get("usage")
    counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return {**first, "completion_tokens": counted}
