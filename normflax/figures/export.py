"""Files of a figure: vector and pixel pictures, the rows behind them, and a caption with the command that made them."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from normflax.figures.style import context


def save(figure: Figure, data: pd.DataFrame, folder: str | Path, name: str, caption: str, command: str) -> dict[str, Path]:
    """Write `<name>.svg`, `.pdf`, `.png` (300 dpi), `.csv` (the rows drawn) and `.md` (caption, command) into `folder`.

    The same figure gives the same bytes: no date, a fixed salt for the ids in the SVG. The pictures carry the caption
    and the command as metadata. Returns the paths by suffix.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in ("svg", "pdf", "png", "csv", "md")}
    metadata = {
        "svg": {"Title": name, "Description": caption, "Source": command, "Date": None},
        "pdf": {"Title": name, "Subject": caption, "Keywords": command, "CreationDate": None},
        "png": {"Title": name, "Description": caption, "Source": command},
    }
    with context():
        for suffix, fields in metadata.items():
            figure.savefig(paths[suffix], metadata=fields)
    data.to_csv(paths["csv"], index=False, na_rep="NaN", lineterminator="\n")
    page = f"![{name}]({name}.png)\n\n{caption}\n\nData: `{name}.csv`. Made by: `{command}`\n"
    paths["md"].write_text(page, encoding="utf-8")
    return paths
