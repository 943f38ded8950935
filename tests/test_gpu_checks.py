"""The checks of tests/gpu on a CPU: one of each piece, and what the runner does with what goes wrong."""

from __future__ import annotations

import pytest

from tests.gpu import __main__ as runner
from tests.gpu.checks import Check, Unfit

pytestmark = [pytest.mark.usefixtures("one_thread", "settings_stay"), pytest.mark.filterwarnings("ignore")]
QUICK = [piece for piece in runner.PIECES if piece not in ("compile", "streams", "regimes")]


@pytest.mark.parametrize("piece", QUICK)
def test_the_first_check_of_a_piece_holds_on_a_cpu(piece: str) -> None:
    first = runner.PIECES[piece]()[0]
    if piece in ("graphs", "machines", "replays", "faults", "warm"):
        with pytest.raises(Unfit):
            first.run("cpu")
    else:
        assert first.run("cpu")


def test_names_are_told_apart() -> None:
    for make in runner.PIECES.values():
        names = [check.name for check in make()]
        assert len(names) == len(set(names))


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> str:
        raise AssertionError("off by 1")

    def lose(device: str) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def skip(device: str) -> str:
        raise Unfit("needs two GPUs")

    checks = [Check("one", lambda device: "1e-7"), Check("two", skip), Check("three", fail), Check("four", lose)]
    monkeypatch.setitem(runner.PIECES, "chains", lambda: [*checks, Check("five", lambda device: "1e-7")])
    rows: list[runner.Row] = []
    runner.run_piece("chains", "cpu", rows.append)
    assert [row["outcome"] for row in rows] == ["passed", "skipped", "failed", "failed", "failed"]
    assert "lost before" in rows[-1]["said"]
    about = {"date": "now", "processor": "P", "torch": "2", "python": "3", "timeloom": "0", "code": "c0de"}
    page = runner.document(rows, about, 1.0)
    assert "**1 passed, 3 failed, 1 skipped**" in page
    assert "- chains · `three`: AssertionError: off by 1" in page


def test_an_unknown_piece_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["nothing"])
    assert "there is no piece nothing; there are modules" in capsys.readouterr().err
