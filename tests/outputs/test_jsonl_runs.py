"""Runs of sample.py that write a JSONL file, resume it, or refuse to write to it."""
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from models import make_gpt, save_checkpoint
from project import RULE, SCRIPT
from script_process import start_script

RUN = ("--start=LINES:prompts.txt", "--num_samples=3", "--max_new_tokens=20", "--stop=e", "--batch_size=4", "--device=cpu")


@pytest.fixture(scope="module")
def finished_run(run_script, tmp_path_factory):
    """The folder of a finished run, the content of its whole.jsonl, and its standard output."""
    folder = tmp_path_factory.mktemp("finished")
    save_checkpoint(folder / "out", make_gpt())
    (folder / "prompts.txt").write_text("The \nO\n\nWhat is it?\nyes\n")
    done = run_script(*RUN, "--out_file=whole.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, (folder / "whole.jsonl").read_bytes(), done.stdout


@pytest.fixture
def folder(finished_run, tmp_path):
    """A copy of that folder that a test may change."""
    return shutil.copytree(finished_run[0], tmp_path / "run")


@pytest.fixture
def whole(finished_run):
    """The content of the finished run's file."""
    return finished_run[1]


@pytest.fixture
def printed(finished_run):
    """The standard output of the finished run."""
    return finished_run[2]


def test_fields_of_a_line(run_script, folder, whole, printed):
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["index"] for line in lines] == list(range(12))
    assert [line["prompt"] for line in lines] == [prompt for prompt in ("The ", "O", "What is it?", "yes") for _ in range(3)]
    assert "".join(f"{line['prompt']}{line['text']}\n{RULE}\n" for line in lines) == printed
    assert {line["finish_reason"] for line in lines} == {"stop", "length"}
    for line in lines:
        assert list(line) == ["version", "index", "prompt", "text", "num_tokens", "finish_reason", "cumulative_logprob", "seed", "checkpoint", "settings"]
        assert line["finish_reason"] == ("length" if line["num_tokens"] == 20 and len(line["text"]) == 20 else "stop")
        assert line["version"] == 2 and line["seed"] == 1337 and line["settings"]["stop"] == ["e"] and line["settings"]["dtype"] == "float32"
        assert line["checkpoint"]["path"] == "out/ckpt.pt" and len(line["checkpoint"]["crc32"]) == 8
        assert line["cumulative_logprob"] <= 0
    assert run_script(*RUN, cwd=folder).stdout == printed # saving does not change the output


