"""Supervised fine-tuning from one recipe.

    import sft
    run = sft.train("recipes/tiny.yaml", {"train.learning_rate": 1e-3})
    print(run.final, run.record["train_loss"])

The functions are in sft/api.py.
"""

import os
import sys

TYPE_CHECKING = False  # typing has not been imported yet: see below
if TYPE_CHECKING:
    from sft.api import compare, evaluate, load_recipe, plan, prepare, train

__all__ = ["compare", "evaluate", "load_recipe", "plan", "prepare", "train"]


def __getattr__(name: str) -> object:
    """Import the function when it is used: a program that starts needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module 'sft' has no attribute '{name}'")
    from sft import api

    return getattr(api, name)


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

from types import ModuleType  # noqa: E402 (after the line above, like every import of this package)


class _CallablePackage(ModuleType):
    """sft.plan and sft.train: packages that are called as the functions of their name."""

    def __call__(self, *arguments: object, **options: object) -> object:
        return __getattr__(self.__name__.removeprefix("sft."))(*arguments, **options)  # type: ignore[operator]


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Python sets a package here once it is imported, whoever imports it first."""
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
