"""The page of `recipes/demo.py` as a Space, on a Hub on this machine."""

import importlib.metadata

import pytest
from conftest import RECIPES
from huggingface_hub import SpaceCard


@pytest.fixture
def space_hub(hub, monkeypatch):
    """A Hub with a target and a draft, for a page of some version of gradio."""
    version = importlib.metadata.version
    known = {"gradio": "6.1.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda package: known.get(package) or version(package))
    hub.repos |= {"org/target": {"main": [{}]}, "me/draft": {"main": [{}]}}
    return hub


def test_a_space(space_hub, run_recipe):
    hub = space_hub
    arguments = ("--target", "org/target", "--draft", "me/draft", "--push_to", "me/page")
    result = run_recipe("demo.py", *arguments, "--private")
    assert result.returncode == 0 and f"{hub.url}/spaces/me/page/commit/" in result.stdout
    commits = hub.repos["spaces/me/page"]["main"]
    assert len(commits) == 2 and "spaces/me/page" in hub.private  # the empty repo's, and ours
    files = {name: content.decode() for name, content in commits[-1].items()}
    assert files.keys() == {"app.py", "demo.py", "requirements.txt", "README.md"}
    assert files["requirements.txt"] == "hf-eagle3[demo]\n"
    compile(files["app.py"], "app.py", "exec")
    assert "from_pretrained('org/target', 'me/draft', dtype='auto')" in files["app.py"]
    assert files["demo.py"] == (RECIPES / "demo.py").read_text(encoding="utf-8")
    card = SpaceCard(files["README.md"])
    assert (card.data.sdk, card.data.sdk_version, card.data.app_file) == ("gradio", "6.1.2", "app.py")
    assert card.data.models == ["org/target", "me/draft"] and card.data.title == "page"
    assert "me/draft" in card.text

    # Once more, with the package from elsewhere.
    result = run_recipe("demo.py", *arguments, "--package", "hf-eagle3[demo] @ git+https://example.org/hf-eagle3")
    assert result.returncode == 0 and len(commits) == 3
    assert commits[-1]["requirements.txt"] == b"hf-eagle3[demo] @ git+https://example.org/hf-eagle3\n"

    # With the draft of a branch, in a folder, and another dtype.
    place = ("--draft_revision", "sub", "--draft_subfolder", "small", "--dtype", "float32")
    result = run_recipe("demo.py", *arguments, *place)
    assert result.returncode == 1 and "sub not found" in result.stderr
    hub.repos["me/draft"]["sub"] = [{}]
    result = run_recipe("demo.py", *arguments, *place)
    expected = b"('org/target', 'me/draft', dtype='float32', revision='sub', subfolder='small')"
    assert result.returncode == 0 and expected in commits[-1]["app.py"]


def test_another_page_stays(space_hub, run_recipe):
    hub = space_hub
    files = {"README.md": b"---\nsdk: docker\n---\n", "Dockerfile": b"FROM python"}
    hub.repos["spaces/me/page"] = {"main": [files]}
    result = run_recipe("demo.py", "--target", "org/target", "--draft", "me/draft", "--push_to", "me/page")
    assert result.returncode == 1 and "The Space me/page has another page" in result.stderr
    assert hub.repos["spaces/me/page"] == {"main": [files]}


def test_models_must_be_on_the_hub(space_hub, tmp_path, run_recipe):
    for draft, message in ((tmp_path, "is no id of the Hub"), ("me/other", "me/other not found")):
        result = run_recipe("demo.py", "--target", "org/target", "--draft", draft, "--push_to", "me/page")
        assert result.returncode == 1 and message in result.stderr
    assert not any(repo.startswith("spaces/") for repo in space_hub.repos)
