"""The example run as its user runs it: resumed, interrupted, deferred, and with everything that can be wrong."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("einops", reason="comes with the extra named examples")
pytest.importorskip("matplotlib", reason="comes with the extra named examples")
pytest.importorskip("rich", reason="comes with the extra named examples")
pytest.importorskip("safetensors", reason="comes with the extra named examples")
pytest.importorskip("tyro", reason="comes with the extra named examples")

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import compare_runs
import train_moe_lm
from matplotlib.figure import Figure
from moe_lm.checkpoint import load_checkpoint, save_checkpoint
from moe_lm.data import bigram_loss, draw_batch, load_corpus, validation_sequences
from moe_lm.errors import UserError
from moe_lm.log import RunLog
from moe_lm.settings import Settings
from moe_lm.trainer import learning_rate
from PIL import Image

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_moe_lm.py"
SMALL = shlex.split(
    "--layers 2 --hidden-size 16 --heads 2 --experts 4 --intermediate-size 8 --context 16 --batch-size 4 "
    "--eval-every 2 --eval-sequences 8 --warmup-steps 2 --decay-steps 8 --checkpoint-every 100 --device cpu"
)
STEPS = 6
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def command(text: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--data", str(text), "--out", str(out), *SMALL, *options]


def run(text: Path, out: Path, *options: str) -> str:
    done = subprocess.run(command(text, out, *options), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of random words."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    words = ["an", "expert", "takes", "some", "rows", "and", "leaves", "all", "other", "rows", "to", "others"]
    chosen = torch.randint(len(words), (2000,), generator=generator).tolist()
    path.write_text(" ".join(words[i] for i in chosen))
    return path


@pytest.fixture(scope="module")
def whole_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, for reading only."""
    out = tmp_path_factory.mktemp("whole") / "run"
    printed = run(text, out, "--steps", str(STEPS))
    assert "validation loss" in printed
    assert "bigram model" in printed
    return out


def assert_same_run(first: Path, second: Path) -> None:
    one, other = (load_checkpoint(folder / "checkpoint.safetensors") for folder in (first, second))
    assert one.facts == other.facts
    torch.testing.assert_close(one.tensors, other.tensors, rtol=0, atol=0)
    assert (first / "log.jsonl").read_text() == (second / "log.jsonl").read_text()


# ---- the run


