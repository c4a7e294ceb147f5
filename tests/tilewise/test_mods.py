"""Mods: what the language understands, what it refuses and how it says so; derivatives, block masks, pictures."""

from __future__ import annotations

import doctest
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewise
from tests import features
from tilewise import AttentionError, mods
from tilewise.reference import scored
from tilewise_lab import cli, picture

S = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PLACE = (0, 1, torch.arange(4)[:, None], torch.arange(5))


def double(x):
    return 2 * x


@tilewise.score_mod
def everything(score, b, h, q_idx, kv_idx, t, cap: float):
    """Each operation with a derivative at least once."""
    x = score / cap + t[q_idx % 3, h]
    x -= double(x).clamp(-0.5, 0.5) * 0.25
    y = torch.exp(-abs(x)) + torch.log(x * x + 1) + torch.sqrt(x**2 + 0.1) + x**-2.0 * 1e-3
    z = torch.tanh(y) * torch.sigmoid(x) + torch.sin(x) * torch.cos(y) + max(x, 0.1) + min(y, 1.0)
    far = not (abs(q_idx - kv_idx) < 2 and q_idx >= kv_idx)
    return z if far else torch.where(kv_idx // 2 == 1, x % 0.7, (2.0**x) + y.relu())


def test_slope_and_sites_are_what_autograd_says() -> None:
    t = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    score = S.clone().requires_grad_()
    mod = everything(t, 1.5)
    value = mod(score, *PLACE)
    dscore, dt = torch.autograd.grad(value.sum(), (score, t))
    place = mods.expr.Place(*PLACE, 4, 5)
    slope, *sites = mods.expr.evaluate(
        [mod.program.slope, *(d for _, d in mod.program.sites)], place, S, (t.detach(),), (1.5,), torch.float64
    )
    torch.testing.assert_close(slope.expand(S.shape), dscore)
    total = torch.zeros_like(t)
    for (load, _), d in zip(mod.program.sites, sites, strict=True):
        mods.expr.scatter_(total, load, d.expand(S.shape), place, (t,), (1.5,))
    torch.testing.assert_close(total, dt)


def bad(source: str) -> object:
    """A decorated function whose body is `return <source>`, from a file of its own."""
    import linecache

    text = f"def wrong(score, b, h, q_idx, kv_idx, t):\n    x = score\n    return {source}\n"
    name = f"<test {zlib.crc32(source.encode())}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, object] = {"torch": torch, "table": torch.zeros(3)}
    exec(compile(text, name, "exec"), space)
    return tilewise.score_mod(space["wrong"])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.fft.fft(x)", "call of"),
        ("x[0]", "an index into 'x'"),
        ("x + t", "the tensor 't' whole"),
        ("x + t[q_idx, 0]", "2 indices"),
        ("x + t[x]", "a float as an index"),
        ("x + nowhere", "unknown name 'nowhere'"),
        ("x + table[0]", "'table', a Tensor"),
        ("[x for _ in range(3)]", "for _ in range"),
        ("x if q_idx in (1, 2) else 0", ""),
    ],
)
def test_what_cannot_be_compiled_shows_its_line(source: str, found: str) -> None:
    with pytest.raises(AttentionError) as caught:
        bad(source)(torch.zeros(3))
    assert f"`return {source}`" in str(caught.value)
    assert found in str(caught.value)


def test_mods_of_one_name_do_not_share() -> None:
    def make(factor: float):
        @tilewise.score_mod
        def scaled(score, b, h, q_idx, kv_idx):
            return score * factor

        return scaled()

    assert make(2.0).key != make(3.0).key
    assert make(2.0).key == make(2.0).key
    torch.testing.assert_close(make(3.0)(S, *PLACE), 3 * S)


def test_a_mod_is_read_once_unless_what_it_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    shift = 1.0

    @tilewise.score_mod
    def shifted(score, b, h, q_idx, kv_idx):
        return score + shift

    assert shifted()(S, *PLACE).equal(S + 1)
    shift = 2.0
    assert shifted()(S, *PLACE).equal(S + 2)
    mods.softcap(2.0)
    monkeypatch.setattr(mods.parse, "read", lambda *args: pytest.fail("read again"))
    mods.softcap(3.0)