def test_ids_of_jsonl_prompts_are_saved(run_script, folder):
    (folder / "p.jsonl").write_text('{"prompt": "The ", "id": "a-1"}\n\n{"id": [2], "prompt": "O", "more": 1}\n{"prompt": "x"}\n')
    done = run_script("--start=JSONL:p.jsonl", "--num_samples=1", "--max_new_tokens=5", "--out_file=a.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line.get("id")) for line in lines] == [("The ", "a-1"), ("O", [2]), ("x", None)]


@pytest.mark.parametrize("share", [pytest.param(0, marks=pytest.mark.slow), 0.4, 0.7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_resumes_a_file_truncated_anywhere(run_script, folder, whole, printed, share):
    end = int(share * len(whole))
    (folder / "cut.jsonl").write_bytes(whole[:end])
    done = run_script(*RUN, "--out_file=cut.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "cut.jsonl").read_bytes() == whole
    num_saved = whole[:end].count(b"\n")
    assert done.stdout == f"{RULE}\n".join(printed.split(f"{RULE}\n")[num_saved:]) # only the new samples
    assert num_saved == 0 or ("cut.jsonl is complete" if num_saved == 12 else f"cut.jsonl holds {num_saved} sample") in done.stderr


@pytest.mark.slow
def test_a_killed_run_resumes(run_script, folder):
    run = ("--num_samples=200", "--max_new_tokens=30", "--batch_size=8", "--start=The ", "--device=cpu")
    assert run_script(*run, "--out_file=uninterrupted.jsonl", cwd=folder).returncode == 0
    for signal_number in signal.SIGKILL, signal.SIGTERM, signal.SIGINT:
        process = start_script(*run, "--out_file=killed.jsonl", cwd=folder)
        while process.poll() is None and not (folder / "killed.jsonl").exists():
            time.sleep(0.01)
        time.sleep(0.15)
        process.send_signal(signal_number)
        process.communicate()
    assert run_script(*run, "--out_file=killed.jsonl", cwd=folder).returncode == 0
    assert (folder / "killed.jsonl").read_bytes() == (folder / "uninterrupted.jsonl").read_bytes()


@pytest.mark.parametrize("change, message", [
    pytest.param(["--seed=1"], "seed is 1337 there, and 1 here", marks=pytest.mark.slow),
    pytest.param(["--num_samples=4"], "num_samples is 3 there, and 4 here", marks=pytest.mark.slow),
    pytest.param(["--top_p=0.5"], "top_p is None there, and 0.5 here", marks=pytest.mark.slow),
    pytest.param(["--stop=None"], "stop is ['e'] there, and [] here", marks=pytest.mark.slow),
    (["--dtype=bfloat16"], "dtype is 'float32' there, and 'bfloat16' here"),
    (["--out_dir=other"], "the checkpoint's checksum is"),
    pytest.param(["--start=LINES:others.txt"], "line 4, is from another run: prompt is 'O' there, and 'A' here", marks=pytest.mark.slow),
    pytest.param(["--start=LINES:fewer.txt"], "holds 12 samples, more than this run generates", marks=pytest.mark.slow),
], ids=str)
def test_the_error_for_a_file_of_another_run_names_the_difference(run_script, folder, whole, change, message):
    save_checkpoint(folder / "other", make_gpt(seed=2))
    (folder / "others.txt").write_text("The \nA\nWhat is it?\nyes\n")
    (folder / "fewer.txt").write_text("The \nO\n")
    done = run_script(*RUN, "--out_file=whole.jsonl", *change, cwd=folder)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert (folder / "whole.jsonl").read_bytes() == whole


# Only the last one is the start of a line that a run writes.
OTHER_CONTENT = [b"my notes\n", b"\n", b"{}\n", b"no line end", b"\x00" * 50, b'{"version": 2, "index": 0, "prompt": 5}\n',
            b'{"version": 2, "index": 0, "prompt": "The ", "settings": 3}\n', b'{"version": 2, "index": 0, "prompt": "']


@pytest.mark.parametrize("content", [pytest.param(content, marks=pytest.mark.slow if 0 < i < 7 else ()) for i, content in enumerate(OTHER_CONTENT)], ids=repr)
def test_a_run_does_not_overwrite_other_files(run_script, folder, content):
    (folder / "a.jsonl").write_bytes(content)
    done = run_script(*RUN, "--out_file=a.jsonl", cwd=folder)
    if content == OTHER_CONTENT[-1]:
        assert done.returncode == 0
    else:
        assert done.returncode == 1 and "nothing is overwritten" in done.stderr and (folder / "a.jsonl").read_bytes() == content


@pytest.mark.slow
def test_a_run_resumes_with_equivalent_settings(run_script, folder):
    run = ("--start=O", "--num_samples=2", "--max_new_tokens=9", "--out_file=a.jsonl")
    (folder / "stop.py").write_text("stop = ['e']\n")
    for ways in ["--top_k=0", "--top_p=1", "--min_p=0", "--stop=e"], ["--top_k=None", "--top_p=None", "--min_p=None", "stop.py"]:
        assert run_script(*run, *ways, cwd=folder).returncode == 0


def test_a_run_resumes_with_another_batch_size(run_script, folder, whole):
    (folder / "cut.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:5]))
    assert run_script(*RUN, "--batch_size=7", "--out_file=cut.jsonl", cwd=folder).returncode == 0
    assert (folder / "cut.jsonl").read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="no shell")
def test_out_file_may_not_be_standard_output(folder):
    with open(folder / "out.txt", "wb") as out:
        process = start_script("--num_samples=2", "--max_new_tokens=3", "--out_file=/dev/stdout", cwd=folder, stdout=out)
        _, messages = process.communicate()
    assert process.returncode == 1 and b"error: standard output goes to /dev/stdout" in messages and (folder / "out.txt").read_text() == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_a_full_disk_is_one_error_line_and_the_run_can_be_resumed(run_script, folder, whole):
    limited = f"ulimit -f 4; export OMP_NUM_THREADS=1; exec {sys.executable} {SCRIPT} {' '.join(map(shlex.quote, RUN))} --out_file=a.jsonl"
    done = subprocess.run(["bash", "-c", limited], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "File too large" in done.stderr.splitlines()[-1]
    assert len(whole) > 4096 == (folder / "a.jsonl").stat().st_size
    assert run_script(*RUN, "--out_file=a.jsonl", cwd=folder).returncode == 0
    assert (folder / "a.jsonl").read_bytes() == whole


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_a_named_pipe_is_refused(run_script, folder):
    os.mkfifo(folder / "pipe")
    done = run_script(*RUN, "--out_file=pipe", cwd=folder)
    assert done.returncode == 1 and "pipe is not a regular file" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or (os.geteuid() == 0 and not shutil.which("setpriv")), reason="needs a user who is not root")
@pytest.mark.parametrize("more", [[], ["--out_file=a.jsonl"], ["--html_file=a.html"]], ids=str)
def test_a_read_only_folder_is_an_error_only_for_output_files(folder, more):
    run = [sys.executable, SCRIPT, "--num_samples=1", "--max_new_tokens=5", "--device=cpu", *more]
    run = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *run] if os.geteuid() == 0 else run
    folder.chmod(0o555)
    try:
        done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
    finally:
        folder.chmod(0o755)
    assert done.returncode == (1 if more else 0)
    assert ("error: cannot write 'a." in done.stderr and "Permission denied" in done.stderr) if more else done.stdout.endswith("-\n")
