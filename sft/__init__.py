"""Supervised fine-tuning from one recipe: see README.md, and train.py for the way through."""

import os
import sys


def _leave_working_directory() -> None:
    """Undo what `python -m sft.train` does: it puts the working directory first on sys.path.

    Somebody else's recipe may lie there beside a yaml.py. The scripts set PYTHONSAFEPATH=1; this is for commands by hand, torchrun's and
    accelerate's among them. It imports nothing that Python has not loaded: that would be looked for in the working directory.
    """
    # argv[0] is `-m` only while Python looks for the module to run.
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:
        return
    os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that this one starts
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib is not loaded)
    if os.path.abspath(sys.path[0]) != project:  # noqa: PTH100
        del sys.path[0]
    else:  # a clone that nobody has installed is found from its own folder alone
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [project, os.environ.get("PYTHONPATH", "")]))


_leave_working_directory()
