"""Python that pages and notebooks show, run piece by piece: what a cell prints, and that none of them raises.

``python cells.py NOTEBOOK`` runs the cells of a notebook and writes, as JSON, what each of them has printed.
"""

import io
import json
import linecache
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any


def cells(notebook: Path) -> list[tuple[str, str]]:
    """The kind (``code`` or ``markdown``) and the text of each cell."""
    found = json.loads(notebook.read_text("utf-8"))["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in found]


def play(name: str, text: str, namespace: dict[str, Any]) -> None:
    """Run a piece of Python as a notebook does: its lines can be read back, as Dynamo and messages do."""
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), namespace)


def play_all(notebook: Path) -> list[str]:
    """What each cell of code prints, from the first to the last. It takes the place of the main module."""
    sys.modules["__main__"] = main = ModuleType("__main__")  # as in a notebook; Dynamo looks names up in it
    printed = []
    for number, (kind, text) in enumerate(cells(notebook)):
        if kind == "code":
            with redirect_stdout(io.StringIO()) as out:
                play(f"{notebook.name}, cell {number}", text, vars(main))
            printed.append(out.getvalue())
    return printed


def printed_by(notebook: Path) -> list[str]:
    """The same in a process and a folder of their own. Raises RuntimeError, with what was told, if a cell raises."""
    found_in = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # from the present folder
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, found_in))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), str(notebook.resolve())]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{notebook}: {done.stderr[-3000:]}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_markdown(notebook: Path, printed: list[str] | None = None) -> str:
    """A notebook as a page, with what its cells have printed, if that is known."""
    outputs, parts = iter(printed or []), list[str]()
    for kind, text in cells(notebook):
        parts.append(f"```python\n{text}\n```" if kind == "code" else text)
        if kind == "code" and (output := next(outputs, "").rstrip()):
            parts.append(f"```text\n{output}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    played = play_all(Path(sys.argv[1]))
    sys.stdout.write(f"\n{json.dumps(played)}\n")
