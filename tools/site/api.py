"""The public names of snug's headers and their contracts, from Doxygen's XML; and the pages of the API reference."""

import pathlib
import re
import subprocess
import xml.etree.ElementTree as ElementTree

# The filters make the comment that opens a header its own, comments of C contracts, and drop defaults that Sphinx cannot read.
DOXYFILE = """
PROJECT_NAME = snug
INPUT = include/snug bindings/c/snug {out}/namespaces.dox
FILE_PATTERNS = *.h *.dox
RECURSIVE = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
OUTPUT_DIRECTORY = {out}
FULL_PATH_NAMES = YES
STRIP_FROM_PATH = {root}
QUIET = YES
WARNINGS = NO
WARN_IF_UNDOCUMENTED = NO
BUILTIN_STL_SUPPORT = YES
MARKDOWN_SUPPORT = YES
AUTOLINK_SUPPORT = NO
HAVE_DOT = NO
CLASS_GRAPH = NO
ENABLE_PREPROCESSING = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = TORCH_MODULE(name)= SNUG_C_API= __cplusplus
EXCLUDE_SYMBOLS = *::detail::* detail
FILTER_PATTERNS = */c.h="sed -e '1s#^#/** @file */ #' -e 's#^/\\* #/** #'" *.h="sed -e 's#^.pragma once#/** @file */#' -e 's# = [{{[][].][^;]*;#;#'"
"""

# A page of the reference: its title and its headers. Headers that no page names are on the last one.
PAGES = {
    "c": ("C interface", []),
    "step": ("A training step", ["stepper", "stepper_options", "step_plan", "accumulation"]),
    "memory": ("Memory and plans", ["memory", "plan", "checkpoint", "sliced", "offload", "chunked_loss", "offload_link"]),
    "precision": ("Precision", ["precision", "autocast", "grad_scaler", "precision_guard"]),
    "optim": ("Optimizers", ["adamw", "sgd", "muon", "clip", "schedule", "step_in_backward", "fused_optimizer", "optimizer"]),
    "data": ("Data and files", ["loader", "sampler", "snapshot", "safetensors"]),
    "distributed": ("Several ranks", ["distributed/process_group", "distributed/data_parallel", "distributed/sharded_optimizer",
                                      "distributed/sync_batch_norm", "training_ranks"]),
    "exported": ("Models from Python", ["exported/exported_module"]),
    "core": ("Core", ["core", "state"]),
    "more": ("More", []),
}


# What of a file and of a class is shown: nothing that is private or protected, and no comparison operators.
SECTIONS = ("briefdescription detaileddescription enum typedef func var define public-type public-func public-static-func "
            "public-attrib public-static-attrib user-defined innerclass innernamespace")


def run_doxygen(root, out):
    """Writes the XML to `out`/xml, without classes that are private to others."""
    out.mkdir(parents=True, exist_ok=True)
    # Doxygen shows what is in a namespace only if the namespace is documented.
    (out / "namespaces.dox").write_text("/** @namespace snug\n The library. */\n")
    subprocess.run(["doxygen", "-"], input=DOXYFILE.format(out=out, root=root), text=True, check=True, cwd=root)
    for path in (out / "xml").glob("*.xml"):
        path.write_text(re.sub(r'<innerclass [^>]*prot="(private|protected)">.*?</innerclass>', "", path.read_text()))
    return out / "xml"


def head_comment(text):
    """The comment with which a header opens, as Markdown: what is indented in it is code."""
    found = re.match(r"#pragma once\n((?://.*\n)+)", text)
    lines = [line[2:] for line in found[1].splitlines()] if found else []
    if not found and (found := re.search(r"^/\* (.*?) \*/", text, re.MULTILINE | re.DOTALL)):
        lines = [" " + re.sub(r"^ \* ?", "", line) for line in found[1].splitlines()]
    markdown, in_code = [], False
    for line in lines:
        code = line.startswith("   ")
        if code != in_code and (line.strip() or not in_code):
            markdown.append("```cpp" if code else "```")
            in_code = code
        markdown.append(line[3:] if in_code else line[1:])
    return "\n".join(markdown + (["```"] if in_code else []))


def has_words(element):
    return any("".join(element.find(tag).itertext()).strip() for tag in ("briefdescription", "detaileddescription"))


def needs_no_words(member, owner):
    """Copies, moves, comparisons and destructors do what they always do; an override has its contract where it was declared."""
    name, arguments = member.findtext("name"), member.findtext("argsstring") or ""
    own = owner.split("::")[-1]
    values = member.findall("enumvalue")
    return (name in (own, "forward") or name.startswith(("~", "operator")) or (values and all(map(has_words, values))) or member.get("kind") in ("friend", "variable")
            or member.find("reimplements") is not None or re.search(r"\b(override|final)\b", arguments) is not None)


