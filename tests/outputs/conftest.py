"""Fixtures of the tests of outputs."""
import pytest

from terminal import Terminal


@pytest.fixture
def terminal(char_checkpoint, tiktoken_cache):
    """Starts sample.py on a terminal."""
    pytest.importorskip("pty")
    started = []

    def start(*arguments, **options):
        started.append(Terminal([f"--out_dir={char_checkpoint}", *arguments], tiktoken_cache, **options))
        return started[-1]
    yield start
    for one in started:
        one.close()
