"""The `normflax` command. Nothing heavy is imported before a command is known."""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

USAGE = """normflax: where should the norm go in a deep Transformer?

  normflax train placement=deepnorm model.depth=24     one run, or with -m a sweep; `normflax train --help` lists the settings
  normflax reproduce depth_stability                   train an experiment, draw its figures, judge its claims
  normflax claims                                      the published claims, with the verdict of the runs that are here
  normflax compare results/runs                        rank the placements of any folder of runs, and draw them over depth
  normflax bench                                       measure speed, probe overhead, compile time and memory here
"""


def main() -> int:
    """Run the command line; its exit code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    command, rest = words[0], words[1:]
    if command == "train":
        from normflax.app import main as train

        return train(rest)
    if command in COMMANDS:
        return COMMANDS[command](rest)
    from normflax.nearest import unknown

    print(f"normflax: {unknown('command', command, ['train', *COMMANDS])}", file=sys.stderr)
    return 2


def reproduce(words: list[str]) -> int:
    """`normflax reproduce NAME [--preset P] [key=value …]`: train an experiment's grids, and draw and judge each."""
    parser = argparse.ArgumentParser(prog="normflax reproduce", description=reproduce.__doc__)
    parser.add_argument("name")
    parser.add_argument("--preset", default="quick")
    arguments, overrides = parser.parse_known_args(words)
    experiment = find(arguments.name)
    if experiment is None or arguments.preset not in experiment.PRESETS:
        return 2 if experiment is None else refuse("preset", arguments.preset, experiment.PRESETS)
    from normflax.app import main as train

    worst = 0
    for grid in experiment.PRESETS[arguments.preset]:
        code = train([f"experiment={grid}", *overrides])  # the sweep of an experiment ends with its figures
        if code not in (0, 1):
            return code
        worst = max(worst, code)
    return worst


def draw(name: str, folder: Path, command: str | None = None) -> int:
    """Draw the figures of experiment `name` from the runs below `folder`, judge its claims, and say where everything is."""
    from normflax.analysis.claims import judge
    from normflax.figures.export import save
    from normflax.records.table import load_table
    from normflax.report.ledger import markdown
    from normflax.report.text import show_claims, show_comparison, show_table

    experiment = find(name)
    if experiment is None:
        return 2
    runs, layers = load_table(folder), load_table(folder, rows="layers")
    if runs.empty:
        print(f"normflax: no runs below {folder}", file=sys.stderr)
        return 2
    if not (runs["state"] == "finished").any():
        print(f"normflax: no run below {folder} is finished: they failed, were interrupted or still train", file=sys.stderr)
        return 1
    where = folder / "figures"
    where.mkdir(exist_ok=True)
    try:
        figures, tables = experiment.figures(runs, layers), experiment.tables(runs, layers)
        claims = judge(experiment.CLAIMS, runs, layers)
    except ValueError as error:  # of a part of the grid not every figure can be made
        print(f"normflax: no figures of {folder}: {error}", file=sys.stderr)
        return 1
    for title, figure in figures.items():
        save(figure, figure.data, where, title, figure.caption, command or f"python -m experiments.{name} {folder}")
    for title, table in (tables | {"claims": claims}).items():
        table.to_csv(where / f"{title}.csv", index=False)
    (where / "claims.md").write_text(markdown(claims, f"Claims of {name}"), encoding="utf-8")
    for title, table in tables.items():
        show_table(title.replace("_", " "), table)
    if not tables:
        show_comparison(runs)
    show_claims(claims)
    print(f"\nfigures (SVG, PDF, PNG, data, caption) and the ledger of claims: {where}")
    return 0


def compare(words: list[str]) -> int:
    """`normflax compare FOLDER`: rank the placements of the runs below FOLDER and draw their loss against depth."""
    parser = argparse.ArgumentParser(prog="normflax compare", description=compare.__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(words).folder
    from normflax.figures.depth import loss_against_depth
    from normflax.figures.export import save
    from normflax.records.table import load_table
    from normflax.report.text import show_comparison

    if not folder.is_dir():
        print(f"normflax: no folder '{folder}' to compare", file=sys.stderr)
        return 2
    runs = load_table(folder)
    if runs.empty:
        print(f"normflax: no runs below {folder}", file=sys.stderr)
        return 2
    figure = loss_against_depth(runs)
    paths = save(figure, figure.data, folder / "figures", "comparison", figure.caption, f"normflax compare {folder}")
    show_comparison(runs)
    print(f"\nfigure: {paths['png']}")
    return 0


def claims(words: list[str]) -> int:
    """`normflax claims [NAME …]`: judge the claims of every experiment by the runs below RESULTS/<experiment>.

    Writes RESULTS/claims.md and RESULTS/claims.csv, and prints all of them or those of the experiments named. Exit code 1 where
    one of those is not reproduced.
    """
    parser = argparse.ArgumentParser(prog="normflax claims", description=claims.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", type=Path, default=Path("results"), help="the folder of the experiments' runs")
    arguments = parser.parse_args(words)
    import pandas as pd

    from normflax.analysis.claims import NOT_REPRODUCED, judge
    from normflax.records.table import load_table
    from normflax.report.ledger import markdown
    from normflax.report.text import show_claims

    if any(find(name) is None for name in arguments.names):
        return 2
    judged = []
    for name in experiments():
        experiment = find(name)
        assert experiment is not None
        folder = arguments.results / name
        tables = [load_table(folder, rows=rows) for rows in ("runs", "layers")] if folder.is_dir() else [pd.DataFrame()] * 2
        try:
            judged.append(judge(experiment.CLAIMS, *tables).assign(experiment=name))
        except ValueError as error:  # two settings where a claim has one
            print(f"normflax: the claims of {folder} can't be judged: {error}", file=sys.stderr)
            return 2
    ledger = pd.concat(judged, ignore_index=True)
    arguments.results.mkdir(parents=True, exist_ok=True)
    ledger.to_csv(arguments.results / "claims.csv", index=False)
    (arguments.results / "claims.md").write_text(markdown(ledger, "Claims"), encoding="utf-8")
    shown = ledger[ledger["experiment"].isin(arguments.names or experiments())]
    show_claims(shown)
    print(f"\nledger: {arguments.results / 'claims.md'}, {arguments.results / 'claims.csv'}")
    return int((shown["verdict"] == NOT_REPRODUCED).any())


def bench(words: list[str]) -> int:
    """`normflax bench`: see normflax/bench.py."""
    from normflax.bench import main as run

    return run(words)


COMMANDS = {"reproduce": reproduce, "claims": claims, "compare": compare, "bench": bench}


def find(name: str) -> ModuleType | None:
    """The experiment called `name`, in a checkout or in the installed package; None, with a sentence, where there is none."""
    from normflax.app import folder_of

    folder = folder_of("experiments")
    package = "normflax.experiments" if folder.parent.name == "normflax" and (folder.parent / "app.py").exists() else "experiments"
    if name not in (known := experiments()):
        refuse("experiment", name, known)
        return None
    return importlib.import_module(f"{package}.{name}")


def experiments() -> list[str]:
    """The names of the experiments there are."""
    from normflax.app import folder_of

    return sorted(path.stem for path in folder_of("experiments").glob("*.py") if path.stem not in ("__init__", "train"))


def refuse(what: str, word: str, allowed) -> int:
    """Say that a word is unknown; exit code 2."""
    from normflax.nearest import unknown

    print(f"normflax: {unknown(what, word, allowed)}", file=sys.stderr)
    return 2
