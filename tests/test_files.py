import pytest

from hf_eagle3.files import write_atomically


def test_files_are_written_completely_or_not_at_all(tmp_path):
    def killed(path):
        path.write_text("half")
        raise KeyboardInterrupt

    path = tmp_path / "file.json"
    write_atomically(path, "ä")
    assert path.read_text(encoding="utf-8") == "ä" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(KeyboardInterrupt):
        write_atomically(str(path), killed)
    assert path.read_text(encoding="utf-8") == "ä"
    write_atomically(path, lambda path: path.write_text("whole"))
    assert path.read_text() == "whole" and list(tmp_path.iterdir()) == [path]


def test_folders_are_made(tmp_path):
    """A benchmark of an hour does not fail at its end because there is no `results/`."""
    write_atomically(tmp_path / "results" / "today" / "file.json", "ä")
    assert (tmp_path / "results" / "today" / "file.json").read_text(encoding="utf-8") == "ä"
