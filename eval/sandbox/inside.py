"""Runs one program inside the sandbox, within the kernel's limits for a process. eval/sandbox/runner.py starts it with `python -c`.

    standard input    {"program", "word", "rlimits": {"RLIMIT_AS": [soft, hard], ...}} as JSON
    standard output   the word if the program reached its last line, else RAISED and the exception

Imports the standard library only: nothing else is inside.
"""

import json
import os
import random
import resource
import sys

RAISED = b"-"


def main() -> None:
    """Run the program and leave; the exit status says nothing, since a program can choose it."""
    job = json.load(sys.stdin)
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for name, value in job["rlimits"].items():
        resource.setrlimit(getattr(resource, name), tuple(value))
    random.seed(0)
    # The program may put others in their place.
    write, leave, pid, own = os.write, os._exit, os.getpid, os.getpid()
    try:
        exec(compile(job["program"], "<program>", "exec", dont_inherit=True), {})
    except BaseException as error:
        if pid() == own:  # a process that the program has started says nothing for it
            try:
                said = f"{type(error).__name__}: {error}"
            except BaseException:
                said = type(error).__name__
            write(verdict, RAISED + said[:300].encode(errors="replace"))
        leave(1)
    if pid() == own:
        write(verdict, job["word"].encode())
    leave(0)


if __name__ == "__main__":
    main()
