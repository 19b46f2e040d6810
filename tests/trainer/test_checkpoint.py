"""Checkpoints are verified before they are believed, and the newest that verifies is taken."""

import json
import re
import resource
import shutil

import jax
import numpy as np
import pytest
from etils import epath

from models import MLPConfig
from tests.tiny import Kill, Tiny, digest, examples, lines, run, saved_steps, tiny_config, tiny_program
from trainer import CheckpointConfig, Checkpoints, DataConfig, EvalConfig, UserError
from trainer.checkpoint import main
from trainer.errors import NoValidCheckpointError, WriteError
from trainer.manifest import DamagedError, read_manifest, state_digest, write_manifest
from trainer.state import flatten_state


@pytest.fixture(scope="module")
def program():
    return tiny_program()


@pytest.fixture(scope="module")
def state(program):
    return program.create_state(0)


def save(folder, program, state, values, **config):
    """Checkpoints 1, 2, … of runs whose metric had `values`; None: there was no evaluation."""
    checkpoints = Checkpoints(folder, CheckpointConfig(**config), program.mesh)
    for step, value in enumerate(values, start=1):
        checkpoints.save(step, state, hooks={}, metrics={} if value is None else {"accuracy": value})
    checkpoints.close()
    return checkpoints


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "config", "kept"),
    [
        ([5, 4, 3, 2, 1], {"keep": 2}, [1, 5]),  # C64
        ([1, 9, 2, 3], {"keep": 2}, [2, 4]),  # C65
        ([1, 9, 2, 3], {"keep": 3}, [2, 3, 4]),
        ([1, 9, 2, 3], {"keep": 2, "mode": "min"}, [1, 4]),
        ([5, 5, 5, 5], {"keep": 2}, [1, 4]),
        ([NAN, 1, NAN, NAN], {"keep": 2}, [2, 4]),
        ([NAN, NAN, NAN], {"keep": 2}, [3]),
        ([None, 2, None, 1, None], {"keep": 3}, [2, 4, 5]),
        ([1, 2, 3, 4], {"keep": 2, "best": None}, [3, 4]),
        ([1, 2, 3], {"keep": 1, "best": None}, [3]),
    ],
)
def test_the_latest_and_the_best_are_kept(tmp_path, program, state, values, config, kept):
    """Cases C64, C65: ties keep the older one; a step whose metric is NaN or was not taken is never a best."""
    checkpoints = save(tmp_path, program, state, values, **{"best": "accuracy", **config})
    assert checkpoints.steps() == kept
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == kept
    assert checkpoints.restore(program.state).step == len(values)


def test_an_improvement_is_saved_when_it_is_seen(tmp_path):
    """Between two intervals, when `best` improves; and the run resumes at the latest."""
    checkpoint = CheckpointConfig(every="100 steps", keep=20, best="loss", mode="min")
    evals = (EvalConfig(DataConfig(examples(11, seed=1)), every="2 steps"),)
    run(tmp_path, train_for="8 steps", checkpoint=checkpoint, evals=evals)
    best, improved = float("inf"), []
    for line in lines(tmp_path, "test"):
        if line["loss"] < best:
            best = line["loss"]
            improved.append(line["step"])
    assert saved_steps(tmp_path) == sorted({*improved, 8})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with checkpoints of the steps 2, 4 and 6; tests copy it."""
    workdir = tmp_path_factory.mktemp("saved")
    run(workdir, checkpoint=CheckpointConfig(every="2 steps", keep=20))
    assert saved_steps(workdir) == [2, 4, 6]
    return workdir


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def restore(workdir, program):
    return Checkpoints(workdir / "checkpoints", CheckpointConfig(), program.mesh).restore(program.state)


def files_of(step_folder):
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << position % 8
    path.write_bytes(bytes(raw))


def test_a_flipped_bit_in_any_file_is_found(copied, program, caplog):
    """Data, metadata and the manifest: the step before is taken, and a warning names the file."""
    files = files_of(copied / "checkpoints" / "6")
    kinds = {path.relative_to(copied / "checkpoints" / "6").parts[0] for path in files}
    assert kinds == {"state", "manifest.json"} and len(files) > 5
    for path in files:
        original = path.read_bytes()
        if not original:
            continue
        flip(path, len(original) // 2)
        caplog.clear()
        assert restore(copied, program).step == 4, path
        assert "checkpoint of step 6 does not verify, trying the one before it" in caplog.text
        assert path.name in caplog.text
        path.write_bytes(original)
    assert restore(copied, program).step == 6


def test_no_flip_in_the_manifest_goes_unseen(copied):
    folder = copied / "checkpoints" / "6"
    path = folder / "manifest.json"
    original, before = path.read_bytes(), read_manifest(folder)
    for position in range(0, len(original), len(original) // 200):
        flip(path, position)
        try:
            assert read_manifest(folder) == before  # only white space may differ
        except DamagedError as error:
            assert "manifest.json" in str(error)
        path.write_bytes(original)


def test_a_wrong_value_under_right_files_is_found_by_its_digest(copied, program):
    """What a file's hash cannot see, such as a faulty read: the leaf is named."""
    folder = copied / "checkpoints" / "6"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    manifest["leaves"]["params/head/bias"]["digest"] = "0" * 16
    write_manifest(epath.Path(folder), manifest)
    assert restore(copied, program).step == 4
    shutil.rmtree(copied / "checkpoints" / "2")
    shutil.rmtree(copied / "checkpoints" / "4")
    with pytest.raises(NoValidCheckpointError, match=r"1 leaves do not hold the values .*: params/head/bias"):
        restore(copied, program)


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty"])
def test_truncated_and_deleted_files_are_found(copied, program, damage):
    files = files_of(copied / "checkpoints" / "6" / "state")
    path = max(files, key=lambda file: file.stat().st_size)
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: -1 if damage == "truncate" else 0])
    assert restore(copied, program).step == 4


