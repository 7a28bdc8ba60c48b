"""Tells the statements of a module that only define something from those that may change what a later import does.

The former are definitions of functions and classes, and constants. A definition runs only its decorators, default
values and base classes, so these must be plain too. The code of a function does not matter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

_DECORATORS = frozenset(
    "abstractmethod abc.abstractmethod classmethod contextmanager contextlib.contextmanager dataclass "
    "dataclasses.dataclass property staticmethod".split()
)
_CALLS = frozenset(
    "bool bytes dataclasses.field dict field float frozenset getLogger int len list logging.getLogger max min "
    "os.environ.get os.getenv os.path.abspath os.path.basename os.path.dirname os.path.join os.path.realpath Path "
    "pathlib.Path range re.compile set str threading.Lock threading.RLock tuple TypeVar typing.TypeVar".split()
)
"""Functions that only make a value."""
_METHODS = frozenset({"absolute", "resolve"})
"""Methods of a `Path` that only make a value."""


_OF_MISSING = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def only_defines(statement: ast.stmt) -> bool:
    """Return whether a statement only defines something, or does nothing when its module is imported."""
    match statement:
        case ast.Pass() | ast.Expr(ast.Constant()):
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return _are_decorators(statement.decorator_list) and _are_plain([statement.args, statement.returns])
        case ast.ClassDef(bases=bases, keywords=keywords, body=body):
            plain = _are_decorators(statement.decorator_list) and _are_plain([*bases, *keywords])
            return plain and all(map(only_defines, body))
        case ast.Assign(targets=targets, value=value):
            return all(map(_is_name, targets)) and _is_plain(value)
        case ast.AnnAssign(target=ast.Name(), annotation=annotation, value=value):
            return _are_plain([annotation, value])
        case ast.If(test=ast.Compare(ast.Name("__name__"), [ast.Eq()], [ast.Constant("__main__")]), orelse=[]):
            return True
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False


def handler_of_missing(statement: ast.Try) -> ast.ExceptHandler | None:
    """Return the handler of a `try` that runs if a module is missing."""
    for handler in statement.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if any(kind is None or ast.unparse(kind) in _OF_MISSING for kind in kinds):
            return handler
    return None


def _is_name(target: ast.expr) -> bool:
    """Whether only a name is assigned to. An attribute may be a setting of a library."""
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


def _are_decorators(decorators: Iterable[ast.expr]) -> bool:
    for decorator in decorators:
        called: ast.expr = decorator
        given: list[ast.AST] = []
        if isinstance(decorator, ast.Call):
            called, given = decorator.func, [*decorator.args, *decorator.keywords]
        of_property = isinstance(called, ast.Attribute) and called.attr in ("setter", "getter", "deleter")
        if not (of_property or ast.unparse(called) in _DECORATORS) or not _are_plain(given):
            return False
    return True


def _are_plain(nodes: Iterable[ast.AST | None]) -> bool:
    return all(node is None or _is_plain(node) for node in nodes)


def _is_plain(node: ast.AST) -> bool:
    """Whether an expression calls only functions that make a value and do nothing else."""
    match node:
        case ast.Lambda(args=arguments):
            return _is_plain(arguments)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _METHODS:
            return _is_plain(value)
        case ast.Call(func=called) if ast.unparse(called) not in _CALLS:
            return False
        case ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
            return False
    return _are_plain(ast.iter_child_nodes(node))
