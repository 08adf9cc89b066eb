"""Prove every family once and write the table into README: `supported_models.py`.

Each family's tiny random model goes through the scenario that the tests run; the first difference
from mlx-lm's own answers stops the script.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.families import table
from tests.families.build import build
from tests.families.scenario import check_parity


def main() -> None:
    """Write the rows between README's markers."""
    rows = {}
    for name in table.model_files():
        if not table.is_family(name):
            rows[name] = table.other_row(name)
        elif name in table.REFUSED:
            rows[name] = table.refused_row(name)
        else:
            rows[name] = table.row_of(name, check_parity(build(name), name).cache_spec)
        print(rows[name], flush=True)
    found = ", ".join(f"{count} {kind}" for kind, count in table.counts(rows).items())
    before, _, rest = table.README.read_text().partition(table.BEGIN)
    after = rest.partition(table.END)[2]
    lines = [table.BEGIN, "", f"{len(rows)} files: {found}.", "", table.HEADER]
    section = "\n".join([*lines, *rows.values(), "", table.END])
    table.README.write_text(before + section + after)


if __name__ == "__main__":
    main()