def test_when_none_verifies_it_is_an_error_that_lists_them_all(copied):
    """Exit code 4; never answered by a fresh start, and nothing is touched."""
    for step in (2, 4, 6):
        flip(max(files_of(copied / "checkpoints" / str(step) / "state"), key=lambda file: file.stat().st_size), 40)
    before = {path: path.read_bytes() for path in files_of(copied)}
    checkpoint = CheckpointConfig(every="2 steps", keep=20)
    trainer = Tiny(tiny_config(train_for="8 steps", checkpoint=checkpoint), copied)
    with pytest.raises(NoValidCheckpointError, match=r"(?s)verifies; move .*step 6: .*step 4: .*step 2: ") as error:
        trainer.fit()
    assert error.value.exit_code == 4
    assert {path: path.read_bytes() for path in files_of(copied)} == before


def test_after_a_fallback_the_run_repeats_the_lost_steps_in_the_same_bits(copied, saved):
    flip(max(files_of(copied / "checkpoints" / "6" / "state"), key=lambda file: file.stat().st_size), 40)
    run(copied, checkpoint=CheckpointConfig(every="2 steps", keep=20))
    assert digest(copied, 6) == digest(saved, 6)
    assert lines(copied) == lines(saved)


def test_a_step_without_its_manifest_does_not_count(copied, program):
    (copied / "checkpoints" / "6" / "manifest.json").unlink()
    (copied / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    (copied / "checkpoints" / "8").mkdir()
    assert restore(copied, program).step == 4
    run(copied, checkpoint=CheckpointConfig(every="2 steps", keep=20))
    assert saved_steps(copied) == [2, 4, 6]


def test_a_save_that_cannot_start_names_its_step(copied):
    """Case C67: a link to nowhere stands where the folder of step 8 should; the earlier checkpoints are intact."""
    (copied / "checkpoints" / "8").symlink_to("/nowhere/at/all")
    changes = {"train_for": "8 steps", "checkpoint": CheckpointConfig(every="2 steps", keep=20)}
    trainer = Tiny(tiny_config(**changes), copied)
    with pytest.raises(WriteError, match=r"the checkpoint of step 8 could not be written to .*/checkpoints/8") as error:
        trainer.fit()
    assert error.value.exit_code == 5
    (copied / "checkpoints" / "8").unlink()
    assert saved_steps(copied) == [2, 4, 6]
    for step in (2, 4, 6):
        assert main(["verify", str(copied), f"--step={step}"]) == 0


def test_a_save_that_fails_in_the_background_names_its_step(tmp_path):
    """Cases C67, C68: no file may grow beyond 40 kB, as on a full disk; the next call says so, with exit code 5."""
    program = tiny_program(model=MLPConfig(in_features=4, hidden=(128, 128), out_features=3))
    state = program.create_state(0)
    checkpoints = save(tmp_path, program, state, [1.0])
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), program.mesh)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        checkpoints.save(2, state, hooks={}, metrics={})
        with pytest.raises(WriteError, match="the checkpoint of step 2 could not be written") as error:
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        checkpoints.close()
    assert error.value.exit_code == 5
    assert checkpoints.restore(program.state).step == 1
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), program.mesh)
    checkpoints.save(2, state, hooks={}, metrics={})  # the disk has room again
    checkpoints.close()
    assert checkpoints.restore(program.state).step == 2


@pytest.mark.parametrize("num_devices", [4, 2, 1])
def test_saved_on_eight_devices_and_restored_on_fewer(saved, tmp_path, num_devices):
    """Case C70: equal bits, and an equal digest when they are saved there."""
    program = tiny_program(jax.devices()[:num_devices])
    restored = restore(saved, program)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), program.mesh)
    checkpoints.save(6, restored.state, hooks={}, metrics={})
    checkpoints.close()
    (folder,) = tmp_path.iterdir()
    assert state_digest(json.loads((folder / "manifest.json").read_text())) == digest(saved, 6)


