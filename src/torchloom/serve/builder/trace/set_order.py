"""Whether code may depend on the order of a set, or on the hash of a text.

Both differ between processes, as PYTHONHASHSEED does, and Dynamo puts no guard on either. Most sets are only asked
whether something is in them, which depends on neither. So where bytecode shows that a set is made, the source of that
code is parsed, if it is still the source of the very same code. Each set in it may be asked for members or its length,
be sorted, or fill dicts that are only looked up by its items (`for kind in set(kinds): masks[kind] = mask_of(kind)`); code
that uses one in any other way counts as depending on its order.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import types
from collections.abc import Collection, Iterator

from torchloom.bytecode import code_digest, nested

_MAKES = frozenset({"BUILD_SET", "SET_ADD", "SET_UPDATE"})
_KINDS = frozenset({"set", "frozenset"})
_VIEWS = frozenset({"keys", "items"})
_OPERATORS = (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor)
_SIGNS = frozenset({"-", "&", "|", "^", "-=", "&=", "|=", "^="})
_OLD_SIGNS = frozenset(
    f"{kind}_{name}" for kind in ("BINARY", "INPLACE") for name in ("SUBTRACT", "AND", "OR", "XOR")
)
"""Instructions for these before Python 3.11."""
_RETURN_SETS = frozenset(
    {"copy", "union", "difference", "intersection", "symmetric_difference", "__or__", "__and__"}
)
_ASK = frozenset({"isdisjoint", "issubset", "issuperset", "__contains__", "__len__", "__eq__"})
_CHANGE = frozenset(
    {
        *("add", "discard", "remove", "clear", "update", "difference_update"),
        *("intersection_update", "symmetric_difference_update"),
    }
)
_ANSWERS = frozenset({"len", "bool", "any", "all", "isinstance", "type"})
"""Functions whose result no order changes; `sorted` is one if it is given no key."""
_FOLDS = frozenset({"any", "all", "len", "sorted", *_KINDS})
"""Functions that may go through what comes of each item in any order."""


def hashes_differ(value: object) -> bool:
    """Return whether a value may hash to something else in another process."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(hashes_differ, value))
    return not isinstance(value, (int, float, complex))


def asks_for_hashes(code: types.CodeType) -> bool:
    """Return whether code calls `hash`; what `__hash__` returns is only looked up by."""
    return code.co_name != "__hash__" and _calls(code, "hash")


def asks_for_addresses(code: types.CodeType) -> bool:
    """Return whether code calls `id`."""
    return _calls(code, "id")


def depends_on_order(code: types.CodeType, names: Collection[str] = ()) -> bool:
    """Return whether code may go through a set, in an order that it makes something of.

    Args:
        code: of one function.
        names: under which it may find sets that were made elsewhere, with a dot before those of attributes and keys;
            sets that it makes if there are none.
    """
    if not any(_has_sets(each, names) for each in nested(code)):
        return False
    statement = _statement_of(code)
    return statement is None or _Sets(statement, names).may_be_gone_through()


def _calls(code: types.CodeType, name: str) -> bool:
    return name in code.co_names and any(
        step.argval == name and step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME"))
        for step in dis.get_instructions(code)
    )


def _has_sets(code: types.CodeType, names: Collection[str]) -> bool:
    if names:
        reached = {f".{each}" for each in (*code.co_names, *code.co_consts)}
        known = {*code.co_names, *code.co_varnames, *code.co_freevars, *reached}
        return not known.isdisjoint(names)
    steps = list(dis.get_instructions(code))
    if not _KINDS.isdisjoint(code.co_names) or any(step.opname in _MAKES for step in steps):
        return True
    if not _VIEWS.isdisjoint(code.co_names) and any(
        step.argrepr in _SIGNS or step.opname in _OLD_SIGNS for step in steps
    ):
        return True
    following = itertools.pairwise(steps)
    return any(
        isinstance(step.argval, frozenset)
        and hashes_differ(step.argval)
        and then.opname != "CONTAINS_OP"
        for step, then in following
    )


