"""``python -m course.lab.store notebooks/NN_NAME.ipynb …``: run notebooks and store them as the repository does.

Executed once from the top with the parameters that stand in them; no live view of a widget (a reader without a kernel
would see "model not found" in the place of its picture), no widget state, no timings.
"""

import os
import sys
import tempfile
from pathlib import Path


def stored(notebook, folder: Path):
    """The nbformat node executed in ``folder``, cleaned. Raises nbconvert's CellExecutionError if a cell fails."""
    from nbconvert.preprocessors import ExecutePreprocessor

    run = ExecutePreprocessor(timeout=1200, kernel_name="python3", record_timing=False, store_widget_state=False)
    notebook, _ = run.preprocess(notebook, {"metadata": {"path": str(folder)}})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = joined(cell.outputs)
    return without_live_views(notebook)


def joined(outputs: list) -> list:
    """Outputs in which what is printed without a break is one stream: a kernel sends it in pieces as time passes."""
    kept: list = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream" and output.name == kept[-1].name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def without_live_views(notebook):
    """The notebook, whose panels are then pictures: a live view would need a kernel and a downloaded script."""
    notebook.metadata.pop("widgets", None)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return notebook


def main(paths: list[str]) -> None:
    """Store each notebook in its own place. If a cell fails, the file stays as it was."""
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        for path in map(Path, paths):
            os.environ["TPLAB_PROGRESS"] = os.path.join(folder, f"{path.stem}.json")  # a stub is not an answer
            if not path.is_file():
                raise SystemExit(f"there is no notebook {path}")
            done = stored(nbformat.read(path, as_version=4), path.resolve().parent)
            nbformat.write(done, path)
            print(f"stored {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
