"""README.md, docs/, the settings files and the demo checkpoint work as documented."""
import ast
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from configurator import find_settings, help_text
from oracles import nanogpt_samples
from project import PROJECT, RULE, SCRIPT
from sampling.inputs.char_tokenizer import CharTokenizer

DOCUMENTS = [PROJECT / "README.md", PROJECT / "SECURITY.md", *sorted((PROJECT / "docs").glob("*.md"))]
DEMO = PROJECT / "out-shakespeare-char"


def code_blocks(language):
    """All code blocks of this language. The id of each is its document's name and its number in the document."""
    return [pytest.param(block, id=f"{path.name}-{i}") for path in DOCUMENTS
            for i, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE))]


def commands():
    """Every command line with sample.py, with continued lines joined. Commands with several processes are slow."""
    found = []
    for block in code_blocks("sh"):
        for line in block.values[0].replace("\\\n", " ").splitlines():
            if "sample.py" in line:
                command = line.split("&&")[-1].strip().replace(".venv/bin/python", "python")
                found.append(pytest.param(command, id=f"{block.id}-{command}", marks=pytest.mark.slow if "torchrun" in command else ()))
    return found


def examples():
    """Every example with its output, with one thread and with all threads. Quick: those in README.md, the last one with all threads."""
    blocks = code_blocks("text")
    readme = [block.id for block in blocks if block.id.startswith("README.md")]
    quick = {(name, "all" if name == readme[-1] else "one") for name in readme}
    return [pytest.param(*block.values, threads, id=f"{block.id}-{threads}", marks=() if (block.id, threads) in quick else pytest.mark.slow)
            for block in blocks for threads in ("one", "all")]


@pytest.fixture
def user_folder(tmp_path):
    """A folder with the files that the documented commands read."""
    (tmp_path / "prompt.txt").write_text("ROMEO:\n")
    (tmp_path / "out-shakespeare-char").symlink_to(DEMO)
    return tmp_path


