"""Saves the samples of a run to out_file, html_file, both or neither."""
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sampling.outputs.console import log
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # most runs need none of these
    from sampling.checkpoints.checkpoint import Checkpoint
    from sampling.outputs.html import HtmlWriter
    from sampling.outputs.jsonl import JsonlWriter


class Outputs:
    """The files of a run. Without files, nothing is saved."""

    def __init__(self, jsonl: "JsonlWriter | None" = None, html: "HtmlWriter | None" = None):
        self.jsonl = jsonl
        # The page comes first: a resumed run can remove a sample from it that out_file lacks, but cannot add one.
        self.writers = [writer for writer in (html, jsonl) if writer is not None]

    @property
    def num_saved(self) -> int:
        """How many samples out_file held when it was opened."""
        return 0 if self.jsonl is None else self.jsonl.num_saved

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests. Those with samples in out_file are marked as already saved.

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
    """Open the files that the settings name. device_type ("cuda") and dtype_name ("float32") are those of the model.

    Raises OSError or ValueError if one of the files cannot be used.
    """
    if not (settings["out_file"] or settings["html_file"]):
        return Outputs()
    from sampling.outputs.html import HtmlWriter
    from sampling.outputs.jsonl import JsonlWriter, reproducibility_settings
    jsonl = html = None
    run_settings = reproducibility_settings(settings, device_type, dtype_name)
    if settings["out_file"]:
        checkpoint_id = {"path": checkpoint.path, "crc32": checkpoint.crc32}
        jsonl = JsonlWriter(settings["out_file"], checkpoint_id, run_settings, settings.get("logprobs"))
        if jsonl.num_saved:
            log(f"{settings['out_file']} holds {jsonl.num_saved} samples already: resuming after them")
    num_saved = jsonl.num_saved if jsonl else 0
    if settings["html_file"]:
        model = settings["out_dir"] if settings["init_from"] == "resume" else settings["init_from"]
        run_info = {"model": model, "start": settings["start"], **run_settings}
        html = HtmlWriter(settings["html_file"], run_info, num_saved)
    return Outputs(jsonl, html)