def test_another_shape_dtype_or_layer_is_an_error_that_lists_the_paths(saved):
    """Case C71, in both directions; nothing is cast or made up."""
    wide = MLPConfig(in_features=4, hidden=(16, 16), out_features=5, dropout=0.2, batch_norm=True)
    with pytest.raises(UserError) as error:
        restore(saved, tiny_program(model=wide))
    text = str(error.value)
    assert "only in this config: params/blocks/1/linear/kernel float32[16, 16]" in text
    assert "params/head/kernel: float32[16, 3] in the checkpoint, float32[16, 5] in this config" in text
    with pytest.raises(UserError, match=r"only in the checkpoint: params/blocks/0/linear/kernel float32\[4, 16\]"):
        restore(saved, tiny_program(model=MLPConfig(in_features=4, hidden=(), out_features=3)))
    program = tiny_program()
    cast = dict(program.state.params)
    cast["head/bias"] = jax.ShapeDtypeStruct((3,), np.dtype("float16"), sharding=cast["head/bias"].sharding)
    program.state = program.state.replace(params=cast)
    with pytest.raises(UserError, match=r"params/head/bias: float32\[3\] in the checkpoint, float16\[3\] in this"):
        restore(saved, program)


def test_restored_leaves_are_what_was_saved(tmp_path, program, state):
    save(tmp_path, program, state, [1.0])
    restored = flatten_state(Checkpoints(tmp_path, CheckpointConfig(), program.mesh).restore(program.state).state)
    for path, leaf in flatten_state(state).items():
        np.testing.assert_array_equal(restored[path], leaf, err_msg=path)
        assert restored[path].sharding == leaf.sharding, path


def test_the_command_lists_verifies_and_digests(copied, capsys):
    assert main(["list", str(copied)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == ["2", "4", "6"]
    assert all("MiB" in line and "leaves" in line for line in listed)
    assert main(["verify", str(copied)]) == 0
    verified = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert verified == [["2", "ok:"], ["4", "ok:"], ["6", "ok:"]]
    assert main(["digest", str(copied)]) == 0
    newest = capsys.readouterr().out
    assert re.fullmatch(rf"6 {digest(copied, 6)}\n", newest) and len(digest(copied, 6)) == 64
    assert main(["digest", str(copied), "--step=2"]) == 0
    assert capsys.readouterr().out == f"2 {digest(copied, 2)}\n" != newest.replace("6", "2", 1)


def test_the_command_names_what_is_damaged(copied, capsys):
    data = max(files_of(copied / "checkpoints" / "4" / "state"), key=lambda file: file.stat().st_size)
    flip(data, 40)
    flip(copied / "checkpoints" / "6" / "manifest.json", 100)
    assert main(["verify", str(copied)]) == 4
    two, four, six = capsys.readouterr().out.splitlines()
    assert two.split()[1] == "ok:"
    assert "damaged" in four and data.name in four
    assert "damaged" in six and "manifest.json" in six
    assert main(["digest", str(copied), "--step=4"]) == main(["digest", str(copied)]) == 4
    out, err = capsys.readouterr()
    assert not out and "step 4 is damaged" in err and "step 6 is damaged" in err
    assert main(["list", str(copied)]) == 0
    assert "damaged" in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--step=3"], "no checkpoint of step 3 in .* it holds steps [2, 4, 6]"), ([], "it holds no complete checkpoint")],
)
def test_the_command_without_a_checkpoint_exits_2(saved, tmp_path, capsys, arguments, message):
    assert main(["digest", str(saved if arguments else tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), error) and "Traceback" not in error


@pytest.mark.parametrize("arguments", [[], ["list"], ["remove", "x"], ["list", "x", "--step=last"]])
def test_the_command_refuses_what_it_does_not_know(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"keep": 0}, "at least 1, found 0"), ({"keep": 1, "best": "loss"}, "at least 2: one for the latest")],
)
def test_keep_leaves_room_for_the_best(fields, message):
    with pytest.raises(UserError, match=rf"checkpoint\.keep: expected {message}"):
        CheckpointConfig(**fields)


def test_a_kill_during_the_first_save_leaves_nothing_to_resume(tmp_path):
    """An incomplete only step is no checkpoint: the run starts anew."""
    run(tmp_path, Kill(2), checkpoint=CheckpointConfig(every="100 steps"))
    (tmp_path / "checkpoints" / "3" / "state").mkdir(parents=True)
    trainer = run(tmp_path, checkpoint=CheckpointConfig(every="100 steps"))
    assert trainer._step == 6
    assert [line["step"] for line in lines(tmp_path, "train")] == [1, 2, 3, 4, 5, 6]
    assert main(["verify", str(tmp_path)]) == 0
