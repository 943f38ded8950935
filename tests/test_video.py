"""Clips: found, split, decoded, turned into features once, and learned from; what is wrong with them is one line."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import wave
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from experiments.mgrit_hmdb51.standin import write_clip, write_clips, write_net
from timeloom.app import cli
from timeloom.app.data import Record, load, prepare, split
from timeloom.app.errors import InputError
from timeloom.app.train.config import preset
from timeloom.app.video import Video, resnet, source
from timeloom.app.video.cache import FeatureCache
from timeloom.app.video.clips import SPLITS, Clip, find_clips
from timeloom.app.video.decode import read_frames
from timeloom.app.video.resnet import DEVIATION, MEAN, Extractor, fingerprint

KINDS = ("approach", "leave", "brighten", "fade")
"""Two pairs: each shows the other's pictures in the opposite order."""
FRAMES, SIZE, FEATURES = 20, 48, 24
ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_net(tmp_path_factory.mktemp("net"), FEATURES, width=8, stages=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty clips and their split files."""
    return write_clips(tmp_path_factory.mktemp("made"), 10, FRAMES, KINDS)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Six clips of two classes that a test may spoil."""
    return write_clips(tmp_path / "few", 3, FRAMES, KINDS[:2])


def spec(clips: Path, net: Path, cache: Path, **options: object) -> str:
    chosen = {"net": net, "cache": cache, "frames": FRAMES, "size": SIZE, "workers": 1, **options}
    return f"video:{clips}," + ",".join(f"{key}={value}" for key, value in chosen.items())


def kept(cache: Path) -> dict[str, int]:
    """Files of features and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in cache.rglob("*.npy") if not path.name.startswith(".")}


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_run_goes_on_and_the_network_learns(
    made: Path, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes are killed with their parent in the middle; then training computes the rest, and tells motion."""
    cache = tmp_path / "cache"
    arguments = [
        "train", "--data", spec(made, net, cache, workers=2), "--hidden", "16", "--pooling", "last", "--compare", "0",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    with subprocess.Popen(
        [sys.executable, "-m", "timeloom", *arguments], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 300
        while len(kept(cache)) < 2 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    before = kept(cache)
    assert 2 <= len(before) < 40
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{child}/cmdline").exists() and _runs(child) for child in children):
        assert time.monotonic() < deadline, "processes outlive their parent"
        time.sleep(0.01)
    before = kept(cache)
    arguments[2] = spec(made, net, cache)
    run = tmp_path / "run"
    more = ["--epochs", "40", "--batch", "14", "--lr", "1e-2", "--out", str(run), "--debug"]
    assert cli.run("train", [*arguments[1:], *more]) == 0
    assert len(kept(cache)) == 40
    assert {path: written for path, written in kept(cache).items() if path in before} == before
    told = capsys.readouterr().out
    words = " ".join(told.split())
    assert "clips: classification; 24 training, 4 validation and 12 test series" in words
    assert f"of {FEATURES} channels" in words
    accuracy = float(told.split("Test accuracy ")[1].split("%")[0])
    assert accuracy >= 70, "four classes; guessing gives 25 %"
    after = kept(cache)
    assert cli.run("evaluate", [str(run), "--json", "--debug"]) == 0
    assert kept(cache) == after, "nothing is computed twice"
    answers = tmp_path / "answers.csv"
    unlabelled = spec(made / "fade", net, cache)
    assert cli.run("predict", [str(run), "--data", unlabelled, "--out", str(answers), "--debug"]) == 0
    assert kept(cache) == after
    assert [line.split(",")[1] for line in answers.read_text().splitlines()[1:]].count("fade") >= 7


def _runs(child: str) -> bool:
    """Whether a process still computes; one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_implicit_gru_learns_by_multigrid(made: Path, net: Path, tmp_path: Path) -> None:
    arguments = [
        "--data", spec(made, net, tmp_path / "cache", classes="approach+leave"), "--cell", "implicit-gru",
        "--solver", "mgrit-paper", "--hidden", "8", "--pooling", "last", "--epochs", "15", "--batch", "14",
        "--lr", "2e-2", "--compare", "0", "--out", str(tmp_path / "run"), "--debug",
    ]  # fmt: skip
    assert cli.run("train", arguments) == 0
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert float(summary.split('"test_quality": ')[1].split(",")[0]) >= 0.8


def test_features_are_those_of_the_net_and_black_frames_pad(few: Path, net: Path, tmp_path: Path) -> None:
    clip = few / "leave" / "leave_2.avi"  # 16 frames of 20
    frames = read_frames(clip, FRAMES, SIZE)
    assert frames.shape == (16, 3, SIZE, SIZE)
    assert frames.dtype == torch.uint8
    mean, deviation = (torch.tensor(numbers).reshape(3, 1, 1) for numbers in (MEAN, DEVIATION))
    model = ResNetForImageClassification.from_pretrained(net).eval()
    black = torch.zeros(4, 3, SIZE, SIZE)
    with torch.no_grad():
        truth = model((torch.cat([frames / 255, black]) - mean) / deviation).logits
    records = {record.name: record.values for record in load(spec(few, net, tmp_path)).records}
    torch.testing.assert_close(records["leave/leave_2.avi"], truth, atol=1e-4, rtol=1e-4)
    assert {len(values) for values in records.values()} == {FRAMES}
    shorter = {r.name: r.values for r in load(spec(few, net, tmp_path, pad="false")).records}
    assert [len(values) for values in shorter.values()] == [20, 18, 16] * 2
    torch.testing.assert_close(shorter["leave/leave_2.avi"], truth[:16], atol=1e-4, rtol=1e-4)
    cut = load(spec(few, net, tmp_path, frames=7)).records
    assert {tuple(record.values.shape) for record in cut} == {(7, FEATURES)}


def test_frames_keep_their_order_and_colours(tmp_path: Path) -> None:
    write_clip(tmp_path / "a.avi", "brighten", FRAMES, seed=1)
    light = read_frames(tmp_path / "a.avi", FRAMES, SIZE).float().mean((1, 2, 3))
    assert (light[4:] > light[:-4]).all()
    assert torch.equal(read_frames(tmp_path / "a.avi", 5, SIZE), read_frames(tmp_path / "a.avi", FRAMES, SIZE)[:5])


def test_what_cannot_be_decoded_is_told(tmp_path: Path) -> None:
    whole, spoiled = tmp_path / "whole.avi", tmp_path / "spoiled.avi"
    write_clip(whole, "leave", FRAMES, seed=1)
    data = whole.read_bytes()
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    for content, told in (
        (b"", "cannot be decoded"),
        (b"no video at all" * 40, "cannot be decoded"),
        (data[: len(data) // 3], "the file is cut short"),
        ((tmp_path / "sound.wav").read_bytes(), "it holds no video"),
    ):
        spoiled.write_bytes(content)
        with pytest.raises(InputError, match=told) as caught:
            read_frames(spoiled, FRAMES, SIZE)
        assert "spoiled.avi" in str(caught.value)
        assert "get it again or remove it" in str(caught.value)
    random = torch.Generator().manual_seed(0)
    for _ in range(40):  # bytes that are wrong anywhere, in names and sizes too, end in frames or in one line
        at = int(torch.randint(len(data) - 300, (), generator=random))
        noise = bytes(torch.randint(256, (300,), generator=random, dtype=torch.uint8).tolist())
        spoiled.write_bytes(data[:at] + noise + data[at + 300 :])
        with contextlib.suppress(InputError):
            assert len(read_frames(spoiled, FRAMES, SIZE)) <= FRAMES


def test_features_are_kept_by_content_and_settings(few: Path, net: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load(spec(few, net, cache))
    first = kept(cache)
    assert len(first) == 6
    shutil.move(few / "leave" / "leave_0.avi", few / "leave" / "again.avi")
    listing = few.parent / SPLITS / "leave_test_split1.txt"
    listing.write_text(listing.read_text().replace("leave_0", "again"))
    assert "leave/again.avi" in [record.name for record in load(spec(few, net, cache)).records]
    assert kept(cache) == first
    write_clip(few / "leave" / "again.avi", "fade", FRAMES, seed=7)
    load(spec(few, net, cache))
    assert len(kept(cache)) == 7
    load(spec(few, net, cache, size=64))
    assert len(kept(cache)) == 13
    half = sorted(cache.rglob("*.npy"))[0]
    half.write_bytes(half.read_bytes()[:200])
    assert len(load(spec(few, net, cache)).records) == 6
    load(spec(few, net, cache, size=64))
    assert half.stat().st_size > 200
    assert fingerprint(str(net)) != fingerprint(str(write_net(tmp_path / "other", FEATURES, width=4, stages=2)))
    assert len({fingerprint(name) for name in ("resnet-18", "resnet-34", "resnet-50")}) == 3


def test_processes_share_the_features(few: Path, net: Path, tmp_path: Path) -> None:
    source, cache = spec(few, net, tmp_path / "shared"), tmp_path / "shared"
    clips = len(find_clips(few, "all"))
    for index in range(3):
        prepare(source, index, 3)
        assert len(kept(cache)) == sum(len(range(i, clips, 3)) for i in range(index + 1))
    before = kept(cache)
    shared, alone = load(source), load(spec(few, net, tmp_path / "alone"))
    assert kept(cache) == before
    for mine, other in zip(shared.records, alone.records, strict=True):
        assert torch.equal(torch.as_tensor(mine.values), torch.as_tensor(other.values))
    prepare("video:nowhere", 0, 2)  # left for `load` to tell of
    prepare(source, 0, 1)


def test_a_corrupt_clip_is_told_and_costs_no_other(few: Path, net: Path, tmp_path: Path) -> None:
    """By two processes."""
    whole = (few / "leave" / "leave_1.avi").read_bytes()
    (few / "leave" / "leave_1.avi").write_bytes(whole[: len(whole) // 2])
    (few / "approach" / "approach_1.avi").write_bytes(b"no video at all" * 40)
    cache = tmp_path / "cache"
    with pytest.raises(InputError) as caught:
        load(spec(few, net, cache, workers=2))
    told = str(caught.value)
    assert "get it again or remove it, or set skip=true (1 more clips cannot be used:" in told
    assert "approach_1.avi" in told
    assert "leave_1.avi" in told
    assert "the features of the other 4 clips are kept" in told
    assert len(kept(cache)) == 4
    before = kept(cache)
    names = [record.name for record in load(spec(few, net, cache, skip="true")).records]
    assert names == ["approach/approach_0.avi", "approach/approach_2.avi", "leave/leave_0.avi", "leave/leave_2.avi"]
    assert kept(cache) == before


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("rm -r {clips}", "clips: no such folder"),
        ("rm {clips}/*/*", "no clips (.avi"),
        ("mkdir {clips}/empty", "empty: a class folder without clips; fill or remove it"),
        ("rm -r {splits}", "no split files: put the folder testTrainMulti_7030_splits beside it"),
        ("rm {splits}/leave_test_split1.txt", "leave_test_split1.txt: no such split file"),
        ("rm {clips}/leave/leave_0.avi", "leave_test_split1.txt: names 'leave_0.avi', which is not in"),
        ("cp {clips}/leave/leave_0.avi {clips}/leave/new.avi", "leave_test_split1.txt: does not name"),
        ("echo 'leave_0.avi 3' > {splits}/leave_test_split1.txt", "line 1: expected a clip's name and 0, 1 or 2"),
        ("> {splits}/leave_test_split1.txt", "leave_test_split1.txt: the file is empty"),
    ],
)
def test_bad_folders_are_told_before_anything_is_computed(few: Path, tmp_path: Path, spoil: str, told: str) -> None:
    subprocess.run(spoil.format(clips=few, splits=few.parent / SPLITS), shell=True, check=True)
    with pytest.raises(InputError) as caught:
        load(spec(few, tmp_path / "no" / "net", tmp_path / "cache"))
    assert told in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("video:", "expected video:FOLDER,option=value"),
        ("video:{clips},frames=none", "frames='none' is not a whole number"),
        ("video:{clips},frames=0", "frames must be at least 1, got 0"),
        ("video:{clips},fps=3", "video has no option 'fps'; it has: splits, split"),
        ("video:{clips},classes=leave+fly", "no folder for the class 'fly'"),
        ("video:{clips},classes=hmdb6", "no folder for the class 'chew'"),
        ("video:{clips},split=2", "approach_test_split2.txt: no such split file"),
        ("video:{clips},net=./nowhere", "net=./nowhere: no such folder; give one with a ResNet"),
        ("video:{clips},net={clips},cache={cache},workers=1", "not a whole ResNet of transformers"),
        ("video:{clips},net={clips},cache={cache},device=nowhere", "device=nowhere: "),
        ("video:{clips},net=resnet-18,cache={clips}/leave/leave_0.avi", "choose another cache="),
    ],
)
def test_bad_options_are_told(few: Path, tmp_path: Path, source: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(source.format(clips=few, cache=tmp_path / "cache"))
    assert told in str(caught.value)


def test_without_a_network_it_says_how_to_get_the_weights(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = list[tuple[str, bool]]()

    def out_of_reach(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        asked.append((name, local_files_only))
        if local_files_only:
            return str(tmp_path)  # begun once, and not finished
        raise RuntimeError("could not connect\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", out_of_reach)
    assert cli.run("train", ["--data", spec(few, Path("resnet-34"), tmp_path), "--out", str(tmp_path / "run")]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: net=resnet-34: the weights are not on this machine, and microsoft/resnet-34 could not"
    )
    assert "hf download microsoft/resnet-34 --local-dir FOLDER; then give net=FOLDER" in line
    assert asked == [("microsoft/resnet-34", True), ("microsoft/resnet-34", False)]


def test_weights_of_the_hub_are_taken_from_where_they_were_fetched(
    few: Path, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, allow_patterns: list[str], local_files_only: bool) -> str:
        assert name == "somebody/a-net"
        if local_files_only:
            raise FileNotFoundError(name)
        return str(net)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    named = load(spec(few, Path("somebody/a-net"), tmp_path)).records
    given = load(spec(few, net, tmp_path)).records
    assert all(torch.equal(a.values, b.values) for a, b in zip(named, given, strict=True))


@pytest.mark.parametrize("library", ["av", "transformers"])
def test_a_missing_library_is_named(
    few: Path, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=rf"need.* {library}: pip install 'timeloom\[video\]'"):
        load(spec(few, net, tmp_path / "cache"))


def test_a_full_disk_is_told_and_what_was_written_stays(
    few: Path, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, done = FeatureCache.save, list[Path]()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def save_three(place: Path, features: torch.Tensor) -> None:
        if len(done) == 3:
            monkeypatch.setattr("os.fsync", full)
        save(place, features)
        done.append(place)

    monkeypatch.setattr(FeatureCache, "save", staticmethod(save_three))
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device"):
        load(spec(few, net, tmp_path / "cache"))
    assert sorted((tmp_path / "cache").rglob("*.npy")) == sorted(done)
    assert len(done) == 3


def test_splits_are_the_official_ones_or_drawn(
    few: Path, net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = few.parent / SPLITS / "leave_test_split1.txt"
    listing.write_text("leave_0.avi 1 \nleave_1.avi 2 \nleave_2.avi 0 \n\n")
    records = load(spec(few, net, tmp_path)).records
    assert {r.name: r.split for r in records if r.label == "leave"} == {
        "leave/leave_0.avi": "train", "leave/leave_1.avi": "test",
    }  # fmt: skip
    drawn = load(spec(few, net, tmp_path, splits="random"))
    assert len(drawn.records) == 6
    assert {record.split for record in drawn.records} == {None}
    assert len(split(drawn, 0.1, 0.1, 0).test) == 2
    shutil.move(few.parent / SPLITS, few / SPLITS)  # among the class folders
    assert len(load(spec(few, net, tmp_path)).records) == 5
    monkeypatch.setenv("HOME", str(few))
    shutil.move(few / SPLITS, few.parent / "elsewhere")
    assert len(load(spec(few, net, tmp_path, splits="~/../elsewhere")).records) == 5


def test_a_folder_of_clips_needs_no_prefix(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named(clips: list[Clip], options: Video) -> list[Record]:
        return [Record(clip.name, torch.ones(1, 1), clip.label, clip.split) for clip in clips]

    monkeypatch.setattr(source, "_records", named)
    assert [record.label for record in load(str(few)).records] == ["approach"] * 3 + ["leave"] * 3
    (few / "labels.csv").write_text("file,label\na.csv,up\n")
    (few / "a.csv").write_text("1\n")
    assert load(str(few)).records[0].name == "a.csv"


def test_a_net_of_eighteen_layers_gives_a_thousand_features(tmp_path: Path) -> None:
    config = ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=1000)
    ResNetForImageClassification(config).save_pretrained(tmp_path)
    extractor = Extractor(tmp_path, "cpu")
    frames = torch.randint(0, 256, (2, 3, 240, 240), dtype=torch.uint8)
    assert extractor(frames).shape == (2, 1000)
    assert extractor.padded(frames, 5).shape == (5, 1000)
    assert resnet.NETS["resnet-50"] == "microsoft/resnet-50"


def test_presets_are_the_papers() -> None:
    for name, data in (("hmdb6", "video:hmdb51,classes=hmdb6"), ("hmdb51", "video:hmdb51")):
        config = preset(name)
        assert (config.preset, config.data) == (name, data)
        assert (config.optim.batch, config.optim.lr, config.optim.optimizer) == (100, 1e-3, "adam")
