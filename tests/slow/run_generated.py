"""Run programs through eval/sandbox/worker.py as another user, or where nobody may make namespaces; prints how each ended.

python -m tests.slow.run_generated [nobody] [sighted] < {"limits": {...}, "programs": [...]}
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from eval.sandbox import seccomp as code_seccomp
from eval.sandbox.folders import NOBODY
from eval.sandbox.system_calls import PR_SET_NO_NEW_PRIVS, prctl
from sft.recipe.schema import REPOSITORY

PYTHONS = (sys.executable, "/usr/bin/python3")


def become(words: list[str]) -> None:
    if "nobody" in words and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if "sighted" in words:
        names = ("unshare", "mount", "setns")
        code_seccomp._REFUSED = {name: code_seccomp._REFUSED[name] for name in names}
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        code_seccomp.refuse_calls(in_sight=False, forks=True)


def works(python: str, before: Callable[[], None]) -> bool:
    """Whether this Python runs as that user: root's own may lie where only root can read."""
    command = [python, "-c", "import json, sys; assert sys.version_info >= (3, 11)"]
    try:
        return subprocess.run(command, preexec_fn=before, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def main(words: list[str]) -> None:
    asked = json.loads(sys.stdin.read())

    def before() -> None:
        become(words)

    python = next((python for python in PYTHONS if Path(python).exists() and works(python, before)), None)
    if python is None:
        print(json.dumps({"skip": "no Python that another user can read"}))
        return
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
    environment |= {"TMPDIR": os.environ["TMPDIR"]} if "TMPDIR" in os.environ else {}
    lines = "".join(json.dumps(line) + "\n" for line in (asked["limits"], *asked["programs"]))
    done = subprocess.run(
        [python, "-s", "-B", "-P", "-m", "eval.sandbox.worker"],
        env=environment,
        input=lines,
        text=True,
        stdout=subprocess.PIPE,
        preexec_fn=before,
        check=True,
    )
    isolation, *endings = [json.loads(line) for line in done.stdout.splitlines()]
    print(json.dumps({"isolation": isolation, "endings": endings}))


if __name__ == "__main__":
    main(sys.argv[1:])
