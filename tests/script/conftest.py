"""A folder with a checkpoint and prompts."""
import pytest

from models import make_gpt, save_checkpoint


@pytest.fixture
def folder(tmp_path):
    """A folder with out/ckpt.pt and prompts.txt."""
    save_checkpoint(tmp_path / "out", make_gpt())
    prompts = "The \nO\nWhat is it?\nyes\nAnd then they all went home. \n"
    (tmp_path / "prompts.txt").write_text(prompts)
    return tmp_path
