"""Dead links of a folder of HTML pages: to files that are not there, and to places that their page does not have."""

import html.parser
import pathlib
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.loaded, self.places = [], [], {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
                if tag in ("link", "script", "img", "iframe"):
                    self.loaded.append(value)
            elif name == "id" or (name == "name" and tag == "a"):
                self.places.add(value)


def dead_links(folder):
    """Yields `page: link`, in order. Links to other hosts are not followed."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (target in pages and urllib.parse.unquote(parts.fragment) not in pages[target].places):
                yield f"{path.relative_to(folder.resolve())}: {link}"


def loads_from_elsewhere(folder):
    """Yields `page: link` for each style, script or picture that a page loads over a network."""
    for path in sorted(folder.rglob("*.html")):
        for link in Page(path).loaded:
            if urllib.parse.urlsplit(link).scheme in ("http", "https") or urllib.parse.urlsplit(link).netloc:
                yield f"{path.relative_to(folder)}: {link}"
