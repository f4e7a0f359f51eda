"""The file of samples: what is in it, and that a run cut short is taken up to the same bytes."""
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from batches import Sample
from prompts import Prompt
from saving import SampleFile

from conftest import PROJECT, make_gpt, save_checkpoint

RUN = ("--start=LINES:prompts.txt", "--num_samples=3", "--max_new_tokens=20", "--stop=e", "--batch_size=4", "--device=cpu")


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "prompts.txt").write_text("The \nO\n\nWhat is it?\nyes\n")
    return tmp_path


@pytest.fixture
def whole(sample, folder):
    """The file of an unbroken run, and what it printed."""
    done = sample(*RUN, "--out_file=whole.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "whole.jsonl").read_bytes(), done.stdout


def test_a_line_a_sample(sample, folder, whole):
    lines = [json.loads(line) for line in whole[0].splitlines()]
    assert [line["sample"] for line in lines] == list(range(12))
    assert [line["prompt"] for line in lines] == [prompt for prompt in ("The ", "O", "What is it?", "yes") for _ in range(3)]
    assert "".join(f"{line['prompt']}{line['text']}\n---------------\n" for line in lines) == whole[1]
    assert {line["ended"] for line in lines} == {"stop", "length"}
    for line in lines:
        assert line["ended"] == ("length" if line["tokens"] == 20 and len(line["text"]) == 20 else "stop")
        assert line["seed"] == 1337 and line["settings"]["stop"] == ["e"] and line["settings"]["dtype"] == "float32"
        assert line["checkpoint"]["path"] == "out/ckpt.pt" and len(line["checkpoint"]["crc32"]) == 8
        assert line["logprob"] <= 0
    assert sample(*RUN, cwd=folder).stdout == whole[1] # saving changes nothing


def test_log_probabilities_are_the_networks(folder, whole):
    import torch

    from conftest import CHARS
    model = make_gpt()
    for line in map(json.loads, whole[0].splitlines()):
        if line["ended"] == "length":
            ids, total = [CHARS.index(char) for char in line["prompt"] + line["text"]], 0
            for i in range(len(line["prompt"]), len(ids)):
                with torch.no_grad():
                    total += model(torch.tensor([ids[max(0, i - 16):i]]))[0][0, -1].log_softmax(-1)[ids[i]].item()
            assert line["logprob"] == pytest.approx(total, rel=6e-4)


def test_ids_of_jsonl_prompts_are_kept(sample, folder):
    (folder / "p.jsonl").write_text('{"prompt": "The ", "id": "a-1"}\n\n{"id": [2], "prompt": "O", "more": 1}\n{"prompt": "x"}\n')
    done = sample("--start=JSONL:p.jsonl", "--num_samples=1", "--max_new_tokens=5", "--out_file=a.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line.get("id")) for line in lines] == [("The ", "a-1"), ("O", [2]), ("x", None)]


def test_a_run_is_taken_up_wherever_it_was_cut(sample, folder, whole):
    rng = random.Random(2)
    lines = whole[1].split("---------------\n")
    for cut in [0, len(whole[0]), *(rng.randrange(len(whole[0])) for _ in range(6))]:
        (folder / "cut.jsonl").write_bytes(whole[0][:cut])
        done = sample(*RUN, "--out_file=cut.jsonl", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert (folder / "cut.jsonl").read_bytes() == whole[0]
        kept = whole[0][:cut].count(b"\n")
        assert done.stdout == "---------------\n".join(lines[kept:]) # only what is new is drawn
        assert kept == 0 or f"cut.jsonl holds {kept} samples" in done.stderr


def test_a_sample_is_in_the_file_at_once(tmp_path):
    file = SampleFile(tmp_path / "a.jsonl", {"crc32": "0"}, {"seed": 1})
    for number in range(3):
        file.add(Sample(number, Prompt("O"), [1], ended="length"))
        assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == number + 1
    file.close()


def test_a_file_that_is_removed_ends_the_run(tmp_path):
    """A night's samples would go nowhere; one that is renamed still gets them."""
    file = SampleFile(str(tmp_path / "a.jsonl"), {"crc32": "0"}, {"seed": 1})
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    file.add(Sample(0, Prompt("O"), [1], ended="length"))
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(OSError, match=r"a\.jsonl': it was removed"):
        file.add(Sample(1, Prompt("O"), [1], ended="length"))
    file.close()


def test_a_killed_run_is_taken_up(sample, folder):
    run = ("--num_samples=400", "--max_new_tokens=30", "--batch_size=8", "--start=The ", "--device=cpu")
    assert sample(*run, "--out_file=whole.jsonl", cwd=folder).returncode == 0
    command = [sys.executable, PROJECT / "sample.py", *run, "--out_file=killed.jsonl"]
    for deadly in signal.SIGKILL, signal.SIGTERM, signal.SIGINT:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (folder / "killed.jsonl").exists():
            time.sleep(0.01)
        time.sleep(0.15)
        process.send_signal(deadly)
        process.wait()
    assert sample(*run, "--out_file=killed.jsonl", cwd=folder).returncode == 0
    assert (folder / "killed.jsonl").read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("change, said", [
    (["--seed=1"], "there seed is 1337, here 1"),
    (["--num_samples=4"], "there num_samples is 3, here 4"),
    (["--top_p=0.5"], "there top_p is None, here 0.5"),
    (["--stop=None"], "there stop is ['e'], here []"),
    (["--dtype=bfloat16"], "there dtype is 'float32', here 'bfloat16'"),
    (["--out_dir=other"], "the checkpoint's checksum is"),
    (["--start=LINES:others.txt"], "line 4, is of another run: there prompt is 'O', here 'A'"),
    (["--start=LINES:fewer.txt"], "holds 12 samples, more than this run draws"),
], ids=str)
def test_a_file_that_another_run_made_is_refused_by_what_differs(sample, folder, whole, change, said):
    save_checkpoint(folder / "other", make_gpt(seed=2))
    (folder / "others.txt").write_text("The \nA\nWhat is it?\nyes\n")
    (folder / "fewer.txt").write_text("The \nO\n")
    done = sample(*RUN, "--out_file=whole.jsonl", *change, cwd=folder)
    assert done.returncode == 1 and said in done.stderr and done.stdout == ""
    assert (folder / "whole.jsonl").read_bytes() == whole[0]


@pytest.mark.parametrize("content", [b"my notes\n", b"\n", b"{}\n", b"no line end", b'{"sample": 0, "prompt": "', b"\x00" * 50,
                                     b'{"sample": 0, "prompt": 5}\n', b'{"sample": 0, "prompt": "The ", "settings": 3}\n'], ids=repr)
def test_what_others_wrote_stays(sample, folder, content):
    (folder / "a.jsonl").write_bytes(content)
    done = sample(*RUN, "--out_file=a.jsonl", cwd=folder)
    if content == b'{"sample": 0, "prompt": "': # the beginning of a line of ours
        assert done.returncode == 0
    else:
        assert done.returncode == 1 and "nothing is overwritten" in done.stderr and (folder / "a.jsonl").read_bytes() == content


def test_ten_more_samples_of_one_prompt_are_added(sample, folder):
    run = ("--start=O", "--max_new_tokens=9", "--device=cpu")
    for count in 3, 8:
        assert sample(*run, f"--num_samples={count}", "--out_file=grown.jsonl", cwd=folder).returncode == 0
    assert sample(*run, "--num_samples=8", "--out_file=at_once.jsonl", cwd=folder).returncode == 0
    assert (folder / "grown.jsonl").read_bytes() == (folder / "at_once.jsonl").read_bytes()


def test_settings_said_otherwise_are_the_same(sample, folder):
    run = ("--start=O", "--num_samples=2", "--max_new_tokens=9", "--out_file=a.jsonl")
    for ways in ["--top_k=0", "--top_p=1", "--min_p=0", "--stop=e"], ["--top_k=None", "--top_p=None", "--min_p=None", "stop.py"]:
        (folder / "stop.py").write_text("stop = ['e']\n")
        assert sample(*run, *ways, cwd=folder).returncode == 0


@pytest.mark.parametrize("lines", [1, 5])
def test_a_file_without_its_last_newline(sample, folder, whole, lines):
    """As editors leave it: refused as it is by another run, completed by the same."""
    left = b"".join(whole[0].splitlines(keepends=True)[:lines])[:-1]
    (folder / "a.jsonl").write_bytes(left)
    assert sample(*RUN, "--seed=2", "--out_file=a.jsonl", cwd=folder).returncode == 1
    assert (folder / "a.jsonl").read_bytes() == left
    assert sample(*RUN, "--out_file=a.jsonl", cwd=folder).returncode == 0
    assert (folder / "a.jsonl").read_bytes() == whole[0]


def test_a_page_of_another_run_stays(sample, folder):
    (folder / "p.txt").write_text("O\n")
    run = ("--num_samples=4", "--max_new_tokens=9", "--html_file=a.html")
    assert sample("--start=O", *run, cwd=folder).returncode == 0
    page = (folder / "a.html").read_bytes()
    assert sample("--start=The ", "--num_samples=2", "--max_new_tokens=9", "--out_file=a.jsonl", cwd=folder).returncode == 0
    done = sample("--start=The ", *run, "--out_file=a.jsonl", cwd=folder)
    assert done.returncode == 1 and "should be the page of this very run" in done.stderr
    assert (folder / "a.html").read_bytes() == page


def test_standard_output_is_no_file_to_save_to(sample, folder):
    command = f"{sys.executable} {PROJECT / 'sample.py'} --num_samples=2 --max_new_tokens=3 --out_file=/dev/stdout > out.txt"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "is where standard output goes" in done.stderr and (folder / "out.txt").read_text() == ""


def test_batches_of_other_sizes_continue_a_file(sample, folder, whole):
    (folder / "cut.jsonl").write_bytes(b"".join(whole[0].splitlines(keepends=True)[:5]))
    assert sample(*RUN, "--batch_size=7", "--out_file=cut.jsonl", cwd=folder).returncode == 0
    assert (folder / "cut.jsonl").read_bytes() == whole[0]


@pytest.mark.skipif(sys.platform == "win32", reason="no such locks")
def test_a_second_run_is_kept_from_the_file(sample, folder):
    import fcntl
    with open(folder / "a.jsonl", "a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        done = sample(*RUN, "--out_file=a.jsonl", cwd=folder)
    assert done.returncode == 1 and "another run writes a.jsonl" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_a_full_disk_is_one_line_and_the_run_goes_on_later(sample, folder, whole):
    limited = f"ulimit -f 4; exec {sys.executable} {PROJECT / 'sample.py'} {' '.join(map(shlex.quote, RUN))} --out_file=a.jsonl"
    done = subprocess.run(["bash", "-c", limited], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "File too large" in done.stderr.splitlines()[-1]
    assert len(whole[0]) > 4096 == (folder / "a.jsonl").stat().st_size
    assert sample(*RUN, "--out_file=a.jsonl", cwd=folder).returncode == 0
    assert (folder / "a.jsonl").read_bytes() == whole[0]


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_what_is_no_file_is_refused(sample, folder):
    os.mkfifo(folder / "pipe")
    done = sample(*RUN, "--out_file=pipe", cwd=folder)
    assert done.returncode == 1 and "pipe is no file" in done.stderr


@pytest.mark.skipif(sys.platform != "linux" or (os.geteuid() == 0 and not shutil.which("setpriv")), reason="needs a user who is refused")
def test_a_folder_that_may_not_be_written(folder):
    run = [sys.executable, PROJECT / "sample.py", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"]
    run = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *run] if os.geteuid() == 0 else run
    folder.chmod(0o555)
    try:
        for more in [], ["--out_file=a.jsonl"], ["--html_file=a.html"]:
            done = subprocess.run([*run, *more], cwd=folder, capture_output=True, text=True)
            assert done.returncode == (1 if more else 0)
            assert ("error: cannot write 'a." in done.stderr and "Permission denied" in done.stderr) if more else done.stdout.endswith("-\n")
    finally:
        folder.chmod(0o755)
