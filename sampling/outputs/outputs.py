"""Where a run saves its samples: out_file, html_file, both or neither."""
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sampling.outputs.console import log
from sampling.outputs.html import HtmlWriter
from sampling.outputs.jsonl import JsonlWriter, reproducibility_settings
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # it imports torch, which takes a second
    from sampling.checkpoints.checkpoint import Checkpoint


class Outputs:
    """The files of a run. Without files, nothing is saved."""

    def __init__(self, jsonl: JsonlWriter | None = None, html: HtmlWriter | None = None):
        self.jsonl = jsonl
        # The page is written first: a resumed run can cut a sample off it that is not in out_file, but cannot add one.
        self.writers = [writer for writer in (html, jsonl) if writer is not None]

    @property
    def num_saved(self) -> int:
        """How many samples out_file held at first."""
        return 0 if self.jsonl is None else self.jsonl.num_saved

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests, those whose samples are in out_file marked as already saved.

        Raises ValueError if out_file is from another run.
        """
        return requests if self.jsonl is None else self.jsonl.resume(requests)

    def write(self, sample: Sample) -> None:
        """Save a finished sample. Raises OSError if it cannot be written."""
        for writer in self.writers:
            writer.write(sample)

    def close(self) -> None:
        """Finish the files."""
        for writer in self.writers:
            writer.close()


def open_outputs(settings: dict[str, Any], checkpoint: "Checkpoint", device_type: str, dtype_name: str) -> Outputs:
    """Open the files that the settings name, as device_type ("cuda") and dtype_name ("float32") have been chosen.

    Raises OSError or ValueError if one of them cannot be used.
    """
    jsonl = html = None
    run_settings = reproducibility_settings(settings, device_type, dtype_name)
    if settings["out_file"]:
        jsonl = JsonlWriter(settings["out_file"], {"path": checkpoint.path, "crc32": checkpoint.crc32}, run_settings)
        if jsonl.num_saved:
            log(f"{settings['out_file']} holds {jsonl.num_saved} samples already: resuming after them")
    num_saved = jsonl.num_saved if jsonl else 0
    if settings["html_file"]:
        model = settings["out_dir"] if settings["init_from"] == "resume" else settings["init_from"]
        run_info = {"model": model, "start": settings["start"], **run_settings}
        html = HtmlWriter(settings["html_file"], run_info, num_saved)
    return Outputs(jsonl, html)
