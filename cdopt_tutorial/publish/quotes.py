"""What pages without code quote of the chapters' runs: figures and minutes."""

from cdopt_tutorial.publish.execute import find_result, open_cache, read_chapter
from cdopt_tutorial.publish.figures import claimed
from cdopt_tutorial.publish.project import Project


def quotes(project: Project, device: str) -> dict[str, dict]:
    """Return what a page may write between double braces.

    Called by `render`. A chapter without a valid result has nothing to quote.

    Returns:
        `figures`: the values that the chapters glued, by their names;
        `minutes`: how long each ran, by the name of its notebook.
    """
    cache = open_cache(project, device)
    figures, minutes = {}, {}
    for chapter in project.chapters():
        result = find_result(cache, read_chapter(chapter))
        if result is None:
            continue
        figures |= claimed(result.nb)
        minutes[chapter.stem] = result.record.data["execution_seconds"] / 60
    return {"figures": figures, "minutes": minutes}