def test_a_given_slope_is_used() -> None:
    @tilewise.score_mod(grad=lambda_free_zero)
    def straight(score, b, h, q_idx, kv_idx):
        return score

    q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
    out = tilewise.attention(q, k, v, score_mod=straight())
    dq, dv = torch.autograd.grad(out.sum(), (q, v))
    assert (dq == 0).all()
    assert (dv != 0).any()


def lambda_free_zero(score, b, h, q_idx, kv_idx):
    return 0.0


@pytest.mark.parametrize("name", features.MASKS)
def test_builtin_masks_and_their_tiles(name: str) -> None:
    ids = torch.tensor([0] * 20 + [1] * 33 + [2] * 27, dtype=torch.int32)[None]
    prefix = torch.tensor([37])
    ours, truth = features.MASKS[name]
    mod = ours(ids, prefix)
    i, j = torch.arange(80)[:, None], torch.arange(75)
    expected = truth(0, 0, i, j, ids=ids, prefix=prefix).expand(80, 75)
    assert torch.equal(mod(0, 0, i, j), expected)
    mask = tilewise.block_mask(mod, 80, 75, block=(16, 32))
    for row in range(5):
        for column in range(3):
            tile = expected[16 * row : 16 * row + 16, 32 * column : 32 * column + 32]
            assert mask.tiles[0, 0, row, column] == (2 if tile.all() else int(tile.any()))
    image = picture.picture(mask)
    assert image.shape == (80, 75, 3)
    assert picture.png(image).startswith(b"\x89PNG")


