"""What the script prints: the samples of nanoGPT and of transformers, and nothing else on standard output."""
import json
import pickle
import re

import pytest
import torch

import sampling
from attacks import call, value, write_attack
from models import CHARS, make_gpt, make_transformers_gpt2, save_checkpoint, save_repeating
from oracles import nanogpt_samples
from project import RULE
from sampling.inputs.tokenizer_choice import TiktokenTokenizer


def printed(texts):
    """What the script prints for these samples."""
    return "".join(f"{text}\n{RULE}\n" for text in texts)


def nanogpt_output(model, prompt, **sampling):
    """What nanoGPT prints for a character-level model."""
    ids = [CHARS.index(char) for char in prompt]
    samples = nanogpt_samples(model, prompt=ids, **sampling)
    return printed("".join(CHARS[i] for i in sample) for sample in samples)


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_samples_equal_nanogpts_with_any_batch_size(run_script, char_checkpoint, batch_size):
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=4", "--max_new_tokens=30", "--start=The ",
                      "--top_k=30", "--temperature=0.9", "--seed=-5", f"--batch_size={batch_size}", "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == nanogpt_output(make_gpt(), "The ", seed=-5, num_samples=4, max_new_tokens=30, top_k=30,
                                         temperature=0.9)


def test_samples_with_default_settings_equal_nanogpts(run_script, tmp_path):
    model = make_gpt(n_layer=1) # 5000 tokens take nanoGPT long
    save_checkpoint(tmp_path, model)
    done = run_script(f"--out_dir={tmp_path}", "--device=cpu")
    assert done.stdout == nanogpt_output(model, "\n", seed=1337, num_samples=10, max_new_tokens=500, top_k=200,
                                         temperature=0.8)


