"""dtype=int8 in sample.py."""
import json

import pytest

import sampling
from project import RULE

PROMPTS = ["The ", "O", "What is it?", "a" * 15, "And then they all went home. "] # block_size is 16


@pytest.fixture
def run_int8(run_script, char_checkpoint, tmp_path):
    """run_int8(*arguments) runs sample.py with dtype=int8 and several prompts, in tmp_path."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))

    def run(*arguments):
        return run_script(f"--out_dir={char_checkpoint}", "--device=cpu", "--dtype=int8", "--start=LINES:prompts.txt", "--num_samples=3",
                          "--max_new_tokens=25", *arguments, cwd=tmp_path)
    return run


@pytest.mark.parametrize("arguments, params", [
    pytest.param([], {}, marks=pytest.mark.slow), (["--context_shift", "--top_k=7"], {"context_shift": True, "top_k": 7})], ids=str)
def test_batches_change_no_sample(run_int8, char_checkpoint, arguments, params):
    """Some prompts are longer than others, and the samples are longer than block_size."""
    generator = sampling.load(str(char_checkpoint), device="cpu", dtype="int8")
    samples = generator.generate(PROMPTS, sampling.SamplingParams(max_new_tokens=25, **params), num_samples=3, batch_size=1)
    expected = "".join(f"{sample.prompt.text}{sample.text}\n{RULE}\n" for sample in samples)
    for batch_size in "--batch_size=4", "--batch_size=None":
        done = run_int8(*arguments, batch_size)
        assert done.returncode == 0 and done.stdout == expected, done.stderr
        assert "on cpu in int8\n" in done.stderr and "arning" not in done.stderr


def test_a_run_is_resumed_only_in_int8(run_int8, tmp_path):
    path = tmp_path / "samples.jsonl"
    done = run_int8("--out_file=samples.jsonl", "--logprobs=2")
    assert done.returncode == 0, done.stderr
    whole = path.read_bytes()
    line = json.loads(whole.splitlines()[0])
    assert line["settings"]["dtype"] == "int8" and len(line["logprobs"]["content"]) == 25
    path.write_bytes(whole[:len(whole) * 2 // 3])
    done = run_int8("--out_file=samples.jsonl", "--logprobs=2", "--dtype=float32")
    assert done.returncode == 1 and "dtype is 'int8' there, and 'float32' here" in done.stderr
    assert run_int8("--out_file=samples.jsonl", "--logprobs=2").returncode == 0 and path.read_bytes() == whole
