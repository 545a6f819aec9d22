"""What follows for the pages from where the book is published; by default, nowhere."""

import os
from typing import Any
from urllib.parse import urlsplit


def add_site(config: dict[str, Any]) -> None:
    """Add to jupyter-book's configuration, in place, what the variables say.

    These are CDOPT_TUTORIAL_URL, _REPOSITORY (on GitHub) and _BRANCH; ValueError if an
    address is none.
    """
    sphinx, published = config["sphinx"]["config"], config.pop("published", {})
    options = config.pop("repository_options", {})
    if url := _address("CDOPT_TUTORIAL_URL", "http"):
        sphinx["extensions"] += published.pop("extensions", [])
        sphinx |= published | {"html_baseurl": f"{url}/", "ogp_site_url": f"{url}/"}
        # It is shown at any depth.
        sphinx["notfound_urls_prefix"] = f"{urlsplit(url).path}/"
    if place := _address("CDOPT_TUTORIAL_REPOSITORY", "https://github.com/"):
        branch = os.environ.get("CDOPT_TUTORIAL_BRANCH") or "main"
        options |= {"repository_url": place, "repository_branch": branch}
        sphinx.setdefault("html_theme_options", {}).update(options)


def _address(variable: str, start: str) -> str:
    """The value of a variable without a slash at its end; empty if it is not set."""
    value = os.environ.get(variable, "").rstrip("/")
    if value and not value.startswith(start):
        raise ValueError(f"{variable} is {value!r}, but must begin with {start}")
    return value
