"""A fixture for the tests of the configurator."""
import pytest

from configurator import override
from example_script import DEFAULTS, SOURCE


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Runs override on a fresh script: script(*arguments, validate=..., log=...) -> the settings that differ from the defaults."""
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
        assert settings.keys() == DEFAULTS.keys() and scope == before | settings
        return {name: value for name, value in settings.items() if repr(value) != repr(DEFAULTS[name])}
    return run
