"""The experiment with instruments: WAV reader, MFCC, loader, generated clips, and the run itself, in small."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments.bppsa_irmas import run as irmas
from experiments.bppsa_irmas import wav
from experiments.bppsa_irmas.clips import Clip, features, find, split
from experiments.bppsa_irmas.instruments import INSTRUMENTS, generate, melody
from experiments.bppsa_irmas.mfcc import FLOOR, mfcc

TINY = 8000
"""Samples a second of tiny clips."""


def _raw(path: Path, data: bytes, channels: int, width: int, rate: int = TINY) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_numbers_of_every_width_are_read(tmp_path: Path, width: int) -> None:
    half = 1 << (8 * width - 1)
    numbers = [-half, -1, 0, 1, half // 2, half - 1]
    data = b"".join(
        (n + half).to_bytes(1, "little") if width == 1 else n.to_bytes(width, "little", signed=True) for n in numbers
    )
    samples, rate = wav.read(_raw(tmp_path / "a.wav", data, 1, width))
    assert rate == TINY
    assert samples.dtype == torch.float32
    assert torch.equal(samples, (torch.tensor(numbers, dtype=torch.float64) / half).float())


def test_channels_are_averaged_and_writing_is_undone_by_reading(tmp_path: Path) -> None:
    sound = 2 * torch.rand(301, 2, generator=torch.Generator().manual_seed(0)) - 1
    wav.write(tmp_path / "stereo.wav", sound, 44100)
    samples, rate = wav.read(tmp_path / "stereo.wav")
    assert rate == 44100
    torch.testing.assert_close(samples, sound.mean(1), atol=1 / 16384, rtol=0)
    wav.write(tmp_path / "loud.wav", torch.tensor([3.0, -3.0]), 44100)
    assert wav.read(tmp_path / "loud.wav")[0].tolist() == [32767 / 32768, -32767 / 32768]
    wav.write(tmp_path / "empty.wav", torch.zeros(0), 44100)
    assert wav.read(tmp_path / "empty.wav")[0].shape == (0,)


def test_what_is_no_wav_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound at all")
    with pytest.raises(ValueError, match=r"text\.wav cannot be read as a WAV file"):
        wav.read(tmp_path / "text.wav")
    (tmp_path / "none.wav").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none\.wav cannot be read as a WAV file \(it ends too early\)"):
        wav.read(tmp_path / "none.wav")
    whole = _raw(tmp_path / "whole.wav", bytes(400), 1, 2).read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"cut\.wav holds 300 bytes of sound where its header promises 400"):
        wav.read(tmp_path / "cut.wav")


def _plain_mfcc(samples: list[float], rate: int, hop: int, window: int, bands: int, coefficients: int) -> Tensor:
    """Sums as they are defined, in Python's floats."""
    length, bins = len(samples), window // 2 + 1

    def mirrored(i: int) -> float:
        return samples[-i if i < 0 else 2 * (length - 1) - i if i >= length else i]

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    edges = [700 * (10 ** (mel(rate / 2) * i / (bands + 1) / 2595) - 1) for i in range(bands + 2)]
    rows = []
    for frame in range(1 + length // hop):
        cut = [mirrored(frame * hop - window // 2 + i) for i in range(window)]
        cut = [value * (0.5 - 0.5 * math.cos(2 * math.pi * i / window)) for i, value in enumerate(cut)]
        power = []
        for b in range(bins):
            real = sum(value * math.cos(2 * math.pi * b * i / window) for i, value in enumerate(cut))
            imaginary = sum(value * math.sin(2 * math.pi * b * i / window) for i, value in enumerate(cut))
            power.append(real**2 + imaginary**2)
        logs = []
        for left, centre, right in zip(edges, edges[1:], edges[2:], strict=False):
            energy = 0.0
            for b in range(bins):
                hertz = b * rate / window
                if left < hertz <= centre:
                    energy += power[b] * (hertz - left) / (centre - left)
                elif centre < hertz < right:
                    energy += power[b] * (right - hertz) / (right - centre)
            logs.append(math.log(max(energy, FLOOR)))
        row = []
        for k in range(coefficients):
            scale = math.sqrt((1 if k == 0 else 2) / bands)
            row.append(scale * sum(v * math.cos(math.pi * k * (j + 0.5) / bands) for j, v in enumerate(logs)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("length", "hop", "window", "bands", "coefficients"),
    [(151, 32, 64, 10, 10), (160, 20, 64, 9, 4), (40, 1, 50, 6, 1)],
)
def test_mfcc_is_as_defined(length: int, hop: int, window: int, bands: int, coefficients: int) -> None:
    samples = torch.randn(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = {"window": window, "bands": bands, "coefficients": coefficients}
    truth = _plain_mfcc(samples.tolist(), TINY, hop, window, bands, coefficients)
    given = mfcc(samples, TINY, hop, **sizes)
    assert given.shape == (1 + length // hop, coefficients)
    torch.testing.assert_close(given, truth, atol=1e-11, rtol=0)
    rounded = mfcc(samples.float(), TINY, hop, **sizes)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), truth, atol=2e-5, rtol=0)


def test_silence_has_finite_features() -> None:
    features_of_silence = mfcc(torch.zeros(4000), TINY, 500)
    assert torch.isfinite(features_of_silence).all()
    torch.testing.assert_close(features_of_silence[:, 0], torch.full((9,), math.log(FLOOR) * math.sqrt(40)))


def test_mfcc_refuses_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="S > 1024, half a window; got \\(1024,\\)"):
        mfcc(torch.zeros(1024), TINY, 512)
    with pytest.raises(ValueError, match="coefficients=41, bands=40"):
        mfcc(torch.zeros(4096), TINY, 512, coefficients=41)
    with pytest.raises(ValueError, match="got hop=0"):
        mfcc(torch.zeros(4096), TINY, 0)


def test_a_clip_of_irmas_has_the_lengths_of_the_paper() -> None:
    samples = torch.zeros(3 * 44100)
    assert [len(mfcc(samples, 44100, hop)) for hop in irmas.HOPS] == [259, 517, 1034]


def _folder(folder: Path, recordings: int = 4, excerpts: int = 3) -> Path:
    """IRMAS in small: two instruments, recordings of several clips, and files that are none."""
    for pitch, name in enumerate(["cel", "flu"]):
        (folder / name).mkdir(parents=True)
        for recording in range(recordings):
            for excerpt in range(1, excerpts + 1):
                sound = 0.5 * torch.sin((pitch + 1) * 0.1 * torch.arange(3000) + recording + excerpt)
                wav.write(folder / name / f"[{name}][nod]{recording:04d}__{excerpt}.wav", sound, TINY)
        (folder / name / "readme.txt").write_text("no clip")
        (folder / name / "._hidden.wav").write_text("no clip")
    (folder / "notes").mkdir()
    return folder


def test_the_folder_is_read(tmp_path: Path) -> None:
    instruments, clips = find(_folder(tmp_path), most=100)
    assert instruments == ["cel", "flu"]
    assert len(clips) == 24
    assert {clip.path.parent.name for clip in clips if clip.instrument == 1} == {"flu"}
    by_hop, target = features(clips, (500, 250), rate=TINY, seconds=0.3)
    assert {hop: tuple(x.shape) for hop, x in by_hop.items()} == {500: (5, 24, 20), 250: (10, 24, 20)}
    assert target.tolist() == [0] * 12 + [1] * 12
    samples, _ = wav.read(clips[13].path)
    assert torch.equal(by_hop[250][:, 13], mfcc(samples[:2400], TINY, 250))


def test_the_papers_features_are_those_of_both_channels_scaled_clip_by_clip(tmp_path: Path) -> None:
    sound = torch.rand(3 * 44100, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    wav.write(tmp_path / "both.wav", sound, 44100)
    wav.write(tmp_path / "quiet.wav", 0.01 * sound[:, :1], 44100)
    clips = [Clip(tmp_path / name, 0) for name in ("both.wav", "quiet.wav")]
    by_hop, _ = features(clips, irmas.HOPS, kind="paper")
    assert {hop: tuple(x.shape) for hop, x in by_hop.items()} == {
        512: (259, 2, 38),
        256: (517, 2, 24),
        128: (1034, 2, 12),
    }
    for x in by_hop.values():
        torch.testing.assert_close(x.mean(0), torch.zeros_like(x[0]), atol=1e-4, rtol=0)
        torch.testing.assert_close(x.std(0, correction=0), torch.ones_like(x[0]), atol=1e-4, rtol=0)
    samples, _ = wav.read_channels(clips[0].path)
    right = mfcc(samples[:, 1].float().contiguous(), 44100, 128, window=1024, coefficients=7)[:, 1:]
    right = (right - right.mean(0)) / right.std(0, correction=0)
    torch.testing.assert_close(by_hop[128][:, 0, 6:], right, atol=1e-4, rtol=0)
    assert torch.equal(by_hop[128][:, 1, :6], by_hop[128][:, 1, 6:])  # one channel counts twice


def test_no_recording_is_both_trained_and_tested_on(tmp_path: Path) -> None:
    _, clips = find(_folder(tmp_path), most=100)
    train, test = split(clips)
    assert sorted(map(str, train + test)) == sorted(map(str, clips))
    assert len(test) == 6  # one recording of four, three clips, of each instrument
    assert not {(c.instrument, c.recording) for c in train} & {(c.instrument, c.recording) for c in test}


def test_the_same_few_clips_are_taken_every_time(tmp_path: Path) -> None:
    _, clips = find(_folder(tmp_path), most=5)
    assert [clip.instrument for clip in clips] == [0] * 5 + [1] * 5
    assert find(tmp_path, most=5)[1] == clips
    every = find(tmp_path, most=100)[1]
    assert clips == every[:5] + every[12:17]


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing is not a folder; give the one that holds a sub-folder for each"):
        find(tmp_path / "missing", most=5)
    _folder(tmp_path / "outer" / "IRMAS-TrainingData")
    with pytest.raises(ValueError, match="WAV files were found in 0 of its 1 sub-folders"):
        find(tmp_path / "outer", most=5)
    _, clips = find(_folder(tmp_path / "single", recordings=1), most=5)
    with pytest.raises(ValueError, match="cel has clips of one recording only"):
        split(clips)


def test_clips_of_another_rate_or_too_short_are_named(tmp_path: Path) -> None:
    wav.write(tmp_path / "short.wav", torch.zeros(2000), TINY)
    clip = Clip(tmp_path / "short.wav", 0)
    with pytest.raises(ValueError, match=r"short\.wav has 2000 samples at 8000 Hz; at least 2400 at 8000 Hz"):
        features([clip], (500,), rate=TINY, seconds=0.3)
    with pytest.raises(ValueError, match=r"short\.wav has 2000 samples at 8000 Hz; at least 132300 at 44100 Hz"):
        features([clip], (500,))


def test_generated_clips_are_reproducible_and_heard_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        generate(tmp_path / name, 2, ("cla", "gac"), rate=TINY, seconds=0.5)
    paths = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.wav"))
    assert len(paths) == 4
    for path in paths:
        assert (tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes()
    assert len({(tmp_path / "a" / path).read_bytes() for path in paths}) == 4
    for instrument in INSTRUMENTS.values():
        sound = melody(instrument, 4000, TINY, torch.Generator().manual_seed(1))
        assert sound.shape == (4000,)
        assert 0.01 < float(sound.abs().max()) < 1.2


@pytest.mark.usefixtures("one_thread")
def test_the_methods_agree(tmp_path: Path) -> None:
    irmas.main(["--fast", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "generated.json").read_text())
    assert results["clips"] == {"train": 9, "test": 3}
    assert list(results["lengths"]) == ["33", "65", "130"]
    for length in results["lengths"].values():
        assert list(length["methods"]) == list(irmas.METHODS)
        for name, one in length["methods"].items():
            assert 0 < one["backward_ms"]["fastest"] < one["step_ms"]["fastest"]
            assert max(one["gradient_error"].values()) < 5e-6
            assert len(one["losses"]) == 3
            assert one["largest_loss_difference"] < 1e-5
            if "levels" in name:
                assert one["backward_solve"]["solver"] == "blelloch scan"
    lines = (tmp_path / "generated.md").read_text().splitlines()
    assert sum(line.startswith(("| 33 |", "| 65 |", "| 130 |")) for line in lines) == 3 * len(irmas.METHODS)
    assert (tmp_path / "generated.png").stat().st_size > 1000


def test_a_wrong_folder_ends_the_run_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        irmas.main(["--data", str(tmp_path)])
    assert "must hold at least two sub-folders with WAV files" in capsys.readouterr().err
