"""Properties of an HTML page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Unclosed tags, images, and URLs that the page would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.pictures, self.fetched = [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.pictures += tag == "svg"
        wanted = {"src", "href", "data"}
        self.fetched += [
            value for name, value in attributes if name in wanted and not value.startswith("#")
        ]
        if tag not in {"meta", "br", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
