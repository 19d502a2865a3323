#!/usr/bin/env python
"""Write a small world of another size or seed as a data_root.

    python scripts/make_small_world.py FOLDER --items 2000

The archive of the package is written with:

    python scripts/make_small_world.py --archive src/pipeline/data/small_world.tar.xz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from small_world.files import SHIPPED, World, pack, write
from small_world.world import POOL


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="output folder, for data_root=FOLDER")
    parser.add_argument(
        "--archive", type=Path, help="write the files that ship, compressed, to this file"
    )
    parser.add_argument("--seed", type=int, default=SHIPPED.seed, help="of lexicons and facts")
    parser.add_argument(
        "--items", type=int, default=SHIPPED.items, help="test items per benchmark and language"
    )
    parser.add_argument("--dev-items", type=int, default=SHIPPED.dev_items)
    parser.add_argument("--math-rows", type=int, default=SHIPPED.math_rows)
    parser.add_argument(
        "--language-rows", type=int, default=SHIPPED.language_rows, help="per constructed language"
    )
    parser.add_argument(
        "--documents", type=int, default=SHIPPED.documents, help="plain text to train a base on"
    )
    asked = vars(parser.parse_args())
    folder, archive, world = asked.pop("folder"), asked.pop("archive"), World(**asked)
    if max(world.items, world.dev_items) > POOL:
        parser.error(f"--items and --dev-items are at most {POOL}: these items are held out")
    del asked["seed"]
    if min(asked.values()) < 0:
        parser.error("numbers of items, rows and documents are 0 or more")
    if archive:
        pack(archive, SHIPPED)
    elif folder:
        for name, rows in write(folder, world).items():
            print(f"{name}: {rows}")
    else:
        parser.error("give a folder, or --archive FILE")


if __name__ == "__main__":
    main()
