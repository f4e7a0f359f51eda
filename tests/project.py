"""The paths of the project and its script, and the line between samples."""
import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = Path(os.environ.get("SAMPLE_PY", PROJECT / "sample.py")) # SAMPLE_PY selects another version of the script
RULE = "---------------" # printed after every sample
