"""Files to plain text: HTML, manual pages, Python, Markdown, component catalogues. Knows no sources."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import lxml.html

_SKIP_TAGS = {
    "script",
    "style",
    "nav",
    "header",
    "footer",
    "svg",
    "img",
    "button",
    "form",
    "head",
    "colgroup",
}
_SKIP_CLASSES = {"headerlink", "viewcode-link", "toctree-wrapper", "contents", "linenos", "sphinxsidebar"}
_BLOCKS = {"p", "div", "section", "article", "main", "blockquote", "dd", "dl", "ul", "ol", "center", "hr"}
_CODE = {"code", "tt", "kbd", "samp"}
_CJK = re.compile(r"[\u3400-\u9fff]")


# ------------------------------------------------------------------------------------------------ HTML
@dataclass
class _Builder:
    """Collects blocks of text while the page's tree is walked."""

    drop: tuple[str, ...] = ()
    blocks: list[tuple[str, str]] = field(default_factory=list)
    line: list[str] = field(default_factory=list)
    lead: str = ""
    depth: int = 0
    style: str = "p"

    def flush(self) -> None:
        text = re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", "".join(self.line))).strip()
        self.line = []
        if text:
            self.blocks.append((self.style, self.lead + text))
            self.lead = "  " * self.depth
            self.style = "p"

    def children(self, node) -> None:
        self.inline(node.text)
        for child in node:
            if isinstance(child.tag, str) and not self.skipped(child):
                self.element(child)
            self.inline(child.tail)

    def inline(self, text: str | None) -> None:
        if text:
            self.line.append(re.sub(r"\s+", " ", text))

    def skipped(self, node) -> bool:
        if node.tag in _SKIP_TAGS or _SKIP_CLASSES & set(node.get("class", "").split()):
            return True
        return any(_matches(node, rule) for rule in self.drop)

    def element(self, node) -> None:
        tag = node.tag.lower()
        if tag == "pre":
            self.pre(node)
        elif re.fullmatch(r"h[1-6]", tag):
            self.wrapped(node, "#" * int(tag[1]) + " ", "p")
        elif tag == "li":
            self.item(node)
        elif tag == "dt":
            self.wrapped(node, "  " * self.depth, "dt")
        elif tag == "table":
            self.table(node)
        elif tag in _CODE and self.style != "dt" and not self.lead.startswith("#"):
            code = " ".join(node.text_content().split())
            self.line.append(f"`{code}`" if code and "`" not in code else code)
        elif tag == "br":
            self.line.append("\n")
        elif tag in _BLOCKS:
            self.flush()
            self.children(node)
            self.flush()
        else:
            self.children(node)

    def wrapped(self, node, lead: str, style: str) -> None:
        self.flush()
        self.lead, self.style = lead, style
        self.children(node)
        self.flush()
        self.lead, self.style = "  " * self.depth, "p"

    def item(self, node) -> None:
        self.flush()
        self.lead, self.style = "  " * self.depth + "- ", "li"
        self.depth += 1
        self.children(node)
        self.flush()
        self.depth -= 1
        self.lead, self.style = "  " * self.depth, "p"

    def pre(self, node) -> None:
        self.flush()
        text = node.text_content().strip("\n").rstrip()
        if text.strip():
            self.blocks.append(("p", f"```\n{text}\n```"))

    def table(self, node) -> None:
        self.flush()
        if node.xpath(".//pre|.//table|.//dl|.//ul"):
            self.children(node)
            self.flush()
            return
        rows = [
            [" ".join(cell.text_content().split()) for cell in row.xpath("./td|./th")]
            for row in node.iter("tr")
        ]
        lines = [" | ".join(cells).strip(" |") for cells in rows if any(cells)]
        text = "\n".join(lines)
        # A table of figures teaches a language model nothing.
        if text and sum(c.isdigit() for c in text) < 0.3 * len(text):
            self.blocks.append(("p", text))

    def text(self) -> str:
        parts: list[str] = []
        previous = ""
        for style, text in self.blocks:
            tight = previous == "dt" or (style == previous == "li")
            parts.append(("\n" if tight else "\n\n") + text)
            previous = style
        return "".join(parts).strip()


