"""From inside a clone of nanoGPT, as most users start: its own model.py, and its own sample.py as
the reference.
"""
import shutil

import pytest

from forks import save_fork
from models import save_meta
from project import nanogpt_folder
from script_process import run_forked, run_python

FLAGS = ("--out_dir=out", "--device=cpu", "--num_samples=2", "--max_new_tokens=25", "--top_k=20",
         "--start=The ")


@pytest.fixture
def clone(tmp_path):
    """A clone of nanoGPT, with a checkpoint of a character model."""
    for name in "model.py", "sample.py", "configurator.py", "train.py":
        shutil.copy(nanogpt_folder() / name, tmp_path)
    save_fork(tmp_path / "model.py")
    save_meta(tmp_path / "data/letters/meta.pkl")
    (tmp_path / "out/meta.pkl").unlink()
    return tmp_path


def test_the_first_command_prints_what_nanogpts_own_script_prints(clone):
    theirs = run_python("sample.py", *FLAGS, "--dtype=float32", cwd=clone)
    ours = run_forked(*FLAGS, cwd=clone)
    print(theirs.stderr, theirs.stdout)
    assert theirs.stdout.endswith(ours.stdout)
    assert "from before June 2023: using its GELU, the tanh form" in ours.stderr
