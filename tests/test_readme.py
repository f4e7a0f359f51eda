"""What comes with the script is as it says: the README's commands, program and tables, the settings files, the demo."""
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from tokenizer import CharTokenizer

from conftest import PROJECT, RULE, nanogpt_samples


@pytest.mark.parametrize("file", sorted(path.name for path in (PROJECT / "config").glob("*.py")))
def test_settings_files(sample, letters, gpt2_folder, file):
    source = f"--init_from={gpt2_folder}" if "gpt2" in file else f"--out_dir={letters}"
    done = sample(f"config/{file}", source, "--max_new_tokens=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(RULE) >= 1 and "warning" not in done.stderr


def readme_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)


def readme_commands():
    """Every sample.py command line of the README, its continued lines joined."""
    text = "\n".join(readme_blocks("sh")).replace("\\\n", " ")
    return [line for line in text.splitlines() if "sample.py" in line]


@pytest.mark.parametrize("command", readme_commands(), ids=str)
def test_readme_commands_run(command, gpt2_folder, vocabulary, tmp_path):
    """As written, but for: the environment that the first one makes, names that need the hub, and how long samples are, how many processes."""
    hub = tmp_path / "hub"
    for name in set(re.findall(r"--init_from=(\S+)", command)) | ({"gpt2-xl"} if "config/gpt2.py" in command else set()):
        snapshot = hub / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for file in gpt2_folder.iterdir():
            (snapshot / file.name).symlink_to(file)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("abc")
    (tmp_path / "prompt.txt").write_text("ROMEO:\n")
    (tmp_path / "out-shakespeare-char").symlink_to(PROJECT / "out-shakespeare-char")
    command = command.split("&&")[-1].replace(".venv/bin/python", "python").replace("python sample.py", f"python {PROJECT}/sample.py")
    command = command.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
    if "torchrun" in command:
        command = command.replace("torchrun --nproc_per_node=8", f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc_per_node=2")
        command = command.replace(" sample.py", f" {PROJECT}/sample.py").replace("--num_samples=1000", "--num_samples=3")
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary), "HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert RULE in done.stdout or "--help" in command


def test_the_readme_program_runs():
    program, = readme_blocks("python")
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("tensor([[30, 27, 25,"), done.stderr


def test_the_readme_lists_every_setting():
    from configurator import find_settings
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", (PROJECT / "README.md").read_text(), re.MULTILINE))
    assert rows == {name: repr(setting.default) for name, setting in find_settings(PROJECT / "sample.py").items()}


@pytest.mark.parametrize("name", ["RESULTS.md", "RESULTS-intel.md"])
def test_the_readme_shows_the_benchmark(name):
    assert (PROJECT / "tests" / "bench" / name).read_text().strip() in (PROJECT / "README.md").read_text()


@pytest.mark.parametrize("block", readme_blocks("text"), ids=lambda block: block.split("\n")[0])
def test_the_readme_shows_what_is_printed(block, vocabulary, tmp_path):
    (tmp_path / "out-shakespeare-char").symlink_to(PROJECT / "out-shakespeare-char")
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    shown = "".join(line for line in block.splitlines(keepends=True) if not line.startswith("$ "))
    script = "\n".join(commands).replace("python sample.py", f"{shlex.quote(sys.executable)} {PROJECT}/sample.py")
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(vocabulary), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_the_demo_prints_what_nanogpt_draws(sample):
    checkpoint = torch.load(PROJECT / "out-shakespeare-char" / "ckpt.pt", weights_only=True)
    chars = sorted(CharTokenizer(PROJECT / "out-shakespeare-char" / "meta.pkl").stoi)
    samples = nanogpt_samples(checkpoint["model_args"], checkpoint["model"], 1337, [chars.index("O")], 2, 150,
                              temperature=0.8, top_k=200)
    done = sample("--out_dir=out-shakespeare-char", "--start=O", "--num_samples=2", "--max_new_tokens=150", "--device=cpu")
    assert done.stdout == "".join("".join(chars[i] for i in ids) + f"\n{RULE}\n" for ids in samples)


def test_the_demo_is_nanogpts_format():
    checkpoint = torch.load(PROJECT / "out-shakespeare-char" / "ckpt.pt", weights_only=True, mmap=True)
    assert checkpoint["model_args"].keys() == {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert checkpoint["model_args"]["block_size"] == 512 and checkpoint["best_val_loss"] < 1.60
    assert {"model", "model_args", "iter_num", "best_val_loss", "config"} <= checkpoint.keys()
    assert all(tensor.dtype == torch.float32 for tensor in checkpoint["model"].values())
    assert sum(file.stat().st_size for file in (PROJECT / "out-shakespeare-char").iterdir() if file.is_file()) <= 6_000_000
    json.dumps(checkpoint["config"]) # plain values, which any reader takes