def _matches(node, rule: str) -> bool:
    name, value = rule.split("=", 1)
    if name == "tag":
        return node.tag == value
    found = node.get(name, "")
    return value in found.split() if name == "class" else found == value


def html_text(data: bytes, root: tuple[str, ...] = ("tag=body",), drop: tuple[str, ...] = ()) -> str:
    """The text of a page as light Markdown: headings, lists, fenced code; no navigation."""
    tree = lxml.html.fromstring(data, parser=lxml.html.HTMLParser(encoding="utf-8"))
    for rule in root:
        found = next(
            (node for node in tree.iter() if isinstance(node.tag, str) and _matches(node, rule)), None
        )
        if found is not None:
            builder = _Builder(drop=drop)
            builder.children(found)
            builder.flush()
            return _titled(builder.text(), tree.findtext(".//title") or "")
    return ""


def _titled(text: str, title: str) -> str:
    title = re.split(r" - cppreference| — | - LibreOffice", " ".join(title.split()))[0]
    return text if not text or not title or text.startswith("#") else f"# {title}\n\n{text}"


# -------------------------------------------------------------------------------------- manual pages
_ROFF_ESCAPES = (
    (re.compile(r'\\".*$'), ""),
    (re.compile(r"\\f(\(..|\[[^]]*\]|.)"), ""),
    (re.compile(r"\\s[-+]?\d"), ""),
    (re.compile(r"\\\*?\((aq|cq|oq)"), "'"),
    (re.compile(r"\\\*?\((lq|rq|dq)"), '"'),
    (re.compile(r"\\\(bu"), "-"),
    (re.compile(r"\\\((em|en)"), "--"),
    (re.compile(r"\\\(..|\\\[[^]]*\]|\\\*\(..|\\\*\[[^]]*\]"), ""),
    (re.compile(r"\\[&|^%:/,cdu]"), ""),
    (re.compile(r"\\[ 0~]"), " "),
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\e"), r"\\"),
)


def roff_text(data: bytes) -> str:
    """The text of a manual page written with the man macros; empty for other macro packages."""
    source = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")
    if re.search(r"^\.(Dd|so) ", source, re.M) or "\ufffd" in source:
        return ""
    page = _Page()
    # Before the first heading stand macro definitions, which are no text.
    start = re.search(r"^\.SH\b", source, re.M)
    for line in source[start.start() :].split("\n") if start else ():
        page.feed(line)
    return page.text()


@dataclass
class _Page:
    blocks: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    verbatim: list[str] | None = None
    term: bool = False

    def feed(self, line: str) -> None:
        if line[:1] in {".", "'"}:
            macro, _, rest = line[1:].strip().partition(" ")
            self.macro(macro, rest.strip())
        elif self.verbatim is not None:
            self.verbatim.append(_unescape(line))
        elif not line.strip():
            self.flush()
        else:
            self.add(_unescape(line))

    def macro(self, name: str, rest: str) -> None:
        arguments = [_unescape(a or b) for a, b in re.findall(r'"([^"]*)"|(\S+)', rest)]
        if name in {"SH", "SS"}:
            self.flush()
            self.blocks.append(("## " if name == "SH" else "### ") + " ".join(arguments))
        elif name in {"nf", "EX"}:
            self.flush()
            self.verbatim = []
        elif name in {"fi", "EE"}:
            self.close()
        elif name in {"B", "I", "SM", "SB"}:
            self.feed_text(" ".join(arguments))
        elif name in {"BR", "RB", "BI", "IB", "IR", "RI"}:
            self.feed_text("".join(arguments))
        elif name in {"TP", "PP", "P", "LP", "IP", "br", "sp", "HP", "RS", "RE"}:
            self.flush()
            self.term = name == "TP"
            if name == "IP" and arguments:
                self.words.append(arguments[0] + " ")

    def feed_text(self, text: str) -> None:
        if self.verbatim is not None:
            self.verbatim.append(text)
        else:
            self.add(text)

    def add(self, text: str) -> None:
        if self.words and not (_CJK.match(self.words[-1][-1:]) and _CJK.match(text[:1])):
            self.words.append(" ")
        self.words.append(text.strip())
        if self.term:
            self.term = False
            self.flush()

    def close(self) -> None:
        if self.verbatim and "".join(self.verbatim).strip():
            self.blocks.append("```\n" + "\n".join(self.verbatim).strip("\n") + "\n```")
        self.verbatim = None

    def flush(self) -> None:
        text = re.sub(r" +", " ", "".join(self.words)).strip()
        self.words = []
        if text:
            self.blocks.append(text)

    def text(self) -> str:
        self.flush()
        self.close()
        return "\n\n".join(self.blocks)


