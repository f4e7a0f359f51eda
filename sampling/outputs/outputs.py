"""Saves the samples of a run to out_file, html_file, both or neither."""
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sampling.outputs.console import log, plural
from sampling.params import Sample, SampleRequest

if TYPE_CHECKING: # most runs need none of these
    from sampling.checkpoints.checkpoint import Checkpoint
    from sampling.outputs.html import HtmlWriter
    from sampling.outputs.jsonl import JsonlPrinter, JsonlWriter


class Outputs:
    """The files of a run. Without files, nothing is saved. jsonl_printer prints lines of JSON on standard output."""

    def __init__(self, jsonl: "JsonlWriter | None" = None, html: "HtmlWriter | None" = None,
                 jsonl_printer: "JsonlPrinter | None" = None):
        self.jsonl = jsonl
        self.uses_stdout = jsonl_printer is not None # then nothing else may be printed there
        # The page comes first: a resumed run can remove a sample from it that out_file lacks, but cannot add one.
        self.writers = [writer for writer in (html, jsonl, jsonl_printer) if writer is not None]

    @property
    def num_saved(self) -> int:
        """How many samples out_file held when it was opened."""
        return 0 if self.jsonl is None else self.jsonl.num_saved

    def resume(self, requests: Iterator[SampleRequest]) -> Iterator[SampleRequest]:
        """Yield all requests. Those with samples in out_file are marked as already saved.

        Raises ValueError if out_file is from another run.
        """
        if self.jsonl is None:
            yield from requests
            return
        num_saved, is_complete = 0, True
        for request in self.jsonl.resume(requests): # this checks the lines of the file
            if is_complete and not request.already_saved:
                is_complete = False
                if num_saved:
                    log(f"{self.jsonl.path} holds {plural(num_saved, 'sample')} already: resuming after them")
            num_saved += request.already_saved
            yield request
        if is_complete:
            log(f"{self.jsonl.path} is complete, with {plural(num_saved, 'sample')}: nothing to sample")

    def write(self, sample: Sample) -> None:
        """Save a finished sample. Raises OSError if it cannot be written."""
        for writer in self.writers:
            writer.write(sample)

    def close(self) -> None:
        """Finish the files."""
        for writer in self.writers:
            writer.close()


def num_logprobs(settings: dict[str, Any]) -> int | None:
    """How many top log-probabilities the outputs need: out_file, the page or the terminal. None if none needs any."""
    in_file = settings["logprobs"] or 0
    if settings["html_file"]:
        from sampling.outputs.html import NUM_ALTERNATIVES
        return max(NUM_ALTERNATIVES, in_file)
    if settings["out_file"] or settings["show_probs"]:
        return in_file
    return None


def open_outputs(settings: dict[str, Any], checkpoint: "Checkpoint", device_type: str, dtype_name: str) -> Outputs:
    """Open the files that the settings name. device_type ("cuda") and dtype_name ("float32") are those of the model.

    Raises OSError or ValueError if one of the files cannot be used.
    """
    if not (settings["out_file"] or settings["html_file"]):
        return Outputs()
    from sampling.outputs.html import HtmlWriter
    from sampling.outputs.jsonl import JsonlPrinter, JsonlWriter, LineFormat, reproducibility_settings
    from sampling.outputs.output_file import check_replaceable
    overwrite = settings["overwrite"]
    for path in (settings["out_file"], settings["html_file"]) if overwrite else ():
        if path not in (None, "-"):
            check_replaceable(path, settings["start"])
    jsonl = html = jsonl_printer = None
    run_settings = reproducibility_settings(settings, device_type, dtype_name)
    checkpoint_id = {"path": checkpoint.path, "crc32": checkpoint.crc32, "iter_num": checkpoint.iter_num}
    line_format = LineFormat(checkpoint_id, run_settings, settings["logprobs"])
    if settings["out_file"] == "-":
        jsonl_printer = JsonlPrinter(line_format)
    elif settings["out_file"]:
        jsonl = JsonlWriter(settings["out_file"], line_format, overwrite)
    num_saved = jsonl.num_saved if jsonl else None
    if settings["html_file"]:
        model = settings["out_dir"] if settings["init_from"] == "resume" else settings["init_from"]
        run_info = {"model": model, "start": settings["start"], **run_settings}
        html = HtmlWriter(settings["html_file"], run_info, num_saved, overwrite)
    return Outputs(jsonl, html, jsonl_printer)
