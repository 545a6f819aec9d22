"""Where the book is published, and the settings of its pages that follow from this."""

import os
import re
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import urlsplit

VERSION = version("cdopt-tutorial")
# Each variable's pattern, whose group is the value, and its description for a reader.
_VARIABLES = {
    "URL": (
        r"(https?://[\w.-]+(?::\d+)?(?:/[\w./~%-]*)?)",
        "an address like https://host/path/",
    ),
    "REPOSITORY": (  # Colab opens notebooks from GitHub only
        r"https?://(github\.com/[\w-]+/[\w.-]+?)(?:\.git)?/?",
        "an address like https://github.com/OWNER/NAME",
    ),
    "BRANCH": (r"([\w.-]+(?:/[\w.-]+)*)", "the name of a branch"),
}


class Site(NamedTuple):
    """Where the book is published; by default, nowhere."""

    url: str | None = None  #: address of the pages, with a slash at its end
    repository: str | None = None  #: https://github.com/OWNER/NAME
    branch: str = "main"  #: from which notebooks are opened


def read_site() -> Site:
    """Read CDOPT_TUTORIAL_URL, _REPOSITORY and _BRANCH; ValueError if one is bad."""
    found = []
    for name, (pattern, needed) in _VARIABLES.items():
        value = os.environ.get(f"CDOPT_TUTORIAL_{name}")
        match = value and re.fullmatch(pattern, value, re.ASCII)
        if value and not match:
            raise ValueError(f"CDOPT_TUTORIAL_{name} is {value!r}: {needed} is needed")
        found.append(match[1] if match else None)
    url, place, branch = found
    url, place = url and url.rstrip("/") + "/", place and f"https://{place}"
    return Site(url, place, branch or Site().branch)


def add_site(config: dict[str, Any], site: Site) -> None:
    """Add what follows from `site` to jupyter-book's configuration, in place."""
    sphinx, published = config["sphinx"]["config"], config.pop("published", {})
    options = config.pop("repository_options", {})
    if site.url:
        sphinx["extensions"] += published.pop("extensions", [])
        sphinx |= published | {
            "html_baseurl": site.url,
            "notfound_urls_prefix": urlsplit(site.url).path,  # shown at any depth
            "ogp_site_url": site.url,
        }
    if site.repository:
        options |= {"repository_url": site.repository, "repository_branch": site.branch}
        sphinx.setdefault("html_theme_options", {}).update(options)
