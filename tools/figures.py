#!/usr/bin/env python3
"""Writes the figures that documents quote from where they were measured: single ones from benchmarks/results/figures.json, tables and
what programs printed from the files of results.

An entry has a name, where it was measured (`source`, a file of results, and `line`, words of the line there that has the numbers), the
program and the date, and the numbers, as the source has them: `value`, and `low` and `high` where there is a spread; `digits` is how many
significant ones are shown. A document quotes it between comments, which readers do not see: <!--=name-->1.10 (1.03 to 1.21)<!--/-->

A table, or a block between ```, is quoted whole. It is the first one below a heading, or below the first line of the file that has the words:

    <!--from benchmarks/results/2026-11-25.md: words-->
    | a | table |
    <!--/from-->

usage: figures.py ROOT            writes the figures into the documents
       figures.py ROOT --check    changes nothing; a line for each that differs, and exit status 1
       figures.py ROOT --replace OLD NEW DATE
                                  entries whose source is OLD take their numbers from the same places of NEW, a later file of the same
                                  program, first; a line for each whose line is not there
"""

import decimal
import json
import pathlib
import re
import sys

FILE = "benchmarks/results/figures.json"
MARK = re.compile(r"(<!--=([\w.]+)-->)(.*?)(<!--/-->)")
BLOCK = re.compile(r"(<!--from ([^\s:]+): ([^\n]+?)-->\n)((?:(?!<!--from ).)*?)(<!--/from-->)", re.DOTALL)


def load(root):
    return {entry["name"]: entry for entry in json.loads((root / FILE).read_text(), parse_float=decimal.Decimal, parse_int=decimal.Decimal)["figures"]}


def rounded(number, digits):
    """With so many significant digits, halves away from zero; None: as it is."""
    if digits is None:
        return f"{number:f}"
    places = int(digits) - 1 - number.adjusted()
    step = decimal.Decimal(1).scaleb(-places)
    return f"{number.quantize(step, decimal.ROUND_HALF_UP):f}" if places > 0 else f"{int(number.quantize(step, decimal.ROUND_HALF_UP))}"


def text_of(entry):
    digits = entry.get("digits")
    text = rounded(entry["value"], digits) + entry.get("unit", "")
    if "low" in entry:
        text += f" ({rounded(entry['low'], digits)} to {rounded(entry['high'], digits)})"
    return text


