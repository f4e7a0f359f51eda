"""A nanoGPT clone with an edited model.py, in a temporary folder."""
import pytest

from forks import edit, save_fork


@pytest.fixture
def fork(tmp_path):
    """fork(part, replacement) edits model.py, and writes out/ckpt.pt of its model.

    Returns the path of model.py. Without arguments, it is unchanged.
    """
    def make(part="", replacement=""):
        path = edit(tmp_path, part, replacement)
        save_fork(path)
        return path
    return make


@pytest.fixture
def sample(run_script, tmp_path):
    """sample(*arguments) runs sample.py in the folder of model.py."""
    def run(*arguments):
        return run_script("--out_dir=out", "--start=The ", "--num_samples=2",
                          "--max_new_tokens=22", "--top_k=20", *arguments, cwd=tmp_path)
    return run