def test_the_mod_is_asked_only_where_it_hides_what_the_band_shows() -> None:
    ids = torch.tensor([0] * 40 + [1] * 24, dtype=torch.int32)
    mask = tilewise.block_mask(mods.document(ids=ids), 64, 64, causal=True, block=(16, 16))
    rows, columns = ([(x // 4, x % 4) for x in entries.tolist()] for entries in mask.lists[1::2])
    # 3 full, 2 only the band hides something, 1 the mod does; the second document begins at 40
    assert rows == [(0, 2), (0, 3), (1, 2), (0, 1), (1, 1), (2, 1), (2, 1), (3, 2)]
    assert columns == [(0, 2), (1, 3), (2, 1), (1, 2), (2, 1), (2, 1), (3, 1), (3, 2)]
    assert mask.tiles[0, 0].tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_reference_computes_only_visited_tiles(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = []
    worth = scored.worth
    monkeypatch.setattr(scored, "worth", lambda raw, *rest: (pairs.append(raw.numel()), worth(raw, *rest))[1])
    x = [torch.randn(96, 2, 4, requires_grad=True) for _ in range(3)]
    cu = torch.tensor([0, 64, 96], dtype=torch.int32)
    mod = mods.block_diagonal(32)
    computed, results = [], []
    for blocks in (False, True):
        if packed:
            mask = tilewise.block_mask_varlen(mod, cu, cu, block=(16, 32)) if blocks else mod
            out = tilewise.attention_varlen(*x, cu, cu, mask_mod=mask)
        else:
            mask = tilewise.block_mask(mod, 96, 96, block=(16, 32)) if blocks else mod
            out = tilewise.attention(*(t[None] for t in x), mask_mod=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        computed.append(sum(pairs))
        pairs.clear()
    torch.testing.assert_close(*results)
    every = 64**2 + 32**2 if packed else 96**2
    assert computed == [2 * 2 * every, 2 * 2 * 3 * 32**2]  # two heads, forward and backward


def test_tiles_of_packed_sequences() -> None:
    """Each sequence has the tiles of a mask of its own lengths, and none past its end."""
    lengths = [(40, 70), (0, 9), (33, 0), (64, 64)]
    cu_q, cu_k = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in zip(*lengths, strict=True))
    mod = mods.block_diagonal(24)
    mask = tilewise.block_mask_varlen(mod, cu_q, cu_k, window=(30, 5), block=(16, 32))
    assert mask.shape == (4, 1, 64, 70)
    for b, (n_q, n_k) in enumerate(lengths):
        expected = torch.zeros(4, 3, dtype=torch.int8)
        if min(n_q, n_k):
            alone = tilewise.block_mask(mod, n_q, n_k, window=(30, 5), block=(16, 32)).tiles[0, 0]
            expected[: alone.shape[0], : alone.shape[1]] = alone
        assert torch.equal(mask.tiles[b, 0], expected)


def test_a_block_mask_of_the_other_kind_is_refused() -> None:
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    mod = mods.block_diagonal(4)
    dense, packed = tilewise.block_mask(mod, 16, 16), tilewise.block_mask_varlen(mod, cu, cu)
    x = torch.zeros(16, 2, 4)
    with pytest.raises(AttentionError, match="made by block_mask; expected one made by block_mask_varlen"):
        tilewise.attention_varlen(x, x, x, cu, cu, mask_mod=dense)
    with pytest.raises(AttentionError, match="made by block_mask_varlen; expected one made by block_mask,"):
        tilewise.attention(x[None], x[None], x[None], mask_mod=packed)
    with pytest.raises(AttentionError, match="tokens of the block mask: found 16; expected q's 15"):
        tilewise.attention_varlen(x[:15], x[:15], x[:15], cu, cu, mask_mod=packed)
    with pytest.raises(AttentionError, match="sequences of a block mask"):
        tilewise.block_mask_varlen(mod, cu, cu[:2])


def test_t5_buckets_are_those_of_the_formula() -> None:
    distance = torch.arange(-128, 129)
    n = distance.abs()
    large = 8 + (torch.log(n.clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
    expected = torch.where(n < 8, n, large.clamp(max=15)) + 16 * (distance > 0)
    assert torch.equal(mods.builtin.t5_buckets(32, True, 128).long(), expected)


def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, slopes: Tensor, table: Tensor) -> Tensor:
    out, lse = tilewise.attention(
        q, k, v, causal=True, softcap=2.0, score_mod=features.distance_table(table), alibi_slopes=slopes, bias=bias,
        sinks=sinks, mask_mod=mods.window_with_globals(3, 1), dropout_p=0.2, seed=5, return_lse=True,
    )  # fmt: skip
    return out.sum(-1).transpose(1, 2) + lse


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, 5, 2, 4), (2, 6, 1, 4), (2, 6, 1, 4), (1, 2, 5, 6), (2,), (2,), (2, 16)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def test_every_term_has_first_and_second_derivatives() -> None:
    assert torch.autograd.gradcheck(call, leaves())
    assert torch.autograd.gradgradcheck(call, leaves())


def test_forward_mode_of_every_term() -> None:
    x = [t.detach() for t in leaves()]
    along = [torch.randn_like(t) for t in x]
    _, moved = torch.func.jvp(call, tuple(x), tuple(along))
    step = 1e-6
    up, down = (call(*(t + sign * step * d for t, d in zip(x, along, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(moved, (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


def test_compiled_whole() -> None:
    def loss(q, k, v, table):
        mod = features.distance_table(table)
        mask = mods.window_with_globals(3, 1)
        return tilewise.attention(q, k, v, softcap=5.0, score_mod=mod, mask_mod=mask).square().sum()

    x = [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)] + [torch.randn(2, 16, requires_grad=True)]
    eager = torch.autograd.grad(loss(*x), x)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*x), x)
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_keeps_what_it_says_and_is_free_of_patterns() -> None:
    keep = tilewise.dropout_mask(2, 3, 256, 256, p=0.3, seed=1).double() - 0.7
    assert abs(keep.mean()) < 3e-3
    for shift in ((1, 0), (0, 1), (1, 1)):
        rolled = keep.roll(shift, (2, 3))
        assert abs((keep * rolled).mean() / 0.21) < 1e-2
    assert not torch.equal(keep[0], keep[1])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"softcap": 0.0}, "softcap"),
        ({"bias": torch.zeros(3, 8, 8)}, "H of bias"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"alibi_slopes": torch.zeros(2, 3)}, "alibi_slopes"),
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"seed": 3}, "seed"),
        ({"score_mod": everything}, "score_mod"),
        ({"score_mod": mods.block_diagonal(3)}, "score_mod"),
        ({"mask_mod": mods.softcap(3.0)}, "mask_mod"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 9, 8)}, "Sq of the block mask"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 8, 8, causal=True)}, "window of the block mask"),
        ({"mask_mod": tilewise.block_mask(mods.block_diagonal(3), 8, 8, window=(2, 2)), "window": (3, 0)}, "window of"),
    ],
)
def test_refusals(options: dict[str, object], what: str) -> None:
    x = torch.zeros(2, 8, 2, 4)
    with pytest.raises(AttentionError, match=what):
        tilewise.attention(x, x, x, **options)


