"""``./launch doctor``: what is installed, which models are here, whether two ranks can start and reduce.

Every problem is shown with its remedy. Exit code 1 if something is missing without which the lab does not work.
"""

import os
import platform
import shlex
import shutil
import sys
import time
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tplab.errors import TplabError
from tplab.show.tables import Table

ROOT = Path(__file__).resolve().parents[3]
PYTHON = shlex.quote(sys.executable)
REINSTALL = (f"{PYTHON} -m pip install --editable {shlex.quote(f'{ROOT}[test]')} "
             f"--editable {shlex.quote(str(ROOT / 'notebooks'))}")


@dataclass(frozen=True)
class Finding:
    """One line of the examination. ``remedy`` is '' when all is well; ``essential``: the lab needs it."""

    what: str
    remedy: str = ""
    essential: bool = True

    def __str__(self):
        mark = "ok  " if not self.remedy else "FAIL" if self.essential else "note"
        return f"[{mark}] {self.what}" + (f"\n       -> {self.remedy}" if self.remedy else "")


def machine():
    """Python and cores."""
    yield Finding(f"Python {platform.python_version()} in {sys.prefix}, {os.cpu_count()} cores, {platform.system()} "
                  f"{platform.machine()}")


def packages(requirements=None):
    """Installed against required versions; ``requirements`` (``["torch==2.13.0"]``): the library's and the course's.

    Without what the extra ``test`` asks for, the lab works, and ``launch test`` does not.
    """
    from packaging.requirements import Requirement

    for requirement in map(Requirement, requirements or _required()):
        if requirement.marker and not requirement.marker.evaluate({"extra": "test"}):
            continue
        essential = not requirement.marker or requirement.marker.evaluate({"extra": ""})
        wanted = f"(required: {requirement.specifier or 'any'}{'' if essential else ', for launch test'})"
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield Finding(f"{requirement.name} is not installed {wanted}", REINSTALL, essential)
            continue
        fits = requirement.specifier.contains(installed, prereleases=True)
        yield Finding(f"{requirement.name} {installed} {wanted}", "" if fits else REINSTALL, essential)


def _required():
    """What both pyproject.toml ask for; what only ``launch test`` needs is marked as an extra."""
    for folder in (ROOT, ROOT / "notebooks"):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        yield from project["dependencies"]
        yield from (f"{need}; extra == 'test'" for need in project.get("optional-dependencies", {}).get("test", ()))


def fast_path():
    """Which form of the fast path computes on this machine, and what it leaves to the reference."""
    from tplab.fast import SWITCH, is_off

    if is_off():
        yield Finding(f"fast path: off, {SWITCH}=0; the reference computes everything")
        return
    from tplab.fast.cpu import form

    yield Finding(f"fast path: {form()}; in float32 and bfloat16, while nothing is patched or traced; the "
                  "reference computes models with windows, experts and the like (`tplab plan` says so)")


def kernel():
    """Whether the notebooks' kernel ``python3`` is this environment's Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    mend = f"{PYTHON} -m ipykernel install --sys-prefix"
    try:
        spec = KernelSpecManager().get_kernel_spec("python3")
    except NoSuchKernel:
        yield Finding("Jupyter has no kernel 'python3'", mend)
        return
    except RuntimeError as error:
        yield Finding(f"Jupyter cannot look for its kernels: {error}", "set HOME to a folder that you can write to")
        return
    # ipykernel's own spec says just "python", which Jupyter reads as the Python that runs it.
    program = shutil.which(spec.argv[0]) or spec.argv[0]
    ours = spec.argv[0].startswith("python") or Path(program).parent == Path(sys.executable).parent
    yield Finding(f"Jupyter kernel 'python3' runs {'this Python' if ours else program}", "" if ours else mend)


def models():
    """The models that can be opened by name."""
    from tplab.checkpoint import open_checkpoint

    remedies = {"fable": "git checkout -- tplab/checkpoint/fable",
                "fable-moe": "git checkout -- tplab/checkpoint/fable_moe",
                "smollm2": f"{PYTHON} -m tplab fetch smollm2"}
    for name, remedy in remedies.items():
        try:
            config = open_checkpoint(name).config
        except TplabError as error:
            yield Finding(f"model {name}: {error}", remedy, essential=name == "fable")
        else:
            yield Finding(f"model {name}: {config.model_type}, {config.num_layers} layers, {config.num_heads} query "
                          f"and {config.num_kv_heads} KV heads")


def ranks():
    """Whether two processes start, meet and add."""
    import torch

    from tplab.pool import RankPool
    from tplab.ranks import all_reduce, rank

    started = time.perf_counter()
    try:
        with RankPool(2) as pool:
            sums = pool.run(lambda: all_reduce(torch.tensor([rank() + 1.0])).item())
    except TplabError as error:
        yield Finding(f"two ranks cannot work together: {error}", "mend what this names; if it names nothing: "
                      f"{PYTHON} -c 'import torch.distributed as d; print(d.is_gloo_available())' must print True, and "
                      "a firewall must let this machine talk to itself")
        return
    seconds = time.perf_counter() - started
    yield Finding(f"two ranks start, all-reduce 1 + 2 and get {sums[0]:g} and {sums[1]:g} ({seconds:.1f} s)",
                  "" if sums == [3.0, 3.0] else REINSTALL)


def environment() -> Table:
    """Whether the lab can run here: packages, the Jupyter kernel, the embedded model; each problem with its remedy.

    On a machine that is ready the table says ``ok`` and nothing else, so that it reads the same everywhere;
    ``./launch doctor`` tells the details.

        >>> lab.environment()
    """
    import pandas as pd

    rows = {}
    for what, examine in (("packages", packages), ("Jupyter kernel", kernel), ("the model fable", models)):
        wrong = [finding for finding in examine() if finding.remedy and finding.essential]
        rows[what] = "ok" if not wrong else "; ".join(f"{finding.what} → {finding.remedy}" for finding in wrong)
    frame = pd.DataFrame({"state": rows.values()}, index=list(rows))
    return Table(frame, frame != "ok")


def main():
    failed = False
    for examine in (machine, packages, fast_path, kernel, models, ranks):
        for finding in examine():
            print(finding, flush=True)
            failed |= bool(finding.remedy) and finding.essential
    print("\nSomething essential is missing: see the lines marked FAIL." if failed else "\nThe lab is ready.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
