"""A script with settings, and a fixture that runs the configurator on it."""
import pytest

from sampling.configurator import override

SOURCE = '''"""A script."""
import math

# First
text = "\\n" # any text
count = 10
rate = 0.8 # how fast, # how far;
           # and more: #2
           #   indented

# Second
top: int | None = 200 # may be off
flag = False # on or off
# Third
ends: str | list | None = None # a text, or several
pick: int | str = 7 # a number, or a word

def main():
    inner = 3 # not a setting
'''


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(*arguments, validate=..., aliases=...) runs override on a fresh script.

    Returns the settings that it changes.
    """
    path = tmp_path / "project" / "script.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **options):
        scope = {"__file__": str(path)}
        exec(SOURCE, scope)
        before = dict(scope)
        try:
            settings = override(scope, arguments, **options)
        except ValueError:
            assert scope == before
            raise
        assert " ".join(settings) == "text count rate top flag ends pick"
        assert scope == before | settings
        return {name: value for name, value in settings.items()
                if repr(value) != repr(before[name])}
    return run
