"""The type stub _snug.pyi names what the extension has, and public functions and methods have types and texts."""

import ast
import inspect
import pathlib
import unittest

import snug
from snug import _snug

STUB = ast.parse(pathlib.Path(snug.__file__).with_name("_snug.pyi").read_text())


def names_in(body):
    """Of what a stub's module or class defines."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


def public(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


class Stubs(unittest.TestCase):
    def test_have_the_names_of_the_extension(self):
        self.assertEqual(set(names_in(STUB.body)), public(_snug))

    def test_have_the_members_of_its_classes(self):
        for node in STUB.body:
            if isinstance(node, ast.ClassDef):
                with self.subTest(node.name):
                    own = {name for name in names_in(node.body) if not name.startswith("_")}
                    self.assertEqual(own, public(getattr(_snug, node.name)))


class Package(unittest.TestCase):
    def test_shows_what_it_lists(self):
        self.assertEqual({name for name in public(snug) if not inspect.ismodule(getattr(snug, name))}, set(snug.__all__))

    def test_has_texts_and_types(self):
        for name in snug.__all__:
            thing = getattr(snug, name)
            members = {name: thing}
            if inspect.isclass(thing) and thing.__module__.startswith("snug._") and thing.__module__ != "snug._snug":
                members |= {f"{name}.{member}": value for member, value in vars(thing).items()
                            if inspect.isfunction(value) and (not member.startswith("_") or member == "__init__")}
                self.assertTrue(thing.__doc__, name)
            for path, function in members.items():
                if inspect.isfunction(function):
                    with self.subTest(path):
                        self.assertTrue(function.__doc__ or path.endswith("__init__"))
                        parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
                        self.assertEqual([p.name for p in parameters if p.annotation is p.empty], [])


if __name__ == "__main__":
    unittest.main()
