"""The filter of system calls, run as the kernel would run it."""

import struct

import pytest

from eval.sandbox.seccomp import filter_program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, REFUSED, KILLED, MISSING = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def answer(program: bytes, architecture: int, number: int, first: int = 0) -> int:
    """What the filter says to a call: the five instructions that it is made of."""
    call = struct.pack("<IIQQ", number, architecture, 0, first)
    lines = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator, at = 0, 0
    while True:
        code, then, otherwise, value = lines[at]
        at += 1
        if code == RETURN:
            return int(value)
        if code == LOAD:
            (accumulator,) = struct.unpack_from("<I", call, value)
            continue
        met = {EQUAL: accumulator == value, AT_LEAST: accumulator >= value, ANY_BIT: bool(accumulator & value)}[code]
        at += then if met else otherwise


def asked(processor: str, number: int, first: int = 0, in_sight: bool = False, forks: bool = True) -> int:
    # The first argument lies at 16 of the kernel's seccomp_data.
    program = filter_program(processor, in_sight, forks)
    call_first = first
    return answer(program, ARCHITECTURES[processor], number, call_first)


SOCKET, READ, KILL, CLONE, CLONE3, PRLIMIT = (41, 198), (0, 63), (62, 129), (56, 220), (435, 435), (302, 261)


@pytest.mark.parametrize("column", [0, 1], ids=list(ARCHITECTURES))
@pytest.mark.parametrize("forks", [True, False])
def test_a_filter_refuses_what_it_should_and_nothing_else(column: int, forks: bool) -> None:
    processor = list(ARCHITECTURES)[column]
    assert asked(processor, SOCKET[column], forks=forks) == REFUSED
    assert asked(processor, READ[column], forks=forks) == ALLOWED
    assert asked(processor, KILL[column], forks=forks) == ALLOWED
    assert asked(processor, KILL[column], in_sight=True, forks=forks) == REFUSED
    assert asked(processor, CLONE3[column], forks=forks) == MISSING
    assert asked(processor, PRLIMIT[column], 0, forks=forks) == ALLOWED
    assert asked(processor, PRLIMIT[column], 4711, forks=forks) == REFUSED


@pytest.mark.parametrize("column", [0, 1], ids=list(ARCHITECTURES))
def test_processes_threads_and_namespaces_are_told_apart(column: int) -> None:
    processor, clone = list(ARCHITECTURES)[column], CLONE[column]
    signal_of_a_child, thread, new_user, new_network = 17, 0x003D0F00, 0x10000000, 0x40000000
    assert asked(processor, clone, signal_of_a_child) == asked(processor, clone, thread) == ALLOWED
    assert asked(processor, clone, signal_of_a_child, forks=False) == REFUSED
    assert asked(processor, clone, thread, forks=False) == ALLOWED
    for flags in (new_user, new_network | signal_of_a_child):
        assert asked(processor, clone, flags) == REFUSED
    if processor == "x86_64":
        assert [asked(processor, number, forks=False) for number in (57, 58)] == [REFUSED, REFUSED]


def test_calls_of_another_architecture_end_the_process() -> None:
    program = filter_program("x86_64", in_sight=True, forks=True)
    assert answer(program, 0x40000003, 102) == KILLED
    assert answer(program, ARCHITECTURES["x86_64"], 0x40000000 + 41) == MISSING
