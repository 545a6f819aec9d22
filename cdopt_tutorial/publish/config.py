"""Jupyter Book's configuration, with what follows from where the book is published.

That is nowhere, unless the variables CDOPT_TUTORIAL_URL, _REPOSITORY (on GitHub) and
_BRANCH say otherwise.
"""

import os
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

import yaml
from jsonschema import ValidationError, validate
from jupyter_book.config import get_validator
from sphinx_external_toc.parsing import MalformedError, parse_toc_yaml

from cdopt_tutorial.publish.project import Project


def read_config(project: Project) -> dict[str, Any]:
    """Return what `_config.yml` and the variables say, for jupyter-book.

    A ValueError names a file that can't be read, or an address that is none.
    """
    file = "_toc.yml"
    try:
        parse_toc_yaml(project.root / file)
        file = "_config.yml"
        config = yaml.safe_load((project.root / file).read_text("utf-8"))
        _add_site(config)
        # jupyter-book itself would ignore a key that it does not know.
        known = deepcopy(get_validator().schema)
        for part in (known, *known["properties"].values()):
            part["additionalProperties"] = False
        validate(config, known)
    except (yaml.YAMLError, MalformedError, ValidationError) as error:
        why = getattr(error, "message", " ".join(str(error).split()))
        raise ValueError(f"{file} can't be read: {why}") from error
    except (KeyError, TypeError, AttributeError) as error:  # of a key that is needed
        raise ValueError(f"{file} can't be read: {error!r}") from error
    return config


def _add_site(config: dict[str, Any]) -> None:
    """Add to the configuration, in place, what the variables say."""
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
