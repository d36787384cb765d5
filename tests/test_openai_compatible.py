"""The engine `openai-compatible` against a server of our own that answers, fails, hangs and breaks off."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny_run import tiny_run
from tiny_tokenizers import tokenizer

from mortice.errors import ConfigError, DataError, TrainingError
from mortice.pretrained import load
from mortice.protocols import EngineContext, Request, Sampling
from mortice_plugins.rollouts.kv_cache import KVCache
from mortice_plugins.rollouts.openai_compatible import OpenAICompatible

TOKENIZER = tokenizer()
EOS = TOKENIZER.eos_ids[0]
SAMPLING = Sampling(max_tokens=5, eos_ids=(EOS,))
REQUESTS = [Request(tuple(TOKENIZER.encode(text)), text) for text in ("one", "two<|im_end|>", "three")]


def said(text: str, reason: str = "stop", tokens: int | None = None, **choice) -> dict:
    usage = {} if tokens is None else {"usage": {"completion_tokens": tokens}}
    return {"choices": [{"text": text, "finish_reason": reason, **choice}], **usage}


class Stub:
    """Answers each request with what `reply(body, turn)` gives: an object for JSON, or (status, bytes, headers)."""

    def __init__(self, reply) -> None:
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.most = self._now = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with stub.lock:
                    turn = len(stub.asked)
                    stub.asked.append(body | {"path": self.path})
                    stub.headers.append(dict(self.headers))
                    stub._now += 1
                    stub.most = max(stub.most, stub._now)
                try:
                    given = reply(body, turn)
                finally:
                    with stub.lock:
                        stub._now -= 1
                status, content, headers = given if isinstance(given, tuple) else (200, json.dumps(given).encode(), {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # a client that has gone
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def serve():
    stubs = []

    def start(reply) -> Stub:
        stubs.append(Stub(reply))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.server.shutdown()
        stub.server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("mortice_plugins.rollouts.openai_compatible.LONGEST_WAIT", 0.01)


def opened(stub: Stub, poll=lambda: None, reports=None, **options):
    def report(message, *, count=None):
        if reports is not None:
            reports.append((message, count))

    return OpenAICompatible(url=stub.url, model="m", **options).open(EngineContext(None, TOKENIZER, report, poll))


def answers(engine, sampling=SAMPLING, requests=REQUESTS):
    return {(i, k): completion for i, k, completion in engine.generate(requests, sampling)}


def test_each_sample_is_asked_for_by_itself(serve):
    stub = serve(lambda body, _: said(body["prompt"][:2], "stop", 2))
    found = answers(opened(stub), Sampling(max_tokens=5, samples=2, temperature=0.7, eos_ids=(EOS,)))
    assert {key: (c.text, c.finish_reason) for key, c in found.items()} == {
        (i, k): (text, "stop") for i, text in enumerate(("on", "tw", "th")) for k in range(2)
    }
    assert found[0, 1].ids == (*TOKENIZER.encode("on"), EOS) and found[0, 1].sampler_logprobs is None
    asked = sorted(stub.asked, key=lambda body: body["prompt"])
    assert [body["prompt"] for body in asked] == ["one"] * 2 + ["three"] * 2 + ["two<|im_end|>"] * 2
    assert len({body["seed"] for body in asked}) == 6 and all(0 <= body["seed"] < 2**31 for body in asked)
    rest = {k: v for k, v in asked[0].items() if k not in ("prompt", "seed")}
    assert rest == {"model": "m", "max_tokens": 5, "temperature": 0.7, "path": "/v1/completions"}
    again = serve(lambda body, _: said("x"))
    answers(opened(again), Sampling(max_tokens=5, samples=2, temperature=0.7, eos_ids=(EOS,)), REQUESTS[:1])
    assert {body["seed"] for body in again.asked} == {body["seed"] for body in asked[:2]}


def test_what_is_asked_of_sampling_is_passed_on(serve):
    stub = serve(lambda *_: said("x"))
    sampling = Sampling(5, 0.0, 0.9, 7, 0.1, 1.2, 0.5, stop=("a", "b"))
    answers(opened(stub), sampling, REQUESTS[:1])
    wanted = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
              "stop": ["a", "b"], "temperature": 0.0}  # fmt: skip
    assert wanted.items() <= stub.asked[0].items()


def test_no_more_requests_at_once_than_asked_for(serve):
    def slowly(*_):
        time.sleep(0.02)
        return said("x")

    stub = serve(slowly)
    answers(opened(stub, concurrency=2), Sampling(max_tokens=1, samples=3))
    assert stub.most == 2 and len(stub.asked) == 9


@pytest.mark.parametrize(
    ("reason", "extra", "sampling", "text", "ended"),
    [
        ("length", {}, SAMPLING, "abc", "length"),
        ("stop", {}, SAMPLING, "abc", "stop"),
        ("stop", {}, Sampling(stop=("b",)), "a", "stop-string"),  # a server that leaves it in the text
        ("stop", {}, Sampling(stop=("z",)), "abc", "stop-string"),  # taken out; nothing says which end it was
        ("stop", {"stop_reason": "z"}, Sampling(stop=("z",)), "abc", "stop-string"),
        ("stop", {"stop_reason": None}, Sampling(stop=("z",)), "abc", "stop"),
    ],
)
def test_reasons(serve, reason, extra, sampling, text, ended):
    stub = serve(lambda *_: said("abc", reason, **extra))
    found = answers(opened(stub), sampling, REQUESTS[:1])[0, 0]
    assert (found.text, found.finish_reason) == (text, ended)
    assert (EOS in found.ids) == (ended == "stop" and bool(sampling.eos_ids))


def test_token_ids_as_servers_give_them(serve):
    vllm = serve(lambda *_: said("ab", token_ids=[70, 71, EOS]))
    assert answers(opened(vllm, ids="return_token_ids"), requests=REQUESTS[:1])[0, 0].ids == (70, 71, EOS)
    assert vllm.asked[0]["return_token_ids"] is True
    content = {"content": [{"id": 70, "logprob": -1.0}, {"id": 71, "logprob": -2.0}]}
    mlx_lm = serve(lambda *_: said("ab", "length", logprobs=content))
    found = answers(opened(mlx_lm, ids="logprobs"), requests=REQUESTS[:1])[0, 0]
    assert found.ids == (70, 71) and found.sampler_logprobs is None and mlx_lm.asked[0]["logprobs"] is True
    for ids in ("return_token_ids", "logprobs"):
        engine = opened(serve(lambda *_: said("ab", logprobs=None)), ids=ids)
        with pytest.raises(TrainingError, match=r'gives no token ids where rollout\.ids = "' + ids):
            answers(engine)


def test_what_an_engine_provides_is_what_its_server_gives():
    options = {"url": "http://localhost/v1", "model": "m"}
    assert OpenAICompatible(**options).provides == frozenset()
    assert OpenAICompatible(**options, ids="logprobs").provides == {"token-ids"}


def test_answers_that_are_other_tokens_are_counted(serve):
    """A byte that is no text, or more tokens than the text has."""
    texts = iter([("ab", 2), ("ab", 3), ("ab", 7), ("ab", None)])
    stub = serve(lambda *_: said(*(lambda text, tokens: (text, "length", tokens))(*next(texts))))
    reports: list = []
    engine = opened(stub, reports=reports, concurrency=1)
    answers(engine, Sampling(samples=4), REQUESTS[:1])
    assert engine.retokenized == 1 and reports == []
    engine.close()
    ((message, count),) = reports
    assert message.startswith("1 of 4 answers") and count == ("rollout_retokenized", 1)


def test_failures_that_may_pass_are_tried_again(serve):
    replies = [
        (500, b"down", {}), (429, b"busy", {"Retry-After": "1"}), (200, b'{"choices": [{"te', {}),
        (200, b"short", {"Content-Length": "100"}),
    ]  # fmt: skip
    stub = serve(lambda _, turn: replies[turn] if turn < len(replies) else said("x"))
    assert answers(opened(stub, retries=4), requests=REQUESTS[:1])[0, 0].text == "x"
    assert len(stub.asked) == 5
    for turn, told in enumerate(("answered 500: down", "answered 429: busy", "no whole JSON", "no whole JSON")):
        failing = serve(lambda *_, turn=turn: replies[turn])
        with pytest.raises(TrainingError, match=f"{failing.url}: .*{told}.* after 3 tries"):
            answers(opened(failing, retries=2), requests=REQUESTS[:1])
        assert len(failing.asked) == 3


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((400, b'{"error": "no such\n model"}', {}), r'answered 400: {"error": "no such model"}$'),
        ((302, b"", {"Location": "http://elsewhere/"}), "answered 302"),
        ({"choices": []}, r"without choices\[0\].text"),
        ({"choices": [{"message": {"content": "x"}}]}, r"without choices\[0\].text"),
        ([1], r"without choices\[0\].text: \[1\]"),
    ],
)
def test_failures_that_stay_are_not(serve, reply, told):
    stub = serve(lambda *_: reply)
    with pytest.raises(TrainingError, match=told):
        answers(opened(stub), requests=REQUESTS[:1])
    assert len(stub.asked) == 1


def test_a_server_that_says_nothing_is_given_up(serve):
    wake = threading.Event()
    stub = serve(lambda *_: wake.wait(5) and said("x"))
    with pytest.raises(TrainingError, match=r"said nothing for 0\.05 s after 2 tries"):
        answers(opened(stub, timeout=0.05, retries=1), requests=REQUESTS[:1])
    wake.set()
    gone = opened(stub, retries=0)
    stub.server.shutdown()
    stub.server.server_close()
    with pytest.raises(TrainingError, match="ConnectionRefusedError"):
        answers(gone)


def test_a_run_that_is_stopped_waits_for_no_server(serve):
    wake = threading.Event()
    stub = serve(lambda *_: wake.wait(20) and said("x"))

    def poll():
        if stub.asked:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        answers(opened(stub, poll=poll))
    assert time.monotonic() - start < 10 and not [t for t in threading.enumerate() if t.name.startswith("rollout")]
    wake.set()


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(serve, monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    stub = serve(lambda *_: (401, b"bad key s3cret-key", {}))
    with pytest.raises(ConfigError, match="SOME_KEY is not set"):
        opened(stub, api_key_variable="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "s3cret-key")
    engine = opened(stub, api_key_variable="SOME_KEY")
    with pytest.raises(TrainingError) as error:
        answers(engine, requests=REQUESTS[:1])
    assert stub.headers[0]["Authorization"] == "Bearer s3cret-key"
    told = f"{error.value!r} {error.value.__cause__!r} {engine!r} {engine.options!r}"
    assert "s3cret" not in told and "answered 401: bad key …" in told
    answers(opened(plain := serve(lambda *_: said("x"))), requests=REQUESTS[:1])
    assert "Authorization" not in plain.headers[0]


@pytest.mark.parametrize("url", ["localhost:8080", "ftp://host/v1", "http://", "http://me:word@host/v1"])
def test_addresses_that_are_none(url):
    with pytest.raises(ValueError, match="'url' must"):
        OpenAICompatible(url=url, model="m")


def test_an_empty_prompt_is_refused(serve):
    stub = serve(lambda *_: said("x"))
    with pytest.raises(DataError, match="'a' is empty"):
        answers(opened(stub), requests=[Request((), "a")])
    assert stub.asked == []


@pytest.mark.oracle
def test_mlx_lms_own_server(tmp_path):
    """A tiny model behind it answers greedily as it does here, and its ids are those that were sampled."""
    pytest.importorskip("mlx_lm")
    tiny_run(tmp_path)
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"})
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm.server", "--model", str(tmp_path / "model"), "--port", str(port)]
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                break
            assert server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        own = load(tmp_path / "model")
        greedy = Sampling(max_tokens=6, temperature=0.0, eos_ids=own.tokenizer.eos_ids)
        requests = [Request(tuple(own.tokenizer.encode(text)), text) for text in ("say: ", "one two")]
        context = EngineContext(own.model, own.tokenizer, lambda *_, **__: None)
        want = answers(KVCache().open(context), greedy, requests)
        options = {"url": f"http://127.0.0.1:{port}/v1", "model": str(tmp_path / "model"), "timeout": 120.0}
        exact = answers(OpenAICompatible(**options, ids="logprobs").open(context), greedy, requests)
        assert {k: (c.ids, c.finish_reason) for k, c in exact.items()} == {
            k: (c.ids, c.finish_reason) for k, c in want.items()
        }
        engine = OpenAICompatible(**options).open(context)
        texts = answers(engine, greedy, requests)
        assert {k: c.text for k, c in texts.items()} == {k: c.text for k, c in exact.items()}
        with pytest.raises(TrainingError, match="answered 4"):
            answers(OpenAICompatible(**options).open(context), Sampling(max_tokens=1, top_p=-1.0), requests)
    finally:
        server.terminate()
        server.wait()
        log.close()
