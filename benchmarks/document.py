"""A result as files: markdown, and beside it CSV and plots, written as soon as each part is there.

Every file says with which command it was made, when, with which versions and on which processor.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import evaluate


class Document:
    """Prints its parts; with ``out``, a markdown file, keeps them there and further files beside.

    Names of further files begin with the markdown file's own.
    """

    def __init__(self, script: str, title: str, text: str, out: Path | None) -> None:
        self.environment = evaluate.environment(script, ["matplotlib"])
        self.out = out
        self.parts: list[str] = []
        self.add(f"# {title}", self.environment, text)

    def add(self, *parts: str) -> None:
        """Further paragraphs or tables."""
        print(*parts, sep="\n\n", end="\n\n", flush=True)
        self.parts += parts
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text("\n\n".join(self.parts) + "\n", encoding="utf-8")

    def beside(self, name: str) -> Path | None:
        """Where the further file ``name`` goes; None without ``out``."""
        return None if self.out is None else self.out.with_name(f"{self.out.stem}_{name}")

    def csv(self, name: str, rows: Sequence[Mapping[str, object]]) -> None:
        """A table of plain numbers, after comment lines that begin with ``#``."""
        path = self.beside(f"{name}.csv")
        if path is None or not rows:
            return
        stream = io.StringIO(newline="")
        columns = list(dict.fromkeys(column for row in rows for column in row))
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        comments = self.environment.replace("- ", "# ", 1).replace("\n- ", "\n# ")
        path.write_text(f"{comments}\n{stream.getvalue()}", encoding="utf-8")

    def pictures(self, paths: Iterable[Path | None]) -> None:
        """Shows pictures that were written beside the document."""
        shown = [f"![{path.stem}]({path.name})" for path in paths if path is not None]
        if shown:
            self.add("\n".join(shown))
