"""Chooses the quickstart's pairs by length alone: `python benchmarks/select_quickstart_pairs.py SOURCE.jsonl FOLDER`.

The 60 different records with the fewest UTF-8 bytes in prompt, chosen and rejected together (ties by file order),
sorted by that length; every third of them is held out, the others train. No model and no outcome is looked at.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def size(record: dict) -> int:
    return sum(len(message["content"].encode()) for key in ("prompt", "chosen", "rejected") for message in record[key])


def main(source: str, folder: str) -> None:
    records = [json.loads(line) for line in Path(source).read_text("utf-8").splitlines()]
    unique = list({json.dumps(record, sort_keys=True): record for record in records}.values())
    shortest = sorted(unique, key=size)[:60]
    held_out = shortest[2::3]
    train = [record for i, record in enumerate(shortest) if i % 3 != 2]
    for name, rows in (("train", train), ("valid", held_out)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        Path(folder, f"{name}.jsonl").write_text(text, "utf-8")
        print(f"{name}: {len(rows)} pairs, {size(rows[0])} to {size(rows[-1])} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
