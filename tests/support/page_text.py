"""What a page of HTML says, and of which elements it is made."""

from html.parser import HTMLParser

_TOGETHER = {"span", "b", "i", "code", "a", "small"}  # elements within a line


class PageText(HTMLParser):
    """The text of ``source``, without markup, style or script; a line for each row, heading or paragraph."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._rows, self.names, self._skipped = [list[str]()], set[str](), 0
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)
        self._skipped += tag in ("style", "script")
        self._row(tag)

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("style", "script")
        self._row(tag)

    def _row(self, tag: str) -> None:
        if tag not in {*_TOGETHER, "td", "th", "dd"}:
            self._rows.append([])

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._rows[-1] += data.split()

    @property
    def lines(self) -> str:
        return "\n".join(" ".join(row) for row in self._rows if row)

    @property
    def text(self) -> str:
        """All of it on one line."""
        return " ".join(self.lines.split())
