"""Places in a source where one small change makes a mutant."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple


class Site(NamedTuple):
    """A piece of a file's text, and what a mutant has in its place."""

    start: int
    kind: str
    before: str
    after: str


#: Each operator, and what a mutant has in its place.
OPERATORS = {
    "==": "!=",
    "!=": "==",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "*": "//",
    "//": "*",
}

# Python ---------------------------------------------------------------------------------------

PYTHON_OPERATOR = re.compile(r"(is not|is|not in|in|and|or)\b|[=!<>]=|//|[<>+*-]")
#: Calls that only say something.
SAYING = re.compile(r"warn|log|print|debug|info\b")


class PythonSites(ast.NodeVisitor):
    """Collects the sites of a Python file; messages, annotations and decorators have none."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [0]
        for line in text.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.sites: list[Site] = []
        self.visit(ast.parse(text))

    def at(self, node: ast.expr | ast.stmt) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind: str, start: int, end: int, after: str) -> None:
        self.sites.append(Site(start, kind, self.text[start:end], after))

    def operator(self, left: ast.expr, right: ast.expr) -> None:
        start, end = self.end(left), self.at(right)
        found = PYTHON_OPERATOR.search(self.text, start, end)
        if found and found[0] in OPERATORS and "#" not in self.text[start:end]:
            self.add("operator", found.start(), found.end(), OPERATORS[found[0]])

    def negate(self, test: ast.expr) -> None:
        source = self.text[self.at(test) : self.end(test)]
        if "TYPE_CHECKING" not in source:
            self.add("condition", self.at(test), self.end(test), f"not ({source})")
        self.visit(test)

    def visit_Raise(self, node: ast.Raise) -> None:
        """A message has no sites."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text has no sites."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        self.operator(node.left, node.comparators[0])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.operator(node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        whole = ast.unparse(node)
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv) and not re.search(
            r"['\"\[]", whole
        ):
            self.operator(node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("condition", self.at(node), self.at(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", self.at(node), self.end(node), str(not node.value))
        elif isinstance(node.value, int):
            self.add("constant", self.at(node), self.end(node), str(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        self.negate(node.test)
        for child in (*node.body, *node.orelse):
            self.visit(child)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.visit(node.body)
        self.visit(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not isinstance(node.value, ast.Constant):
            self.add("return value", self.at(node.value), self.end(node.value), "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if SAYING.search(ast.unparse(node.value.func)):
                return
            self.add("statement", self.at(node), self.end(node), "pass")
        self.generic_visit(node)


def python_sites(text: str) -> Iterator[Site]:
    """Yield the sites of a Python file."""
    if text.isascii():
        yield from PythonSites(text).sites


# Rust -----------------------------------------------------------------------------------------

#: Comments, strings, characters and attributes, which are not code.
RUST_TEXTS = re.compile(
    r"//[^\n]*|/\*.*?\*/|b?r#\"(?:.*?)\"#|b?\"(?:\\.|[^\"\\])*\"|b?'(?:\\[^\n]+?|[^\\'\n])'"
    r"|#!?\[(?:[^\[\]]|\[[^\]]*\])*\]",
    re.DOTALL,
)
TEST_ITEM = re.compile(r"#\[cfg\((?:test|all\(test|any\(test)[^\n]*\]\s*\n(?:\s*#\[[^\n]*\]\n)*")
RUST_OPERATOR = re.compile(r"(?<=\s)(?:==|!=|<=|>=|<|>|&&|\|\||\+|-)(?=\s)")
RUST_NUMBER = re.compile(r"(?<![\w.])(\d[\d_]*)((?:[ui](?:8|16|32|64|size))?)(?![\w.]|\s*=>)")
RUST_BOOL = re.compile(r"\b(?:true|false)\b(?!\s*=>)")
RUST_IF = re.compile(r"\b(?:if|while) (?!let\b)((?:(?!=>)[^{};])+?) \{")
RUST_STATEMENT = re.compile(
    r"(?m)^ +((?!let |return|use |break|continue|drop\()[a-z_][\w.:]*\([^;\n]*\)\??;)$"
)
RUST_RETURN = re.compile(r"-> (bool|usize|u64|Option<[^{;]*>|Result<\(\)[^{;]*>) (\{)")
RUST_VALUES = {"bool": "true", "usize": "0", "u64": "0", "Option": "None", "Result": "Ok(())"}


def blank(text: str) -> str:
    """Return spaces in place of a text, with its lines."""
    return re.sub(r"[^\n]", " ", text)


def closing(text: str, opening: int) -> int:
    """Return where the brace at `opening` is closed."""
    depth = 0
    for found in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return found.end()
    return len(text)


def rust_code(text: str) -> str:
    """Return a Rust file with spaces in place of comments, texts, attributes and tests."""
    tests = [found.span() for found in TEST_ITEM.finditer(text)]
    code = RUST_TEXTS.sub(lambda found: blank(found[0]), text)
    for start, end in tests:
        begun = re.compile(r"[{;]").search(code, end)
        last = closing(code, begun.start()) if begun and begun[0] == "{" else end
        code = code[:start] + blank(code[start:last]) + code[last:]
    return code


def rust_sites(text: str) -> Iterator[Site]:
    """Yield the sites of a Rust file; some do not compile."""
    code = rust_code(text)
    for found in RUST_OPERATOR.finditer(code):
        yield Site(found.start(), "operator", found[0], OPERATORS[found[0]])
    for found in RUST_NUMBER.finditer(code):
        yield Site(found.start(), "constant", found[0], f"{int(found[1]) + 1}{found[2]}")
    for found in RUST_BOOL.finditer(code):
        yield Site(found.start(), "constant", found[0], "false" if found[0] == "true" else "true")
    for found in RUST_IF.finditer(code):
        if " let " not in found[1]:
            before = text[found.start(1) : found.end(1)]
            yield Site(found.start(1), "condition", before, f"!({before})")
    for found in RUST_STATEMENT.finditer(code):
        before = text[found.start(1) : found.end(1)]
        yield Site(found.start(1), "statement", before, "")
    for found in RUST_RETURN.finditer(code):
        value = RUST_VALUES[found[1].partition("<")[0]]
        yield Site(found.start(2), "return value", "{", f"{{ return {value};")
