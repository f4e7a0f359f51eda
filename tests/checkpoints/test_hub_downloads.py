"""Downloads from a Hugging Face hub, its cache, and offline mode. The hub is a small server in this process."""
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hf_tokenizers import save_tokenizer
from models import make_transformers_gpt2
from project import GPT2_FILES, PROJECT

COMMIT = "0123456789abcdef" * 2 + "01234567"
ARGUMENTS = "--init_from=someone/tiny", "--start=Hello", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"


def sha1(content):
    return hashlib.sha1(content).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model; the server's files are {name: content}."""

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        if path == "/api/models/someone/tiny/revision/main":
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/someone/tiny/tree/{COMMIT}":
            self.answer(json.dumps([{"type": "file", "path": name, "size": len(content), "oid": sha1(content)}
                                    for name, content in files.items()]).encode())
        elif "/resolve/" in path and path.rpartition("/")[2] in files:
            self.server.sent.append(path.rpartition("/")[2])
            self.answer(files[self.server.sent[-1]])
        else:
            self.answer(b"", 404)

    do_HEAD = do_GET

    def answer(self, content, status=200):
        self.send_response(status)
        headers = {"Content-Length": str(len(content)), "ETag": f'"{sha1(content)}"', "X-Repo-Commit": COMMIT}
        for name, value in headers.items() if status == 200 else [("X-Error-Code", "RepoNotFound")]:
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub without files, and the environment to use it with empty caches."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.files, server.sent = {}, []
        server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache"),
                      "HF_HUB_OFFLINE": "0", "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HF_HUB_DISABLE_XET": "1"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def model_on_hub(hub, tmp_path):
    """The hub has a small model and its tokenizer."""
    size = save_tokenizer("byte-level", tmp_path / "model")
    make_transformers_gpt2(vocab_size=size).save_pretrained(tmp_path / "model")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub.files |= {"README.md": b"", "tf_model.h5": bytes(10**6)}


@pytest.mark.usefixtures("model_on_hub")
def test_a_model_is_downloaded_with_its_tokenizer_and_then_used_offline(hub, run_script):
    first = run_script(*ARGUMENTS, **hub.env)
    assert first.returncode == 0 and first.stdout.startswith("Hello"), first.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent)
    assert not {"README.md", "tf_model.h5"} & set(hub.sent)
    num_sent = len(hub.sent)
    offline = run_script(*ARGUMENTS, **hub.env | {"HF_HUB_OFFLINE": "1"})
    assert (offline.returncode, offline.stdout, len(hub.sent)) == (0, first.stdout, num_sent), offline.stderr


@pytest.mark.slow
@pytest.mark.parametrize("arguments, environment, message", [
    (["--init_from=someone/other"], {}, "there is no folder 'someone/other' here, and the Hugging Face hub has"),
    ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, "could not get 'someone/tiny': there is no such folder here"),
], ids=["no-such-model", "no-network"])
def test_what_the_hub_does_not_give_is_one_line(arguments, environment, message, hub, run_script):
    done = run_script(*ARGUMENTS, *arguments, separate=True, **hub.env | environment)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(f"error: {message}")


@pytest.mark.usefixtures("needs_gpt2_encoding")
def test_gpt2s_vocabulary_comes_from_the_hub_at_last(hub, tiktoken_cache):
    vocab = json.loads((tiktoken_cache / GPT2_FILES["encoder.json"]).read_text())
    hub.files = {"tokenizer.json": json.dumps({"model": {"vocab": vocab}}).encode()}
    code = "from sampling.inputs.tiktoken_tokenizer import *; print(TiktokenTokenizer(log=print).encode('Hello world'))"
    command, env = [sys.executable, "-c", code], {**os.environ, **hub.env, "HTTPS_PROXY": "http://127.0.0.1:9"}
    dead = subprocess.run(command, cwd=PROJECT, env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True)
    assert dead.stdout.count(b" failed (") == dead.stdout.count(b"\n") == 2 and b"Retry" not in dead.stderr
    lines = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True).stdout.splitlines()
    assert lines[0].startswith("GPT-2's encoding: tiktoken's download failed") and lines[1:] == ["[15496, 995]"]
