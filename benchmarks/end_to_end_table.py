"""The table of end_to_end.py, from one or several of its files.

    python benchmarks/end_to_end_table.py benchmarks/measured/h200-8b/end_to_end_nine*.jsonl
    python benchmarks/end_to_end_table.py --counted 4 benchmarks/measured/h200-8b/end_to_end_nine*.jsonl
    python benchmarks/end_to_end_table.py benchmarks/measured/h200-1.5b/end_to_end_nine.jsonl \
        --predictions benchmarks/measured/h200-1.5b/end_to_end_nine_calibration.jsonl

Files with the same prompts only, which means the same `--updates`. `of base` compares trained tokens per second with as
many updates of the baseline, in the same round. A mode that made only its first update shows that one. `--each` prints
the updates one by one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from update_rows import PARTS, Row, summary

HEADER = (
    f"{'mode':28}{'counted':>8}{'upd/h':>7}{'predicted':>17}{'tok/s':>7}{'of base':>9}{'s/upd':>7}"
    + "".join(f"{part:>11}" for part in PARTS)
    + f"{'bubble':>8}{'idle':>7}{'stale':>7}{'GiB':>7}"
)


@dataclass(frozen=True)
class MeasuredMode:
    """The updates of a mode. `predicted`: updates per hour after the first update, None where some are left out."""

    name: str
    rows: Sequence[Row]
    predicted: float | None
    peak_gib: float
    round: int = 1

    @property
    def counted(self) -> int:
        return max(1, len(self.rows) - 1)  # as summary()

    def cut(self, counted: int) -> MeasuredMode:
        """Its first update and `counted` more."""
        if len(self.rows) <= counted + 1:
            return self
        return replace(self, rows=self.rows[: counted + 1], predicted=None)


def read(path: Path) -> list[MeasuredMode]:
    """The modes of a file that were run to their end, in order."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [_mode(line, lines) for line in lines if line["kind"] == "mode"]


def _mode(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> MeasuredMode:
    name, turn = line["mode"], line.get("round", 1)
    updates = (other for other in lines if other["kind"] == "update" and other["mode"] == name)
    rows = [_row(update) for update in updates if update.get("round", 1) == turn]
    predicted = line["predicted"]["updates_per_hour"] if len(rows) > 1 else None
    return MeasuredMode(name, rows, predicted, line["peak_tensors_gib"], turn)


def predicted_otherwise(mode: MeasuredMode, path: Path) -> MeasuredMode:
    """With the prediction for as many updates that `path` holds, if there is one."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    said = [line for line in lines if line["kind"] == "prediction" and line["mode"] == mode.name]
    fitting = [line["updates_per_hour"] for line in said if line["updates"] == len(mode.rows) - 1]
    return replace(mode, predicted=fitting[-1] if fitting else None)


def _row(line: dict[str, Any]) -> Row:
    return Row(**{field.name: line[field.name] for field in fields(Row) if field.name in line})


def table(modes: Sequence[MeasuredMode], counted: int | None = None) -> str:
    baselines: dict[int, MeasuredMode] = {}
    for mode in modes:
        if mode.name == "baseline":
            baselines.setdefault(mode.round, mode)
    shown = [mode if counted is None else mode.cut(counted) for mode in modes]
    return "\n".join([HEADER, *(table_row(mode, baselines.get(mode.round)) for mode in shown)])


def table_row(mode: MeasuredMode, baseline: MeasuredMode | None = None) -> str:
    found = summary(mode.rows)
    said, ratio = "", ""
    if mode.predicted is not None:
        said = f"{mode.predicted:.1f} {mode.predicted / found['updates_per_hour'] - 1:+7.1%}"
    if baseline is not None and mode.counted <= baseline.counted:
        beside = summary(baseline.cut(mode.counted if len(mode.rows) > 1 else 0).rows)
        ratio = f"{found['trained_tokens_per_second'] / beside['trained_tokens_per_second']:.2f}x"
    counted = mode.counted if len(mode.rows) > 1 else "first"
    return (
        f"{_name(mode):28}{counted:>8}{found['updates_per_hour']:7.1f}{said:>17}"
        f"{found['trained_tokens_per_second']:7.0f}{ratio:>9}{found['seconds_per_update']:7.1f}"
        + "".join(f"{round(found[part], 2) + 0.0:11.2f}" for part in PARTS)
        + f"{found['bubble']:8.1%}{found['idle']:7.1%}{found['staleness_mean']:7.2f}{mode.peak_gib:7.1f}"
    )


def each_update(mode: MeasuredMode) -> str:
    lines = [
        f"{_name(mode):28}{place:8}{row.seconds:9.2f}"
        + "".join(f"{round(getattr(row, part), 2) + 0.0:11.2f}" for part in PARTS)
        + f"{row.trained_tokens:9,}"
        for place, row in enumerate(mode.rows, start=1)
    ]
    return "\n".join(lines)


def _name(mode: MeasuredMode) -> str:
    return mode.name if mode.round == 1 else f"{mode.name} ({mode.round})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--counted", type=int, help="only so many updates after the first")
    parser.add_argument("--each", action="store_true", help="also every update: its seconds by part, and its tokens")
    parser.add_argument("--predictions", type=Path, metavar="FILE", help="use those in this file of end_to_end.py")
    options = parser.parse_args()
    if options.counted is not None and options.counted < 1:
        raise SystemExit("--counted: at least 1")
    modes = [mode for path in options.files for mode in read(path)]
    if options.predictions is not None:
        modes = [predicted_otherwise(mode, options.predictions) for mode in modes]
    print(table(modes, options.counted))
    if options.each:
        parts = "".join(f"{part:>11}" for part in PARTS)
        print(f"\n{'mode':28}{'update':>8}{'seconds':>9}{parts}{'tokens':>9}", *map(each_update, modes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