def is_in_commented_group(lines, number):
    """Whether a contract stands above the lines without a gap in which line `number`, from 1, is."""
    for line in reversed(lines[:number - 1]):
        if not line.strip() or line.rstrip().endswith(("{", ":")) or line.strip().startswith(("}", "#")):
            return False
        if line.lstrip().startswith(("///", "/*", "* ")) or "///<" in line:
            return True
    return False


def undocumented(root, xml):
    """Public names without a contract, as `file:line: kind name`.

    A name has one where a comment stands beside it or above the group of lines that it is in, or where the comment that
    opens its header names it. A type NameOptions or NameImpl belongs to Name. The fields of a type belong to it, so their
    own comments are not asked for; and a type has a contract where all its fields or values have one. forward() is what a
    module's class is described by."""
    for path in sorted(xml.glob("*.xml")):
        for compound in ElementTree.parse(path).getroot().findall("compounddef"):
            owner = compound.findtext("compoundname")
            if compound.get("kind") not in ("class", "struct", "namespace", "file") or compound.get("prot", "public") != "public" or "detail" in owner:
                continue
            if compound.get("kind") in ("class", "struct"):
                place = compound.find("location")
                short = owner.split("::")[-1]
                names = {short, re.sub(r"(Options|Impl)$", "", short)}
                head = head_comment((root / place.get("file")).read_text())
                called = {re.sub("_", "", word).lower() for word in re.findall(r"\w+", head)}
                fields = [member for member in compound.iter("memberdef") if member.get("kind") == "variable" and member.get("prot") == "public"]
                if not has_words(compound) and not called & {name.lower() for name in names} and not (fields and all(map(has_words, fields))):
                    yield f"{place.get('file')}:{place.get('line')}: {compound.get('kind')} {owner}"
            for member in compound.iter("memberdef"):
                place = member.find("location")
                if member.get("prot") != "public" or has_words(member) or needs_no_words(member, owner):
                    continue
                name = member.findtext("name")
                text = (root / place.get("file")).read_text()
                if is_in_commented_group(text.splitlines(), int(place.get("line"))):
                    continue
                head = head_comment(text)
                if compound.get("kind") in ("namespace", "file") and re.search(rf"\b{re.escape(name)}\b", head):
                    continue
                yield f"{place.get('file')}:{place.get('line')}: {member.get('kind')} {owner}::{name}"


COMMENT = re.compile(r"(?:^ *///(?!<).*\n)+|^/\* (?!---)(?:.|\n)*?\*/|\A#pragma once\n(?://.*\n)+", re.MULTILINE)


def unfinished(root):
    """Contracts, and comments that open headers, that end neither with a sentence nor with code, as `file:line: its end`."""
    for header in (header for headers in public_headers(root).values() for header in headers):
        text = header.read_text()
        for comment in COMMENT.finditer(text):
            last = re.sub(r"^ *(///?|/?\*)?|\*/$", "", comment[0].rstrip().splitlines()[-1]).rstrip()
            if not last.endswith((".", ":", ";")) and not last.startswith("  "):
                yield f"{header.relative_to(root)}:{text.count(chr(10), 0, comment.start()) + comment[0].rstrip().count(chr(10)) + 1}: {last.strip()}"


def public_headers(root):
    """Page -> its headers, as installed."""
    folder = root / "include/snug"
    left = {path.relative_to(folder).as_posix().removesuffix(".h"): path for path in sorted(folder.rglob("*.h")) if path.name != "snug.h"}
    pages = {page: [left.pop(name) for name in names if name in left] for page, (_, names) in PAGES.items()}
    pages["c"], pages["more"] = [root / "bindings/c/snug/c.h"], list(left.values())
    return {page: headers for page, headers in pages.items() if headers}


def write_pages(root, pages):
    """A page for each module, with each header's opening comment and its declarations. Returns the pages' names."""
    pages.mkdir(parents=True, exist_ok=True)
    for module, headers in public_headers(root).items():
        text = [f"# {PAGES[module][0]}", ""]
        for header in headers:
            text += [f"## {header.relative_to(root / ('bindings/c' if module == 'c' else 'include')).as_posix()}", "", head_comment(header.read_text()), "",
                     f"```{{doxygenfile}} {header.name}", ":project: snug", f":sections: {SECTIONS}", "```", ""]
        (pages / f"{module}.md").write_text("\n".join(text))
    return list(public_headers(root))
