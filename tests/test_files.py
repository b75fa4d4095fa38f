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
