"""Where the project and its script are, for all tests."""
import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = Path(os.environ.get("SAMPLE_PY", PROJECT / "sample.py")) # SAMPLE_PY: test another version of the script
RULE = "---------------" # printed after every sample
