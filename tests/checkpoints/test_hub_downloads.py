"""Downloads from a Hugging Face hub, its cache, and offline mode. The hub is a small server in this process."""
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from hf_tokenizers import save_tokenizer
from models import make_transformers_gpt2

COMMIT = "0123456789abcdef" * 2 + "01234567"
ARGUMENTS = "--init_from=someone/tiny", "--start=Hello", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model; the server's files are {name: content}."""

    def do_GET(self):
        files, path = self.server.files, self.path.partition("?")[0]
        if re.fullmatch("/api/models/someone/tiny/revision/main", path):
            self.answer(json.dumps({"id": "someone/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}).encode())
        elif path == f"/api/models/someone/tiny/tree/{COMMIT}":
            self.answer(json.dumps([{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                                    for name, content in files.items()]).encode())
        elif path.startswith(f"/someone/tiny/resolve/{COMMIT}/") and path.rpartition("/")[2] in files:
            self.server.sent.append(path.rpartition("/")[2])
            self.answer(files[self.server.sent[-1]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content):
        self.send_response(200)
        for name, value in {"Content-Length": len(content), "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path):
    """A hub with a small model and its tokenizer, and the environment to use it with an empty cache."""
    size = save_tokenizer("byte-level", tmp_path / "model")
    make_transformers_gpt2(vocab_size=size).save_pretrained(tmp_path / "model")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.sent = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}, []
    server.files |= {"README.md": b"", "tf_model.h5": bytes(10**6)}
    server.env = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0",
                  "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"), "HF_HUB_DISABLE_XET": "1"}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_with_its_tokenizer_and_then_used_offline(hub, run_script):
    first = run_script(*ARGUMENTS, **hub.env)
    assert first.returncode == 0 and first.stdout.startswith("Hello"), first.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.sent) and not {"README.md", "tf_model.h5"} & set(hub.sent)
    num_sent = len(hub.sent)
    offline = run_script(*ARGUMENTS, **hub.env | {"HF_HUB_OFFLINE": "1"})
    assert (offline.returncode, offline.stdout, len(hub.sent)) == (0, first.stdout, num_sent), offline.stderr


@pytest.mark.slow
def test_older_files_are_downloaded_too(hub, run_script, tmp_path):
    """And the cache is used where the hub does not answer."""
    save_tokenizer("older-files", tmp_path / "older")
    torch.save(make_transformers_gpt2(vocab_size=len(json.loads((tmp_path / "older" / "vocab.json").read_text()))).state_dict(),
               tmp_path / "older" / "pytorch_model.bin")
    hub.files = {path.name: path.read_bytes() for path in (tmp_path / "older").iterdir()} | {"config.json": hub.files["config.json"]}
    first = run_script(*ARGUMENTS, separate=True, **hub.env)
    assert first.returncode == 0 and first.stdout.startswith("Hello"), first.stderr
    hub.files = {}
    assert run_script(*ARGUMENTS, separate=True, **hub.env | {"HF_ENDPOINT": "http://127.0.0.1:9"}).stdout == first.stdout


@pytest.mark.slow
def test_a_model_that_the_hub_lacks(hub, run_script):
    done = run_script(*ARGUMENTS, "--init_from=someone/other", separate=True, **hub.env)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: there is no folder 'someone/other' here, and the Hugging Face hub has")


@pytest.mark.slow
def test_a_model_that_is_not_cached_and_no_network(hub, run_script):
    done = run_script(*ARGUMENTS, separate=True, **hub.env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: could not get 'someone/tiny': there is no such folder here, it is not in")