@functools.cache
def _statement_of(code: types.CodeType) -> ast.stmt | None:
    """Return the statement of a module or class that defines code, None where no source is known to be its own."""
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename))
    if not text:
        return None
    try:
        tree, made = _parsed(text, code.co_filename)
    except (SyntaxError, ValueError, RecursionError):
        return None
    line = code.co_firstlineno
    if (line, code_digest(code)) not in made:
        return None  # edited since it was imported, or changed on import as pytest does
    body: list[ast.stmt] = tree.body
    while True:
        found = next(
            (each for each in body if _first_line(each) <= line <= (each.end_lineno or 0)), None
        )
        if not isinstance(found, (ast.ClassDef, ast.If, ast.Try, ast.With)):
            return found
        inner = [each for each in ast.iter_child_nodes(found) if isinstance(each, ast.stmt)]
        if not inner:
            return found
        body = inner


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


@functools.lru_cache(maxsize=16)
def _parsed(text: str, name: str) -> tuple[ast.Module, frozenset[tuple[int, str]]]:
    """Return a text's tree, and lines and digests of the code that it makes."""
    tree = ast.parse(text)
    made = compile(text, name, "exec", dont_inherit=True)
    return tree, frozenset((each.co_firstlineno, code_digest(each)) for each in nested(made))