def _unescape(line: str) -> str:
    for pattern, by in _ROFF_ESCAPES:
        line = pattern.sub(by, line)
    return line


# ------------------------------------------------------------------------------------- code, Markdown
def python_text(data: bytes) -> str:
    """A source file without the licence comment at its head; empty for tables in disguise."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n").expandtabs(8)
    head = re.match(r"(?:#[^\n]*\n|\s*\n)+", text)
    if head and re.search(r"copyright|licen[cs]e", head.group(), re.I):
        text = text[head.end() :]
    lines = [line for line in text.split("\n") if line.strip()]
    digits = sum(c.isdigit() for c in text)
    if not lines or max(map(len, lines)) > 400 or digits > 0.12 * len(text) or "\ufffd" in text:
        return ""
    return text.strip() + "\n"


def markdown_text(data: bytes) -> str:
    """Markdown without front matter, raw HTML, images and badges; links keep their words."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^\s*</?[A-Za-z][^>\n]*>\s*$", "", text, flags=re.M)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]\n]*)\]\([^)\n]*\)", r"\1", text)
    return text.strip()


def changelog_texts(data: bytes, releases: int = 12) -> Iterator[tuple[str, str]]:
    """(first release, text) of a change log cut into chapters; without pull request numbers and authors."""
    text = markdown_text(data)
    text = re.sub(r"\s*[（(](?:by\s+)?[#@][^()（）\n]*[)）]", "", text)
    text = re.sub(r"\s*(?:by\s+)?@[\w-]+(?:\s*[（(]?#\d+[)）]?)?|\s*\(?#\d+\)?", "", text)
    parts = re.split(r"^(?=#{2,3} (?:🌈 )?v?\d)", text, flags=re.M)
    parts = [part.strip() for part in parts if re.match(r"#{2,3} (?:🌈 )?v?\d", part)]
    for start in range(0, len(parts), releases):
        chapter = parts[start : start + releases]
        yield chapter[0].split("\n")[0].strip("# 🌈`"), "\n\n".join(chapter)


def webtypes_texts(data: bytes) -> Iterator[tuple[str, str]]:
    """(component, page) for each component of a web-types catalogue."""
    html = json.loads(data)["contributions"]["html"]
    for component in html.get("elements", []) + html.get("vue-components", []):
        yield component["name"], _component_page(component)


_GROUPS = (
    ("attributes", "属性"),
    ("props", "属性"),
    ("slots", "插槽"),
    ("events", "事件"),
    ("methods", "方法"),
)


def _component_page(component: dict) -> str:
    blocks = [f"# {component['name']}", component.get("description", "")]
    groups = {**component.get("js", {}), **component}
    for key, title in _GROUPS:
        entries = groups.get(key) or []
        if entries:
            blocks.append(f"## {title}")
        blocks.extend(_entry(entry) for entry in entries if entry.get("description"))
    return "\n\n".join(block for block in blocks if block)


def _entry(entry: dict) -> str:
    kind = entry.get("type") or (entry.get("value") or {}).get("type") or ""
    kind = " | ".join(kind) if isinstance(kind, list) else str(kind)
    default = f"，默认值：`{entry['default']}`" if entry.get("default") else ""
    kind = f"（`{kind}`{default}）" if kind else ""
    description = re.sub(r"\[([^]\n]*)\]\([^)\n]*\)", r"\1", entry["description"])
    return f"`{entry['name'] or 'default'}`{kind}：{description}"
