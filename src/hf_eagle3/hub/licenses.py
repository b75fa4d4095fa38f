"""Licences that the Hub knows."""

import difflib
import re

from huggingface_hub import ModelCard


# https://huggingface.co/docs/hub/repositories-licenses
IDS = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0
    cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0
    cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0
    cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0
    ms-pl ncsa odbl odc-by ofl-1.1 open-mdw openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
    """.split()  # noqa: SIM905
)


def check_license(license: str | None, name: str | None = None, link: str | None = None) -> None:
    """
    Checks a licence, before anything is pushed.

    Args:
        license (`str`, *optional*): A licence id of the Hub, or `"other"`.
        name (`str`, *optional*): With `"other"`: the licence's name.
        link (`str`, *optional*): With `"other"`: an address, or the name of a file in the repo.

    Raises:
        ValueError: if the Hub does not know the id, or name and link do not fit it.
    """
    if license is not None and license not in IDS:
        spelled = re.sub(r"[\s_]+|-?v(?=\d)", "-", license.strip().lower()).replace("license", "").strip("-")
        close = difflib.get_close_matches(spelled, sorted(IDS), n=1, cutoff=0.5)
        raise ValueError(
            f"{license!r} is not a licence id of the Hub{f'; the closest is {close[0]!r}' if close else ''}. For a licence without "
            "an id pass 'other', with a name and a link (`--license_name`, `--license_link`)."
        )
    if license == "other" and not (name and link):
        raise ValueError(
            "The licence 'other' needs a name and a link. Pass `--license_name`, and as `--license_link` an address or the name "
            "of a file in the repo."
        )
    if license != "other" and (name or link):
        raise ValueError(
            f"`--license_name` and `--license_link` are for the licence 'other', not for {license!r}. Pass `--license other`, or "
            "leave them out."
        )


def license_of(
    card: ModelCard | None, license: str | None = None, name: str | None = None, link: str | None = None
) -> dict[str, str | None]:
    """Returns a licence, or else that in a card, as arguments of [`render_card`]. All are `None` without both."""
    stated = {"license": license, "license_name": name, "license_link": link}
    return stated if license or card is None else {key: card.data.get(key) for key in stated}