BUILTIN = sorted(set(mods.__all__) - {"PROGRAMS", "BlockMask", "Mod", "Program", "block_mask", "block_mask_varlen",
                                      "mask_mod", "score_mod"})  # fmt: skip


def pixels(file: bytes) -> bytes:
    """Of a PNG that tilewise wrote: the bytes of its only IDAT, unpacked."""
    at = file.index(b"IDAT")
    (size,) = struct.unpack(">I", file[at - 4 : at])
    return file[16:24] + zlib.decompress(file[at + 4 : at + 4 + size])


@pytest.mark.parametrize("name", BUILTIN)
def test_every_builtin_has_an_example_and_its_picture_in_the_docs(name: str, tmp_path) -> None:
    assert ">>>" in getattr(mods, name).__doc__
    docs = Path(__file__).parents[2] / "docs"
    file = f"mod-{name.replace('_', '-')}.png"
    assert f"]({file})" in (docs / "mods.md").read_text()
    assert cli.main(["show-mask", name, "--out", str(tmp_path / file)]) == 0
    assert pixels((tmp_path / file).read_bytes()) == pixels((docs / file).read_bytes())


@pytest.mark.parametrize("name", BUILTIN)
def test_examples_of_mods(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(getattr(mods, name).__doc__, vars(mods.builtin).copy(), name, None, 0)
    assert doctest.DocTestRunner().run(test).failed == 0


def test_show_mask(tmp_path, capsys) -> None:
    for suffix in ("png", "html"):
        out = tmp_path / f"mask.{suffix}"
        assert cli.main(["show-mask", "block_diagonal", "128", "--queries", "512", "--out", str(out)]) == 0
        assert out.stat().st_size > 100
    assert "12 empty, 0 partial, 4 full" in capsys.readouterr().out
    assert cli.main(["show-mask", "nothing"]) == 2


def test_show_a_score_mod(tmp_path, capsys) -> None:
    """ALiBi of head 1: 0 on the diagonal, deepest in the corners; a mod of one's own, too."""
    out = tmp_path / "scores.html"
    command = ["show-mask", "alibi", "0.25", "0.5", "--head", "1", "--queries", "64", "--out", str(out)]
    assert cli.main(command) == 0
    assert "of head 1: from -31.5 to 0" in capsys.readouterr().out
    assert "-31.5</span>" in out.read_text()
    image = picture.heat(mods.alibi(torch.tensor([0.5])), 64, 64).image
    assert image.shape == (64, 64, 3)
    assert tuple(image[5, 5].tolist()) == picture.ZERO
    assert tuple(image[0, 63].tolist()) == tuple(image[63, 0].tolist()) == picture.LEAST
    own = tmp_path / "own.py"
    own.write_text(
        "import tilewise\n@tilewise.score_mod\ndef near(score, b, h, q_idx, kv_idx, x):\n"
        "    return score + x * (kv_idx - q_idx)\n"
    )
    assert cli.main(["show-mask", f"{own}:near", "2.0", "--queries", "8", "--out", str(tmp_path / "own.png")]) == 0
    assert "near, a score of 0 at 8 queries x 8 keys of head 0: from -14 to 14" in capsys.readouterr().out
