#!/usr/bin/env python3
"""Makes the site: the guide from README.md and docs/, the API reference from the public headers, and a search that works from
a file:// URL. Needs doxygen, and Sphinx with the packages that requirements.txt names.

usage: make_site.py ROOT OUT       OUT/html/index.html is the first page; exit status 1 for a dead link, a name without a contract
                                   or a contract without an end
"""

import pathlib
import re
import shutil
import subprocess
import sys

import api
import links

# The guide, in the order of a first reading. A page of docs/ that is in no group is an error of Sphinx.
GUIDE = {
    "Begin": ["start", "python", "pytorch", "fit"],
    "Within a budget": ["budget", "plans"],
    "Parts": ["by-hand", "precision", "optimizers", "ranks"],
    "Other languages": ["exported", "c"],
    "Reference": ["program", "devices", "open", "renamed"],
}
# What pages link to beside pages: shown as it is.
LINKED = ("bindings", "examples", "python", "script", "include", "src", "program", "tests", "tools", "LICENSE", "requirements.txt", "packages.txt")


def toctree(caption, pages):
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def stage(root, source):
    """The pages as Sphinx reads them: README.md is the first one."""
    shutil.rmtree(source, ignore_errors=True)
    (source / "docs").mkdir(parents=True)
    shutil.copytree(root / "benchmarks/results", source / "benchmarks/results")
    for name in LINKED:
        (source / name).symlink_to(root / name)
    (source / "docs/figures").symlink_to(root / "docs/figures")
    for page in sorted((root / "docs").glob("*.md")):
        (source / "docs" / page.name).write_text(page.read_text().replace("](../README.md", "](../index.md"))
    for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (source / page).write_text((root / page).read_text().replace("](README.md", "](index.md"))
    modules = api.write_pages(root, source / "api")
    first = (root / "README.md").read_text()
    for caption, pages in GUIDE.items():
        first += toctree(caption, [f"docs/{page}" for page in pages if (root / f"docs/{page}.md").exists()])
    first += toctree("API reference", [f"api/{module}" for module in modules])
    first += toctree("Work on snug", ["ARCHITECTURE", "CONTRIBUTING", "CHANGELOG"])
    results = [f"benchmarks/results/{path.stem}" for path in sorted((root / "benchmarks/results").glob("*.md"), reverse=True)]
    first += toctree("Results", results)
    (source / "index.md").write_text(first)


def configuration(xml, version):
    return f"""
project, author, version = "snug", "", {version!r}
extensions = ["myst_parser", "breathe"]
root_doc = "index"
include_patterns = ["index.md", "docs/*.md", "api/*.md", "*.md", "benchmarks/results/*.md"]
breathe_projects = {{"snug": {str(xml)!r}}}
breathe_default_project = "snug"
myst_heading_anchors = 3
html_theme = "furo"
html_title = "snug " + version
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = []
pygments_style, pygments_dark_style = "friendly", "native"
# No faults of the pages: tables in code blocks, results that begin below a title, and structs of C that are typedefs of the same name.
suppress_warnings = ["misc.highlighting_failure", "myst.header", "duplicate_declaration.cpp"]
"""


def make(root, out):
    """Writes OUT/html. Returns a line for each dead link, public name without a contract, contract that does not end in a sentence, and
    thing that a page loads from elsewhere."""
    source = out / "source"
    stage(root, source)
    xml = api.run_doxygen(root, out / "doxygen")
    version = re.search(r"project\(\s*snug\s+VERSION\s+([\d.]+)", (root / "CMakeLists.txt").read_text())[1]
    (source / "conf.py").write_text(configuration(xml, version))
    shutil.rmtree(out / "html", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", out / "doctrees", source, out / "html"], check=True)
    return ([f"no contract: {name}" for name in api.undocumented(root, xml)] + [f"no sentence at its end: {end}" for end in api.unfinished(root)]
            + [f"dead link: {link}" for link in links.dead_links(out / "html")]
            + [f"not of the site: {link}" for link in links.loads_from_elsewhere(out / "html")])


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if shutil.which("doxygen") is None:
        sys.exit("make_site: there is no doxygen; apt-get install doxygen")
    root, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    problems = make(root, out)
    print("\n".join(problems) if problems else out / "html/index.html")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
