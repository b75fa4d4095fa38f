"""Licenses of drafts."""

from typing import Any

from huggingface_hub import ModelCard


def check_license(license: str | None, name: str | None = None, link: str | None = None) -> None:
    """
    Checks whether a license, its name and its link fit each other. The Hub knows which ids there are: it checks the card
    before anything is pushed.

    Args:
        license (`str`, *optional*): A license id of the Hub, or `"other"`.
        name (`str`, *optional*): With `"other"`: the license's name.
        link (`str`, *optional*): With `"other"`: an address, or the name of a file in the repo.

    Raises:
        ValueError: if name and link do not fit the license.
    """
    if license == "other" and not (name and link):
        raise ValueError(
            "The license 'other' needs a name and a link (`--license_name`, `--license_link`: an address, or a file in the repo)."
        )
    if license != "other" and (name or link):
        raise ValueError(
            f"`--license_name` and `--license_link` are for the license 'other', not for {license!r}. Pass `--license other`, or "
            "leave them out."
        )


def license_of(
    card: ModelCard | None, license: str | None = None, name: str | None = None, link: str | None = None
) -> dict[str, Any]:
    """Returns a license, or else that in a card, as arguments of [`render_card`]. All are `None` without both."""
    stated = {"license": license, "license_name": name, "license_link": link}
    return stated if license or card is None else {key: card.data.get(key) for key in stated}