def block_of(text, words):
    """Below a heading, if `words` are one as it stands, else below the first line that has them; not beyond the next heading. None: there is none."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if (line == words if words.startswith("#") else words in line)), len(lines)) + 1
    block = []
    for line in lines[begin:]:
        is_fenced = bool(block) and block[0] == "```"
        if block and not (is_fenced or line.startswith("|")) or not is_fenced and re.match("#+ ", line):
            break
        if block or line.startswith("|") or line == "```":
            block.append(line)
        if is_fenced and line == "```":
            break
    return "\n".join(block) + "\n" if block else None


def block_quoted(root, source, words):
    return block_of((root / source).read_text(), words) if (root / source).is_file() else None


def unended(path):
    text = path.read_text()
    if text.count("<!--from ") != len(BLOCK.findall(text)):
        yield "block"
    if text.count("<!--=") != len(MARK.findall(text)):
        yield "figure"


def documents(root):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\d.]\d)")


def replaced(entry, old, new):
    """The entry with the numbers that stand in the line of `new` where those of the entry stand in the line of `old`. None: there is no such
    line, or one of the numbers stands in the old one more than once."""
    given = {key: f"{entry[key]:f}" for key in ("value", "low", "high") if key in entry}
    for was in (line for line in old.splitlines() if entry["line"] in line):
        before = NUMBER.findall(was)
        if any(before.count(number) != 1 for number in given.values()):
            continue
        for line in new.splitlines():
            now = NUMBER.findall(line)
            if entry["line"] in line and len(now) == len(before):
                return {**entry, **{key: decimal.Decimal(now[before.index(number)]) for key, number in given.items()}}
    return None


def replace(root, old, new, date):
    """Yields the names of entries that cannot be found."""
    texts = [(root / source).read_text() for source in (old, new)]
    entries = []
    for entry in load(root).values():
        found = replaced(entry, *texts) if entry["source"] == old else entry
        if found is None:
            yield entry["name"]
        entries.append({**found, "source": new, "date": date} if found and entry["source"] == old else entry)
    # json has no decimals of its own: they go through it as marked texts.
    text = json.dumps({"figures": entries}, indent=1, default=lambda number: f"@{number:f}@")
    (root / FILE).write_text(re.sub(r'"@(-?[\d.]+)@"', r"\1", text) + "\n")


def problems(root):
    """What is wrong with the marks of the documents, and with the entries."""
    entries, quoted = load(root), set()
    for path in documents(root):
        for _, name, shown, _ in MARK.findall(path.read_text()):
            where = f"{path.relative_to(root)}: {name}"
            quoted.add(name)
            if name not in entries:
                yield f"{where} is not in {FILE}"
            elif shown != text_of(entries[name]):
                yield f"{where} is {shown!r}, and {text_of(entries[name])!r} in {FILE}"
        for _, source, words, shown, _ in BLOCK.findall(path.read_text()):
            where = f"{path.relative_to(root)}: from {source}: {words}"
            measured = block_quoted(root, source, words)
            if measured is None:
                yield f"{where}: there is no such block"
            elif shown != measured:
                yield f"{where}: the document's block is another"
        for what in unended(path):
            yield f"{path.relative_to(root)}: a {what}'s comment has no end"
    for name, entry in entries.items():
        if name not in quoted:
            yield f"{FILE}: {name} is quoted nowhere"
        missing = [key for key in ("source", "line", "program", "date", "machine") if not entry.get(key)]
        if missing:
            yield f"{FILE}: {name} does not say its {', '.join(missing)}"
            continue
        lines = [line for line in (root / entry["source"]).read_text().splitlines() if entry["line"] in line]
        numbers = [f"{entry[key]:f}" for key in ("value", "low", "high") if key in entry]
        if not any(all(re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", line) for number in numbers) for line in lines):
            yield f"{FILE}: no line of {entry['source']} with '{entry['line']}' has {', '.join(numbers)}"


def unmarked(text):
    """Numbers with a decimal point below "## What it costs" that stand in no mark, no quoted block and no code."""
    section = re.search(r"^## What it costs\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    rest = MARK.sub("", BLOCK.sub("", section[1])) if section else ""
    return re.findall(r"\d+\.\d+", re.sub(r"`[^`]*`|\([^)]*\)", "", rest))


def write(root):
    """Nothing in a document with a mark that has no end: what follows it might be lost."""
    entries = load(root)
    for path in documents(root):
        if any(True for _ in unended(path)):
            continue
        text = path.read_text()
        new = MARK.sub(lambda m: m[1] + text_of(entries[m[2]]) + m[4] if m[2] in entries else m[0], text)
        new = BLOCK.sub(lambda m: m[1] + (block_quoted(root, m[2], m[3]) or m[4]) + m[5], new)
        if new != text:
            path.write_text(new)


def main():
    is_replacement = len(sys.argv) == 6 and sys.argv[2] == "--replace"
    if len(sys.argv) < 2 or not (is_replacement or sys.argv[2:] in ([], ["--check"])):
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1]).resolve()
    found = [f"{name} is not in {sys.argv[4]}" for name in replace(root, *sys.argv[3:])] if is_replacement else []
    if sys.argv[2:] != ["--check"]:
        write(root)
    found += list(problems(root)) + [f"README.md: {number} is in no mark" for number in unmarked((root / "README.md").read_text())]
    print("\n".join(found) if found else "figures are those of the file")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