def make_hub_cache(folder, names, model):
    """Make a Hugging Face hub cache that has the files of this model under each of these names."""
    for name in names:
        snapshot = folder / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for file in model.iterdir():
            (snapshot / file.name).symlink_to(file)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("abc")


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, run_script, gpt2_folder, tiktoken_cache, user_folder):
    """They run as written, but with short samples, small models in the hub cache, and fewer processes and samples for torchrun."""
    names = re.findall(r"--(?:init_from|draft)=(\S+)", command) or (["gpt2-xl"] if "config/gpt2.py" in command else [])
    make_hub_cache(user_folder / "hub", names, gpt2_folder)
    command += "" if "--help" in command else " --max_new_tokens=20"
    if command.startswith("python sample.py "):
        done = run_script(*shlex.split(command)[2:], cwd=user_folder, HF_HUB_CACHE=str(user_folder / "hub"))
    else:
        command = command.replace("torchrun --nproc_per_node=8", f"{shlex.quote(sys.executable)} -m torch.distributed.run --nproc_per_node=2")
        command = command.replace(" sample.py", f" {SCRIPT}").replace("--num_samples=1000", "--num_samples=3")
        env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "HF_HUB_CACHE": str(user_folder / "hub"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(["bash", "-c", command], cwd=user_folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert RULE in done.stdout or "--help" in command


@pytest.mark.parametrize("block, threads", examples())
def test_examples_print_the_documented_output(block, threads, tiktoken_cache, user_folder):
    commands = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    shown = "".join(line for line in block.splitlines(keepends=True) if not line.startswith("$ "))
    script = "\n".join(commands).replace("python sample.py", f"{shlex.quote(sys.executable)} {SCRIPT}")
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tiktoken_cache), "CUDA_VISIBLE_DEVICES": ""} | ({"OMP_NUM_THREADS": "1"} if threads == "one" else {})
    done = subprocess.run(["bash", "-ec", script], cwd=user_folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


@pytest.mark.parametrize("program", code_blocks("python"))
def test_programs_run(program):
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=PROJECT, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_examples_of_the_help_fit_into_a_terminal_of_80_columns():
    docstring = ast.get_docstring(ast.parse(SCRIPT.read_text(encoding="utf-8")))
    examples = [line for line in help_text(docstring, find_settings(SCRIPT), 80).splitlines() if line.startswith("    python sample.py")]
    assert len(examples) >= 3 and max(map(len, examples)) <= 80


def test_the_table_of_settings_is_complete():
    tables = [path.read_text(encoding="utf-8").partition("| setting | default |")[2].partition("\n\n")[0] for path in DOCUMENTS]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", "\n".join(tables), re.MULTILINE))
    assert rows == {name: repr(setting.default) for name, setting in find_settings(SCRIPT).items()}


def test_the_benchmark_can_switch_off_every_optimisation(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT / "tests" / "bench")
    import compare
    import without
    assert compare.ROWS_OF.keys() == without.OPTIMISATIONS.keys()
    assert all(compare.lines_of(optimisation) > 0 for optimisation in compare.ROWS_OF)


def test_the_summary_has_the_rates_of_the_benchmark_results():
    columns = [("124M, 1 sample", "float32"), ("124M, 1 sample", "int8"), ("124M, 10 samples", "float32"), ("124M, 10 samples", "int8"),
               ("10.6M, 10 samples, inside the window", "float32")]
    summary = (PROJECT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| \[.*/bench/(RESULTS.*)\) \| (.*) \|$", summary.replace("*", ""), re.MULTILINE)
    assert len(lines) == 4
    for name, line in lines:
        results = (PROJECT / "tests" / "bench" / name).read_text(encoding="utf-8")
        rates = {(row, program): rate for row, program, rate in re.findall(r"^\| (.*?) \| (.*?) \| ([\d.,]+) \|", results, re.MULTILINE)}
        for (row, dtype), cell in zip(columns, line.split(" | "), strict=True):
            own_rate, other_rate = re.fullmatch(r"([\d.,]+), .* ([\d.,]+)", cell).groups()
            assert own_rate == rates[row, f"sample.py {dtype}"]
            assert other_rate in [rate for (other_row, _), rate in rates.items() if other_row == row]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_point_to_existing_files(path):
    links = [link for link in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("file", sorted(path.name for path in (PROJECT / "config").glob("*.py")))
def test_settings_files_run_without_warnings(run_script, char_checkpoint, gpt2_folder, file):
    source = f"--init_from={gpt2_folder}" if "gpt2" in file else f"--out_dir={char_checkpoint}"
    done = run_script(f"config/{file}", source, "--max_new_tokens=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(RULE) >= 1 and "warning" not in done.stderr


def test_the_demo_prints_the_same_samples_as_nanogpt(run_script):
    checkpoint = torch.load(DEMO / "ckpt.pt", weights_only=True)
    chars = sorted(CharTokenizer(DEMO / "meta.pkl").stoi)
    samples = nanogpt_samples(checkpoint["model_args"], checkpoint["model"], 1337, [chars.index("O")], 2, 80,
                              temperature=0.8, top_k=200)
    done = run_script("--out_dir=out-shakespeare-char", "--start=O", "--num_samples=2", "--max_new_tokens=80", "--device=cpu")
    assert done.stdout == "".join("".join(chars[i] for i in ids) + f"\n{RULE}\n" for ids in samples)


def test_the_demo_has_nanogpts_format():
    checkpoint = torch.load(DEMO / "ckpt.pt", weights_only=True, mmap=True)
    assert checkpoint["model_args"].keys() == {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert checkpoint["model_args"]["block_size"] == 512 and checkpoint["best_val_loss"] < 1.45
    assert {"model", "model_args", "iter_num", "best_val_loss", "config"} <= checkpoint.keys()
    assert all(tensor.dtype == torch.float16 for tensor in checkpoint["model"].values())
    assert sum(file.stat().st_size for file in DEMO.iterdir() if file.is_file()) <= 6_000_000
    json.dumps(checkpoint["config"]) # plain values only