def test_a_run_leaves_a_log_a_checkpoint_and_a_picture(whole_run: Path) -> None:
    lines = [json.loads(line) for line in (whole_run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert all(0 < line["train_loss"] < 10 for line in lines)
    assert [sum(layer) for layer in lines[0]["tokens_per_expert"]] == [4 * 16 * 2] * 2
    assert [line["device"] for line in lines if "device" in line] == ["CPU (fp32)"]
    with Image.open(whole_run / "curves.png") as image:
        assert image.format == "PNG"
        image.load()
        assert min(image.size) > 500
        assert len(image.convert("RGB").getcolors(2**24)) > 100
    assert sorted(path.name for path in whole_run.iterdir()) == ["checkpoint.safetensors", "curves.png", "log.jsonl"]


def test_half_a_run_and_its_resumption_are_the_whole_run_bit_for_bit(
    text: Path, whole_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "halves"
    run(text, out, "--steps", str(STEPS // 2))
    printed = run(text, out, "--steps", str(STEPS), "--resume")
    assert f"resumed after step {STEPS // 2}" in printed
    assert_same_run(out, whole_run)


def test_a_deferred_run_is_the_plain_run(text: Path, whole_run: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "deferred", "--steps", str(STEPS), "--defer-wgrad")
    assert_same_run(tmp_path / "deferred", whole_run)


def test_a_run_in_fp8_is_near_the_plain_run(text: Path, whole_run: Path, tmp_path: Path) -> None:
    run(text, tmp_path / "fp8", "--steps", str(STEPS), "--fp8")
    plain, fp8 = (RunLog.read(folder / "log.jsonl") for folder in (whole_run, tmp_path / "fp8"))
    assert fp8.train_loss != plain.train_loss
    assert fp8.train_loss == pytest.approx(plain.train_loss, rel=0.01)
    assert all("experts in FP8" in name for name in fp8.device.values())


def test_a_step_with_gradients_left_behind_is_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grouped_experts.backward_dw", lambda model: None)
    with pytest.raises(RuntimeError, match="weight gradients are pending"):
        train_moe_lm.main(command(text, tmp_path / "run", "--defer-wgrad")[2:])


def test_ctrl_c_saves_and_the_printed_command_resumes(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "interrupted run"
    process = subprocess.Popen(
        command(text, out, "--steps", "1000000"),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "validation" not in (line := process.stdout.readline()) or not line.startswith("step 2:"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""
    done = load_checkpoint(out / "checkpoint.safetensors").tensors["log.train_loss"].numel()
    assert f"stopped after step {done}, saved in {out}" in printed
    resume = shlex.split(printed.splitlines()[-1])
    assert resume[0] == sys.executable
    subprocess.run([*resume, "--steps", str(done + 2)], env=ENVIRONMENT, check=True, timeout=300, capture_output=True)
    run(text, tmp_path / "whole", "--steps", str(done + 2))
    assert_same_run(out, tmp_path / "whole")


def test_a_second_signal_stops_at_once() -> None:
    with train_moe_lm.StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_overwrite_begins_anew(text: Path, whole_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    (out / "notes.txt").write_text("mine")
    assert train_moe_lm.main(command(text, out, "--overwrite", "--steps", "1")[2:]) == 0
    assert len((out / "log.jsonl").read_text().splitlines()) == 1
    assert (out / "notes.txt").read_text() == "mine"


def test_a_finished_run_can_be_resumed_and_says_its_result_again(
    text: Path, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    assert train_moe_lm.main(command(text, out, "--resume", "--steps", str(STEPS))[2:]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert_same_run(out, whole_run)


def test_a_larger_learning_rate_learns_words(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--steps", "60", "--learning-rate", "0.02", "--decay-steps", "60", "--eval-every", "60")
    assert train_moe_lm.main(command(text, tmp_path / "run", *options)[2:]) == 0
    first, *_, last = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert first["train_loss"] > math.log(256) - 0.5
    assert last["validation_loss"] < 2.5


# ---- several runs in one picture


def a_log(device: str, step: int = 1, losses: int = 4) -> RunLog:
    log = RunLog(validation_loss={2: 1.5, 4: 1.25})
    for done in range(1, losses + 1):
        log.add_step(4.0 / done, torch.full((2, 4), done, dtype=torch.int32), "CPU (fp32)" if done < step else device)
    return log


def a_run(folder: Path, log: RunLog) -> Path:
    folder.mkdir()
    log.write(folder / "log.jsonl")
    return folder


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    log = a_log("NVIDIA H200 (bf16)", step=3)
    assert log.device == {1: "CPU (fp32)", 3: "NVIDIA H200 (bf16)"}
    read = RunLog.read(a_run(tmp_path / "run", log) / "log.jsonl")
    kept = RunLog.from_tensors(log.to_tensors(), {str(step): name for step, name in log.device.items()})
    for other in (read, kept):
        assert (other.train_loss, other.validation_loss) == (log.train_loss, log.validation_loss)
        assert other.device == log.device
        torch.testing.assert_close(other.tokens_per_expert, log.tokens_per_expert, rtol=0, atol=0)


def test_runs_are_compared_in_one_picture(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k)))
    gpu, picture = a_run(tmp_path / "gpu", a_log("NVIDIA H200 (bf16)")), tmp_path / "losses.png"
    assert compare_runs.main([str(whole_run), str(gpu), "--output", str(picture)]) == 0
    assert capsys.readouterr().out == f"wrote {picture}\n"
    with Image.open(picture) as image:
        assert image.format == "PNG"
        image.load()
    (axes,) = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per byte)")
    names = [f"{d}, {c}" for d in ("CPU (fp32)", "NVIDIA H200 (bf16)") for c in ("training", "validation")]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    lines = {line.get_label(): line for line in axes.get_lines()}
    for number, log in enumerate((RunLog.read(whole_run / "log.jsonl"), RunLog.read(gpu / "log.jsonl"))):
        assert list(lines[names[2 * number]].get_ydata()) == log.train_loss
        assert list(lines[names[2 * number]].get_xdata()) == list(range(1, len(log.train_loss) + 1))
        assert list(lines[names[2 * number + 1]].get_ydata()) == list(log.validation_loss.values())
        assert list(lines[names[2 * number + 1]].get_xdata()) == list(log.validation_loss)


def test_runs_are_named_after_their_devices_if_that_tells_them_apart(tmp_path: Path) -> None:
    cpu, gpu = a_run(tmp_path / "a", a_log("CPU (fp32)")), a_run(tmp_path / "b", a_log("GPU (bf16)"))
    both = a_run(tmp_path / "c", a_log("GPU (bf16)", step=3))
    again, unknown = a_run(tmp_path / "d", a_log("GPU (bf16)")), a_run(tmp_path / "e", RunLog([1.0]))
    names = compare_runs.named_logs
    assert list(names([cpu, gpu, both])) == ["CPU (fp32)", "GPU (bf16)", "CPU (fp32), then GPU (bf16)"]
    assert list(names([gpu, again])) == [f"{gpu} GPU (bf16)", f"{again} GPU (bf16)"]
    assert list(names([cpu, unknown])) == [f"{cpu} CPU (fp32)", f"{unknown}"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "cannot be read: No such file"),
        ("text\n", "is not the log of a run"),
        ("[1]\n", "is not the log of a run"),
    ],
)
def test_a_folder_without_a_log_is_no_run(
    contents: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if contents is not None:
        (tmp_path / "log.jsonl").write_text(contents)
    assert compare_runs.main([str(tmp_path), "--output", str(tmp_path / "losses.png")]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'log.jsonl'}: {message}")
    assert not (tmp_path / "losses.png").exists()


def test_a_resumed_run_keeps_the_devices_of_its_steps(
    text: Path, whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    monkeypatch.setattr("moe_lm.trainer.device_name", lambda device, fp8: "another")
    assert train_moe_lm.main(command(text, out, "--resume", "--steps", str(STEPS + 2))[2:]) == 0
    assert RunLog.read(out / "log.jsonl").device == {1: "CPU (fp32)", STEPS + 1: "another"}


# ---- what can be wrong


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[-1000] ^= 1
    path.write_bytes(contents)


def replace_by_text(path: Path) -> None:
    path.write_text("this is no checkpoint")


def leave(path: Path) -> None:
    pass


ERRORS: dict[str, tuple[list[str], Callable[[Path], None], str]] = {
    "run-there": ([], leave, "holds a run already (checkpoint.safetensors, log.jsonl, curves.png): say --resume"),
    "only-the-log-there": ([], Path.unlink, "holds a run already (log.jsonl, curves.png)"),
    "both-flags": (["--resume", "--overwrite"], leave, "--resume and --overwrite exclude each other"),
    "no-checkpoint": (["--resume"], Path.unlink, "there is no checkpoint to resume from"),
    "cut-off": (["--resume"], cut_off, "is not a whole checkpoint of this program"),
    "text-for-checkpoint": (["--resume"], replace_by_text, "is not a whole checkpoint of this program"),
    "bit-flipped": (["--resume"], flip_a_bit, "is damaged"),
    "other-width": (["--resume", "--hidden-size", "32"], leave, "its run had hidden_size = 16, this one has 32"),
    "other-experts": (["--resume", "--experts", "8"], leave, "its run had experts = 4, this one has 8"),
    "other-rate": (["--resume", "--learning-rate", "1"], leave, "its run had learning_rate = 0.003, this one has 1.0"),
    "other-seed": (["--resume", "--seed", "1"], leave, "its run had seed = 0, this one has 1"),
    "other-text": (["--resume", "--data", str(SCRIPT)], leave, "its run learned from another text"),
    "fewer-steps": (["--resume", "--steps", "5"], leave, "steps: wanted at least the 6 that are done, got 5"),
    "data-missing": (["--overwrite", "--data", "/nowhere/text"], leave, "/nowhere/text: cannot be read: No such file"),
    "data-a-folder": (["--overwrite", "--data", "/"], leave, "/: cannot be read: Is a directory"),
    "data-empty": (["--overwrite", "--data", os.devnull], leave, "wanted text, got nothing"),
    "context-too-long": (
        ["--overwrite", "--context", "5000"],
        leave,
        "wanted at least 50011 bytes for a context of 5000, got",
    ),
    "no-steps": (["--overwrite", "--steps", "0"], leave, "steps: wanted at least 1, got 0"),
    "not-a-number": (["--overwrite", "--weight-decay", "nan"], leave, "weight_decay: wanted at least 0, got nan"),
    "endless-rate": (["--overwrite", "--learning-rate", "inf"], leave, "learning_rate: wanted a finite number above 0"),
    "huge-seed": (["--overwrite", "--seed", str(2**63)], leave, "seed: wanted less than 2**63"),
    "heads": (["--overwrite", "--heads", "3"], leave, "hidden_size: wanted a multiple of twice the number of heads"),
    "top-k": (["--overwrite", "--top-k", "5"], leave, "top_k: wanted at most the number of experts, 4, got 5"),
    "no-gpu": (["--overwrite", "--device", "cuda"], leave, "device: wanted cuda"),
}


@pytest.mark.parametrize(("options", "spoil", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_are_one_line_and_nothing_is_overwritten(
    text: Path,
    whole_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "run"
    shutil.copytree(whole_run, out)
    spoil(out / "checkpoint.safetensors")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert train_moe_lm.main(command(text, out, "--steps", str(STEPS), *options)[2:]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert message in printed
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_an_error_ends_the_process_with_a_code_and_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "missing", tmp_path / "out"), env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'missing'}: cannot be read: No such file or directory\n"
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert train_moe_lm.main(command(text, tmp_path / "file")[2:]) == 1
    assert "wanted a folder, got a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    text: Path, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--steps", "40", "--learning-rate", "1e30", "--checkpoint-every", "1")
    assert train_moe_lm.main(command(text, tmp_path / "run", *options)[2:]) == 1
    assert "try a lower --learning-rate" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "run" / "checkpoint.safetensors").tensors["log.train_loss"].isfinite().all()


# ---- parts


def test_a_failed_write_keeps_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {"a": torch.ones(3)}, {"n": 1})

    def write_half_and_fail(self: Path, contents: bytes) -> None:
        with self.open("wb") as file:
            file.write(contents[:20])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", write_half_and_fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, {"a": torch.zeros(3)}, {"n": 2})
    assert load_checkpoint(path).facts == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_every_byte_of_a_checkpoint_is_guarded(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {"a": torch.arange(3), "b": torch.ones(2)}, {"n": 1})
    whole = path.read_bytes()
    for position in range(len(whole)):
        spoiled = bytearray(whole)
        spoiled[position] ^= 4
        path.write_bytes(spoiled)
        with pytest.raises(UserError):
            load_checkpoint(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            load_checkpoint(path)


def test_bigram_loss_is_that_of_counted_pairs() -> None:
    train = torch.tensor([0, 1, 0, 1, 0, 2], dtype=torch.uint8)
    sequences = torch.tensor([[0, 1, 0], [0, 2, 2]])
    # After 0 came 1, 1, 2; after 1 came 0, 0; after 2 nothing; one is added to each of 256.
    p = [3 / 259, 3 / 258, 2 / 259, 1 / 256]
    assert math.isclose(bigram_loss(train, sequences), -sum(map(math.log, p)) / 4, rel_tol=1e-12)


def test_batches_and_validation_sequences_are_runs_of_the_text() -> None:
    tokens = torch.arange(101, dtype=torch.uint8)
    batch = draw_batch(tokens, 500, 10, torch.Generator().manual_seed(0))
    assert batch.shape == (500, 11)
    assert (batch.diff() == 1).all()
    assert (batch.min(), batch.max()) == (0, 100)
    sequences = validation_sequences(tokens, 1000, 10)
    targets = sequences[:, 1:].flatten().tolist()
    assert (sequences.diff() == 1).all()
    assert sorted(targets) == list(range(1, 101))
    assert validation_sequences(tokens, 3, 10)[:, 0].tolist() == [0, 45, 90]


def test_the_standard_library_is_a_text_that_does_not_change() -> None:
    first, second = load_corpus(None, 128), load_corpus(None, 128)
    assert first.digest == second.digest
    assert len(first.train) > 5_000_000
    assert len(first.validation) == (len(first.train) + len(first.validation)) // 10


def test_the_learning_rate_rises_falls_and_stays() -> None:
    settings = Settings(learning_rate=1.0, warmup_steps=10, decay_steps=110)
    rates = [learning_rate(step, settings) for step in (1, 5, 10, 60, 110, 5000)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1, 0.1])
    assert learning_rate(1, Settings(warmup_steps=0)) > 0