def test_int8_samples_do_not_depend_on_the_batch_size(run_script, char_checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("The \nO\nWhat is it?\naaaaaaaaaaaaaaa\nAnd then they all went home. ")
    run = (f"--out_dir={char_checkpoint}", "--device=cpu", "--dtype=int8", "--start=LINES:prompts.txt",
           "--num_samples=2", "--max_new_tokens=20", "--context_shift")
    outputs = [run_script(*run, f"--batch_size={size}", cwd=tmp_path) for size in (1, 4, None)]
    assert outputs[0].stdout == outputs[1].stdout == outputs[2].stdout
    assert outputs[0].stdout.count(RULE) == 10 and "on cpu in int8\n" in outputs[0].stderr


@pytest.mark.parametrize("sampling", [
    dict(top_k=200), dict(top_k=0, top_p=0.9, min_p=0.01, repetition_penalty=1.2)], ids=["top_k", "others"])
def test_samples_of_hugging_face_weights_equal_transformers(run_script, gpt2_folder, gpt2_encoding, sampling):
    tokenizer, theirs = TiktokenTokenizer(), make_transformers_gpt2()
    idx = torch.tensor([tokenizer.encode("Hello, I'm a")])
    torch.manual_seed(3)
    expected = [theirs.generate(idx, do_sample=True, max_new_tokens=25, temperature=0.8, eos_token_id=None,
                                pad_token_id=0, **sampling)[0].tolist() for _ in range(3)]
    done = run_script(f"--init_from={gpt2_folder}", "--start=Hello, I'm a", "--num_samples=3", "--max_new_tokens=25",
                      "--seed=3", "--batch_size=2", "--device=cpu", *(f"--{k}={v}" for k, v in sampling.items()))
    assert done.stdout == printed(map(tokenizer.decode, expected))
    assert f"{gpt2_folder} has no tokenizer of its own: using GPT-2's encoding" in done.stderr


def test_samples_go_to_stdout_and_messages_to_stderr(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=3", "--max_new_tokens=5", "--start=LINES:-",
                      "--stop=\\n", stdin=b"A prompt that is longer than the window")
    assert re.fullmatch(rf"(A prompt that is longer than the window[^-]{{5}}\n{RULE}\n){{3}}", done.stdout)
    assert "num_samples=3" in done.stderr and "parameters" in done.stderr and "tokens/s" in done.stderr
    assert done.stderr.count("warning: ") == 1 and "if you mean a newline" in done.stderr
    assert "standard input, line 1: the prompt has 39 tokens, but the model sees only the last 16" in done.stderr


def test_a_stop_text_that_no_tokens_spell_gets_a_warning(run_script, char_checkpoint, gpt2_folder):
    run = "--interactive", "--max_new_tokens=1", "--stop=('|x', 'e')"
    done = run_script(f"--out_dir={char_checkpoint}", *run, stdin=b"The\nO\n")
    line = f"warning: the stop text '|x' never occurs: {char_checkpoint}/meta.pkl lacks '|'"
    assert [text for text in done.stderr.splitlines() if text.startswith("warning")] == [line]
    done = run_script(f"--init_from={gpt2_folder}", *run, "--stop=<|endoftext|>", "--stop=é", stdin=b"The\n")
    assert done.returncode == 0 and "warning" not in done.stderr


def test_a_bad_line_of_a_pipe_ends_the_run_after_the_lines_before_it(run_script, char_checkpoint):
    done = run_script(f"--out_dir={char_checkpoint}", "--num_samples=2", "--max_new_tokens=5", "--start=JSONL:-",
                      stdin=b'{"prompt": "A"}\n{"prompt": "B"}\n{"text": "C"}\n')
    assert done.returncode == 1 and done.stdout.count(RULE) == 4
    assert "error: standard input, line 3: every line must be an object with a prompt" in done.stderr


def test_a_random_seed_is_printed_and_saved_and_gives_the_samples_again(run_script, char_checkpoint, tmp_path):
    run = f"--out_dir={char_checkpoint}", "--num_samples=2", "--max_new_tokens=30"
    first = run_script(*run, "--seed=random", "--out_file=a.jsonl", cwd=tmp_path)
    assert first.returncode == 0 and first.stdout != run_script(*run, "--seed=random").stdout
    drawn = re.search(r"seed: (\d+), drawn at random; --seed=\1 gives", first.stderr)[1]
    assert run_script(*run, f"--seed={drawn}").stdout == first.stdout
    assert [json.loads(line)["seed"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [int(drawn)] * 2
    resumed = run_script(*run, f"--seed={drawn}", "--out_file=a.jsonl", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr


# ---- user errors of every kind: each ends the script with one line; other tests have more cases without the script

pytest_plugins = ["attacks"]
WRONG_SETTINGS = [ # an argument, a part of the error line: exit status 2
    ("-p", "unknown setting -p; did you mean start?"),
    ("bad.py", "error: bad.py: top_k must be from 1 to 10**9, or None or 0 for every token; got -5"),
]
UNUSABLE = [ # arguments, a part of the error line: exit status 1
    ("--start=FILE:-", "is empty"),
    *((f"--start={kind}:", f"error: cannot read the prompt file '': No such file or directory; {kind}: takes the path")
      for kind in ("FILE", "LINES", "JSONL")),
    ("--start=FILE:out", "error: cannot read the prompt file 'out': Is a directory; "),
    ("--out_file=/proc/x", "error: cannot write '/proc/x': the folder /proc is missing, or takes no files; "),
    ("--html_file=out", "error: out is a folder, a device or a pipe, and not a file: give another path"),
    ("--html_file=bad.py", "error: bad.py was not written by sample.py, or its beginning was edited, so it is neither"),
    ("--start=LINES:- --watch", "watch=True uses the prompts again for each checkpoint"),
    ("--init_from=no/such/model", "error: there is no model at no/such/model; found ckpt.pt in out; pass --o"),
    ("--init_from=gpt2", "error: 'gpt2' is no folder here, and did not come from the Hugging Face hub ("),
    ("--init_from=out", "out is no Hugging Face model; out holds ckpt.pt; pass --out_dir=out"),
]


@pytest.mark.parametrize("arguments, status, message", [
    *((arguments, 2, message) for arguments, message in WRONG_SETTINGS),
    *((arguments, 1, message) for arguments, message in UNUSABLE)])
def test_bad_input_is_one_error_line(run_script, tmp_path, arguments, status, message):
    save_checkpoint(tmp_path / "out", make_gpt())
    (tmp_path / "bad.py").write_text("top_k = -5\n")
    done = run_script("--out_dir=out", "--device=cpu", "--num_samples=1", *arguments.split(), cwd=tmp_path)
    *others, error = done.stderr.splitlines()
    assert done.returncode == status and done.stdout == ""
    assert error.startswith("error: ") and message in error
    assert not any("rror" in line for line in others) and (status == 1 or not others)


def test_a_leading_tilde_is_the_home_folder_unless_a_file_is_called_so(run_script, tmp_path):
    save_checkpoint(tmp_path / "home" / "out", make_gpt())
    (tmp_path / "home" / "prompt").write_text("The ")
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "prompt").write_text("And ")
    for start, prompt in ("FILE:~/out/../prompt", "The "), ("FILE:~/prompt", "And "):
        done = run_script("--out_dir=~/out", "--tokenizer=~/out/meta.pkl", "--out_file=~/a.jsonl", "--num_samples=1",
                          "--device=cpu", f"--start={start}", "--overwrite", cwd=tmp_path, HOME=str(tmp_path / "home"))
        assert done.stdout.startswith(prompt) and (tmp_path / "home" / "a.jsonl").stat().st_size, done.stderr


def test_two_halves_of_a_character_are_the_character_and_one_half_is_an_error(run_script, tmp_path):
    save_repeating(tmp_path, [*"😀".encode()], 256)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"tokenizer": "byte"}))
    run = f"--out_dir={tmp_path}", "--device=cpu", "--max_new_tokens=8", "--temperature=0", "--num_samples=1"
    pair = r'"\ud83d\ude00"'
    saved = *run, f"--out_file={tmp_path}/a.jsonl", f"--stop=[{pair}]"
    (tmp_path / "my.py").write_text(f"start = {pair}\n")
    for arguments in (*run, f"--start={pair}"), (*run, str(tmp_path / "my.py")):
        assert run_script(*arguments).stdout == f"😀😀😀\n{RULE}\n"
    assert run_script(*saved, f"--start={pair}").stdout == f"😀\n{RULE}\n" # before the stop text
    assert "is complete" in run_script(*saved, "--start=😀").stderr
    assert "error: the prompt is not valid UTF-8 at character 2" in run_script(*run, r'--start="a\ud83d"').stderr
    gpt = sampling.load(tmp_path, device="cpu")
    assert gpt.score("\ud83d\ude00").num_tokens == 3 # all bytes but the first
    sample, = gpt.generate("\ud83d\ude00", stop="\ud83d\ude00", temperature=0)
    assert sample.prompt.text == "😀" and sample.text == "" and sample.finish_reason == "stop"


def test_the_script_runs_nothing_in_a_hostile_pickle(run_script, valid_checkpoint, tmp_path):
    for place, status in ("x", 0), ("model", 1): # beside the model, and instead of it
        write_attack(place, call("os mkdir", value("ran")), tmp_path, valid_checkpoint)
        done = run_script("--out_dir=out", "--num_samples=1", cwd=tmp_path)
        assert done.returncode == status and not (tmp_path / "ran").exists()
    assert done.stdout == "" and "error: cannot read out/ckpt.pt: " in done.stderr and "os.mkdir" in done.stderr
