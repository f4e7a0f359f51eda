"""Files to which a run appends its samples."""
import os
import sys

import pytest

from sampling.outputs.output_file import append, check_not_removed, open_output

needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="no such locks")


def test_appending_keeps_the_existing_content(tmp_path):
    (tmp_path / "a").write_bytes(b"before\n")
    with open_output(tmp_path / "a") as file:
        assert file.read() == b"before\n"
        append(file, b"after\n")
        assert (tmp_path / "a").read_bytes() == b"before\nafter\n" # written immediately


@needs_locks
def test_a_second_run_cannot_open_the_same_file(tmp_path):
    with open_output(tmp_path / "a"), pytest.raises(ValueError, match=r"another run writes to .*a: give the file another name"):
        open_output(tmp_path / "a")
    open_output(tmp_path / "a").close()


def test_the_error_names_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file"):
        open_output(tmp_path)
    (tmp_path / "file").touch()
    for path, reason in ("no/such", "there is no folder"), ("file/a", "Not a directory"), ("x" * 300, "File name too long"):
        with pytest.raises(OSError, match=rf"cannot write '.*: {reason}"):
            open_output(f"{tmp_path}/{path}")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_the_error_for_a_full_disk_names_the_file():
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(OSError, match="cannot write '/dev/full': No space left on device"):
        append(file, b"line\n")


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be removed there")
def test_a_removed_file_is_an_error_but_a_renamed_file_is_not(tmp_path):
    path = f"{tmp_path}/a"
    with open_output(path) as file:
        os.rename(path, f"{path}b")
        check_not_removed(file)
        os.unlink(f"{path}b")
        with pytest.raises(OSError, match=r"a': it was removed"):
            check_not_removed(file)
