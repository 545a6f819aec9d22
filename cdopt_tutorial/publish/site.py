"""Where the book is published, and what its pages say of it and of themselves."""

import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

VERSION = version("cdopt-tutorial")

_LAUNCH = {
    "binderhub_url": "https://mybinder.org",
    "colab_url": "https://colab.research.google.com",
    "notebook_interface": "jupyterlab",
}


@dataclass(frozen=True)
class Site:
    """What is known of where the book is published; nothing, by default."""

    url: str | None = None  #: address of the published pages; it ends with a slash
    repository: str | None = None  #: the public one, https://github.com/OWNER/NAME
    branch: str = "main"  #: of the repository, from which notebooks are opened


def read_site() -> Site:
    """Return what CDOPT_TUTORIAL_URL, _REPOSITORY and _BRANCH say, or a ValueError."""
    address = r"(https?://[\w.-]+(?::\d+)?(?:/[\w./~%-]*)?)"
    url = _read("URL", address, "an address like https://host/path/")
    # Colab opens notebooks from GitHub only.
    address = r"https?://(github\.com/[\w-]+/[\w.-]+?)(?:\.git)?/?"
    needed = "an address like https://github.com/OWNER/NAME"
    place = _read("REPOSITORY", address, needed)
    branch = _read("BRANCH", r"([\w.-]+(?:/[\w.-]+)*)", "the name of a branch")
    url, place = url and url.rstrip("/") + "/", place and f"https://{place}"
    return Site(url, place, branch or Site.branch)


def _read(name: str, pattern: str, needed: str) -> str | None:
    """Return the part of a variable that is wanted; None if it is not set, or empty."""
    value = os.environ.get(f"CDOPT_TUTORIAL_{name}")
    if not value:
        return None
    if match := re.fullmatch(pattern, value, re.ASCII):
        return match[1]
    raise ValueError(f"CDOPT_TUTORIAL_{name} is {value!r}: {needed} is needed")


def add_site(config: dict[str, Any], site: Site) -> None:
    """Add to a configuration of jupyter-book, in place, what follows from `site`."""
    sphinx, published = config["sphinx"]["config"], config.pop("published", {})
    if site.url:
        sphinx["extensions"] += published.pop("extensions", [])
        sphinx |= published | {
            "html_baseurl": site.url,
            "notfound_urls_prefix": urlsplit(site.url).path,  # shown at any depth
            "ogp_site_url": site.url,
        }
    if site.repository:
        sphinx.setdefault("html_theme_options", {}).update(
            repository_url=site.repository,
            repository_branch=site.branch,
            use_repository_button=True,
            launch_buttons=_LAUNCH,
        )