class _Sets:
    """The sets in a statement, and what becomes of them."""

    def __init__(self, statement: ast.stmt, names: Collection[str]) -> None:
        self._tree, self._names = statement, frozenset(names)
        self._above = {
            child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)
        }
        self._locals: set[str] = set()
        self._imported = {
            each.asname or each.name
            for node in ast.walk(statement)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        self._views = {
            target.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Assign) and _is_view(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        while more := set(self._assigned()) - self._locals:
            self._locals |= more

    def may_be_gone_through(self) -> bool:
        """Return whether any of them goes where its order could be seen."""
        return any(
            self._is_set(node) and not self._is_asked(node)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.expr)
        )

    def _assigned(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and self._is_set(node.value):
                yield from (each.id for each in node.targets if isinstance(each, ast.Name))
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                is_set = node.value is not None and self._is_set(node.value)
                if is_set and isinstance(node.target, ast.Name):
                    yield node.target.id

    def _is_set(self, node: ast.AST) -> bool:  # noqa: PLR0911 - one for each form of expression
        match node:
            case ast.Set(elts):
                constants = [each.value for each in elts if isinstance(each, ast.Constant)]
                is_plain = len(constants) == len(elts) and not any(map(hashes_differ, constants))
                return not self._names and not is_plain
            case ast.SetComp():
                return not self._names
            case ast.Call(ast.Name(id=name)) if name in _KINDS:
                return not self._names or any(map(self._is_set, node.args))
            case ast.Call(ast.Attribute(base, name)) if name in _RETURN_SETS:
                return self._is_set(base)
            case ast.BinOp(left, operator, right) if isinstance(operator, _OPERATORS):
                sides = (left, right)
                is_of_views = any(
                    _is_view(each) or (isinstance(each, ast.Name) and each.id in self._views)
                    for each in sides
                )
                return (is_of_views and not self._names) or any(map(self._is_set, sides))
            case ast.Name(name, ast.Load()):
                is_imported = name in self._imported and f".{name}" in self._names
                return name in self._locals or name in self._names or is_imported
            case ast.Attribute(_, name, ast.Load()):
                return name in self._names or f".{name}" in self._names
            case ast.Subscript(_, ast.Constant(str(name)), ast.Load()):
                return f".{name}" in self._names
            case ast.IfExp(_, one, other):
                return self._is_set(one) or self._is_set(other)
            case ast.BoolOp(_, values):
                return any(map(self._is_set, values))
            case ast.NamedExpr(_, value):
                return self._is_set(value)
        return False

    def _is_told(self, node: ast.AST) -> bool:
        """Return whether an expression is part of what an error says."""
        while isinstance(node, (ast.expr, ast.keyword)):
            node = self._above[node]
        return isinstance(node, ast.Raise)

    def _is_asked(self, node: ast.expr) -> bool:  # noqa: C901, PLR0911 - one for each form of use
        """Return whether what a set is used for does not show its order; what makes another set is judged there."""
        above = self._above.get(node)
        if above is not None and (self._is_set(above) or self._is_told(node)):
            return True
        match above:
            case ast.Compare() | ast.UnaryOp(ast.Not()):
                return True
            case ast.If() | ast.While() | ast.Assert() | ast.Expr() | ast.IfExp():
                return getattr(above, "test", node) is node
            case ast.Assign(targets):
                return all(isinstance(each, ast.Name) for each in targets)
            case ast.AnnAssign(target) | ast.AugAssign(target):
                return isinstance(target, ast.Name)
            case ast.Call(ast.Name(id=name), args):
                return node in args and (
                    name in _ANSWERS or (name == "sorted" and not above.keywords)
                )
            case ast.Call(ast.Attribute(base, name), args):
                return (
                    node in args and name in (_RETURN_SETS | _ASK | _CHANGE) and self._is_set(base)
                )
            case ast.Attribute(_, name):
                is_called = isinstance(self._above.get(above), ast.Call)
                return is_called and name in (_ASK | _CHANGE)
            case ast.For(ast.Name(item), body=body, orelse=[]):
                return self._is_kept_to(item) and all(self._fills(each, item) for each in body)
            case ast.comprehension(ast.Name(item)):
                made = self._above[above]
                if isinstance(made, ast.SetComp):
                    return True
                if isinstance(made, ast.DictComp):
                    return self._fills(self._above[made], item)
                last = self._above.get(made)
                return (
                    isinstance(made, (ast.GeneratorExp, ast.ListComp))
                    and isinstance(last, ast.Call)
                    and isinstance(last.func, ast.Name)
                    and last.func.id in _FOLDS
                    and not last.keywords
                )
        return False

    def _fills(self, node: ast.AST, item: str) -> bool:
        """Return whether a statement only puts what is made of an item in dicts, where it is looked up by that item."""
        match node:
            case ast.If(test, body, orelse):
                return _is_made_of(test, item) and all(
                    self._fills(each, item) for each in body + orelse
                )
            case ast.Assign([ast.Subscript(ast.Name(name), ast.Name(key))], value):
                return key == item and _is_made_of(value, item) and self._is_looked_up(name)
            case ast.Assign([ast.Name(name)], ast.DictComp(ast.Name(key), value, [_])):
                return key == item and _is_made_of(value, item) and self._is_looked_up(name)
        return False

    def _is_looked_up(self, name: str) -> bool:
        """Return whether a name stands for a dict that is made here, and nothing is used of it but entries."""
        is_made = False
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name) and node.id == name:
                above = self._above[node]
                value = getattr(above, "value", None)
                is_made |= isinstance(value, (ast.Dict, ast.DictComp))
                if isinstance(node.ctx, ast.Load) and not (
                    isinstance(above, ast.Subscript) and value is node
                ):
                    return False
        return is_made

    def _is_kept_to(self, item: str) -> bool:
        """Return whether an item is a name of items of loops alone: none is read after its loop."""
        inside = {
            id(node)
            for each in ast.walk(self._tree)
            for loop in getattr(each, "generators", [each])
            if isinstance(loop, (ast.For, ast.comprehension)) and isinstance(loop.target, ast.Name)
            if loop.target.id == item
            for node in ast.walk(each)
        }
        return all(
            id(node) in inside
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Name) and node.id == item
        )


def _is_made_of(value: ast.expr, item: str) -> bool:
    """Return whether an expression gives each call the item, and looks up nothing by another name of a dict."""
    for node in ast.walk(value):
        is_given = any(isinstance(each, ast.Name) and each.id == item for each in ast.walk(node))
        is_call = isinstance(node, ast.Call)
        is_entry = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
        if isinstance(node, ast.NamedExpr) or ((is_call or is_entry) and not is_given):
            return False
    return True


def _is_view(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _VIEWS
    )
