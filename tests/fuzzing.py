"""Settings of the fuzz tests. A quick run tries a tenth of the random examples, --slow tries all, the same every time.

This command tries other examples at every call, for about an hour:

    python -m pytest --slow --hypothesis-profile=hour -k fuzz
"""
import pytest
from hypothesis import HealthCheck, settings

PERCENT = dict(quick=10, slow=100, hour=15_000) # how many of its examples each test tries


def load_profile(name):
    """Choose a profile. --hypothesis-profile on the command line overrides it."""
    for profile, percent in PERCENT.items():
        settings.register_profile(profile, max_examples=percent, derandomize=profile != "hour", deadline=None,
                                  database=None, suppress_health_check=list(HealthCheck))
    settings.load_profile(name)


def fuzz(examples):
    """Mark a fuzz test, and set how many examples it tries with --slow."""
    def decorate(test):
        return pytest.mark.fuzz(settings(max_examples=-(-examples * settings.default.max_examples // 100))(test))
    return decorate
