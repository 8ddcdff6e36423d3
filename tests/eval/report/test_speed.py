from typing import Any

from eval.report.blocks import MISSING
from eval.report.speed import speed_facts

TOKENS, LABELLED = "Tokens per second, mean after the first logged step", "Labelled tokens per second"
MFU, TIMES, WAITING = (
    "Share of the GPUs' bf16 peak (MFU)",
    "Time of a step, p50 and p90",
    "Share of it waiting for data",
)


def line(seen: int, rate: float, **values: Any) -> dict[str, Any]:
    speeds = {"labelled_tokens_per_second": rate / 4, "step_seconds_p50": 0.5, "step_seconds_p90": 0.75, "mfu": 0.4}
    return {"tokens_seen": seen, "tokens_per_second": rate, "data_seconds": 0.5, **speeds, **values}


def test_the_mean_rate_is_all_tokens_over_all_time_but_for_the_first_line() -> None:
    # 1,000 tokens at 100 a second are 10 s, 3,000 at 600 are 5 s: 4,000 in 15 s.
    rows = speed_facts([line(50, 1.0), line(1050, 100.0), line(4050, 600.0, mfu=0.7, step_seconds_p50=1.5)])
    assert rows == {TOKENS: "267", LABELLED: "67", MFU: "50.0%", TIMES: "1.000 s, 0.750 s", WAITING: "6.7%"}


def test_where_the_peak_is_not_known_the_share_is_not_either() -> None:
    assert speed_facts([line(50, 1.0), line(1050, 100.0, mfu=None)])[MFU] == "not known"


def test_a_run_of_one_line_has_no_steady_speed() -> None:
    assert set(speed_facts([line(50, 1.0)]).values()) == {MISSING}
    assert set(speed_facts([]).values()) == {MISSING}


def test_lines_of_an_older_version_give_what_they_hold() -> None:
    lines = [{"tokens_seen": 10, "tokens_per_second": 5.0}, {"tokens_seen": 20, "tokens_per_second": 2.0}]
    rows = speed_facts(lines)
    assert (rows[TOKENS], rows[LABELLED], rows[WAITING]) == ("2", MISSING, MISSING)
    assert speed_facts([*lines, {"tokens_seen": None, "tokens_per_second": None}])[TOKENS] == "2"
