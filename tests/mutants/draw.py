"""Draw mutants of the package: small faults that the tests of a module and the laws should find.

    python tests/mutants/draw.py        # writes mutants.jsonl, one mutant per line

The draw has a fixed seed. It takes one mutant from each method file and ten from what all methods stand on. A mutant
changes one token of one line: an arithmetic operator, a number, the direction of a comparison, or the key of a random
draw. `run.py` applies them and runs the tests.
"""

import ast
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("mutants.jsonl")
SEED = 25
NAMED = ["bayes/pac_bayes.py", "deploy/wire.py", "engine/accounting.py", "store.py"]
FOLDERS = ["bayes", "fed", "engine"]  # two more from each

OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.FloorDiv: "*", ast.Mod: "+"}
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.FloorDiv: "//", ast.Mod: "%"}
TURNED = {ast.Lt: (" < ", " > "), ast.Gt: (" > ", " < "), ast.LtE: (" <= ", " >= "), ast.GtE: (" >= ", " <= ")}
TURNED |= {ast.Eq: (" == ", " != "), ast.NotEq: (" != ", " == ")}


@dataclass(frozen=True)
class Mutant:
    """One changed line: `old` becomes `new`."""

    file: str
    line: int
    kind: str
    old: str
    new: str


def main() -> None:
    """Write the mutants."""
    draw = random.Random(SEED)
    chosen: list[Mutant] = []
    methods = sorted(path for path in (ROOT / "priory" / "methods").glob("*.py") if path.name != "__init__.py")
    for path in methods:
        chosen.append(one_of(list(mutants(path)), draw))
    for name in NAMED:
        chosen.append(one_of(list(mutants(ROOT / "priory" / name)), draw))
    for folder in FOLDERS:
        files = sorted((ROOT / "priory" / folder).glob("*.py"))
        files = [path for path in files if str(path.relative_to(ROOT / "priory")) not in NAMED and any(mutants(path))]
        chosen += [one_of(list(mutants(path)), draw) for path in draw.sample(files, 2)]
    FILE.write_text("".join(json.dumps(asdict(mutant), ensure_ascii=False) + "\n" for mutant in chosen))
    print(f"{len(chosen)} mutants in {FILE.relative_to(ROOT)}")


def one_of(found: list[Mutant], draw: random.Random) -> Mutant:
    """Return a random mutant, of a random kind first, so that rare kinds are drawn as well."""
    kind = draw.choice(sorted({mutant.kind for mutant in found}))
    return draw.choice([mutant for mutant in found if mutant.kind == kind])


def mutants(path: Path) -> Iterator[Mutant]:
    """Return every mutant of a file's code; types, messages and docstrings stay as they are."""
    source = path.read_text()
    lines = source.splitlines()
    tree = ast.parse(source)
    keys = split_names(tree)
    for node in code_of(tree):
        for kind, line, start, end, new in changes(node, lines, keys):
            old = lines[line - 1]
            # Offsets of the syntax tree count bytes.
            raw = old.encode()
            mutated = (raw[:start] + new.encode() + raw[end:]).decode()
            if mutated != old:
                yield Mutant(str(path.relative_to(ROOT)), line, kind, old, mutated)


def code_of(tree: ast.Module) -> Iterator[ast.AST]:
    """Walk what runs: no annotations, no f-strings, no messages of exceptions, no checks of hyper-parameters."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            continue
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            waiting += [
                child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
            ]


def split_names(tree: ast.Module) -> dict[str, str]:
    """Return, for each name that a key was split into, the name next to it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_call(node.value, "split"):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and all(isinstance(name, ast.Name) for name in target.elts):
                    names = [name.id for name in target.elts if isinstance(name, ast.Name)]
                    found |= dict(zip(names, names[1:] + names[:1], strict=True))
    return found


def changes(node: ast.AST, lines: list[str], keys: dict[str, str]) -> Iterator[tuple[str, int, int, int, str]]:
    """Return the kind, line, first and last byte and new text of each change at a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not (_is_text(node.left) or _is_text(node.right)):
        found = _between(node.left, node.right, f" {SYMBOLS[type(node.op)]} ", lines) or _between(
            node.left, node.right, SYMBOLS[type(node.op)], lines
        )
        if found is not None:
            line, start, end = found
            text = lines[line - 1].encode()[start:end].decode()
            yield "operator", line, start, end, text.replace(SYMBOLS[type(node.op)], OPERATORS[type(node.op)])
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        old, new = TURNED[type(node.ops[0])]
        found = _between(node.left, node.comparators[0], old, lines)
        if found is not None:
            yield "comparison", *found, new
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.lineno == node.end_lineno:
        assert node.end_col_offset is not None
        changed = node.value + 1 if isinstance(node.value, int) else (node.value * 2 if node.value else 0.5)
        yield "constant", node.lineno, node.col_offset, node.end_col_offset, repr(changed)
    if isinstance(node, ast.Call):
        for name in node.args:
            if isinstance(name, ast.Name) and name.id in keys and not _is_call(node, "split"):
                assert name.end_col_offset is not None
                yield "key", name.lineno, name.col_offset, name.end_col_offset, keys[name.id]


def _between(left: ast.expr, right: ast.expr, symbol: str, lines: list[str]) -> tuple[int, int, int] | None:
    """Return line, first and last byte of an operator that is on the line where its left side ends."""
    if left.end_lineno is None or left.end_lineno != right.lineno or left.end_col_offset is None:
        return None
    between = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset]
    at = between.find(symbol.encode())
    if at < 0:
        return None
    return right.lineno, left.end_col_offset + at, left.end_col_offset + at + len(symbol.encode())


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_call(node: ast.Call, name: str) -> bool:
    function = node.func
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == name


if __name__ == "__main__":
    main()
